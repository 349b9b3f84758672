"""The graph of what people shared: FedShare's LightGCN on the server (sharing spec A.6).

Nodes are the senders, in the order of their keys, and all items. Degrees count shared edges alone, so an item that
nobody shared keeps its first row. A sender has no vector of its own: it starts from the mean of its items' rows, from
zeros, or from a row that the server learns. All of it is linear in the rows, so slopes take the same way back.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.types import Arrays, Floats, Ints, Keys, Longs, Ragged, SharedRecord
from tacita.kernels.graph import propagate_rows
from tacita.learn.training.central_model import InteractionGraph

UserStart = Literal["mean", "zero", "learned"]


@dataclass(frozen=True)
class SharedGraph:
    """Who shared what, ready to pass vectors along."""

    users: Keys  # (users,) distinct senders, ascending
    lists: Ragged  # (users) what each shared, ascending; edges that count less have a "weight"
    n_items: int
    layers: int = 3
    start: UserStart = "mean"
    graph: InteractionGraph = field(init=False, repr=False, compare=False)
    people: Ragged = field(init=False, repr=False, compare=False)  # (items) who shared each
    part: tuple[Floats, Floats] = field(init=False, repr=False, compare=False)  # of an edge in its user's mean, twice

    def __post_init__(self) -> None:
        user, item = self.lists.rows(), self.lists.ids
        object.__setattr__(self, "people", Ragged.from_pairs(item, user, self.n_items, self.lists.values))
        to = np.concatenate([item + np.int32(len(self.users)), self.people.ids])
        ptr = np.concatenate([self.lists.ptr, len(item) + self.people.ptr[1:]])
        mine, theirs = (one.values.get("weight", np.ones(len(one.ids))) for one in (self.lists, self.people))
        ends, edge = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)), np.concatenate([mine, theirs])
        degree = np.bincount(ends, weights=edge, minlength=len(ptr) - 1)
        scale = np.zeros(len(degree))
        scale[degree > 0] = degree[degree > 0] ** -0.5
        weight = edge * scale[ends] * scale[to]
        object.__setattr__(self, "graph", InteractionGraph(ptr, to, weight.astype(np.float32)))
        share = 1 / np.where(degree > 0, degree, 1)[: len(self.users)]
        part = (mine * share[user]).astype(np.float32), (theirs * share[self.people.ids]).astype(np.float32)
        object.__setattr__(self, "part", part)

    @staticmethod
    def of(
        record: SharedRecord,
        n_items: int,
        extra_edges: tuple[Keys, Ints] | None = None,
        layers: int = 3,
        start: UserStart = "mean",
        extra_weight: Floats | None = None,
    ) -> SharedGraph:
        """The graph of the record, and of further edges (senders and items) that the server itself adds.

        A record is the same object from round to round until somebody asks for something, and so is its graph.
        """
        shape = (n_items, layers, start)
        known = None if extra_edges is not None else _find_cached_graph(record, shape)
        if known is not None:
            return known
        sender, item = record.sender, record.item.astype(np.int64)
        if extra_edges is not None:
            sender = np.concatenate([sender, extra_edges[0]])
            item = np.concatenate([item, extra_edges[1].astype(np.int64)])
        users, user = np.unique(sender, return_inverse=True)
        pair = user * np.int64(max(1, n_items)) + item
        pair, first = np.unique(pair, return_index=True)  # what is in the record counts as that
        user, item = np.divmod(pair, max(1, n_items))
        values: Arrays = {}
        if extra_weight is not None:
            values["weight"] = np.concatenate([np.ones(len(record), np.float32), extra_weight])[first]
        made = SharedGraph(users, Ragged.from_pairs(user, item, len(users), values), n_items, layers, start)
        if extra_edges is None:
            _GRAPH_CACHE[:] = [(weakref.ref(record, lambda _: _GRAPH_CACHE.clear()), shape, made)]
        return made

    def __len__(self) -> int:
        """How many edges it has."""
        return len(self.lists.ids)

    @property
    def shared_items(self) -> Ints:
        """The items with an edge, ascending."""
        return np.flatnonzero(self.people.counts()).astype(np.int32)

    def smooth(self, table: Floats, people: Floats | None = None) -> tuple[Floats, Floats]:
        """The final vectors of users and items: the mean of the layers; `people`: learned rows of the users."""
        both = np.concatenate([self.init_user_vectors(table, people), table])
        both = self.graph.smooth(both, self.layers)
        return both[: len(self.users)], both[len(self.users) :]

    def init_user_vectors(self, table: Floats, people: Floats | None = None) -> Floats:
        """The users' vectors before anything passes along."""
        if self.start == "learned":
            assert people is not None, "learned rows have to be given"
            return people
        out = np.zeros((len(self.users), table.shape[1]), np.float32)
        if self.start == "zero":
            return out
        mean = np.empty_like(out)
        propagate_rows(self.lists.ptr, self.lists.ids, self.part[0], out, np.ascontiguousarray(table), mean)
        return mean

    def backpropagate_table(self, slope_users: Floats, slope_items: Floats) -> Floats:
        """The slope in the table, given those in the final vectors."""
        return self.backpropagate(slope_users, slope_items)[1]

    def backpropagate(self, slope_users: Floats, slope_items: Floats) -> tuple[Floats, Floats]:
        """The slopes in the users' first vectors and in the table."""
        both = self.graph.smooth(np.concatenate([slope_users, slope_items]), self.layers)
        users, items = both[: len(self.users)], both[len(self.users) :]
        if self.start != "mean":
            return users, items
        out = np.empty_like(items)
        propagate_rows(self.people.ptr, self.people.ids, self.part[1], items, users, out)
        return users, out


_GRAPH_CACHE: list[tuple[weakref.ref[SharedRecord], Hashable, SharedGraph]] = []
"""The graph that was made last, as long as the record that it was made of lives: withdrawn edges end with it."""


def _find_cached_graph(given: SharedRecord, shape: Hashable) -> SharedGraph | None:
    for record, kind, made in _GRAPH_CACHE:
        if record() is given and kind == shape:
            return made
    return None


def list_edges(graph: SharedGraph) -> tuple[Longs, Longs]:
    """Both ends of every edge, by user."""
    return graph.lists.rows().astype(np.int64), graph.lists.ids.astype(np.int64)
