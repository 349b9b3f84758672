"""Stepper: moves the local models of a cohort by some SGD steps; `FusedStepper` is the compiled one.

The others are modules of their own. All give the same answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import ExtraSamples, Floats, Ints, LocalModels, Longs
from tacita.kernels.steps import affine_steps
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
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return StepExtras(np.zeros(n_clients + 1, np.int64), ints, ints, floats, floats)

    @staticmethod
    def collect(local: LocalModels, samples: Mapping[str, ExtraSamples | None]) -> StepExtras:
        """The samples of each part, by its name; None: it has none in this step."""
        n_clients = local.view.n_clients
        client, row, owner, label, weight = [], [], [], [], []
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
        ptr = np.zeros(n_clients + 1, np.int64)
        np.cumsum(np.bincount(clients, minlength=n_clients), out=ptr[1:])
        return StepExtras(
            ptr,
            np.concatenate(row)[order].astype(np.int32),
            np.concatenate(owner)[order].astype(np.int32),
            np.concatenate(label)[order].astype(np.float32),
            np.concatenate(weight)[order].astype(np.float32),
        )


class Stepper(ABC):
    def __init__(self, backbone: Scorer, plan: TrainConfig, local: LocalModels) -> None:
        self.backbone = backbone
        self.plan = plan
        self.local = local

    def row_logits(self) -> Floats:
        """The logit of every local row under its client's own model, as it stands; clients are one user each."""
        reading = self.backbone.reading(self.local.private, {})
        assert reading is not None, "models that are not affine in the item row have steppers that say it"
        a, c = reading
        client = np.repeat(np.arange(self.local.view.n_clients), np.diff(self.local.row_start))
        return np.asarray((a[client] * self.local.rows).sum(1) + c[client], np.float32)

    @abstractmethod
    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        """Steps first..last-1 of every client that has them; one phase of them, or all in turn."""


class FusedStepper(Stepper):
    def __init__(self, backbone: Scorer, plan: TrainConfig, local: LocalModels) -> None:
        super().__init__(backbone, plan, local)
        assert backbone.affine_kind is not None
        self.kind = backbone.affine_kind
        rates = backbone.rates(local.view.n_items)
        self.rate = np.concatenate([np.full(width, rates[name], np.float32) for name, width in backbone.layout.items()])
        self.item_rate = rates["rows"]

    @staticmethod
    def supports(backbone: Scorer, plan: TrainConfig) -> bool:
        plain = plan.objective == "bce" and plan.optimiser == "sgd" and plan.l2 == 0 and plan.n_joint_silos == 0
        return plain and plan.batches == "samples" and backbone.affine_kind is not None

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = (0, len(self.backbone.phases)) if phase is None else (phase, phase + 1)
        self._take_steps(first, last, phases, extras, whole=False)

    def train_whole(self) -> None:
        """Gather, take all steps and diff, client by client: for models whose rows nobody looks at in between."""
        n_steps, phases = int(self.local.n_steps.max(initial=0)), (0, len(self.backbone.phases))
        self._take_steps(0, n_steps, phases, StepExtras.empty(self.local.view.n_clients), whole=True)

    def _take_steps(self, first: int, last: int, phases: tuple[int, int], extras: StepExtras, whole: bool) -> None:
        local = self.local
        affine_steps(
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
            self.item_rate,
            extras.ptr,
            extras.row,
            extras.label,
            extras.weight,
            whole,
            local.row_item,
            local.view.items,
        )
