"""One model of many users in one place: the server of prediction transfer, and the centralised control.

A user is a row as an item is. Adam is lazy on rows: moments, bias correction and decay act on a row only in steps whose
batch has it, so that a step costs what it touches; towers and the rows of a graph model, where every step reaches all
of them, move in every step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Floats, Ints, Keys, Longs
from tacita.kernels.adam import adam_rows, adam_used_rows
from tacita.kernels.graph import add_bce_slopes, propagate_rows
from tacita.kernels.sampling import shuffle_order
from tacita.kernels.steps import affine_scores
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.kernels.tower import tower_catalogue, tower_logits, tower_slopes
from tacita.models.base import Backbone
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_aligned, score_all

if TYPE_CHECKING:
    import torch

HEADS = "heads/"
_ROWS = ("users", "items")
_USERS_PER_TASK = 32  # users whom one core scores at a time
_SAMPLES_PER_TASK = (
    512  # samples that one core scores; the same whatever the number of cores, so that sums are the same
)


@dataclass(frozen=True)
class InteractionGraph:
    """Who is joined to what: users first, then items; weights divided by the roots of both ends' degrees."""

    ptr: Longs  # (nodes + 1,)
    to: Ints  # (2 * edges,)
    weight: Floats

    @staticmethod
    def from_edges(user: AnyArray, item: AnyArray, weight: AnyArray, n_users: int, n_items: int) -> InteractionGraph:
        """Edges given twice add up; a node whose edges weigh nothing passes nothing on."""
        pair, at = np.unique(user.astype(np.int64) * n_items + item, return_inverse=True)
        heavy = np.bincount(at, weights=weight, minlength=len(pair))
        one, other = pair // n_items, pair % n_items + n_users
        ends, far = np.concatenate([one, other]), np.concatenate([other, one])
        both = np.concatenate([heavy, heavy])
        n = n_users + n_items
        degree = np.bincount(ends, weights=both, minlength=n)
        scale = np.zeros(n)
        scale[degree > 0] = degree[degree > 0] ** -0.5
        order = np.argsort(ends, kind="stable")
        ptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(ends, minlength=n), out=ptr[1:])
        value = (both * scale[ends] * scale[far])[order]
        return InteractionGraph(ptr, far[order].astype(np.int32), value.astype(np.float32))

    def smooth(self, start: Floats, layers: int) -> Floats:
        """The mean of the first vectors and of those after 1..layers passes.

        The matrix is its own transpose, so this also carries slopes back.
        """
        start = np.ascontiguousarray(start, np.float32)
        now, spare = start, [np.empty_like(start), np.empty_like(start)]
        for k in range(layers):
            propagate_rows(self.ptr, self.to, self.weight, start, now, spare[k % 2])
            now = spare[k % 2]
        return now / np.float32(layers + 1)


@dataclass(frozen=True)
class CentralState:
    """A value: arrays in, arrays out; training makes a new one."""

    values: Arrays  # users (users, width), items (items, width), heads/<name>
    moments: Arrays  # users.mean, users.square, users.steps (users,), the same of items and of all heads

    def arrays(self) -> Arrays:
        """All of it, by names that files can hold."""
        return {
            **{f"values/{k}": v for k, v in self.values.items()},
            **{f"moments/{k}": v for k, v in self.moments.items()},
        }

    @staticmethod
    def from_arrays(arrays: Arrays) -> CentralState:
        values, moments = (
            {k.removeprefix(kind): v for k, v in arrays.items() if k.startswith(kind)}
            for kind in ("values/", "moments/")
        )
        return CentralState(values, moments)

    @property
    def heads(self) -> Arrays:
        return {k.removeprefix(HEADS): v for k, v in self.values.items() if k.startswith(HEADS)}


