"""training-loss: changes nothing, and leaves in the log how well the received model fits those who train it."""

from __future__ import annotations

from tacita.core.types import CohortView, LocalModels, StateUpdate
from tacita.methods.personal.interest import client_loss
from tacita.round.parts import Part
from tacita.round.registry import register


@register
class TrainingLoss(Part):
    """The mean cross-entropy of a round's samples, for the lab's log alone: it never travels."""

    name = "training-loss"

    def after_training(self, view: CohortView, local: LocalModels) -> StateUpdate:
        local.notes["loss"] = client_loss(self.context.scorer, view, local)
        return {}
