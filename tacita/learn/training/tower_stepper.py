"""The compiled stepper of NeuMF and NeuNCF: all steps of a client at once, clients on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import AnyArray, Floats, LocalModels, Longs
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.kernels.tower import tower_row_logits, tower_steps
from tacita.learn.training.stepper import StepExtras, Stepper
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer

_SHARES = 8  # for every core, so that none waits long for another


class TowerStepper(Stepper):
    backbone: TowerModel

    def __init__(self, backbone: TowerModel, plan: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, plan, local)
        rates = backbone.rates(local.view.n_items)
        self.rate = np.concatenate([np.full(width, rates[name], np.float32) for name, width in backbone.layout.items()])
        self.row_rate = np.full(backbone.item_width, rates["rows"], np.float32)
        each = {name: np.full(shape, rates[name], np.float32) for name, shape in backbone.shared().items()}
        self.flat_rate = backbone.flatten_heads({name: v[None] for name, v in each.items()})[0]
        self.form = (backbone.gmf_width, np.array(backbone.config.tower, np.int64))

    @staticmethod
    def supports(backbone: Scorer, plan: TrainConfig) -> bool:
        plain = plan.objective == "bce" and plan.optimiser == "lazy-adam" and plan.l2 == 0 and plan.n_joint_silos == 0
        return plain and plan.batches == "samples" and isinstance(backbone, TowerModel) and not backbone.reads_context

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        local = self.local
        whole = first == 0 and last >= int(local.n_steps.max(initial=0)) and len(extras.row) == 0
        assert whole, "a client's steps are taken all at once"
        flat, decay = self.backbone.flatten_heads(local.heads), np.float32(self.plan.weight_decay)
        moments = self._load_moments(flat)

        def train(some: tuple[int, int]) -> None:
            tower_steps(
                *some, local.batch, *self.form, local.turn_ptr, local.order, local.row_of, local.label,
                local.row_start, local.rows, local.private, flat, self.rate, self.row_rate, self.flat_rate, decay,
                *moments,
            )  # fmt: skip

        run_on_cores(local.turn_ptr, train)
        for name, value in self.backbone.unflatten_heads(flat).items():
            local.heads[name][...] = value
        for kind, made in zip(("mean", "square"), moments[-2:], strict=True):
            if local.moments:
                for name, value in self.backbone.unflatten_heads(made).items():
                    local.moments[f"heads.{name}.{kind}"][...] = value

    def _load_moments(self, flat: Floats) -> tuple[AnyArray, ...]:
        """What is kept of Adam, as the loop wants it; it is empty where nothing is."""
        held = self.local.moments
        if not held:
            longs, table, vectors = np.zeros(0, np.int64), self.local.rows[:0], flat[:0]
            return (longs, longs, table, table, self.local.private[:0], self.local.private[:0], vectors, vectors)
        own = [held[f"{name}.{kind}"] for name in ("rows", "private") for kind in ("mean", "square")]
        heads = [
            self.backbone.flatten_heads({name: held[f"heads.{name}.{kind}"] for name in self.local.heads})
            for kind in ("mean", "square")
        ]
        return (held["steps"], held["rows.steps"], *own, *heads)

    def row_logits(self) -> Floats:
        local, flat = self.local, self.backbone.flatten_heads(self.local.heads)
        out = np.empty(len(local.rows), np.float32)

        def read(some: tuple[int, int]) -> None:
            tower_row_logits(*some, *self.form, local.row_start, local.rows, local.private, flat, out)

        run_on_cores(local.turn_ptr, read)
        return out


def run_on_cores(ptr: Longs, work: Callable[[tuple[int, int]], None]) -> None:
    """Some neighbouring clients at a time, with about as many samples."""
    cores = threads_in_use()
    marks = np.linspace(0, ptr[-1], cores * _SHARES + 1).astype(np.int64)
    ends = np.unique(np.append(np.searchsorted(ptr, marks), [0, len(ptr) - 1]))
    with limit_blas_threads(), ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, pairwise(ends.tolist())))
