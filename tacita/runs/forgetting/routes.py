"""Which way a request goes (sharing spec D.3), and why.

The run's own parts take back what they can. What none of them can is taken back by training again without it, which
every run can: in the lab the people and their histories are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Ragged
from tacita.models.statistic_model import StatisticModel
from tacita.round.part import Part, forgetting_scope, implements
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


def choose_route(plan: Plan, request: ResolvedRequest, shares: SharedItems, retrain: bool = False) -> UnlearningRoute:
    """The way of a request; `shares`: of the people who ask. `again`: whatever the run's own way is."""
    if request.requests.kind == "share":
        return _route_share(plan)
    if request.clears_residue:
        return _route_retraining(plan, "what was forgotten before left something in the model")
    if retrain:
        return _route_retraining(plan, "--again asks for it")
    if request.requests.kind != "unshare" and plan.learner.unlearning is not None:
        name, model = plan.backbone.name, plan.backbone
        assert isinstance(model, StatisticModel)
        noise = "" if model.retracts_exactly else ", with noise of its own, which is charged"
        why = f"{name} is a function of a sum over people, so what was told is taken out of the sum{noise}."
        return UnlearningRoute((name,), why)
    return _route_withdrawal(plan, request, shares)


def check_kind(plan: Plan, kind: str) -> None:
    """Refuse requests about shared items where nobody shares anything, whoever asks."""
    if plan.names_of(Role.SHARED) or kind not in ("share", "unshare"):
        return
    if kind == "unshare":
        raise TacitaError(
            f"nobody shares anything in a run of {_describe_run(plan)}, so there is nothing "
            "to take back from the server's "
            "record; `tacita forget` takes back what was learned."
        )
    raise TacitaError(
        f"nobody in a run of {_describe_run(plan)} learns from what is shared; train with --method fedshare."
    )


def _route_share(plan: Plan) -> UnlearningRoute:
    specs = plan.state_specs()
    taking = [name for name, kept in specs.items() if any(spec.role is Role.SHARED for spec in kept)]
    return UnlearningRoute(
        tuple(taking), "what is shared goes to the server, and is no longer learned from on the device."
    )


def _route_withdrawal(plan: Plan, request: ResolvedRequest, shares: SharedItems) -> UnlearningRoute:
    able = plan.forgetting_parts
    of_shared = _parts_reaching(able, {"given"})
    of_local = _parts_reaching(able, {"local", "people"} if request.whole else {"local"})
    n_shared, n_local, n_late = _count_shared(request, shares)
    late = LATE_STAYS if n_late and not of_local else ""
    if not able:
        return _route_retraining(plan, f"nothing in a run of {_describe_run(plan)} takes data back")
    if request.requests.kind == "unshare" or not n_local:
        return _route_shared(plan, of_shared, n_shared, late)
    if of_local and (of_shared or not n_shared):
        return _route_local(able, of_local, of_shared if n_shared else [])
    if n_shared and of_shared:
        named = _part_names(of_shared)
        reason = f"{n_shared} of the interactions were shared, and {_join_names(named)} takes shared ones back."
        return UnlearningRoute(named, reason, f"{LOCAL_STAYS} {late}".strip())
    if n_shared:
        return _route_retraining(plan, f"{_join_names(_part_names(able))} does not take back what was shared")
    only = "whole people only" if _parts_reaching(able, {"people"}) else "what was shared only"
    return _route_retraining(plan, f"none of that was shared, and {_join_names(_part_names(able))} takes back {only}")


def _parts_reaching(parts: Sequence[Part], scopes: set[str]) -> list[Part]:
    """The parts that take one of some things out of the model."""
    return [part for part in parts if scopes & set(forgetting_scope(part))]


def _route_shared(plan: Plan, of_shared: Sequence[Part], n_shared: int, late: str) -> UnlearningRoute:
    """The route of what was shared and nothing else."""
    if not of_shared:
        able = _join_names(_part_names(plan.forgetting_parts))
        return _route_retraining(plan, f"{able} does not take back what was shared")
    named = _part_names(of_shared)
    reason = f"all {n_shared} interactions were shared, and {_join_names(named)} takes shared ones back."
    return UnlearningRoute(named, reason, late)


def _route_local(able: Sequence[Part], of_local: Sequence[Part], of_shared: Sequence[Part]) -> UnlearningRoute:
    """The route of what devices learned from; `of_shared`: who takes back what was shared of it, if anything was."""
    rest = "none of it was shared"
    if of_shared:
        rest = "some of it was shared and some learned from on the device"
    named = _part_names([part for part in able if part in of_local or part in of_shared])
    reason = f"{rest}, and {_join_names(_part_names(of_local))} takes back what devices learned from."
    return UnlearningRoute(named, reason)


def _route_retraining(plan: Plan, because: str) -> UnlearningRoute:
    told = sends_substitutes(plan)
    why = f"{because}, so the run is trained again from its beginning without it."
    return UnlearningRoute((RETRAINING,), why, SUBSTITUTES_STAY if told else "")


def sends_substitutes(plan: Plan) -> bool:
    """Whether devices tell the server something else in place of shared items, which retraining does not undo."""
    return any(implements(part, "redact") and not forgetting_scope(part) for part in plan.parts)


def _count_shared(asked: ResolvedRequest, shares: SharedItems) -> tuple[int, int, int]:
    """How many of the interactions were shared, how many were not, and how many of the first were learned before."""
    rows, ids = asked.items.rows(), asked.items.ids
    found, late = (one.holds(rows, ids) for one in (shares.shared, shares.learned))
    return int(found.sum()), int((~found).sum()), int((found & late).sum())


def _part_names(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(part.name for part in parts)


def _join_names(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)


def _describe_run(plan: Plan) -> str:
    parts = ", ".join(part.name for part in plan.parts) or "none"
    return f"method '{plan.config.method}' on backbone '{plan.backbone.name}' (parts: {parts})"
