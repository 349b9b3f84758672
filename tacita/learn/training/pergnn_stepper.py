"""The compiled stepper of FedPerGNN by lazy Adam: all steps of a client at once, clients on all cores."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import Floats, Longs, Ragged
from tacita.kernels.pergnn import run_pergnn_steps
from tacita.learn.training.silo_stepper import find_batches
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import run_on_cores
from tacita.models.fedpergnn import COUNT, NEIGHBOURS, FedPerGNN
from tacita.models.scorer import Scorer


class PerGNNStepper(Stepper):
    backbone: FedPerGNN

    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bce" and train.l2 == 0 and train.moments == "fresh"
        has_lone_users = train.n_joint_silos == 0 and train.optimiser == "lazy-adam"
        is_model = type(backbone) is FedPerGNN and backbone.config.output == "product"
        return is_plain and has_lone_users and is_model

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        self.assert_all_steps_at_once(first, last, extras)
        local = self.local
        take_steps = cast(Any, run_pergnn_steps)
        lists, row = local.rows_needed[CONTEXT]
        neighbours, n_neighbours = self._read_neighbours(lists)
        names = list(local.heads)
        flat = np.concatenate([local.heads[name].reshape(len(local.heads[name]), -1) for name in names], axis=1)
        batches = find_batches(local)
        width = self.backbone.item_width
        rate = np.full(width, self.rates["p"], np.float32)
        row_rate = np.full(width, self.rates["rows"], np.float32)

        def train_clients(clients: tuple[int, int]) -> None:
            take_steps(
                *clients,
                *batches,
                local.order,
                local.row_of,
                local.label,
                lists.ptr,
                row,
                neighbours,
                n_neighbours,
                local.row_start,
                local.rows,
                local.private,
                flat,
                rate,
                row_rate,
                np.float32(self.rates["bias"]),
                np.float32(self.train.weight_decay),
            )

        run_on_cores(local.turn_ptr, train_clients)
        ends = np.cumsum([local.heads[name][0].size for name in names])[:-1]
        for name, piece in zip(names, np.split(flat, ends, axis=1), strict=True):
            local.heads[name][...] = piece.reshape(local.heads[name].shape)

    def _read_neighbours(self, lists: Ragged) -> tuple[Floats, Longs]:
        """The neighbours' vectors beside each entry, and how many there are."""
        n_entries = len(lists.ids)
        if NEIGHBOURS not in lists.values:
            return np.zeros((n_entries, 0, self.backbone.item_width), np.float32), np.zeros(n_entries, np.int64)
        return lists.values[NEIGHBOURS], lists.values[COUNT].astype(np.int64)

    def compute_row_logits(self) -> Floats:
        # torch takes seconds to import, and training needs none
        from tacita.learn.training.autograd_stepper import AutogradStepper

        return AutogradStepper(self.backbone, self.train, self.local).compute_row_logits()
