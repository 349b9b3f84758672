"""training-loss: changes nothing, and leaves in the log how well the received model fits those who train it."""

from __future__ import annotations

from tacita.core.types import CohortView, LocalModels
from tacita.methods.personal.interest import compute_client_losses
from tacita.round.part import Part
from tacita.round.registry import register
from tacita.round.task import TrainingOutcome


@register
class TrainingLoss(Part):
    """The mean cross-entropy of a round's samples, for the lab's log alone: it never travels."""

    name = "training-loss"

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        losses = compute_client_losses(self.context.scorer, view, local)
        local.notes["loss"] = losses
        return TrainingOutcome()
