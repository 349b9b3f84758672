"""The compiled stepper of NeuMF and NeuNCF: all steps of a client at once, clients on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import AnyArray, Floats, LocalModels, Longs
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.kernels.tower import write_tower_row_logits
from tacita.kernels.tower_steps import run_tower_steps
from tacita.learn.training.stepper import StepExtras, Stepper
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer

_SHARES = 8  # for every core, so that none waits long for another


class TowerStepper(Stepper):
    backbone: TowerModel

    def __init__(self, backbone: TowerModel, train: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, train, local)
        rates = self.rates
        private_rates = [np.full(width, rates[name], np.float32) for name, width in backbone.private_layout.items()]
        self.rate = np.concatenate(private_rates)
        self.row_rate = np.full(backbone.item_width, rates["rows"], np.float32)
        head_rates = {}
        for name, shape in backbone.list_head_shapes().items():
            head_rates[name] = np.full((1, *shape), rates[name], np.float32)
        self.flat_rate = backbone.flatten_heads(head_rates)[0]
        self.sizes = (backbone.gmf_width, np.array(backbone.config.tower, np.int64))

    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bce" and train.optimiser == "lazy-adam" and train.l2 == 0
        cuts_samples = train.n_joint_silos == 0 and train.batches == "samples"
        is_tower = isinstance(backbone, TowerModel) and not backbone.reads_context
        return is_plain and cuts_samples and is_tower

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        self.assert_all_steps_at_once(first, last, extras)
        local = self.local
        flat = self.backbone.flatten_heads(local.heads)
        moments = self._load_moments(flat)

        def train_clients(clients: tuple[int, int]) -> None:
            run_tower_steps(
                *clients,
                local.batch,
                *self.sizes,
                local.turn_ptr,
                local.order,
                local.row_of,
                local.label,
                local.row_start,
                local.rows,
                local.private,
                flat,
                self.rate,
                self.row_rate,
                self.flat_rate,
                np.float32(self.train.weight_decay),
                *moments,
            )

        run_on_cores(local.turn_ptr, train_clients)
        for name, value in self.backbone.unflatten_heads(flat).items():
            local.heads[name][...] = value
        if local.moments:
            self._store_moments("mean", moments[-2])
            self._store_moments("square", moments[-1])

    def _store_moments(self, kind: str, flat: AnyArray) -> None:
        for name, value in self.backbone.unflatten_heads(flat).items():
            self.local.moments[f"heads.{name}.{kind}"][...] = value

    def _load_moments(self, flat: Floats) -> tuple[AnyArray, ...]:
        """What is kept of Adam, as the loop wants it; it is empty where nothing is."""
        moments = self.local.moments
        if not moments:
            no_steps = np.zeros(0, np.int64)
            no_rows = self.local.rows[:0]
            no_private = self.local.private[:0]
            no_heads = flat[:0]
            return (no_steps, no_steps, no_rows, no_rows, no_private, no_private, no_heads, no_heads)
        return (
            moments["steps"],
            moments["rows.steps"],
            moments["rows.mean"],
            moments["rows.square"],
            moments["private.mean"],
            moments["private.square"],
            self._flatten_moments("mean"),
            self._flatten_moments("square"),
        )

    def _flatten_moments(self, kind: str) -> AnyArray:
        moments = self.local.moments
        return self.backbone.flatten_heads({name: moments[f"heads.{name}.{kind}"] for name in self.local.heads})

    def compute_row_logits(self) -> Floats:
        local = self.local
        flat = self.backbone.flatten_heads(local.heads)
        logits = np.empty(len(local.rows), np.float32)

        def score_clients(clients: tuple[int, int]) -> None:
            write_tower_row_logits(*clients, *self.sizes, local.row_start, local.rows, local.private, flat, logits)

        run_on_cores(local.turn_ptr, score_clients)
        return logits


def run_on_cores(ptr: Longs, work: Callable[[tuple[int, int]], None]) -> None:
    """Some neighbouring clients at a time, with about as many samples."""
    cores = threads_in_use()
    marks = np.linspace(0, ptr[-1], cores * _SHARES + 1).astype(np.int64)
    cuts = np.searchsorted(ptr, marks)
    ends = np.unique(np.append(cuts, [0, len(ptr) - 1]))
    with limit_blas_threads(), ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, pairwise(ends.tolist())))
