"""Settings of local training that cannot work together are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.learn.training.ego_stepper import EgoStepper
from tacita.learn.training.pergnn_stepper import PerGNNStepper
from tacita.learn.training.recurrent_stepper import RecurrentStepper
from tacita.learn.training.silo_stepper import SiloStepper
from tacita.learn.training.stepper import FusedStepper
from tacita.learn.training.tower_stepper import TowerStepper
from tacita.models.scorer import Scorer
from tacita.round.clashes import check_objective
from tacita.round.part import Part

COMPILED_STEPPERS = (FusedStepper, TowerStepper, SiloStepper, EgoStepper, PerGNNStepper, RecurrentStepper)


def check_training(backbone: Scorer, parts: Sequence[Part], train: TrainConfig) -> None:
    """Refuse settings of local training that cannot work together; asked once a run."""
    _check_stepper(backbone, train)
    _check_optimiser(backbone, train)
    check_objective(parts, train)
    for part in parts:
        weighs_samples = "likes" in part.fills
        if train.stepper == "fused" and weighs_samples and not EgoStepper.supports(backbone, train):
            raise TacitaError(
                f"part '{part.name}' weighs samples, which no fused step for backbone '{backbone.name}' does; "
                "use train.stepper = 'auto'."
            )


def _check_stepper(backbone: Scorer, train: TrainConfig) -> None:
    if train.stepper != "fused":
        return
    if not any(stepper.supports(backbone, train) for stepper in COMPILED_STEPPERS):
        raise TacitaError(
            f"no fused step for backbone '{backbone.name}' with these settings (bce and no l2: sgd and no silos for "
            "models that are affine in the item row, lazy-adam or pfedme for towers; bpr, lazy-adam and no silos for "
            "ego; bce, lazy-adam and no silos for fedpergnn; bce, lazy-adam or pfedme, and batches of people for "
            "interest); "
            "use train.stepper = 'autograd'."
        )


def _check_optimiser(backbone: Scorer, train: TrainConfig) -> None:
    if train.objective == "bpr" and train.negatives == 0:
        raise TacitaError("train.objective = 'bpr' ranks positives above negatives; set train.negatives to 1 or more.")
    if train.weight_decay > 0 and train.optimiser != "lazy-adam":
        raise TacitaError(
            f"train.weight_decay with optimiser '{train.optimiser}' would move rows that a client does not have; "
            "use train.optimiser = 'lazy-adam', or train.l2."
        )
    if train.moments == "kept" and train.optimiser != "lazy-adam":
        raise TacitaError(f"train.moments = 'kept' is for train.optimiser = 'lazy-adam', not '{train.optimiser}'.")
    if train.optimiser == "pfedme" and len(backbone.phases) > 1:
        raise TacitaError(
            f"optimiser 'pfedme' moves a whole model at once, and backbone '{backbone.name}' moves in "
            f"{len(backbone.phases)} phases; use another backbone or train.optimiser = 'sgd'."
        )
