"""Rules about parts that cannot be in one run, checked when the run is assembled, here and on nodes."""

from __future__ import annotations

from collections.abc import Sequence

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.round.part import Part, implements, list_forgetting_scope
from tacita.round.release_rules import check_accounts, check_mean, check_participation, check_release_order, check_unit
from tacita.round.serving import SINGLE_SERVER
from tacita.round.state import Role
from tacita.round.task import SINGLE_OWNER


def check_parts(parts: Sequence[Part], train: TrainConfig, n_items: int) -> None:
    """Refuse settings that a part cannot work with on this catalogue, and releases that would break a promise."""
    check_release_order(parts)
    for part in parts:
        part.check(n_items)
    for part in parts:
        check_unit(part, train)
        check_participation(part, train)
        check_mean(part, train)
        check_accounts(part)
    check_withdrawals(parts)


def check_withdrawals(parts: Sequence[Part]) -> None:
    """Refuse a part that forgets what devices learned from, where devices would learn from it once more."""
    for part in parts:
        scope = set(list_forgetting_scope(part))
        forgets_training = implements(part, "on_server") and not scope.isdisjoint({"local", "people"})
        trains_rows = part.context.backbone.learner == "rows"
        if forgets_training and trains_rows and not _keeps_withdrawn_items(parts):
            raise TacitaError(
                f"part '{part.name}' forgets what devices learned from, and no part keeps withdrawn items out of later "
                "rounds; list part 'withdrawal' before it, or 'sharing' where users share items."
            )


def _keeps_withdrawn_items(parts: Sequence[Part]) -> bool:
    specs = [spec for part in parts for spec in part.state(0)]
    return any(spec.role is Role.WITHDRAWN for spec in specs)


def check_single_owners(parts: Sequence[Part]) -> None:
    """Refuse two parts that decide what only one may decide."""
    for name, decision in SINGLE_OWNER.items():
        _check_single([part for part in parts if name in part.fills], decision)
    for name, decision in SINGLE_SERVER.items():
        _check_single([part for part in parts if name in part.serves], decision)


def _check_single(owners: Sequence[Part], decision: str) -> None:
    if len(owners) > 1:
        first = owners[0].name
        second = owners[1].name
        raise TacitaError(f"parts '{first}' and '{second}' both decide {decision}; leave one of them out.")


def check_objective(parts: Sequence[Part], train: TrainConfig) -> None:
    """Refuse parts whose samples, labels or pulls do not fit the objective and optimiser of a run."""
    for part in parts:
        _check_part_objective(part, train)


def _check_part_objective(part: Part, train: TrainConfig) -> None:
    if train.objective != "squared" and "labels" in part.fills:
        raise TacitaError(f"part '{part.name}' makes up ratings; set train.objective = 'squared'.")
    if train.objective == "bpr" and "samples" in part.fills:
        raise TacitaError(
            f"part '{part.name}' brings samples with soft labels, and train.objective = 'bpr' learns from pairs of "
            "a positive and a negative; use train.objective = 'bce'."
        )
    if train.objective == "squared" and "likes" in part.fills:
        raise TacitaError(
            f"part '{part.name}' brings items to learn as liked, and train.objective = 'squared' learns ratings; "
            "use train.objective = 'bpr' or 'bce'."
        )
    if train.optimiser == "pfedme" and "pull" in part.fills:
        raise TacitaError(f"part '{part.name}' pulls the model that 'pfedme' only follows; use another optimiser.")
    reads_probabilities = part.reads_logits or not part.fills.isdisjoint({"step_samples", "samples"})
    if train.objective == "squared" and reads_probabilities:
        raise TacitaError(
            f"part '{part.name}' deals in probabilities, and train.objective = 'squared' fits raw scores; "
            "use train.objective = 'bce'."
        )
