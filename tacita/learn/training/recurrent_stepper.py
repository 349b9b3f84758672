"""The compiled stepper of the interest model: all steps of a client at once, clients on all cores.

A client may be a silo of many people. Batches hold whole people, or `train.held_steps` of them share theirs, so a state
is made once a person and epoch. Over held steps it stands still, where the torch steppers make it anew in each: the
only setting in which the two differ by more than rounding.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import Floats, LocalModels
from tacita.kernels.interest import PIECES, interest_pfedme_steps, interest_steps
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import run_on_cores
from tacita.models.interest import GAP, RATING, InterestModel
from tacita.models.scorer import Scorer


class RecurrentStepper(Stepper):
    backbone: InterestModel

    def __init__(self, backbone: InterestModel, plan: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, plan, local)
        rates = backbone.rates(local.view.n_items)
        shapes = backbone.shared()
        starts = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())])
        place = dict(zip(shapes, starts.tolist()))
        sizes = backbone.config.tower
        deeper = range(1, len(sizes))
        self.form: tuple[Any, ...] = (
            np.array([place[name] for name in PIECES]),
            np.array([place["item_layer"], *(place[f"layer_{k}"] for k in deeper)]),
            np.array([place[f"bias_{k}"] for k in range(len(sizes))]),
            np.array(sizes, np.int64),
            backbone.config.gap_width,
            np.float32(backbone.config.mu),
        )
        self.rate = np.full(backbone.config.dim, rates["p"], np.float32)
        self.row_rate = np.full(backbone.item_width, rates["rows"], np.float32)
        self.flat_rate = np.concatenate([np.full(math.prod(v), rates[k], np.float32) for k, v in shapes.items()])

    @staticmethod
    def supports(backbone: Scorer, plan: TrainConfig) -> bool:
        plain = plan.objective == "bce" and plan.optimiser in ("lazy-adam", "pfedme") and plan.l2 == 0
        return plain and plan.batches == "people" and isinstance(backbone, InterestModel)

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        local = self.local
        whole = first == 0 and last >= int(local.n_steps.max(initial=0)) and len(extras.row) == 0
        assert whole, "a client's steps are taken all at once"
        flat = self.backbone.flatten_heads(local.heads)
        lists, row = local.rows_needed[CONTEXT]
        read = (
            local.batch_ptr, local.batch_start, local.order, local.owner, local.row_of, local.label,
            lists.ptr, row, lists.values[RATING], lists.values[GAP], local.row_start,
        )  # fmt: skip
        if self.plan.optimiser == "pfedme":
            self._run_pfedme(flat, read)
        else:
            self._run_adam(flat, read)
        for name, value in self.backbone.unflatten_heads(flat).items():
            local.heads[name][...] = value

    def _run_adam(self, flat: Floats, read: tuple[Any, ...]) -> None:
        """By lazy Adam."""
        local, decay, steps = self.local, np.float32(self.plan.weight_decay), cast(Any, interest_steps)

        def train(some: tuple[int, int]) -> None:
            steps(
                *some, *self.form, decay, local.batches_per_group, *read, local.rows, local.view.user_ptr,
                local.private,
                flat,
                self.rate, self.row_rate, self.flat_rate,
            )  # fmt: skip

        run_on_cores(local.turn_ptr, train)

    def _run_pfedme(self, flat: Floats, read: tuple[Any, ...]) -> None:
        """By pFedMe: personal models learn beside those that were received."""
        local, how, steps = self.local, self.plan.pfedme, cast(Any, interest_pfedme_steps)
        said = how.inner_steps, np.float32(how.inner_lr), np.float32(how.lam), np.float32(how.eta)
        rows, private, mine = local.rows.copy(), local.private.copy(), flat.copy()

        def train(some: tuple[int, int]) -> None:
            steps(
                *some, *self.form, *said, *read, local.view.user_ptr, local.rows, local.private,
                flat,
                rows, private, mine,
            )  # fmt: skip

        run_on_cores(local.turn_ptr, train)
        heads = {f"heads.{name}": value for name, value in self.backbone.unflatten_heads(mine).items()}
        local.personal = {"private": private, "rows": rows, **heads}
