"""The compiled stepper of a user's own star under cosine BPR: all steps of a client at once, clients on all cores."""

from __future__ import annotations

import numpy as np

from tacita.core.config import TrainConfig
from tacita.kernels.ego import run_ego_steps
from tacita.kernels.membership import mark_listed
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import run_on_cores
from tacita.models.ego import EgoModel
from tacita.models.scorer import Scorer


class EgoStepper(Stepper):
    backbone: EgoModel

    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bpr" and train.optimiser == "lazy-adam" and train.n_joint_silos == 0
        cuts_samples = train.batches == "samples"
        is_ego = type(backbone) is EgoModel  # who derives from it may read other items or weigh them
        return is_plain and cuts_samples and is_ego

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        self.assert_all_steps_at_once(first, last, extras)
        local = self.local
        train = self.train
        backbone = self.backbone
        partner = local.partner
        assert partner is not None
        weight = local.weight
        if weight is None:
            weight = np.ones(len(local.item), np.float32)
        context, row = local.rows_needed[CONTEXT]
        inside = mark_listed(local.view.n_items, local.user_ptr, local.item, context.ptr, context.ids)
        rate = np.full(backbone.item_width, self.rates["p"], np.float32)
        row_rate = np.full(backbone.item_width, self.rates["rows"], np.float32)

        def train_clients(clients: tuple[int, int]) -> None:
            run_ego_steps(
                *clients,
                local.batch,
                np.float32(train.bpr_scale),
                np.float32(train.l2),
                backbone.config.item_propagation,
                local.turn_ptr,
                local.order,
                partner,
                weight,
                local.row_of,
                inside,
                context.ptr,
                row,
                local.row_start,
                local.rows,
                local.private,
                rate,
                row_rate,
                np.float32(train.weight_decay),
            )

        run_on_cores(local.turn_ptr, train_clients)
