"""How gradients move the local models of a cohort; but for moments that clients keep, solvers start afresh in a round.

A cohort's clients take their steps together, and those that have fewer of them must stand still from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tacita.core.config import TrainConfig
from tacita.core.types import AnyArray, Longs
from tacita.kernels.pfedme import move_local_rows, step_personal_rows

_DECAYS = (0.9, 0.999)
_EPS = 1e-8
Loss = Callable[[list[Tensor]], Tensor]  # of all that moves, in order
UsedRows = dict[str, Tensor]  # kind -> what the step's batch uses of it, ascending


@dataclass(frozen=True)
class MovingArray:
    """One array of local models, a row per client, user or item row."""

    kind: str  # private, heads or rows
    tensor: Tensor  # what learns
    own: Tensor  # what the client sends or keeps: the same memory, unless a personal model learns beside it
    rate: Any
    client: Tensor  # of each row
    saved_moments: tuple[Tensor, Tensor, Tensor] | None = None
    """Mean, square and steps that lazy-adam goes on from, in place."""

    @property
    def phase(self) -> str:
        """What a phase calls it."""
        return "rows" if self.kind == "rows" else "private"


class Optimiser(ABC):
    sparse: ClassVar[bool] = False  # whether a step leaves alone what its batch does not use

    def __init__(self, train: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        self.train = train
        self.moving = moving
        self.n_steps = n_steps

    def take_step(self, step: int, phase: tuple[str, ...], loss: Loss, used: UsedRows) -> None:
        """One step of what moves in this phase."""
        leaves = [self._make_gradient_leaf(array, used[array.kind]) for array in self.moving]
        chosen = [k for k, array in enumerate(self.moving) if array.phase in phase]
        moved = [leaves[k] for k in chosen]
        grads = torch.autograd.grad(loss(leaves), moved, allow_unused=True, materialize_grads=True)  # unused: none
        with torch.no_grad():
            for k, grad in zip(chosen, grads, strict=True):
                used_rows = used[self.moving[k].kind]
                if self.sparse and len(used_rows) < len(grad):
                    grad = grad[used_rows]
                self.apply_gradient(k, grad, step, used_rows)

    def copies_rows(self, kind: str, n: int, n_used: int) -> bool:
        """Whether a step reads a copy of the rows it uses, so that slopes are not as long as the table."""
        return self.sparse and kind != "heads" and 0 < n_used < n

    def _make_gradient_leaf(self, array: MovingArray, used: Tensor) -> Tensor:
        """What a step differentiates."""
        table = array.tensor.detach()
        if self.copies_rows(array.kind, len(table), len(used)):
            table = table[used]
        return table.requires_grad_()

    @abstractmethod
    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        """By the slopes of all rows or, if the solver is sparse, of those that are used."""

    def finish_pending_steps(self, step: int) -> None:  # noqa: B027  most have nothing to make up for
        """Whatever the steps before this one left undone."""

    def build_active_mask(self, k: int, step: int) -> Tensor:
        """1 where the client has this step, shaped to multiply: the others have finished."""
        array = self.moving[k]
        is_active = torch.from_numpy(step < self.n_steps)
        return is_active[array.client].reshape(_column_shape(array.tensor))


def _column_shape(table: Tensor) -> tuple[int, ...]:
    """The shape in which a number per row multiplies a table."""
    return (-1, *[1] * (table.ndim - 1))


class Sgd(Optimiser):
    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        array = self.moving[k]
        array.tensor.sub_(array.rate * grad)


class Adam(Optimiser):
    """Dense: a row goes on moving by its momentum in steps that do not use it."""

    def __init__(self, train: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(train, moving, n_steps)
        self.moments: list[tuple[Tensor, Tensor]] = []
        for array in moving:
            mean = torch.zeros_like(array.tensor)
            square = torch.zeros_like(array.tensor)
            self.moments.append((mean, square))

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        array = self.moving[k]
        mean, square = self.moments[k]
        mean.copy_(0.9 * mean + 0.1 * grad)
        square.copy_(0.999 * square + 0.001 * (grad * grad))
        corrected_mean = mean / (1 - 0.9 ** (step + 1))
        corrected_square = square / (1 - 0.999 ** (step + 1))
        scale = corrected_square.sqrt() + _EPS
        direction = self.build_active_mask(k, step) * corrected_mean / scale
        array.tensor.sub_(array.rate * direction)


class LazyAdam(Adam):
    """Moments, bias correction and decay of a row act only in the steps that use it; the others leave it alone.

    Numbers are those of torch's SparseAdam with a count of steps per row.
    """

    sparse = True

    def __init__(self, train: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(train, moving, n_steps)
        self.steps = [torch.zeros(len(array.tensor), dtype=torch.int64) for array in moving]
        for k, array in enumerate(moving):
            if array.saved_moments is not None:
                mean, square, steps = array.saved_moments
                self.moments[k] = (mean, square)
                self.steps[k] = steps
        steps_before = max((int(steps.max()) for steps in self.steps if len(steps)), default=0)
        most_steps = steps_before + int(n_steps.max(initial=0))
        powers = np.arange(most_steps + 1)
        self.bias = [torch.from_numpy(1 - decay**powers).float() for decay in _DECAYS]

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        array = self.moving[k]
        mean, square = self.moments[k]
        steps = self.steps[k]
        rows = array.tensor[used]
        slope = grad + self.train.weight_decay * rows
        steps[used] += 1
        mean[used] = 0.9 * mean[used] + 0.1 * slope
        square[used] = 0.999 * square[used] + 0.001 * (slope * slope)
        shape = _column_shape(grad)
        mean_bias, square_bias = (bias[steps[used]].reshape(shape) for bias in self.bias)
        rate = array.rate * (square_bias.sqrt() / mean_bias)
        scale = square[used].sqrt() + _EPS
        array.tensor[used] = rows - rate * mean[used] / scale


class PFedMe(Optimiser):
    """The personal model leans on the local one, which follows it a little after every step.

    The personal model goes on from where the last step left it, and in every round from what was received. A row that a
    step does not use only leans: how far, over any number of such steps, has a closed form, and is made up for when the
    row is used next.
    """

    sparse = True

    def __init__(self, train: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(train, moving, n_steps)
        self.last_steps = [torch.zeros(len(array.tensor), dtype=torch.int64) for array in moving]
        """The step that a row waits at."""

    def take_step(self, step: int, phase: tuple[str, ...], loss: Loss, used: UsedRows) -> None:
        config = self.train.pfedme
        with torch.no_grad():
            for k, array in enumerate(self.moving):
                rows = used[array.kind]
                self._apply_missed_steps(k, rows, step)
                self.last_steps[k][rows] = step + 1
        for _ in range(config.inner_steps):
            super().take_step(step, phase, loss, used)
        share = np.float32(config.eta * config.lam)
        for array in self.moving:
            rows = used[array.kind]
            move_local_rows(rows.numpy(), flatten_rows(array.tensor), flatten_rows(array.own), share)

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        array = self.moving[k]
        rate = np.float32(self.train.pfedme.inner_lr)
        lam = np.float32(self.train.pfedme.lam)
        personal = flatten_rows(array.tensor)
        own = flatten_rows(array.own)
        step_personal_rows(used.numpy(), flatten_rows(grad), personal, own, rate, lam)

    def finish_pending_steps(self, step: int) -> None:
        last_step = torch.from_numpy(np.minimum(step, self.n_steps))
        with torch.no_grad():
            for k, array in enumerate(self.moving):
                last = last_step[array.client]
                late = torch.nonzero(self.last_steps[k] < last)[:, 0]
                self._apply_missed_steps(k, late, last[late])
                self.last_steps[k][late] = last[late]

    def _apply_missed_steps(self, k: int, rows: Tensor, step: int | Tensor) -> None:
        """The steps before this one that did not use these rows."""
        array = self.moving[k]
        config = self.train.pfedme
        missed = step - self.last_steps[k][rows]
        is_late = missed > 0
        rows = rows[is_late]
        missed = missed[is_late].double()
        if not len(rows):
            return
        inner = (1 - config.inner_lr * config.lam) ** config.inner_steps  # of the distance, what the inner steps leave
        per_step = inner * (1 - config.eta * config.lam)
        remaining = per_step**missed
        covered = missed if per_step == 1 else (1 - remaining) / (1 - per_step)
        shape = _column_shape(array.tensor)
        own = array.own[rows]
        distance = array.tensor[rows] - own
        follow = (config.eta * config.lam * inner * covered).float()
        own = own + follow.reshape(shape) * distance
        array.own[rows] = own
        array.tensor[rows] = own + remaining.float().reshape(shape) * distance


def flatten_rows(table: Tensor) -> AnyArray:
    """Its rows, as vectors in the same memory."""
    if not len(table):
        return np.zeros((0, 0), np.float32)
    return table.detach().reshape(len(table), -1).numpy()


OPTIMISERS: dict[str, type[Optimiser]] = {"sgd": Sgd, "adam": Adam, "lazy-adam": LazyAdam, "pfedme": PFedMe}
