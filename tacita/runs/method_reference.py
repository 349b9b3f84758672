"""What there is to learn with: every preset with its family, its promises and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tacita.core.config import ParticipationConfig, TrainConfig
from tacita.methods import find_part_class, list_preset_names, list_preset_parts
from tacita.methods.catalogue import METHODS
from tacita.report.text_tables import render_markdown_table
from tacita.round.capabilities import Privacy, Unlearning
from tacita.round.preset import PRINTED
from tacita.round.registry import find_preset_settings, is_lab_only

SCOPES = {"given": "what was shared", "local": "single items", "people": "whole users"}
NO_FAMILY = "average"


@dataclass(frozen=True)
class MethodReference:
    """What a person may want to know of a preset before using it."""

    name: str
    family: str
    paper: str
    about: str
    parts: tuple[str, ...]
    budget: str
    forgetting: str
    cost: str
    live: str

    def to_row(self) -> dict[str, Any]:
        return {"method": self.name, "family": self.family, "about": self.about}


FAMILIES = {
    "average": "Averages of updates",
    "continual": "Streams of blocks: what is learned next and what is kept (F3CRec)",
    "distillation": "Predictions travel, models stay (FedKDRec)",
    "personal": "Interests and personal budgets (LIPM, DPPS)",
    "sharing": "People share, and take back (FedShare), and ways to forget",
}
"""The heading of each family in docs/methods.md."""


def render_methods_page(methods: Sequence[MethodReference]) -> str:
    """Tables of Markdown, one for each family."""
    lines: list[str] = []
    for family in dict.fromkeys(method.family for method in methods):
        rows = [_to_markdown_row(method) for method in methods if method.family == family]
        lines += [f"### {FAMILIES.get(family, family)}", "", *render_markdown_table(rows), ""]
    return "\n".join(lines)


def _to_markdown_row(method: MethodReference) -> dict[str, str]:
    return {
        "`--method`": f"`{method.name}`",
        "what it does": method.about,
        "paper": method.paper,
        "budget": method.budget,
        "forgetting": method.forgetting,
        "cost": method.cost,
        "runs in": method.live,
    }


def list_methods() -> list[MethodReference]:
    """Every preset, families together."""
    methods = [build_method_reference(name) for name in list_preset_names()]
    return sorted(methods, key=lambda method: (method.family, method.name))


def build_method_reference(name: str) -> MethodReference:
    specs = list_preset_parts(name)
    parts = tuple(str(spec["name"]) for spec in specs)
    info = METHODS.get(name) or METHODS.get(name.removesuffix(PRINTED))
    return MethodReference(
        name=name,
        family=_find_family(parts),
        paper=info.paper if info else "a method of your own",
        about=info.about if info else _read_first_doc_line(parts),
        parts=parts,
        budget=_describe_budget(parts),
        forgetting=_describe_forgetting(parts),
        cost=_describe_cost(find_preset_settings(name)),
        live="lab only: it needs a third party" if any(map(is_lab_only, parts)) else "lab and live",
    )


def _find_family(parts: tuple[str, ...]) -> str:
    """The folder of the first part of a preset."""
    for name in parts:
        module = find_part_class(name).__module__.split(".")
        if module[:2] == ["tacita", "methods"]:
            return module[2]
        return "own"
    return NO_FAMILY


def _read_first_doc_line(parts: tuple[str, ...]) -> str:
    for name in parts:
        text = find_part_class(name).__doc__
        if text:
            return text.strip().splitlines()[0].rstrip(".")
    return "no description"


def _describe_budget(parts: tuple[str, ...]) -> str:
    private = [name for name in parts if issubclass(find_part_class(name), Privacy)]
    if not private:
        return "no epsilon"
    return f"an epsilon, counted by part '{private[0]}'"


def _describe_forgetting(parts: tuple[str, ...]) -> str:
    scopes: list[str] = []
    for name in parts:
        cls = find_part_class(name)
        if issubclass(cls, Unlearning):
            scopes += [SCOPES.get(scope, scope) for scope in cls.scope]
    if not scopes:
        return "by retraining"
    listed = ", ".join(dict.fromkeys(scopes))
    return f"{listed} by its own route; the rest by retraining"


def _describe_cost(settings: dict[str, Any]) -> str:
    train = {**TrainConfig().model_dump(), **settings.get("train", {})}
    participation = {**ParticipationConfig().model_dump(), **train["participation"]}
    share = f"{100 * participation['rate']:.3g} % of the clients" if participation["kind"] != "all" else "all clients"
    epochs = train["local_epochs"]
    plural = "s" if epochs > 1 else ""
    return f"at most {train['rounds']} rounds a block, {share}, {epochs} local epoch{plural}"
