"""The page that answers "Which should I use?": an answer made of the cells, then a table for each dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from tacita.metrics import confidence_interval
from tacita.research.experiments.experiment_spec import Experiment, ExperimentCell
from tacita.research.experiments.single_block import Line
from tacita.runs.server_view import SHARES, SUM_ALONE

QUALITY, UP, DOWN, PRICE = "ndcg@10", "KB up, a person", "KB down, a person", "forgetting, CPU seconds"
_HEAD = ("method", "NDCG@10", "HR@10", "up", "down", "seconds", "epsilon", "forgetting one person", "sees")
_POPULAR = "popular"
_LITTLE = 100.0  # times that an epsilon lets odds grow, from which on it bounds little
_REST = "Others"


@dataclass(frozen=True)
class ChoiceRow:
    """One method on one dataset, over its seeds."""

    name: str
    label: str
    backbone: str
    lines: list[Line]
    same_runs: tuple[str, ...] = ()  # labels of others that are the same run under this protocol

    def mean(self, name: str) -> float:
        told = self._values(name)
        return float(np.mean(told)) if told else float("nan")

    def format_interval(self, name: str = QUALITY) -> str:
        told = self._values(name)
        if not told:
            return "–"
        mean, half = confidence_interval(told)
        return f"{mean:.4f}" + ("" if np.isnan(half) else f" ± {half:.4f}")

    def format_median(self, name: str) -> str:
        """Of what varies with the machine, and little else."""
        told = self._values(name)
        return _format_short(float(np.median(told))) if told else "–"

    def word(self, name: str) -> str:
        return next((str(w) for one in self.lines if (w := one.get("words", {}).get(name))), "")

    @property
    def is_exact(self) -> bool:
        return self.word("forgets").endswith(": exact")

    @property
    def is_retrained(self) -> bool:
        return self.word("forgets").startswith(("trains again", "retrain"))

    @property
    def outcome(self) -> tuple[object, ...]:
        """Rows that agree in this are one run."""
        seeds = sorted((one["seed"], *(tuple(one["values"].get(n, ())) for n in (QUALITY, UP))) for one in self.lines)
        return (*seeds, self.word("forgets"), self.word("sees"))

    def _values(self, name: str) -> list[float]:
        return [line["values"][name][0] for line in self.lines if name in line["values"]]


def render_choice_page(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> str:
    """What to use for what, and all that was measured."""
    found = {}
    for dataset in dict.fromkeys(one.dataset for one in cells):
        rows = _build_rows(experiment, [one for one in cells if one.dataset == dataset], lines)
        if rows:
            found[dataset] = rows
    text = [
        "# Which should I use?",
        "",
        "Every method of this project under one protocol, one table for each dataset.",
        "",
    ]
    aside = {name for title in experiment.aside for name in experiment.groups[title]}
    text += [*(f"- {one}" for one in _write_advice(found, aside)), ""]
    letters: dict[str, str] = {}
    for dataset, rows in found.items():
        text += [f"## {dataset}", "", *_format_tables(experiment, rows, letters)]
        text += [*_list_missing(experiment, dataset, [one for one in cells if one.dataset == dataset], lines), ""]
    text += [
        "## What the server sees of a person",
        "",
        *(f"- **{mark}**: {sees}" for sees, mark in letters.items()),
        "",
    ]
    text += ["## How it was measured", "", *(f"- {note}" for note in experiment.notes)]
    text += ["- `tacita reproduce choose` makes this page; finished cells are kept under docs/reproduction/cells."]
    return "\n".join(text).rstrip() + "\n"


def _build_rows(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> list[ChoiceRow]:
    """Best first; what is the same run as another stands with it."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for cell in cells:
        if "values" in lines.get(cell.key, {}):
            groups.setdefault((cell.variant, cell.backbone), []).append(lines[cell.key])
    rows: dict[tuple[object, ...], ChoiceRow] = {}
    for (name, backbone), found in groups.items():
        row = ChoiceRow(name, experiment.variants[name].label, backbone, found)
        first = rows.setdefault(row.outcome, row)
        if first is not row:
            rows[row.outcome] = replace(first, same_runs=(*first.same_runs, row.label))
    return sorted(rows.values(), key=lambda one: -one.mean(QUALITY))


# The answer


