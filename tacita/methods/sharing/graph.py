"""The graph of what users shared: FedShare's LightGCN on the server (sharing spec A.6).

Nodes are the senders, in the order of their keys, and all items. Degrees count shared edges alone, so an item that
nobody shared keeps its first row. A sender has no vector of its own: it starts from the mean of its items' rows, from
zeros, or from a row that the server learns. All of it is linear in the rows, so gradients take the same way back.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.types import AnyArray, Arrays, Doubles, Floats, Ints, Keys, Longs, Ragged, SharedRecord
from tacita.kernels.graph import propagate_rows
from tacita.learn.training.central_state import InteractionGraph

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
        lists = self.lists
        user = lists.rows()
        item = lists.ids
        columns = lists.values
        people = Ragged.from_pairs(item, user, self.n_items, columns)
        of_users = _read_edge_weights(lists)
        of_items = _read_edge_weights(people)
        n_users = len(self.users)
        item_nodes = item + np.int32(n_users)
        n_edges = len(item)
        item_ends = n_edges + people.ptr[1:]
        ends = np.concatenate([lists.ptr, item_ends])
        targets = np.concatenate([item_nodes, people.ids])
        edges = np.concatenate([of_users, of_items])
        degree, graph = _build_normalised_graph(ends, targets, edges)
        has_edges = degree > 0
        divisor = np.where(has_edges, degree, 1)
        share = 1 / divisor[:n_users]
        user_part = of_users * share[user]
        item_part = of_items * share[people.ids]
        user_share = user_part.astype(np.float32)
        item_share = item_part.astype(np.float32)
        part = (user_share, item_share)
        object.__setattr__(self, "people", people)
        object.__setattr__(self, "graph", graph)
        object.__setattr__(self, "part", part)

    @staticmethod
    def from_record(
        record: SharedRecord,
        n_items: int,
        extra_edges: tuple[Keys, Ints] | None = None,
        layers: int = 3,
        start: UserStart = "mean",
        extra_weight: Floats | None = None,
    ) -> SharedGraph:
        """The graph of the record, and of further edges (senders and items) that the server itself adds.

        A record is the same object from round to round until a user asks for something, and so is its graph.
        """
        if extra_edges is not None:
            users, lists = _list_extended_edges(record, n_items, extra_edges, extra_weight)
            return SharedGraph(users, lists, n_items, layers, start)
        shape = (n_items, layers, start)
        cached = _find_cached_graph(record, shape)
        if cached is not None:
            return cached
        sender = record.sender
        users, lists, _ = _group_edges_by_sender(sender, record.item, n_items)
        graph = SharedGraph(users, lists, n_items, layers, start)
        _cache_graph(record, shape, graph)
        return graph

    def __len__(self) -> int:
        """How many edges it has."""
        return len(self.lists.ids)

    @property
    def shared_items(self) -> Ints:
        """The items with an edge, ascending."""
        items = np.flatnonzero(self.people.counts())
        return items.astype(np.int32)

    def propagate_and_average(self, table: Floats, people: Floats | None = None) -> tuple[Floats, Floats]:
        """The final vectors of users and items: the mean of the layers; `people`: learned rows of the users."""
        users = self.init_user_vectors(table, people)
        nodes = np.concatenate([users, table])
        smoothed = self.graph.propagate_and_average(nodes, self.layers)
        return self._split_users_and_items(smoothed)

    def _split_users_and_items(self, rows: Floats) -> tuple[Floats, Floats]:
        n_users = len(self.users)
        user_rows = rows[:n_users]
        return user_rows, rows[n_users:]

    def init_user_vectors(self, table: Floats, people: Floats | None = None) -> Floats:
        """The users' vectors before anything passes along."""
        if self.start == "learned":
            assert people is not None, "learned rows have to be given"
            return people
        width = table.shape[1]
        shape = (len(self.users), width)
        zeros = np.zeros(shape, np.float32)
        if self.start == "zero":
            return zeros
        mean = np.empty_like(zeros)
        share = self.part[0]
        rows = np.ascontiguousarray(table)
        lists = self.lists
        propagate_rows(lists.ptr, lists.ids, share, zeros, rows, mean)
        return mean

    def backpropagate_table(self, user_gradient: Floats, item_gradient: Floats) -> Floats:
        """The gradient in the table, from those in the final vectors."""
        _, table_gradient = self.backpropagate(user_gradient, item_gradient)
        return table_gradient

    def backpropagate(self, user_gradient: Floats, item_gradient: Floats) -> tuple[Floats, Floats]:
        """The gradients in the users' first vectors and in the table."""
        nodes = np.concatenate([user_gradient, item_gradient])
        smoothed = self.graph.propagate_and_average(nodes, self.layers)
        users, items = self._split_users_and_items(smoothed)
        if self.start != "mean":
            return users, items
        table = np.empty_like(items)
        share = self.part[1]
        people = self.people
        propagate_rows(people.ptr, people.ids, share, items, users, table)
        return users, table