@dataclass(frozen=True)
class TrainingSamples:
    """What is learnt from; labels may be soft."""

    user: Longs
    item: Longs
    label: Floats
    weight: Floats

    def take(self, which: Any) -> TrainingSamples:
        return TrainingSamples(self.user[which], self.item[which], self.label[which], self.weight[which])


def require_central(backbone: Backbone) -> Scorer:
    """The backbone, where it can be trained with all users in one place."""
    if isinstance(backbone, Scorer) and (backbone.on_graph or not backbone.reads_context):
        return backbone
    raise TacitaError(f"backbone '{backbone.name}' has no central model; use neumf, neuncf, lightgcn or mf.")


@dataclass(frozen=True)
class CentralModel:
    """A backbone whose users are all here; a graph model needs its graph."""

    backbone: Scorer
    graph: InteractionGraph | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_central(self.backbone)
        if self.backbone.on_graph and self.graph is None:
            raise TacitaError(f"backbone '{self.backbone.name}' scores on a graph, and none was given.")

    def init_state(self, draws: Draws, user_keys: Keys, item_keys: Keys) -> CentralState:
        backbone = self.backbone
        values = {"users": backbone.init_private(draws, user_keys), "items": backbone.init_items(draws, item_keys)}
        heads = backbone.init_heads(draws)
        values |= {f"{HEADS}{name}": v for name, v in heads.items()}
        sizes = {"users": values["users"].shape, "items": values["items"].shape}
        sizes["heads"] = (1, sum(v.size for v in heads.values()))
        moments: Arrays = {}
        for name, shape in sizes.items():
            moments |= {f"{name}.{kind}": np.zeros(shape, np.float32) for kind in ("mean", "square")}
            moments[f"{name}.steps"] = np.zeros(shape[0], np.int64)
        return CentralState(values, moments)

    def train(
        self,
        state: CentralState,
        samples: TrainingSamples,
        batch: int,
        orders: Sequence[np.uint64],
        loss: Literal["mean", "sum"] = "mean",
    ) -> CentralState:
        """An epoch for every key of `orders`: weighted BCE, mean or sum over a batch, each shuffled by its key."""
        if len(samples.user) == 0:
            return state
        worker = self._make_trainer(state)
        order = np.empty(len(samples.user), np.int64)
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            for key in orders:
                shuffle_order(key, np.zeros(1, np.uint64), np.array([0, len(order)]), batch, order)
                for at in range(0, len(order), batch):
                    some = samples.take(order[at : at + batch])
                    each = np.float32(len(some.user) if loss == "mean" else 1)
                    worker.step(replace(some, weight=some.weight / each), cores)
        return worker.state()

    def _make_trainer(self, state: CentralState) -> _Trainer:
        if self.backbone.on_graph:
            return _GraphTrainer(self, state)
        return (_TowerTrainer if isinstance(self.backbone, TowerModel) else _RowTrainer)(self, state)

    def vectors(self, state: CentralState) -> tuple[Floats, Floats]:
        """A vector of `dim` numbers for each: of NeuMF those it multiplies, of a graph model the final ones."""
        users, items = state.values["users"], state.values["items"]
        if self.backbone.on_graph:
            assert self.graph is not None
            both = self.graph.smooth(np.concatenate([users, items]), self.backbone.config.layers)  # type: ignore[attr-defined]
            return both[: len(users)], both[len(users) :]
        dim = self.backbone.config.dim  # type: ignore[attr-defined]
        return users[:, :dim], items[:, :dim]

    def score(self, state: CentralState, users: AnyArray) -> Floats:
        """Logits (users, items), in tiles of one shape."""
        if self.backbone.on_graph:
            mine, items = self.vectors(state)
            return affine_scores(mine[users], np.zeros(len(users), np.float32), np.ascontiguousarray(items.T))
        mine, items = state.values["users"][users], state.values["items"]
        if not self.backbone.grouped:
            return score_all(self.backbone, mine, state.heads, items)
        rows = np.pad(items, ((0, -len(items) % _SAMPLES_PER_TASK), (0, 0)))
        out, form = np.empty((len(users), len(items)), np.float32), self._tower_arguments(state)

        def score_some(at: int) -> None:
            some = slice(at, at + _USERS_PER_TASK)
            tower_catalogue(*form, mine[some], rows, _SAMPLES_PER_TASK, out[some])

        self._run_on_cores(score_some, range(0, len(users), _USERS_PER_TASK))
        return out

    def _tower_arguments(self, state: CentralState) -> tuple[Floats, Longs, int]:
        """A tower as compiled loops want it."""
        assert isinstance(self.backbone, TowerModel)
        flat = self.backbone.flatten_heads({k: v[None] for k, v in state.heads.items()})[0]
        return flat, np.array(self.backbone.config.tower, np.int64), self.backbone.gmf_width

    def _run_on_cores(self, work: Callable[[int], None], numbers: Iterable[int]) -> None:
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            list(cores.map(work, numbers))

    def score_pairs(self, state: CentralState, user: AnyArray, item: AnyArray) -> Floats:
        """Logits of aligned users and items."""
        if self.backbone.on_graph:
            mine, items = self.vectors(state)
            return np.asarray((mine[user] * items[item]).sum(1), np.float32)
        values = state.values
        if not self.backbone.grouped:
            return score_aligned(self.backbone, values["users"][user], state.heads, values["items"][item])
        n, form = len(user), self._tower_arguments(state)
        out = np.empty(n + -n % _SAMPLES_PER_TASK, np.float32)
        whose, what = (np.pad(np.asarray(x, np.int64), (0, -n % _SAMPLES_PER_TASK)) for x in (user, item))

        def score_some(at: int) -> None:
            some = slice(at, at + _SAMPLES_PER_TASK)
            out[some] = tower_logits(*form, values["users"], values["items"], whose[some], what[some])

        self._run_on_cores(score_some, range(0, n, _SAMPLES_PER_TASK))
        return out[:n]


