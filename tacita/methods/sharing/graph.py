"""The graph of what people shared: FedShare's LightGCN on the server (sharing spec A.6).

Nodes are the senders, in the order of their keys, and all items. Degrees count shared edges alone, so an item that
nobody shared keeps its first row. A sender has no vector of its own: it starts from the mean of its items' rows, from
zeros, or from a row that the server learns. All of it is linear in the rows, so slopes take the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.types import Floats, Given, Ints, Keys, Longs, Ragged
from tacita.kernels.graph import pass_along
from tacita.learn.training.central import Graph

Start = Literal["mean", "zero", "learned"]


@dataclass(frozen=True)
class SharedGraph:
    """Who shared what, ready to pass vectors along."""

    users: Keys  # (users,) distinct senders, ascending
    lists: Ragged  # (users) what each shared, ascending
    n_items: int
    layers: int = 3
    start: Start = "mean"
    graph: Graph = field(init=False, repr=False, compare=False)
    people: Ragged = field(init=False, repr=False, compare=False)  # (items) who shared each
    part: tuple[Floats, Floats] = field(init=False, repr=False, compare=False)  # of an edge in its user's mean, twice

    def __post_init__(self) -> None:
        user, item = self.lists.rows(), self.lists.ids
        object.__setattr__(self, "people", Ragged.from_pairs(item, user, self.n_items))
        to = np.concatenate([item + np.int32(len(self.users)), self.people.ids])
        ptr = np.concatenate([self.lists.ptr, len(item) + self.people.ptr[1:]])
        degree = np.diff(ptr)
        scale = np.zeros(len(degree))
        scale[degree > 0] = degree[degree > 0] ** -0.5
        weight = np.repeat(scale, degree) * scale[to]
        object.__setattr__(self, "graph", Graph(ptr, to, weight.astype(np.float32)))
        share = (1 / np.maximum(1, self.lists.counts())).astype(np.float32)
        object.__setattr__(self, "part", (share[user], share[self.people.ids]))

    @staticmethod
    def of(
        given: Given,
        n_items: int,
        extra_edges: tuple[Keys, Ints] | None = None,
        layers: int = 3,
        start: Start = "mean",
    ) -> SharedGraph:
        """The graph of the record, and of further edges (senders and items) that the server itself adds."""
        sender, item = given.sender, given.item.astype(np.int64)
        if extra_edges is not None:
            sender = np.concatenate([sender, extra_edges[0]])
            item = np.concatenate([item, extra_edges[1].astype(np.int64)])
        users, user = np.unique(sender, return_inverse=True)
        pair = np.sort(user * np.int64(max(1, n_items)) + item)
        user, item = np.divmod(pair[np.append(True, np.diff(pair) > 0)[: len(pair)]], max(1, n_items))
        return SharedGraph(users, Ragged.from_pairs(user, item, len(users)), n_items, layers, start)

    def __len__(self) -> int:
        """How many edges it has."""
        return len(self.lists.ids)

    @property
    def shared(self) -> Ints:
        """The items with an edge, ascending."""
        return np.flatnonzero(self.people.counts()).astype(np.int32)

    def smooth(self, table: Floats, people: Floats | None = None) -> tuple[Floats, Floats]:
        """The final vectors of users and items: the mean of the layers; `people`: learned rows of the users."""
        both = np.concatenate([self.first(table, people), table])
        both = self.graph.smooth(both, self.layers)
        return both[: len(self.users)], both[len(self.users) :]

    def first(self, table: Floats, people: Floats | None = None) -> Floats:
        """The users' vectors before anything passes along."""
        if self.start == "learned":
            assert people is not None, "learned rows have to be given"
            return people
        out = np.zeros((len(self.users), table.shape[1]), np.float32)
        if self.start == "zero":
            return out
        mean = np.empty_like(out)
        pass_along(self.lists.ptr, self.lists.ids, self.part[0], out, np.ascontiguousarray(table), mean)
        return mean

    def carry_back(self, slope_users: Floats, slope_items: Floats) -> Floats:
        """The slope in the table, given those in the final vectors."""
        return self.carry_back_both(slope_users, slope_items)[1]

    def carry_back_both(self, slope_users: Floats, slope_items: Floats) -> tuple[Floats, Floats]:
        """The slopes in the users' first vectors and in the table."""
        both = self.graph.smooth(np.concatenate([slope_users, slope_items]), self.layers)
        users, items = both[: len(self.users)], both[len(self.users) :]
        if self.start != "mean":
            return users, items
        out = np.empty_like(items)
        pass_along(self.people.ptr, self.people.ids, self.part[1], items, users, out)
        return users, out


def edges_of(graph: SharedGraph) -> tuple[Longs, Longs]:
    """Both ends of every edge, by user."""
    return graph.lists.rows().astype(np.int64), graph.lists.ids.astype(np.int64)
