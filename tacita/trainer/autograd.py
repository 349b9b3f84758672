"""The torch stepper: any backbone, whole cohort at once, gradients by autograd.

Every client has its own rows, private vectors and heads, so one backward pass over the sum of the clients' mean
losses gives each client exactly its own gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tacita.backbones.base import Backbone
from tacita.config import TrainConfig
from tacita.trainer.stepper import StepExtras, Stepper
from tacita.types import Local

_LANES = 64


class AutogradStepper(Stepper):
    def __init__(self, backbone: Backbone, plan: TrainConfig, local: Local) -> None:
        torch.set_num_threads(1)
        super().__init__(backbone, plan, local)
        rates = backbone.rates(local.view.n_items)
        self.rows = torch.from_numpy(local.rows).requires_grad_()
        self.private = torch.from_numpy(local.private).requires_grad_()
        self.heads = {name: torch.from_numpy(v).requires_grad_() for name, v in local.heads.items()}
        vector = [torch.full((width,), rates[name]) for name, width in backbone.layout.items()]
        self.rates: list[tuple[str, torch.Tensor, Any]] = [
            ("private", self.private, torch.cat(vector) if vector else 0.0),
            *(("private", tensor, rates[name]) for name, tensor in self.heads.items()),
            ("rows", self.rows, rates["rows"]),
        ]
        self.moments = [(torch.zeros_like(t), torch.zeros_like(t)) for _, t, _ in self.rates]
        self.owner = local.owner
        self.client_of_user = torch.from_numpy(np.repeat(np.arange(local.view.n_clients), np.diff(local.view.user_ptr)))
        clients = np.arange(local.view.n_clients)
        client_of_row = torch.from_numpy(np.repeat(clients, np.diff(local.row_start)))
        self.client_of = [self.client_of_user, *(torch.from_numpy(clients) for _ in self.heads), client_of_row]

    def _batch(self, step: int, extras: StepExtras) -> tuple[torch.Tensor, ...]:
        """Owner, row, label and weight of every sample of this step, extras last."""
        local = self.local
        n = np.diff(local.ptr)
        per_epoch = local.steps_per_epoch
        active = np.flatnonzero(step < local.n_steps)
        epoch, within = np.divmod(step, per_epoch[active])
        size = np.minimum(local.batch, n[active] - within * local.batch)
        start = local.ptr[active] + within * local.batch
        offsets = np.cumsum(size) - size
        position = np.repeat(start - offsets, size) + np.arange(size.sum())
        sample = local.order[np.repeat(epoch, size), position]
        keep = np.repeat(step < local.n_steps, np.diff(extras.ptr))
        extra_client = np.repeat(np.arange(local.view.n_clients), np.diff(extras.ptr))[keep]
        row = np.concatenate(
            [
                local.row_of[sample] + np.repeat(local.row_start[active], size),
                extras.row[keep] + local.row_start[extra_client],
            ]
        )
        owner = np.concatenate([self.owner[sample], extras.owner[keep]])
        label = np.concatenate([local.label[sample], extras.label[keep]])
        weight = np.concatenate([np.repeat(1.0 / size, size), extras.weight[keep]])
        idle = (0, -len(row) % _LANES)  # weightless samples: no odd tail whose rounding differs
        return (
            torch.from_numpy(np.pad(owner.astype(np.int64), idle)),
            torch.from_numpy(np.pad(row.astype(np.int64), idle)),
            torch.from_numpy(np.pad(label.astype(np.float32), idle)),
            torch.from_numpy(np.pad(weight.astype(np.float32), idle)),
        )

    def _loss(self, step: int, extras: StepExtras) -> torch.Tensor:
        owner, row, label, weight = self._batch(step, extras)
        private = self.backbone.named(self.private[owner])
        heads = {name: tensor[self.client_of_user[owner]] for name, tensor in self.heads.items()}
        logits = self.backbone.score(private, heads, self.rows[row])
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
        return (weight * each).sum()

    def run(self, first: int, last: int, phase: int | None, extras: StepExtras) -> None:
        phases = self.backbone.phases if phase is None else (self.backbone.phases[phase],)
        for step in range(first, min(last, int(self.local.n_steps.max(initial=0)))):
            for moving in phases:
                chosen = [(k, t, rate) for k, (group, t, rate) in enumerate(self.rates) if group in moving]
                grads = torch.autograd.grad(self._loss(step, extras), [t for _, t, _ in chosen])
                with torch.no_grad():
                    for (k, tensor, rate), grad in zip(chosen, grads, strict=True):
                        tensor -= rate * self._direction(k, grad, step)

    def _direction(self, k: int, grad: torch.Tensor, step: int) -> torch.Tensor:
        if self.plan.optimiser == "sgd":
            return grad
        mean, square = self.moments[k]
        mean.copy_(0.9 * mean + 0.1 * grad)
        square.copy_(0.999 * square + 0.001 * (grad * grad))
        corrected = mean / (1 - 0.9 ** (step + 1))
        going = torch.from_numpy(step < self.local.n_steps)[self.client_of[k]]  # the others have finished
        going = going.reshape(-1, *[1] * (grad.ndim - 1))
        return going * corrected / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
