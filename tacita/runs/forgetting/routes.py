"""The unlearning route of a request (sharing spec D.3): who carries it out, and why.

The run's own parts take back what they can. What none of them can is taken back by retraining without it, which every
run can: in the lab the people and their histories are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Ragged
from tacita.models.statistic_model import StatisticModel
from tacita.round.capabilities import Scope
from tacita.round.fulfilment import can_fulfil, can_retract, list_parts_reaching, list_unlearning_scopes
from tacita.round.part import Part, implements, list_forgetting_scope
from tacita.round.plan import Plan
from tacita.round.state import Role
from tacita.runs.forgetting.requests import ResolvedRequest

RETRAINING = "training again"
REMEDY = "--again trains again without it"
SUBSTITUTES_STAY = (
    "What others told the server in place of their items was drawn from a table that had learned from the data, and "
    "stays as it was told: to draw it anew would cost their privacy once more."
)
LOCAL_STAYS = f"What the person's device learned from and never shared stays in the model as it is; {REMEDY}."
LATE_STAYS = f"What the person's device had learned from before it was shared stays in the model as it is; {REMEDY}."


@dataclass(frozen=True)
class UnlearningRoute:
    """Who carries a request out, and why they do."""

    by: tuple[str, ...]
    reason: str
    residue: str = ""  # what of the request it does not reach

    @property
    def is_retraining(self) -> bool:
        """The run begins again, without what is withdrawn."""
        return self.by == (RETRAINING,)


@dataclass(frozen=True)
class SharedItems:
    """What people share, a list for each of them."""

    shared: Ragged
    learned: Ragged  # what of it their devices may have learned from before they shared it

    def take(self, users: AnyArray) -> SharedItems:
        return SharedItems(self.shared.take(users), self.learned.take(users))


@dataclass(frozen=True)
class InteractionCounts:
    """How many of the interactions of a request reached the model in which way."""

    shared: int
    local: int  # never shared: only the device learned from them
    late: int  # shared, after the device may have learned from them


def check_kind(plan: Plan, kind: str) -> None:
    """Refuse requests about shared items where nobody shares anything, whoever asks."""
    if kind not in ("share", "unshare") or can_fulfil(plan, kind):
        return
    run = _describe_run(plan)
    if kind == "unshare":
        raise TacitaError(
            f"nobody shares anything in a run of {run}, so there is nothing to take back from the server's record; "
            "`tacita forget` takes back what was learned."
        )
    raise TacitaError(f"nobody in a run of {run} learns from what is shared; train with --method fedshare.")


def choose_route(plan: Plan, request: ResolvedRequest, shares: SharedItems, retrain: bool = False) -> UnlearningRoute:
    """The route of a request; `shares`: of the people who ask. `retrain`: whatever the run's own route is."""
    kind = request.requests.kind
    if kind == "share":
        return _route_share(plan)
    if request.clears_residue:
        return _route_retraining(plan, "what was forgotten before left something in the model")
    if retrain:
        return _route_retraining(plan, "--again asks for it")
    if can_retract(plan, kind):
        return _route_retraction(plan)
    return _route_withdrawal(plan, request, shares)


def _route_share(plan: Plan) -> UnlearningRoute:
    owners = []
    for owner, specs in plan.list_state_specs().items():
        if any(spec.role is Role.SHARED for spec in specs):
            owners.append(owner)
    reason = "what is shared goes to the server, and is no longer learned from on the device."
    return UnlearningRoute(tuple(owners), reason)


def _route_retraction(plan: Plan) -> UnlearningRoute:
    """The route out of a sum over people."""
    model = plan.backbone
    assert isinstance(model, StatisticModel)
    noise = "" if model.retracts_exactly else ", with noise of its own, which is charged"
    reason = f"{model.name} is a function of a sum over people, so what they sent is taken out of the sum{noise}."
    return UnlearningRoute((model.name,), reason)


