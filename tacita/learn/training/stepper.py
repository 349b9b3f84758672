"""Stepper: moves the local models of a cohort by some SGD steps; `FusedStepper` is the compiled one.

The others are modules of their own. All give the same answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.flat_indices import compute_offsets
from tacita.core.types import ExtraSamples, Floats, Ints, LocalModels, Longs
from tacita.kernels.steps import run_affine_steps
from tacita.kernels.threads import threads_in_use
from tacita.models.scorer import Scorer

CONTEXT = "its context"
"""The name under which a model's own lists are at hand; parts have names without spaces."""


@dataclass(frozen=True)
class StepExtras:
    """All parts' extra samples of one step, grouped by client."""

    ptr: Longs  # (clients + 1,)
    row: Ints  # local row
    owner: Ints  # which of the cohort's users
    label: Floats
    weight: Floats

    @staticmethod
    def empty(n_clients: int) -> StepExtras:
        ptr = np.zeros(n_clients + 1, np.int64)
        ints = np.zeros(0, np.int32)
        floats = np.zeros(0, np.float32)
        return StepExtras(ptr, ints, ints, floats, floats)

    @staticmethod
    def collect(local: LocalModels, samples: Mapping[str, ExtraSamples | None]) -> StepExtras:
        """The samples of each part, by its name; None: it has none in this step."""
        n_clients = local.view.n_clients
        client = []
        row = []
        owner = []
        label = []
        weight = []
        for name, extra in samples.items():
            if extra is None:
                continue
            lists, rows = local.rows_needed[name]
            counts = np.diff(extra.ptr)
            client.append(np.repeat(np.arange(n_clients), counts))
            row.append(rows[extra.pick])
            owner.append(lists.rows()[extra.pick])
            label.append(extra.label)
            weight.append(extra.weight)
        if not client:
            return StepExtras.empty(n_clients)
        clients = np.concatenate(client)
        order = np.argsort(clients, kind="stable")
        return StepExtras(
            compute_offsets(np.bincount(clients, minlength=n_clients)),
            np.concatenate(row)[order].astype(np.int32),
            np.concatenate(owner)[order].astype(np.int32),
            np.concatenate(label)[order].astype(np.float32),
            np.concatenate(weight)[order].astype(np.float32),
        )


class Stepper(ABC):
    def __init__(self, backbone: Scorer, train: TrainConfig, local: LocalModels) -> None:
        self.backbone = backbone
        self.train = train
        self.local = local
        self.rates = backbone.list_learning_rates(local.view.n_items)

    def assert_all_steps_at_once(self, first: int, last: int, extras: StepExtras) -> None:
        """For steppers that take all steps of a client at once, with nothing in between."""
        most_steps = int(self.local.n_steps.max(initial=0))
        is_whole = first == 0 and last >= most_steps and len(extras.row) == 0
        assert is_whole, "a client's steps are taken all at once"

    def compute_row_logits(self) -> Floats:
        """The logit of every local row under its client's own model, as it stands; clients are one user each."""
        reading = self.backbone.reduce_to_affine(self.local.private, {})
        assert reading is not None, "models that are not affine in the item row have steppers that say it"
        weights, bias = reading
        n_rows = np.diff(self.local.row_start)
        client = np.repeat(np.arange(self.local.view.n_clients), n_rows)
        products = weights[client] * self.local.rows
        logits = products.sum(1) + bias[client]
        return np.asarray(logits, np.float32)

    @abstractmethod
    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        """Steps first..last-1 of every client that has them; one phase of them, or all in turn."""


class FusedStepper(Stepper):
    """All clients, all steps, for backbones that are affine in the item row."""

    def __init__(self, backbone: Scorer, train: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, train, local)
        assert backbone.affine_kind is not None
        self.kind = backbone.affine_kind
        private_rates = [
            np.full(width, self.rates[name], np.float32) for name, width in backbone.private_layout.items()
        ]
        self.rate = np.concatenate(private_rates)

    @staticmethod
    def supports(backbone: Scorer, train: TrainConfig) -> bool:
        is_plain = train.objective == "bce" and train.optimiser == "sgd" and train.l2 == 0
        cuts_samples = train.n_joint_silos == 0 and train.batches == "samples"
        return is_plain and cuts_samples and backbone.affine_kind is not None

    def run_steps(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = (0, len(self.backbone.phases))
        if phase is not None:
            phases = (phase, phase + 1)
        self._take_steps(first, last, phases, extras, whole=False)

    def train_and_diff_at_once(self) -> None:
        """Gather, take all steps and diff, client by client: for models whose rows nobody looks at in between."""
        n_steps = int(self.local.n_steps.max(initial=0))
        phases = (0, len(self.backbone.phases))
        no_extras = StepExtras.empty(self.local.view.n_clients)
        self._take_steps(0, n_steps, phases, no_extras, whole=True)

    def _take_steps(self, first: int, last: int, phases: tuple[int, int], extras: StepExtras, whole: bool) -> None:
        local = self.local
        run_affine_steps(
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
            self.rates["rows"],
            extras.ptr,
            extras.row,
            extras.label,
            extras.weight,
            whole,
            local.row_item,
            local.view.items,
        )
