"""The compiled stepper: all clients, all steps, for backbones that are affine in the item row."""

from __future__ import annotations

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import LocalModels
from tacita.kernels.steps import affine_steps
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.stepper import StepExtras, Stepper
from tacita.models.scorer import Scorer


class FusedStepper(Stepper):
    def __init__(self, backbone: Scorer, plan: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, plan, local)
        assert backbone.affine_kind is not None
        self.kind = backbone.affine_kind
        rates = backbone.rates(local.view.n_items)
        self.rate = np.concatenate([np.full(width, rates[name], np.float32) for name, width in backbone.layout.items()])
        self.item_rate = rates["rows"]

    @staticmethod
    def supports(backbone: Scorer, plan: TrainConfig) -> bool:
        plain = plan.objective == "bce" and plan.optimiser == "sgd" and plan.l2 == 0 and plan.n_joint_silos == 0
        return plain and plan.batches == "samples" and backbone.affine_kind is not None

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = (0, len(self.backbone.phases)) if phase is None else (phase, phase + 1)
        self._take_steps(first, last, phases, extras, whole=False)

    def train_whole(self) -> None:
        """Gather, take all steps and diff, client by client: for models whose rows nobody looks at in between."""
        n_steps, phases = int(self.local.n_steps.max(initial=0)), (0, len(self.backbone.phases))
        self._take_steps(0, n_steps, phases, StepExtras.empty(self.local.view.n_clients), whole=True)

    def _take_steps(self, first: int, last: int, phases: tuple[int, int], extras: StepExtras, whole: bool) -> None:
        local = self.local
        affine_steps(
            threads_in_use(),
            self.kind,
            len(self.backbone.phases) == 2,
            first,
            last,
            *phases,
            local.batch,
            local.turn_ptr,
            local.order,
            local.row_of,
            local.label,
            local.row_start,
            local.rows,
            local.private,
            self.rate,
            self.item_rate,
            extras.ptr,
            extras.row,
            extras.label,
            extras.weight,
            whole,
            local.row_item,
            local.view.items,
        )