class _Trainer(ABC):
    """Arrays of a state while they move."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        self.backbone, self.decay = central.backbone, np.float32(central.weight_decay)
        self.values = {k: v.copy() for k, v in state.values.items()}
        self.moments = {k: v.copy() for k, v in state.moments.items()}
        rates = self.backbone.rates(len(self.values["items"]))
        mine = [np.full(width, rates[name], np.float32) for name, width in self.backbone.layout.items()]
        item_width = self.values["items"].shape[1]
        self.rate = {"users": np.concatenate(mine), "items": np.full(item_width, rates["rows"], np.float32)}
        shapes = self.backbone.shared()  # in this order: that of a file is another
        heads = [np.full(math.prod(shape), rates[name], np.float32) for name, shape in shapes.items()]
        self.rate["heads"] = np.concatenate(heads) if heads else np.zeros(0, np.float32)

    def adam_arguments(self, name: str) -> tuple[Any, ...]:
        """What one of Adam's kernels moves, after the gradient."""
        return (*(self.moments[f"{name}.{kind}"] for kind in ("mean", "square", "steps")), self.rate[name], self.decay)

    @abstractmethod
    def step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        """Move everything by one batch."""

    def state(self) -> CentralState:
        return CentralState(self.values, self.moments)


class _RowTrainer(_Trainer):
    """A batch's own rows, and a tower that all share."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        import torch  # here and below: it takes two seconds, which those who only measure do not need

        super().__init__(central, state)
        torch.set_num_threads(1)
        names = [f"{HEADS}{k}" for k in self.backbone.shared()]
        flat = np.concatenate([self.values[k].reshape(-1) for k in names]) if names else np.zeros(0, np.float32)
        self.flat, at = flat[None], 0
        for name in names:  # views of one vector, so that one call moves them all
            size = self.values[name].size
            self.values[name] = flat[at : at + size].reshape(self.values[name].shape)
            at += size
        self.heads = {k.removeprefix(HEADS): torch.from_numpy(self.values[k]).requires_grad_() for k in names}
        self.slots = {name: np.full(len(self.values[name]), -1, np.int64) for name in _ROWS}
        self.only = np.zeros(1, np.int64)

    def step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        pieces = [batch.take(slice(at, at + _SAMPLES_PER_TASK)) for at in range(0, len(batch.user), _SAMPLES_PER_TASK)]
        slopes = list(zip(*cores.map(self._compute_gradients, pieces), strict=True))
        used = dict(zip(_ROWS, (batch.user, batch.item), strict=True))

        def move(name: str) -> None:
            slope = slopes[("users", "items", "heads").index(name)]
            if name == "heads":
                adam_rows(self.only, sum(slope[1:], slope[0]), self.flat, *self.adam_arguments(name))
            else:
                adam_used_rows(
                    used[name], np.concatenate(slope), self.slots[name], self.values[name], *self.adam_arguments(name)
                )

        list(cores.map(move, (*_ROWS, "heads") if self.heads else _ROWS))

    def _compute_gradients(self, piece: TrainingSamples) -> tuple[Floats, Floats, Floats]:
        """Of the loss of some samples, in their users' rows, their items' rows and all heads."""
        import torch

        from tacita.learn.training.objectives import bce

        used = {"users": piece.user, "items": piece.item}
        rows = [torch.from_numpy(self.values[name][some]).requires_grad_() for name, some in used.items()]
        each = bce(self._compute_logits(*rows), torch.from_numpy(piece.label))
        users, items, *heads = torch.autograd.grad(
            (torch.from_numpy(piece.weight) * each).sum(), [*rows, *self.heads.values()]
        )
        flat = torch.cat([one.reshape(-1) for one in heads])[None] if heads else torch.zeros(1, 0)
        return users.numpy(), items.numpy(), flat.numpy()

    def _compute_logits(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        named = self.backbone.named(users)
        wide = {k: v[None].expand(len(users), *v.shape) for k, v in self.heads.items()}
        one_by_one: torch.Tensor = self.backbone.score(named, wide, items)
        return one_by_one


class _TowerTrainer(_RowTrainer):
    """A tower goes up and down by hand."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        super().__init__(central, state)
        assert isinstance(self.backbone, TowerModel)
        self.form = (np.array(self.backbone.config.tower, np.int64), self.backbone.gmf_width)

    def _compute_gradients(self, piece: TrainingSamples) -> tuple[Floats, Floats, Floats]:
        users, items = (self.values[name] for name in _ROWS)
        made = tower_slopes(self.flat[0], *self.form, users, items, piece.user, piece.item, piece.label, piece.weight)
        return made[0], made[1], made[2][None]


class _GraphTrainer(_Trainer):
    """All rows, through the graph: its slopes are worked out here, for they take the same way back."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        super().__init__(central, state)
        assert central.graph is not None
        self.graph, self.layers = central.graph, central.backbone.config.layers  # type: ignore[attr-defined]
        self.n_users = len(self.values["users"])
        self.both = np.concatenate([self.values[name] for name in _ROWS])
        self.everything = {name: np.arange(len(self.values[name])) for name in _ROWS}

    def step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        ends = self.graph.smooth(self.both, self.layers)
        slope = np.zeros_like(ends)
        add_bce_slopes(batch.user, batch.item + self.n_users, batch.label, batch.weight, ends, slope)
        slope = self.graph.smooth(slope, self.layers)
        for name, some in (("users", slice(0, self.n_users)), ("items", slice(self.n_users, None))):
            adam_rows(self.everything[name], slope[some], self.both[some], *self.adam_arguments(name))

    def state(self) -> CentralState:
        values = {"users": self.both[: self.n_users].copy(), "items": self.both[self.n_users :].copy()}
        return CentralState(values, self.moments)
