"""How gradients move the local models of a cohort; but for moments that clients keep, solvers start afresh in a round.

A cohort's clients take their steps together, and those that have fewer of them must stand still from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacita.core.config import TrainConfig
from tacita.core.types import Longs

_DECAYS = (0.9, 0.999)
_EPS = 1e-8
Used = dict[str, Tensor]  # kind -> what the step's batch uses of it, ascending


@dataclass(frozen=True)
class Moving:
    """One array of local models, a row per client, user or item row."""

    kind: str  # private, heads or rows
    tensor: Tensor  # what is differentiated
    own: Tensor  # what the client sends or keeps: the same memory, unless a personal model learns beside it
    rate: Any
    client: Tensor  # of each row
    kept: tuple[Tensor, Tensor, Tensor] | None = None  # mean, square and steps that lazy-adam goes on from, in place

    @property
    def phase(self) -> str:
        """What a phase calls it."""
        return "rows" if self.kind == "rows" else "private"


class Solver(ABC):
    def __init__(self, plan: TrainConfig, moving: list[Moving], n_steps: Longs) -> None:
        self.plan = plan
        self.moving = moving
        self.n_steps = n_steps

    def take(self, step: int, phase: tuple[str, ...], loss: Callable[[], Tensor], used: Used) -> None:
        """One step of what moves in this phase."""
        chosen = [k for k, one in enumerate(self.moving) if one.phase in phase]
        moved = [self.moving[k].tensor for k in chosen]
        grads = torch.autograd.grad(loss(), moved, allow_unused=True, materialize_grads=True)  # unused: it has none
        with torch.no_grad():
            for k, grad in zip(chosen, grads, strict=True):
                self.move(k, grad, step, used[self.moving[k].kind])

    @abstractmethod
    def move(self, k: int, grad: Tensor, step: int, used: Tensor) -> None: ...

    def going(self, k: int, step: int) -> Tensor:
        """1 where the client has this step, shaped to multiply: the others have finished."""
        one = self.moving[k]
        return torch.from_numpy(step < self.n_steps)[one.client].reshape(-1, *[1] * (one.tensor.ndim - 1))


class Sgd(Solver):
    def move(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one = self.moving[k]
        one.tensor.sub_(one.rate * grad)


class Adam(Solver):
    """Dense: a row goes on moving by its momentum in steps that do not use it."""

    def __init__(self, plan: TrainConfig, moving: list[Moving], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.moments = [(torch.zeros_like(one.tensor), torch.zeros_like(one.tensor)) for one in moving]

    def move(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, (mean, square) = self.moving[k], self.moments[k]
        mean.copy_(0.9 * mean + 0.1 * grad)
        square.copy_(0.999 * square + 0.001 * (grad * grad))
        corrected = mean / (1 - 0.9 ** (step + 1))
        direction = self.going(k, step) * corrected / ((square / (1 - 0.999 ** (step + 1))).sqrt() + _EPS)
        one.tensor.sub_(one.rate * direction)


class LazyAdam(Adam):
    """Moments, bias correction and decay of a row act only in the steps that use it; the others leave it alone.

    Numbers are those of torch's SparseAdam with a count of steps per row.
    """

    def __init__(self, plan: TrainConfig, moving: list[Moving], n_steps: Longs) -> None:
        super().__init__(plan, moving, n_steps)
        self.steps = [torch.zeros(len(one.tensor), dtype=torch.int64) for one in moving]
        for k, one in enumerate(moving):
            if one.kept is not None:
                self.moments[k], self.steps[k] = one.kept[:2], one.kept[2]
        before = max((int(one.max()) for one in self.steps if len(one)), default=0)
        powers = np.arange(before + int(n_steps.max(initial=0)) + 1)
        self.bias = [torch.from_numpy(1 - decay**powers).float() for decay in _DECAYS]

    def move(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, (mean, square), steps = self.moving[k], self.moments[k], self.steps[k]
        some = one.tensor[used]
        slope = grad[used] + self.plan.weight_decay * some
        steps[used] += 1
        mean[used] = 0.9 * mean[used] + 0.1 * slope
        square[used] = 0.999 * square[used] + 0.001 * (slope * slope)
        first, second = (bias[steps[used]].reshape(-1, *[1] * (grad.ndim - 1)) for bias in self.bias)
        one.tensor[used] = some - one.rate * (second.sqrt() / first) * mean[used] / (square[used].sqrt() + _EPS)


class PFedMe(Solver):
    """The personal model leans on the local one, which follows it a little after every step.

    The personal model goes on from where the last step left it, and in every round from what was received.
    """

    def take(self, step: int, phase: tuple[str, ...], loss: Callable[[], Tensor], used: Used) -> None:
        how = self.plan.pfedme
        for _ in range(how.inner_steps):
            super().take(step, phase, loss, used)
        with torch.no_grad():
            for k, one in enumerate(self.moving):
                one.own.sub_(self.going(k, step) * (how.eta * how.lam * (one.own - one.tensor)))

    def move(self, k: int, grad: Tensor, step: int, used: Tensor) -> None:
        one, how = self.moving[k], self.plan.pfedme
        one.tensor.sub_(self.going(k, step) * (how.inner_lr * (grad + how.lam * (one.tensor - one.own))))


SOLVERS: dict[str, type[Solver]] = {"sgd": Sgd, "adam": Adam, "lazy-adam": LazyAdam, "pfedme": PFedMe}