def _write_advice(found: dict[str, list[ChoiceRow]], aside: set[str]) -> list[str]:
    """One line for each thing that somebody may need, from all rows but those that are there to be compared with."""

    def line(
        need: str, may: Callable[[ChoiceRow], bool], tell: Callable[[ChoiceRow], str], least: str = ""
    ) -> Iterable[str]:
        told = []
        for dataset, rows in found.items():
            fit = [one for one in rows if one.name not in {_POPULAR, *aside} and may(one)]
            if fit:
                one = min(fit, key=lambda row: row.mean(least)) if least else fit[0]
                told.append(f"on {dataset} **{one.label}** (NDCG@10 {one.format_interval()}, {tell(one)})")
        return [f"{need}: {'; '.join(told)}."] if told else []

    beats = {id(one) for rows in found.values() for one in _select_above_popular(rows)}
    out = [
        *line("If whoever gets the model may know the histories", lambda one: True, _describe_forgetting),
        *line(
            "If you need an epsilon below 10",
            lambda one: one.mean("epsilon") < 10,
            _format_odds,
        ),
        *line(
            "If people must be forgotten exactly and at once",
            lambda one: one.is_exact and not one.is_retrained,
            _describe_forgetting,
        ),
        *line(
            "If no update may be seen by itself, and no budget is needed",
            lambda one: one.word("sees").startswith(SUM_ALONE),
            lambda one: f"{one.format_median(UP)} KB up",
        ),
        *line(
            "If people choose what they share and take it back",
            lambda one: one.word("sees").startswith(SHARES),
            _describe_forgetting,
        ),
        *line(
            "If little may be sent, and more than most popular is wanted",
            lambda one: id(one) in beats,
            lambda one: f"{one.format_median(UP)} KB up",
            UP,
        ),
    ]
    for dataset, rows in found.items():
        popular = next((one for one in rows if one.name == _POPULAR), None)
        if popular:
            below = [one.label for one in rows if one.mean(QUALITY) < popular.mean(QUALITY) and one.name not in aside]
            out.append(f"Below most popular ({popular.format_interval()}) on {dataset}: {'; '.join(below) or 'none'}.")
    return out


def _select_above_popular(rows: list[ChoiceRow]) -> list[ChoiceRow]:
    """Better than most popular, where that was measured."""
    floor = next((one.mean(QUALITY) for one in rows if one.name == _POPULAR), 0.0)
    return [one for one in rows if one.mean(QUALITY) > floor]


# The tables


def _format_tables(experiment: Experiment, rows: list[ChoiceRow], letters: dict[str, str]) -> list[str]:
    """A table for each group, best first; rows of no group come last."""
    text = []
    in_group = {name for names in experiment.groups.values() for name in names}
    rest = [one.name for one in rows if one.name not in in_group]
    for title, names in {**experiment.groups, _REST: rest}.items():
        own = [one for one in rows if one.name in names]
        if not own:
            continue
        text += [f"**{title}**", ""] if experiment.groups else []
        text += ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
        text += [_format_row(one, letters) for one in own] + [""]
    return text


def _format_row(row: ChoiceRow, letters: dict[str, str]) -> str:
    sees = row.word("sees")
    mark = letters.setdefault(sees, chr(ord("A") + len(letters))) if sees else "–"
    name = row.label + (f" ({len(row.lines)} seed{'s' if len(row.lines) > 1 else ''})" if row.name != _POPULAR else "")
    if row.same_runs:
        name += f"; the same run: {', '.join(row.same_runs)}"
    told = [
        name,
        row.format_interval(),
        row.format_interval("hr@10"),
        row.format_median(UP),
        row.format_median(DOWN),
        row.format_median("CPU seconds"),
    ]
    return "| " + " | ".join([*told, _format_epsilon(row), _format_forgetting(row), mark]) + " |"


def _format_epsilon(row: ChoiceRow) -> str:
    value = row.mean("epsilon")
    if np.isnan(value):
        return "none"
    unit = row.word("promise")
    return f"{value:,.4g}" + (f", {unit}" if unit else "")


def _format_odds(row: ChoiceRow) -> str:
    """An epsilon with what it bounds, so that nobody takes a large one for a protection; odds are about a person."""
    if not row.word("promise").startswith("a person"):
        return f"epsilon {_format_epsilon(row)}"
    most = float(np.exp(row.mean("epsilon")))
    little = ", which bounds little ([privacy.md](privacy.md))" if most > _LITTLE else ""
    return f"epsilon {_format_epsilon(row)}: the odds of a guess may grow {_format_short(most)} times{little}"


def _format_forgetting(row: ChoiceRow) -> str:
    """How one person is forgotten, and the processor's seconds."""
    way = row.word("forgets")
    if not way:
        return "–"
    name, _, kind = way.partition(": ")
    said = "train again, exact" if row.is_retrained else f"{kind or name}" + (f" ({name})" if kind != "exact" else "")
    return f"{said}, {row.format_median(PRICE)} s"


def _describe_forgetting(row: ChoiceRow) -> str:
    return f"forgetting one person: {_format_forgetting(row)}"


def _list_missing(
    experiment: Experiment, dataset: str, cells: list[ExperimentCell], lines: dict[str, Line]
) -> list[str]:
    """What has no figure, and why."""
    failed: dict[str, str] = {}
    short, seeds = [], max((one.seed for one in cells), default=0)
    for name in dict.fromkeys(one.variant for one in cells):
        own = [lines.get(one.key, {}) for one in cells if one.variant == name]
        done = sum("values" in one for one in own)
        broken = next((str(one["failed"]) for one in own if "failed" in one), "")
        label = experiment.variants[name].label
        if broken and not done:
            failed[label] = broken
        elif done < min(seeds, len(own)):
            short.append(f"{label}" + (f" ({done} of {len(own)} seeds)" if done else ""))
    text = [f"{label} failed: {why}" for label, why in failed.items()]
    text += [f"Not run, or not all of it: {'; '.join(short)}."] if short else []
    return [*text, *([experiment.missing[dataset]] if dataset in experiment.missing and (short or failed) else [])]


def _format_short(value: float) -> str:
    """Three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
