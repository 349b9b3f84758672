"""Stepper: moves the local models of a cohort by some SGD steps. Two of them, same answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.types import ExtraSamples, Floats, Ints, LocalModels, Longs
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
    def collect(local: LocalModels, extras: dict[str, ExtraSamples]) -> StepExtras:
        client, row, owner, label, weight = [], [], [], [], []
        for name, extra in extras.items():
            lists, rows = local.rows_needed[name]
            client.append(np.repeat(np.arange(local.view.n_clients), np.diff(extra.ptr)))
            row.append(rows[extra.pick])
            owner.append(lists.rows()[extra.pick])
            label.append(extra.label)
            weight.append(extra.weight)
        if not client:
            return StepExtras.empty(local.view.n_clients)
        who = np.concatenate(client)
        order = np.argsort(who, kind="stable")
        ptr = np.zeros(local.view.n_clients + 1, np.int64)
        np.cumsum(np.bincount(who, minlength=local.view.n_clients), out=ptr[1:])
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
