"""Which way a request goes (sharing spec D.3), why, and what a run needs that cannot go any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.core.errors import TacitaError
from tacita.core.types import Given
from tacita.lab.forgetting.wishes import Asked
from tacita.round.parts import Part, overrides
from tacita.round.plan import Plan

REMEDY = "train with --method fedshare or --backbone tally, or add part 'retrain'"


@dataclass(frozen=True)
class Way:
    """Who carries a request out, and why they do."""

    by: tuple[str, ...]
    why: str
    leaves: str = ""  # what of the request it does not reach


def way_of(plan: Plan, asked: Asked, given: Given) -> Way:
    """The way of a request, or one sentence that names the remedy where there is none."""
    if asked.requests.kind == "share":
        return _sharing(plan)
    if asked.requests.kind == "unshare" or not plan.learner.takes_back:
        return _unlearning(plan, asked, given)
    name, model = plan.backbone.name, plan.backbone.retracts
    noise = "" if model is None or model.exact else ", with noise of its own, which is charged"
    return Way((name,), f"{name} is a function of a sum over people, so what was told is taken out of the sum{noise}.")


def _sharing(plan: Plan) -> Way:
    taking = [part.name for part in plan.parts if "shared" in part.device_arrays(0)]
    if not taking:
        raise TacitaError(
            f"nobody in a run of {_called(plan)} learns from what is shared; train with --method fedshare."
        )
    return Way(tuple(taking), "what is shared goes to the server, and is no longer learned from on the device.")


def _unlearning(plan: Plan, asked: Asked, given: Given) -> Way:
    able = [part for part in plan.parts if overrides(part, "handle") or overrides(part, "handle_many")]
    able = [part for part in able if part.takes_back]
    shared, local = _counts(asked, given)
    if not able:
        raise TacitaError(f"nothing in a run of {_called(plan)} takes data back; {REMEDY}.")
    both = [part for part in able if "local" in part.takes_back]
    named = _names(able)
    if asked.requests.kind == "unshare" or not local:
        return Way(named, f"all {shared} interactions were shared, and {_list(named)} takes shared ones back.")
    if both:
        rest = "none of it was shared" if not shared else "some of it was shared and some learned from on the device"
        return Way(named, f"{rest}, and {_list(_names(both))} takes back what devices learned from.")
    if not shared:
        raise TacitaError(
            f"none of that was shared, and '{named[0]}' takes back what was shared only; train with --method "
            "retraction, or add part 'retrain'."
        )
    why = f"{shared} of the interactions were shared, and {_list(named)} takes shared ones back."
    return Way(named, why, "What the person's device learned from and never shared stays in the model as it is.")


def _counts(asked: Asked, given: Given) -> tuple[int, int]:
    """How many of the interactions were shared, and how many were not."""
    shared, mine = given.of(asked.requests.senders), asked.items
    found = int(shared.holds(mine.rows(), mine.ids).sum())
    return found, len(mine.ids) - found


def _names(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(part.name for part in parts)


def _list(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _called(plan: Plan) -> str:
    parts = ", ".join(part.name for part in plan.parts) or "none"
    return f"method '{plan.config.method}' on backbone '{plan.backbone.name}' (parts: {parts})"
