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
    saved_moments: tuple[Tensor, Tensor, Tensor] | None = (
        None  # mean, square and steps that lazy-adam goes on from, in place
    )

    @property
    def phase(self) -> str:
        """What a phase calls it."""
        return "rows" if self.kind == "rows" else "private"


class Optimiser(ABC):
    sparse: ClassVar[bool] = False  # whether a step leaves alone what its batch does not use

    def __init__(self, plan: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        self.plan = plan
        self.moving = moving
        self.n_steps = n_steps

    def take_step(self, step: int, phase: tuple[str, ...], loss: Loss, used: UsedRows) -> None:
        """One step of what moves in this phase."""
        leaves = [self._make_leaf(one, used[one.kind]) for one in self.moving]
        chosen = [k for k, one in enumerate(self.moving) if one.phase in phase]
        moved = [leaves[k] for k in chosen]
        grads = torch.autograd.grad(loss(leaves), moved, allow_unused=True, materialize_grads=True)  # unused: none
        with torch.no_grad():
            for k, grad in zip(chosen, grads, strict=True):
                some = used[self.moving[k].kind]
                self.apply_gradient(k, grad[some] if self.sparse and len(some) < len(grad) else grad, step, some)

    def copies_rows(self, kind: str, n: int, n_used: int) -> bool:
        """Whether a step reads a copy of the rows it uses, so that slopes are not as long as the table."""
        return self.sparse and kind != "heads" and 0 < n_used < n

    def _make_leaf(self, one: MovingArray, used: Tensor) -> Tensor:
        """What a step differentiates."""
        table = one.tensor.detach()
        return (table[used] if self.copies_rows(one.kind, len(table), len(used)) else table).requires_grad_()

    @abstractmethod
    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        """By the slopes of all rows or, if the solver is sparse, of those that are used."""

    def finish_pending(self, step: int) -> None:  # noqa: B027  most have nothing to make up for
        """Whatever the steps before this one left undone."""

    def active_mask(self, k: int, step: int) -> Tensor:
        """1 where the client has this step, shaped to multiply: the others have finished."""
        one = self.moving[k]
        return torch.from_numpy(step < self.n_steps)[one.client].reshape(-1, *[1] * (one.tensor.ndim - 1))


class Sgd(Optimiser):
    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one = self.moving[k]
        one.tensor.sub_(one.rate * grad)


class Adam(Optimiser):
    """Dense: a row goes on moving by its momentum in steps that do not use it."""

    def __init__(self, plan: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.moments = [(torch.zeros_like(one.tensor), torch.zeros_like(one.tensor)) for one in moving]

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, (mean, square) = self.moving[k], self.moments[k]
        mean.copy_(0.9 * mean + 0.1 * grad)
        square.copy_(0.999 * square + 0.001 * (grad * grad))
        corrected = mean / (1 - 0.9 ** (step + 1))
        direction = self.active_mask(k, step) * corrected / ((square / (1 - 0.999 ** (step + 1))).sqrt() + _EPS)
        one.tensor.sub_(one.rate * direction)


class LazyAdam(Adam):
    """Moments, bias correction and decay of a row act only in the steps that use it; the others leave it alone.

    Numbers are those of torch's SparseAdam with a count of steps per row.
    """

    sparse = True

    def __init__(self, plan: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.steps = [torch.zeros(len(one.tensor), dtype=torch.int64) for one in moving]
        for k, one in enumerate(moving):
            if one.saved_moments is not None:
                self.moments[k], self.steps[k] = one.saved_moments[:2], one.saved_moments[2]
        before = max((int(one.max()) for one in self.steps if len(one)), default=0)
        powers = np.arange(before + int(n_steps.max(initial=0)) + 1)
        self.bias = [torch.from_numpy(1 - decay**powers).float() for decay in _DECAYS]

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, (mean, square), steps = self.moving[k], self.moments[k], self.steps[k]
        some = one.tensor[used]
        slope = grad + self.plan.weight_decay * some
        steps[used] += 1
        mean[used] = 0.9 * mean[used] + 0.1 * slope
        square[used] = 0.999 * square[used] + 0.001 * (slope * slope)
        first, second = (bias[steps[used]].reshape(-1, *[1] * (grad.ndim - 1)) for bias in self.bias)
        one.tensor[used] = some - one.rate * (second.sqrt() / first) * mean[used] / (square[used].sqrt() + _EPS)


class PFedMe(Optimiser):
    """The personal model leans on the local one, which follows it a little after every step.

    The personal model goes on from where the last step left it, and in every round from what was received. A row that a
    step does not use only leans: how far, over any number of such steps, has a closed form, and is made up for when the
    row is used next.
    """

    sparse = True

    def __init__(self, plan: TrainConfig, moving: list[MovingArray], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.last_steps = [torch.zeros(len(one.tensor), dtype=torch.int64) for one in moving]  # the step a row waits at

    def take_step(self, step: int, phase: tuple[str, ...], loss: Loss, used: UsedRows) -> None:
        how = self.plan.pfedme
        with torch.no_grad():
            for k, one in enumerate(self.moving):
                self._apply_missed_steps(k, used[one.kind], step)
                self.last_steps[k][used[one.kind]] = step + 1
        for _ in range(how.inner_steps):
            super().take_step(step, phase, loss, used)
        for one in self.moving:
            share = np.float32(how.eta * how.lam)
            move_local_rows(used[one.kind].numpy(), flatten_rows(one.tensor), flatten_rows(one.own), share)

    def apply_gradient(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, how = self.moving[k], self.plan.pfedme
        rate, lam = np.float32(how.inner_lr), np.float32(how.lam)
        step_personal_rows(used.numpy(), flatten_rows(grad), flatten_rows(one.tensor), flatten_rows(one.own), rate, lam)

    def finish_pending(self, step: int) -> None:
        with torch.no_grad():
            for k, one in enumerate(self.moving):
                last = torch.from_numpy(np.minimum(step, self.n_steps))[one.client]
                late = torch.nonzero(self.last_steps[k] < last)[:, 0]
                self._apply_missed_steps(k, late, last[late])
                self.last_steps[k][late] = last[late]

    def _apply_missed_steps(self, k: int, some: Tensor, step: int | Tensor) -> None:
        """The steps before this one that did not use these rows."""
        one, how = self.moving[k], self.plan.pfedme
        missed = step - self.last_steps[k][some]
        some, missed = some[missed > 0], missed[missed > 0].double()
        if not len(some):
            return
        inner = (1 - how.inner_lr * how.lam) ** how.inner_steps  # of the distance, what the inner steps leave
        each = inner * (1 - how.eta * how.lam)
        left = each**missed
        gone = missed if each == 1 else (1 - left) / (1 - each)
        shape = (-1, *[1] * (one.tensor.ndim - 1))
        own = one.own[some]
        apart = one.tensor[some] - own
        own = own + (how.eta * how.lam * inner * gone).float().reshape(shape) * apart
        one.own[some] = own
        one.tensor[some] = own + left.float().reshape(shape) * apart


def flatten_rows(table: Tensor) -> AnyArray:
    """Its rows, as vectors in the same memory."""
    return table.detach().reshape(len(table), -1).numpy() if len(table) else np.zeros((0, 0), np.float32)


OPTIMISERS: dict[str, type[Optimiser]] = {"sgd": Sgd, "adam": Adam, "lazy-adam": LazyAdam, "pfedme": PFedMe}
