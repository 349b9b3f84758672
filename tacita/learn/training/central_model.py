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
from tacita.core.types import AnyArray, Arrays, Floats, Keys, Longs
from tacita.kernels.adam import adam_step_rows, adam_step_used_rows
from tacita.kernels.graph import add_bce_slopes
from tacita.kernels.sampling import shuffle_client_samples
from tacita.kernels.steps import compute_affine_scores
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.kernels.tower import compute_tower_logits, compute_tower_slopes, write_catalogue_logits
from tacita.learn.training.central_state import HEADS, CentralState, InteractionGraph, TrainingSamples
from tacita.models.base import Backbone
from tacita.models.neural_cf import TowerModel
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_aligned, score_catalogue

if TYPE_CHECKING:
    import torch

_ROWS = ("users", "items")
_MOMENTS = ("mean", "square", "steps")
_USERS_PER_TASK = 32  # users whom one core scores at a time
_SAMPLES_PER_TASK = 512
"""Samples that one core scores; the same whatever the number of cores, so that sums are the same."""


def require_central(backbone: Backbone) -> Scorer:
    """The backbone, where it can be trained with all users in one place."""
    if isinstance(backbone, Scorer) and (backbone.on_graph or not backbone.reads_context):
        return backbone
    raise TacitaError(f"backbone '{backbone.name}' has no central model; use neumf, neuncf, lightgcn or mf.")


@dataclass(frozen=True)
class CentralModel:
    """A backbone with all its users in one place; a graph model needs its graph."""

    backbone: Scorer
    graph: InteractionGraph | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_central(self.backbone)
        if self.backbone.on_graph and self.graph is None:
            raise TacitaError(f"backbone '{self.backbone.name}' scores on a graph, and none was given.")

    def init_state(self, draws: Draws, user_keys: Keys, item_keys: Keys) -> CentralState:
        backbone = self.backbone
        users = backbone.init_private(draws, user_keys)
        items = backbone.init_items(draws, item_keys)
        values = {"users": users, "items": items}
        head_size = 0
        for name, head in backbone.init_heads(draws).items():
            values[f"{HEADS}{name}"] = head
            head_size += head.size
        shapes = {"users": users.shape, "items": items.shape, "heads": (1, head_size)}
        moments: Arrays = {}
        for name, shape in shapes.items():
            moments[f"{name}.mean"] = np.zeros(shape, np.float32)
            moments[f"{name}.square"] = np.zeros(shape, np.float32)
            moments[f"{name}.steps"] = np.zeros(shape[0], np.int64)
        return CentralState(values, moments)

    def train_epochs(
        self,
        state: CentralState,
        samples: TrainingSamples,
        batch: int,
        orders: Sequence[np.uint64],
        loss: Literal["mean", "sum"] = "mean",
    ) -> CentralState:
        """An epoch for every key of `orders`: weighted BCE, mean or sum over a batch, each shuffled by its key."""
        n_samples = len(samples.user)
        if n_samples == 0:
            return state
        trainer = self._make_trainer(state)
        order = np.empty(n_samples, np.int64)
        common_owner = np.zeros(1, np.uint64)
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            for key in orders:
                shuffle_client_samples(key, common_owner, np.array([0, n_samples]), batch, order)
                for start in range(0, n_samples, batch):
                    chosen = samples.take(order[start : start + batch])
                    divisor = np.float32(len(chosen.user) if loss == "mean" else 1)
                    trainer.take_batch_step(replace(chosen, weight=chosen.weight / divisor), cores)
        return trainer.build_state()

    def _make_trainer(self, state: CentralState) -> _Trainer:
        if self.backbone.on_graph:
            return _GraphTrainer(self, state)
        if isinstance(self.backbone, TowerModel):
            return _TowerTrainer(self, state)
        return _RowTrainer(self, state)

    def compute_vectors(self, state: CentralState) -> tuple[Floats, Floats]:
        """A vector of `dim` numbers for each: of NeuMF those it multiplies, of a graph model the final ones."""
        users = state.values["users"]
        items = state.values["items"]
        if self.backbone.on_graph:
            assert self.graph is not None
            layers = self.backbone.config.layers  # type: ignore[attr-defined]
            nodes = self.graph.propagate_and_average(np.concatenate([users, items]), layers)
            return nodes[: len(users)], nodes[len(users) :]
        dim = self.backbone.config.dim  # type: ignore[attr-defined]
        return users[:, :dim], items[:, :dim]

    def score_catalogue(self, state: CentralState, users: AnyArray) -> Floats:
        """Logits (users, items), in tiles of one shape."""
        if self.backbone.on_graph:
            vectors, items = self.compute_vectors(state)
            offsets = np.zeros(len(users), np.float32)
            return compute_affine_scores(vectors[users], offsets, np.ascontiguousarray(items.T))
        private = state.values["users"][users]
        items = state.values["items"]
        if not self.backbone.grouped:
            return score_catalogue(self.backbone, private, state.heads, items)
        n_idle = -len(items) % _SAMPLES_PER_TASK
        rows = np.pad(items, ((0, n_idle), (0, 0)))
        tower = self._prepare_tower_arguments(state)
        logits = np.empty((len(users), len(items)), np.float32)

        def score_users(start: int) -> None:
            span = slice(start, start + _USERS_PER_TASK)
            write_catalogue_logits(*tower, private[span], rows, _SAMPLES_PER_TASK, logits[span])

        self._run_on_cores(score_users, range(0, len(users), _USERS_PER_TASK))
        return logits

    def _prepare_tower_arguments(self, state: CentralState) -> tuple[Floats, Longs, int]:
        """A tower as compiled loops want it."""
        assert isinstance(self.backbone, TowerModel)
        heads = {name: head[None] for name, head in state.heads.items()}
        flat = self.backbone.flatten_heads(heads)[0]
        sizes = np.array(self.backbone.config.tower, np.int64)
        return flat, sizes, self.backbone.gmf_width

    def _run_on_cores(self, work: Callable[[int], None], numbers: Iterable[int]) -> None:
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            list(cores.map(work, numbers))

    def score_pairs(self, state: CentralState, user: AnyArray, item: AnyArray) -> Floats:
        """Logits of aligned users and items."""
        if self.backbone.on_graph:
            vectors, rows = self.compute_vectors(state)
            products = vectors[user] * rows[item]
            return np.asarray(products.sum(1), np.float32)
        users = state.values["users"]
        items = state.values["items"]
        if not self.backbone.grouped:
            return score_aligned(self.backbone, users[user], state.heads, items[item])
        n = len(user)
        n_idle = -n % _SAMPLES_PER_TASK
        tower = self._prepare_tower_arguments(state)
        padded_user = np.pad(np.asarray(user, np.int64), (0, n_idle))
        padded_item = np.pad(np.asarray(item, np.int64), (0, n_idle))
        logits = np.empty(n + n_idle, np.float32)

        def score_samples(start: int) -> None:
            span = slice(start, start + _SAMPLES_PER_TASK)
            logits[span] = compute_tower_logits(*tower, users, items, padded_user[span], padded_item[span])

        self._run_on_cores(score_samples, range(0, n, _SAMPLES_PER_TASK))
        return logits[:n]


