"""The compiled stepper: all clients, all steps, for backbones that are affine in the item row."""

from __future__ import annotations

import numpy as np

from tacita.backbones.base import Backbone
from tacita.config import TrainConfig
from tacita.kernels.steps import affine_steps
from tacita.trainer.stepper import StepExtras, Stepper
from tacita.types import Local


class FusedStepper(Stepper):
    def __init__(self, backbone: Backbone, plan: TrainConfig, local: Local) -> None:
        super().__init__(backbone, plan, local)
        assert backbone.affine_kind is not None
        self.kind = backbone.affine_kind
        rates = backbone.rates(local.view.n_items)
        self.rate = np.concatenate([np.full(width, rates[name], np.float32) for name, width in backbone.layout.items()])
        self.item_rate = rates["rows"]

    @staticmethod
    def supports(backbone: Backbone, plan: TrainConfig) -> bool:
        plain = plan.objective == "bce" and plan.optimiser == "sgd" and plan.l2 == 0 and plan.silos == 0
        return plain and backbone.affine_kind is not None

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        local = self.local
        n_phases = len(self.backbone.phases)
        affine_steps(
            self.kind,
            n_phases == 2,
            first,
            last,
            0 if phase is None else phase,
            n_phases if phase is None else phase + 1,
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
        )
