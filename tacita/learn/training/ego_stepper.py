"""The compiled stepper of a user's own star under cosine BPR: all steps of a client at once, clients on all cores."""

from __future__ import annotations

import numpy as np

from tacita.core.config import TrainConfig
from tacita.kernels.ego import ego_steps
from tacita.kernels.membership import mark_listed
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import run_on_cores
from tacita.models.ego import EgoModel
from tacita.models.scorer import Scorer


class EgoStepper(Stepper):
    backbone: EgoModel

    @staticmethod
    def supports(backbone: Scorer, plan: TrainConfig) -> bool:
        plain = plan.objective == "bpr" and plan.optimiser == "lazy-adam" and plan.n_joint_silos == 0
        cut = plan.batches == "samples"
        return plain and cut and type(backbone) is EgoModel  # who derives from it may read other items or weigh them

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        local, plan, backbone = self.local, self.plan, self.backbone
        whole = first == 0 and last >= int(local.n_steps.max(initial=0)) and len(extras.row) == 0
        assert whole, "a client's steps are taken all at once"
        partner = local.partner
        assert partner is not None
        weight = np.ones(len(local.item), np.float32) if local.weight is None else local.weight
        context, row = local.rows_needed[CONTEXT]
        inside = mark_listed(local.view.n_items, local.user_ptr, local.item, context.ptr, context.ids)
        rates = backbone.rates(local.view.n_items)
        rate, row_rate = (np.full(backbone.item_width, rates[name], np.float32) for name in ("p", "rows"))

        def train(some: tuple[int, int]) -> None:
            ego_steps(
                *some, local.batch, np.float32(plan.bpr_scale), np.float32(plan.l2), backbone.config.item_propagation,
                local.turn_ptr, local.order, partner, weight, local.row_of, inside, context.ptr, row, local.row_start,
                local.rows, local.private, rate, row_rate, np.float32(plan.weight_decay),
            )  # fmt: skip

        run_on_cores(local.turn_ptr, train)