class _Trainer(ABC):
    """Arrays of a state while they move."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        self.backbone = central.backbone
        self.decay = np.float32(central.weight_decay)
        self.values = {name: value.copy() for name, value in state.values.items()}
        self.moments = {name: moment.copy() for name, moment in state.moments.items()}
        rates = self.backbone.list_learning_rates(len(self.values["items"]))
        user_rates = [np.full(width, rates[name], np.float32) for name, width in self.backbone.private_layout.items()]
        item_width = self.values["items"].shape[1]
        head_rates = [np.zeros(0, np.float32)]
        for name, shape in self.backbone.list_head_shapes().items():  # in this order: that of a file is another
            head_rates.append(np.full(math.prod(shape), rates[name], np.float32))
        self.rate = {
            "users": np.concatenate(user_rates),
            "items": np.full(item_width, rates["rows"], np.float32),
            "heads": np.concatenate(head_rates),
        }

    def adam_arguments(self, name: str) -> tuple[Any, ...]:
        """What one of Adam's kernels moves, after the gradient."""
        moments = [self.moments[f"{name}.{kind}"] for kind in _MOMENTS]
        return (*moments, self.rate[name], self.decay)

    @abstractmethod
    def take_batch_step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        """Move everything by one batch."""

    def build_state(self) -> CentralState:
        return CentralState(self.values, self.moments)


