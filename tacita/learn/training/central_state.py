"""The values of central training: the graph of interactions, the state of the one model, and its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.flat_indices import compute_offsets
from tacita.core.types import AnyArray, Arrays, Floats, Ints, Longs
from tacita.kernels.graph import propagate_rows

HEADS = "heads/"
VALUES = "values/"
MOMENTS = "moments/"


@dataclass(frozen=True)
class InteractionGraph:
    """Who is joined to what: users first, then items; weights divided by the roots of both ends' degrees."""

    ptr: Longs  # (nodes + 1,)
    to: Ints  # (2 * edges,)
    weight: Floats

    @staticmethod
    def from_edges(user: AnyArray, item: AnyArray, weight: AnyArray, n_users: int, n_items: int) -> InteractionGraph:
        """Edges given twice add up; a node whose edges weigh nothing passes nothing on."""
        pairs = user.astype(np.int64) * n_items + item
        pair, number = np.unique(pairs, return_inverse=True)
        pair_weight = np.bincount(number, weights=weight, minlength=len(pair))
        user_node = pair // n_items
        item_node = pair % n_items + n_users
        source = np.concatenate([user_node, item_node])
        target = np.concatenate([item_node, user_node])
        edge_weight = np.concatenate([pair_weight, pair_weight])
        n_nodes = n_users + n_items
        degree = np.bincount(source, weights=edge_weight, minlength=n_nodes)
        has_edges = degree > 0
        scale = np.zeros(n_nodes)
        scale[has_edges] = degree[has_edges] ** -0.5
        scaled_weight = edge_weight * scale[source] * scale[target]
        order = np.argsort(source, kind="stable")
        ptr = compute_offsets(np.bincount(source, minlength=n_nodes))
        return InteractionGraph(ptr, target[order].astype(np.int32), scaled_weight[order].astype(np.float32))

    def propagate_and_average(self, start: Floats, layers: int) -> Floats:
        """The mean of the first vectors and of those after 1..layers passes.

        The matrix is its own transpose, so this also carries slopes back.
        """
        start = np.ascontiguousarray(start, np.float32)
        buffers = [np.empty_like(start), np.empty_like(start)]
        now = start
        for layer in range(layers):
            after = buffers[layer % 2]
            propagate_rows(self.ptr, self.to, self.weight, start, now, after)
            now = after
        return now / np.float32(layers + 1)


@dataclass(frozen=True)
class CentralState:
    """A value: arrays in, arrays out; training makes a new one."""

    values: Arrays  # users (users, width), items (items, width), heads/<name>
    moments: Arrays  # users.mean, users.square, users.steps (users,), the same of items and of all heads

    def to_arrays(self) -> Arrays:
        """All of it, by names that files can hold."""
        arrays: Arrays = {f"{VALUES}{name}": value for name, value in self.values.items()}
        for name, moment in self.moments.items():
            arrays[f"{MOMENTS}{name}"] = moment
        return arrays

    @staticmethod
    def from_arrays(arrays: Arrays) -> CentralState:
        return CentralState(_select_prefix(arrays, VALUES), _select_prefix(arrays, MOMENTS))

    @property
    def heads(self) -> Arrays:
        return _select_prefix(self.values, HEADS)


def _select_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class TrainingSamples:
    """What is learnt from; labels may be soft."""

    user: Longs
    item: Longs
    label: Floats
    weight: Floats

    def take(self, which: Any) -> TrainingSamples:
        return TrainingSamples(self.user[which], self.item[which], self.label[which], self.weight[which])
