"""The compiled stepper of the interest model: all steps of a client at once, clients on all cores.

A client may be a silo of many people. Batches hold whole people, or `train.held_steps` of them share theirs, so a state
is computed once a person and epoch. Over held steps it stands still, where the torch steppers compute it in each: the
only setting in which the two differ by more than rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Floats, Ints, LocalModels, Ragged
from tacita.kernels.interest import run_interest_pfedme_steps, run_interest_steps
from tacita.kernels.sampling import draw_folds
from tacita.learn.training.stepper import CONTEXT, StepExtras, Stepper
from tacita.learn.training.tower_stepper import run_on_cores
from tacita.models.interest import GAP, RATING, InterestModel
from tacita.models.scorer import Scorer

FOLD = "fold"
"""The column of a model's own lists that says which fold of its user's history an entry is in."""


def draw_item_folds(backbone: InterestModel, local: LocalModels, draws: Draws) -> LocalModels:
    """The same models; where the model cuts histories into folds, samples and entries of histories say theirs."""
    if backbone.config.folds == 1 or CONTEXT not in local.rows_needed:
        return local
    view = local.view
    n_folds = backbone.config.folds
    key = draws.private("state-folds", view.block, view.round)
    lists, row = local.rows_needed[CONTEXT]
    entry_fold = draw_folds(key, view.user_keys, lists.rows(), lists.ids, n_folds)
    cut_lists = Ragged(lists.ptr, lists.ids, {**lists.values, FOLD: entry_fold})
    rows_needed = {**local.rows_needed, CONTEXT: (cut_lists, row)}
    fold = draw_folds(key, view.user_keys, local.owner, local.item, n_folds)
    return replace(local, rows_needed=rows_needed, fold=fold)


def refuse_plain_steps(backbone: Scorer) -> None:
    """Only the compiled step knows folds and centres; the others would score items by states made of them."""
    if not isinstance(backbone, InterestModel):
        return
    for name, plain in (("folds", 1), ("centred", False)):
        value = getattr(backbone.config, name)
        if value != plain:
            raise TacitaError(
                f"backbone.{name} = {value} needs the compiled step of '{backbone.name}' (bce, lazy-adam, no l2, "
                f"batches of people, no part that joins single steps); set backbone.{name} to {plain}."
            )


class RecurrentStepper(Stepper):
    backbone: InterestModel

    def __init__(self, backbone: InterestModel, train: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, train, local)
        rates = self.rates
        shapes = backbone.list_head_shapes()
        self.form = _prepare_model_arguments(backbone)
        self.rate = np.full(backbone.config.dim, rates["p"], np.float32)
        self.row_rate = np.full(backbone.item_width, rates["rows"], np.float32)
        flat_rates = [np.full(math.prod(shape), rates[name], np.float32) for name, shape in shapes.items()]
        self.flat_rate = np.concatenate(flat_rates)

    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bce" and train.optimiser in ("lazy-adam", "pfedme") and train.l2 == 0
        return is_plain and train.batches == "people" and isinstance(backbone, InterestModel)

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        self.assert_all_steps_at_once(first, last, extras)
        local = self.local
        flat = self.backbone.flatten_heads(local.heads)
        samples = self._prepare_sample_arguments()
        if self.train.optimiser == "pfedme":
            self._run_pfedme_steps(flat, samples)
        else:
            self._run_adam_steps(flat, samples)
        local.heads.update(self.backbone.unflatten_heads(flat))  # views: with a person a client a copy is dear

    def _prepare_fold_arguments(self) -> tuple[Ints, Ints]:
        """Folds of the events and of the samples; empty where all events make one state."""
        lists, _ = self.local.rows_needed[CONTEXT]
        if self.backbone.config.folds == 1:
            no_folds = np.zeros(0, np.int32)
            return no_folds, no_folds
        if self.local.fold is None:
            refuse_plain_steps(self.backbone)
        assert self.local.fold is not None
        return lists.values[FOLD], self.local.fold

    def _prepare_sample_arguments(self) -> tuple[Any, ...]:
        """What both loops read and never change."""
        local = self.local
        lists, row = local.rows_needed[CONTEXT]
        return (
            local.batch_ptr,
            local.batch_start,
            local.order,
            local.owner,
            local.row_of,
            local.label,
            lists.ptr,
            row,
            lists.values[RATING],
            lists.values[GAP],
        )

    def _run_adam_steps(self, flat: Floats, samples: tuple[Any, ...]) -> None:
        """By lazy Adam."""
        local = self.local
        take_steps = cast(Any, run_interest_steps)
        decay = np.float32(self.train.weight_decay)
        folds = self._prepare_fold_arguments()

        def train_clients(clients: tuple[int, int]) -> None:
            take_steps(
                *clients,
                *self.form,
                self.backbone.config.folds,
                decay,
                local.batches_per_group,
                *samples,
                *folds,
                local.row_start,
                local.rows,
                local.view.user_ptr,
                local.private,
                flat,
                self.rate,
                self.row_rate,
                self.flat_rate,
            )

        run_on_cores(local.turn_ptr, train_clients)

    def _run_pfedme_steps(self, flat: Floats, samples: tuple[Any, ...]) -> None:
        """By pFedMe: personal models learn beside those that were received."""
        local = self.local
        config = self.train.pfedme
        take_steps = cast(Any, run_interest_pfedme_steps)
        settings = (config.inner_steps, np.float32(config.inner_lr), np.float32(config.lam), np.float32(config.eta))
        personal_rows = local.rows.copy()
        personal_private = local.private.copy()
        personal_flat = flat.copy()

        def train_clients(clients: tuple[int, int]) -> None:
            take_steps(
                *clients,
                *self.form,
                *settings,
                *samples,
                local.row_start,
                local.view.user_ptr,
                local.rows,
                local.private,
                flat,
                personal_rows,
                personal_private,
                personal_flat,
            )

        run_on_cores(local.turn_ptr, train_clients)
        local.personal = {"private": personal_private, "rows": personal_rows}
        for name, value in self.backbone.unflatten_heads(personal_flat).items():
            local.personal[f"heads.{name}"] = value


def _prepare_model_arguments(backbone: InterestModel) -> tuple[Any, ...]:
    """Where the pieces of the flat shared parameters begin, and the sizes, as compiled loops want them."""
    sizes = backbone.config.tower
    layers = ["item_layer", *(f"layer_{k}" for k in range(1, len(sizes)))]
    biases = [f"bias_{k}" for k in range(len(sizes))]
    return (
        backbone.find_piece_starts(),
        backbone.find_starts(layers),
        backbone.find_starts(biases),
        np.array(sizes, np.int64),
        backbone.config.gap_width,
        np.float32(backbone.config.mu),
    )
