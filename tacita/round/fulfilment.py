"""Which requests a run fulfils and which parts do it: one answer for the lab and for nodes."""

from __future__ import annotations

from tacita.round.capabilities import Scope
from tacita.round.part import Part
from tacita.round.plan import Plan
from tacita.round.request import UNLEARNING_KINDS
from tacita.round.state import Role


def can_fulfil(plan: Plan, kind: str) -> bool:
    """Whether the run's own parts or its learner carry out such requests; retraining is not counted."""
    if kind in ("share", "unshare"):
        return shares_items(plan)
    if can_retract(plan, kind):
        return True
    scopes = list_unlearning_scopes(plan)
    if kind == "leave":
        return bool(scopes) or shares_items(plan)
    return bool(scopes - {"people"})


def shares_items(plan: Plan) -> bool:
    """Whether users of the run share items with the server."""
    return bool(plan.list_state_names(Role.SHARED))


def can_retract(plan: Plan, kind: str) -> bool:
    """Whether the learner takes terms out of its sum, which reaches everything that a user contributed."""
    return plan.learner.unlearning is not None and kind in UNLEARNING_KINDS


def list_unlearning_scopes(plan: Plan) -> set[Scope]:
    """All that the parts of a run take out of the model."""
    scopes = set[Scope]()
    for part in plan.forgetting_parts:
        scopes.update(_get_scopes(part))
    return scopes


def list_parts_reaching(plan: Plan, *scopes: Scope) -> list[Part]:
    """The parts that take at least one of these out of the model."""
    return [part for part in plan.forgetting_parts if not _get_scopes(part).isdisjoint(scopes)]


def _get_scopes(part: Part) -> set[Scope]:
    unlearning = part.unlearning
    return set() if unlearning is None else set(unlearning.scope)