def _route_withdrawal(plan: Plan, request: ResolvedRequest, shares: SharedItems) -> UnlearningRoute:
    local_scopes: tuple[Scope, ...] = ("local", "people") if request.whole else ("local",)
    of_shared = list_parts_reaching(plan, "given")
    of_local = list_parts_reaching(plan, *local_scopes)
    counts = _count_interactions(request, shares)
    late = LATE_STAYS if counts.late and not of_local else ""
    unlearners = _quote_names(plan.forgetting_parts)
    if not unlearners:
        return _route_retraining(plan, f"nothing in a run of {_describe_run(plan)} takes data back")
    if request.requests.kind == "unshare" or not counts.local:
        return _route_shared(plan, of_shared, counts.shared, late)
    if of_local and (of_shared or not counts.shared):
        return _route_local(plan, of_local, of_shared if counts.shared else [])
    if counts.shared and of_shared:
        sharers = _quote_names(of_shared)
        reason = f"{counts.shared} of the interactions were shared, and {sharers} takes shared ones back."
        return UnlearningRoute(_list_part_names(of_shared), reason, f"{LOCAL_STAYS} {late}".strip())
    if counts.shared:
        return _route_retraining(plan, f"{unlearners} does not take back what was shared")
    only = "whole people only" if "people" in list_unlearning_scopes(plan) else "what was shared only"
    return _route_retraining(plan, f"none of that was shared, and {unlearners} takes back {only}")


def _count_interactions(request: ResolvedRequest, shares: SharedItems) -> InteractionCounts:
    rows = request.items.rows()
    ids = request.items.ids
    is_shared = shares.shared.holds(rows, ids)
    is_late = is_shared & shares.learned.holds(rows, ids)
    n_shared = int(is_shared.sum())
    return InteractionCounts(shared=n_shared, local=len(ids) - n_shared, late=int(is_late.sum()))


def _route_shared(plan: Plan, of_shared: Sequence[Part], n_shared: int, late: str) -> UnlearningRoute:
    """The route of what was shared and nothing else."""
    if not of_shared:
        unlearners = _quote_names(plan.forgetting_parts)
        return _route_retraining(plan, f"{unlearners} does not take back what was shared")
    reason = f"all {n_shared} interactions were shared, and {_quote_names(of_shared)} takes shared ones back."
    return UnlearningRoute(_list_part_names(of_shared), reason, late)


def _route_local(plan: Plan, of_local: Sequence[Part], of_shared: Sequence[Part]) -> UnlearningRoute:
    """The route of what devices learned from; `of_shared`: who takes back what was shared of it, if anything was."""
    rest = "none of it was shared"
    if of_shared:
        rest = "some of it was shared and some learned from on the device"
    parts = [part for part in plan.forgetting_parts if part in of_local or part in of_shared]
    has_people_only = all("local" not in list_forgetting_scope(part) for part in of_local)
    reach = "takes whole people out of the model" if has_people_only else "takes back what devices learned from"
    reason = f"{rest}, and {_quote_names(of_local)} {reach}."
    return UnlearningRoute(_list_part_names(parts), reason)


def _route_retraining(plan: Plan, because: str) -> UnlearningRoute:
    reason = f"{because}, so the run is trained again from its beginning without it."
    residue = SUBSTITUTES_STAY if sends_substitutes(plan) else ""
    return UnlearningRoute((RETRAINING,), reason, residue)


def sends_substitutes(plan: Plan) -> bool:
    """Whether devices tell the server something else in place of shared items, which retraining does not undo."""
    return any(implements(part, "redact") and not list_forgetting_scope(part) for part in plan.parts)


def _list_part_names(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(part.name for part in parts)


def _quote_names(parts: Sequence[Part]) -> str:
    return " and ".join(f"'{part.name}'" for part in parts)


def _describe_run(plan: Plan) -> str:
    parts = ", ".join(part.name for part in plan.parts) or "none"
    return f"method '{plan.config.method}' on backbone '{plan.backbone.name}' (parts: {parts})"