def _read_edge_weights(lists: Ragged) -> AnyArray:
    ones = np.ones(len(lists.ids))
    return lists.values.get("weight", ones)


def _build_normalised_graph(ends: Longs, targets: Ints, edges: AnyArray) -> tuple[Doubles, InteractionGraph]:
    """The degree of every node, and the graph whose edges are divided by the roots of both degrees."""
    n_nodes = len(ends) - 1
    nodes = np.arange(n_nodes)
    counts = np.diff(ends)
    source = np.repeat(nodes, counts)
    weights = np.bincount(source, weights=edges, minlength=n_nodes)
    degree: Doubles = weights.astype(np.float64)
    has_edges = degree > 0
    scale = np.zeros(len(degree))
    known_degree = degree[has_edges]
    scale[has_edges] = known_degree**-0.5
    weight = edges * scale[source]
    weight *= scale[targets]
    edge_weight = weight.astype(np.float32)
    return degree, InteractionGraph(ends, targets, edge_weight)


def _group_edges_by_sender(sender: Keys, item: AnyArray, n_items: int) -> tuple[Keys, Ragged, Longs]:
    """The distinct senders, what each shared, and where each edge comes first."""
    width = max(1, n_items)
    users, user = np.unique(sender, return_inverse=True)
    first_pairs = user * np.int64(width)
    item_numbers = item.astype(np.int64)
    pairs = first_pairs + item_numbers
    pairs, first = np.unique(pairs, return_index=True)
    user, item = np.divmod(pairs, width)
    n_users = len(users)
    lists = Ragged.from_pairs(user, item, n_users)
    return users, lists, first


def _list_extended_edges(
    record: SharedRecord, n_items: int, extra_edges: tuple[Keys, Ints], extra_weight: Floats | None
) -> tuple[Keys, Ragged]:
    """The edges of the record and further ones; an edge in both counts as that of the record."""
    extra_sender, extra_item = extra_edges
    sender = np.concatenate([record.sender, extra_sender])
    item = np.concatenate([record.item, extra_item])
    users, lists, first = _group_edges_by_sender(sender, item, n_items)
    if extra_weight is None:
        return users, lists
    n_edges = len(record)
    ones = np.ones(n_edges, np.float32)
    weight = np.concatenate([ones, extra_weight])
    columns: Arrays = {"weight": weight[first]}
    extended = Ragged(lists.ptr, lists.ids, columns)
    return users, extended


_GRAPH_CACHE: list[tuple[weakref.ref[SharedRecord], Hashable, SharedGraph]] = []
"""The graph that was built last, as long as its record lives: withdrawn edges end with it."""


def _cache_graph(record: SharedRecord, shape: Hashable, graph: SharedGraph) -> None:
    reference = weakref.ref(record, _clear_cache)
    _GRAPH_CACHE[:] = [(reference, shape, graph)]


def _clear_cache(_: weakref.ref[SharedRecord]) -> None:
    _GRAPH_CACHE.clear()


def _find_cached_graph(record: SharedRecord, shape: Hashable) -> SharedGraph | None:
    for reference, cached_shape, graph in _GRAPH_CACHE:
        is_of_record = reference() is record
        if is_of_record and cached_shape == shape:
            return graph
    return None


def list_edge_ends(graph: SharedGraph) -> tuple[Longs, Longs]:
    """Both ends of every edge, by user."""
    user = graph.lists.rows()
    item = graph.lists.ids
    users = user.astype(np.int64)
    items = item.astype(np.int64)
    return users, items