class _RowTrainer(_Trainer):
    """A batch's own rows, and a tower that all share."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        import torch  # here and below: it takes two seconds, which those who only measure do not need

        super().__init__(central, state)
        torch.set_num_threads(1)
        names = list(self.backbone.list_head_shapes())
        heads = [self.values[f"{HEADS}{name}"].reshape(-1) for name in names]
        flat = np.concatenate([np.zeros(0, np.float32), *heads])
        self.flat = flat[None]
        self.heads = {}
        start = 0
        for name in names:  # views of one vector, so that one call moves them all
            head = self.values[f"{HEADS}{name}"]
            end = start + head.size
            head_view = flat[start:end].reshape(head.shape)
            self.values[f"{HEADS}{name}"] = head_view
            self.heads[name] = torch.from_numpy(head_view).requires_grad_()
            start = end
        self.slots = {name: np.full(len(self.values[name]), -1, np.int64) for name in _ROWS}
        self.only_row = np.zeros(1, np.int64)

    def take_batch_step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        starts = range(0, len(batch.user), _SAMPLES_PER_TASK)
        pieces = [batch.take(slice(start, start + _SAMPLES_PER_TASK)) for start in starts]
        gradients = list(cores.map(self._compute_gradients, pieces))
        user_slopes, item_slopes, head_slopes = zip(*gradients, strict=True)

        def move_users() -> None:
            self._move_rows("users", batch.user, np.concatenate(user_slopes))

        def move_items() -> None:
            self._move_rows("items", batch.item, np.concatenate(item_slopes))

        def move_heads() -> None:
            slope = sum(head_slopes[1:], head_slopes[0])
            adam_step_rows(self.only_row, slope, self.flat, *self.adam_arguments("heads"))

        moves = [move_users, move_items]
        if self.heads:
            moves.append(move_heads)
        list(cores.map(_call_function, moves))

    def _move_rows(self, name: str, used: Longs, slope: Floats) -> None:
        adam_step_used_rows(used, slope, self.slots[name], self.values[name], *self.adam_arguments(name))

    def _compute_gradients(self, piece: TrainingSamples) -> tuple[Floats, Floats, Floats]:
        """Of the loss of some samples, in their users' rows, their items' rows and all heads."""
        import torch

        from tacita.learn.training.objectives import compute_bce_loss

        users = torch.from_numpy(self.values["users"][piece.user]).requires_grad_()
        items = torch.from_numpy(self.values["items"][piece.item]).requires_grad_()
        losses = compute_bce_loss(self._compute_logits(users, items), torch.from_numpy(piece.label))
        loss = (torch.from_numpy(piece.weight) * losses).sum()
        leaves = [users, items, *self.heads.values()]
        user_slope, item_slope, *head_slopes = torch.autograd.grad(loss, leaves)
        flat = torch.zeros(1, 0)
        if head_slopes:
            flat = torch.cat([slope.reshape(-1) for slope in head_slopes])[None]
        return user_slope.numpy(), item_slope.numpy(), flat.numpy()

    def _compute_logits(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        rep = self.backbone.split_private(users)
        heads = {name: head[None].expand(len(users), *head.shape) for name, head in self.heads.items()}
        logits: torch.Tensor = self.backbone.compute_logits(rep, heads, items)
        return logits


def _call_function(work: Callable[[], None]) -> None:
    work()


class _TowerTrainer(_RowTrainer):
    """A tower goes up and down by hand."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        super().__init__(central, state)
        assert isinstance(self.backbone, TowerModel)
        self.sizes = (np.array(self.backbone.config.tower, np.int64), self.backbone.gmf_width)

    def _compute_gradients(self, piece: TrainingSamples) -> tuple[Floats, Floats, Floats]:
        users = self.values["users"]
        items = self.values["items"]
        user_slope, item_slope, flat_slope = compute_tower_slopes(
            self.flat[0], *self.sizes, users, items, piece.user, piece.item, piece.label, piece.weight
        )
        return user_slope, item_slope, flat_slope[None]


class _GraphTrainer(_Trainer):
    """All rows, through the graph: its slopes are worked out here, for they take the same way back."""

    def __init__(self, central: CentralModel, state: CentralState) -> None:
        super().__init__(central, state)
        assert central.graph is not None
        self.graph = central.graph
        self.layers = central.backbone.config.layers  # type: ignore[attr-defined]
        self.n_users = len(self.values["users"])
        self.nodes = np.concatenate([self.values["users"], self.values["items"]])
        self.spans = {"users": slice(0, self.n_users), "items": slice(self.n_users, None)}

    def take_batch_step(self, batch: TrainingSamples, cores: ThreadPoolExecutor) -> None:
        vectors = self.graph.propagate_and_average(self.nodes, self.layers)
        slope = np.zeros_like(vectors)
        item_node = batch.item + self.n_users
        add_bce_slopes(batch.user, item_node, batch.label, batch.weight, vectors, slope)
        slope = self.graph.propagate_and_average(slope, self.layers)
        for name, span in self.spans.items():
            rows = self.nodes[span]
            adam_step_rows(np.arange(len(rows)), slope[span], rows, *self.adam_arguments(name))

    def build_state(self) -> CentralState:
        users = self.nodes[: self.n_users].copy()
        items = self.nodes[self.n_users :].copy()
        return CentralState({"users": users, "items": items}, self.moments)
