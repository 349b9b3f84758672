"""The compiled stepper of NeuMF and NeuNCF on clients of any number of people, by lazy Adam or pFedMe.

All steps of a client are taken at once, clients on all cores. Clients of one person each that train by Adam have a
stepper of their own, which goes on from kept moments (tower_stepper.py).
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.flat_indices import compute_offsets
from tacita.core.types import Floats, LocalModels, Longs
from tacita.kernels.silo_steps import run_silo_adam_steps, run_silo_pfedme_steps
from tacita.kernels.tower import write_tower_row_logits
from tacita.learn.training.stepper import StepExtras
from tacita.learn.training.tower_stepper import TowerStepper, run_on_cores
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer


class SiloStepper(TowerStepper):
    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bce" and train.l2 == 0 and train.moments == "fresh"
        is_tower = isinstance(backbone, TowerModel) and not backbone.reads_context
        return is_plain and is_tower and train.optimiser in ("lazy-adam", "pfedme")

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        self.assert_all_steps_at_once(first, last, extras)
        local = self.local
        flat = self.backbone.flatten_heads(local.heads)
        samples = (
            *find_batches(local),
            local.order,
            local.owner,
            local.view.user_ptr,
            local.row_of,
            local.label,
            local.row_start,
        )
        if self.train.optimiser == "pfedme":
            self._run_pfedme_steps(flat, samples)
        else:
            self._run_adam_steps(flat, samples)
        for name, value in self.backbone.unflatten_heads(flat).items():
            local.heads[name][...] = value

    def _run_adam_steps(self, flat: Floats, samples: tuple[Any, ...]) -> None:
        local = self.local
        take_steps = cast(Any, run_silo_adam_steps)
        rates = (
            self.rate,
            np.float32(self.rates["rows"]),
            self._list_piece_rates(),
            np.float32(self.train.weight_decay),
        )

        def train_clients(clients: tuple[int, int]) -> None:
            take_steps(*clients, *self.sizes, *samples, local.rows, local.private, flat, *rates)

        run_on_cores(local.turn_ptr, train_clients)

    def _list_piece_rates(self) -> Floats:
        """The rates of the shared parameters, one after another; a model without products has none of the last."""
        rates = [self.rates[name] for name in self.backbone.list_head_shapes()]
        n_pieces = 2 * len(self.backbone.config.tower) + 4
        return np.pad(np.array(rates, np.float32), (0, n_pieces - len(rates)))

    def _run_pfedme_steps(self, flat: Floats, samples: tuple[Any, ...]) -> None:
        """Personal models learn beside those that were received."""
        local = self.local
        config = self.train.pfedme
        take_steps = cast(Any, run_silo_pfedme_steps)
        personal = (local.rows.copy(), local.private.copy(), flat.copy())
        settings = (config.inner_steps, config.inner_lr, config.lam, config.eta)

        def train_clients(clients: tuple[int, int]) -> None:
            take_steps(*clients, *self.sizes, *samples, local.rows, local.private, flat, *personal, *settings)

        run_on_cores(local.turn_ptr, train_clients)
        rows, private, personal_flat = personal
        local.personal = {"private": private, "rows": rows}
        for name, value in self.backbone.unflatten_heads(personal_flat).items():
            local.personal[f"heads.{name}"] = value

    def compute_row_logits(self) -> Floats:
        """By the model that learned: under pFedMe the personal one. A client of several people answers as its first."""
        local = self.local
        models = local.personal
        if not models:
            heads = {f"heads.{name}": head for name, head in local.heads.items()}
            models = {"rows": local.rows, "private": local.private, **heads}
        flat = self.backbone.flatten_heads({name: models[f"heads.{name}"] for name in local.heads})
        private = models["private"][local.view.user_ptr[:-1]]
        logits = np.empty(len(local.rows), np.float32)

        def score_clients(clients: tuple[int, int]) -> None:
            write_tower_row_logits(*clients, *self.sizes, local.row_start, models["rows"], private, flat, logits)

        run_on_cores(local.turn_ptr, score_clients)
        return logits


def find_batches(local: LocalModels) -> tuple[Longs, Longs]:
    """The batches of each client in an epoch, and the first turn of each in every epoch."""
    if local.batch_ptr is not None and local.batch_start is not None:
        return local.batch_ptr, local.batch_start
    n_batches = local.steps_per_epoch
    ptr = compute_offsets(n_batches)
    client = np.repeat(np.arange(len(n_batches)), n_batches)
    number = np.arange(ptr[-1]) - ptr[client]
    starts = np.append(local.turn_ptr[client] + number * local.batch, local.turn_ptr[-1])
    return ptr, np.repeat(starts[None], len(local.order), axis=0)
