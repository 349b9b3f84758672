"""The server's own steps on a table, through the graph of what was shared (sharing spec A.7).

Positives above negatives (BPR) and rows that agree with what the graph makes of them (InfoNCE), both in cosines, by
Adam with fresh moments. Slopes are worked out by hand: losses are written in rows of length one, then lengths and the
graph are taken back once for the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tacita.core.types import AnyArray, Floats, Keys, Longs
from tacita.kernels.adam import adam_rows
from tacita.kernels.cosine import add_bpr_slopes, backprop_unit_rows, normalise_rows
from tacita.kernels.hashing import choose_distinct
from tacita.kernels.sampling import draw_samples, room_for_negatives, shuffle_order
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.methods.sharing.graph import SharedGraph, list_edges

_PIECE = 128  # rows of a softmax that one core makes; the same whatever the number of cores, so that sums are the same


@dataclass(frozen=True)
class GraphObjective:
    """What the steps minimise, and how far they go."""

    tau: float = 0.2
    lam1: float = 0.3  # weight of the agreement
    lam: float = 1e-4  # weight of the squared rows of a batch, over its size
    lr: float = 1e-3
    bpr: bool = True
    scale: float = 1.0
    cl_grad: Literal["both", "anchor"] = "both"


@dataclass(frozen=True)
class Batch:
    """What one step looks at."""

    user: Longs  # places of users in the graph
    liked: Longs
    other: Longs
    items: Longs  # whose views are to agree


@dataclass(frozen=True)
class UnitRows:
    """Rows of length one, and how long they were."""

    rows: Floats
    length: Floats

    @staticmethod
    def of(table: Floats) -> UnitRows:
        made = UnitRows(np.empty(table.shape, np.float32), np.empty(len(table), np.float32))
        normalise_rows(table, made.rows, made.length)
        return made

    def backpropagate(self, slope: Floats) -> Floats:
        """The slope in the rows as they were; takes the given one's place."""
        backprop_unit_rows(self.rows, self.length, slope)
        return slope


class AdamTable:
    """A table that moves, with moments that live as long as this object."""

    def __init__(self, table: Floats, lr: float) -> None:
        self.table = np.array(table, np.float32)
        self.mean, self.square = np.zeros_like(self.table), np.zeros_like(self.table)
        self.all, self.steps = np.arange(len(table)), np.zeros(len(table), np.int64)
        self.rate = np.full(self.table.shape[1], lr, np.float32)

    def step(self, slope: Floats) -> None:
        moments = (self.mean, self.square, self.steps)
        adam_rows(self.all, slope, self.table, *moments, self.rate, np.float32(0.0))


def compute_infonce(
    own: Floats, views: Floats, tau: float, weight: float, cores: ThreadPoolExecutor
) -> tuple[float, Floats, Floats]:
    """InfoNCE of two views of the same items, in rows of length one: its mean, and slopes times `weight` in both.

    The denominator has every item of the batch, the item itself as well.
    """
    factor = np.float32(weight / (tau * len(own)))

    def some_rows(at: int) -> tuple[AnyArray, Floats, Floats]:
        some = own[at : at + _PIECE]
        logits = np.asarray((some * np.float32(1 / tau)) @ views.T, np.float32)
        itself = np.arange(len(some)), at + np.arange(len(some))
        loss = -logits[itself].astype(np.float64)
        most = logits.max(1)
        logits -= most[:, None]
        np.exp(logits, out=logits)
        total = logits.sum(1)
        logits *= (factor / total)[:, None]
        logits[itself] -= factor
        return loss + most + np.log(total), logits @ views, logits.T @ some

    loss, left, right = zip(*cores.map(some_rows, range(0, len(own), _PIECE)), strict=True)
    return float(np.concatenate(loss).mean()), np.concatenate(left), sum(right[1:], right[0])


@dataclass(frozen=True)
class BatchGradients:
    """Of one batch's loss."""

    people: Floats  # in the users' first vectors
    table: Floats
    bpr: float  # the losses themselves
    cl: float


@dataclass(frozen=True)
class DeviceVectors:
    """Vectors that some people's own devices have for them, of length one."""

    place: Longs  # in the graph
    rows: Floats


@dataclass(frozen=True)
class GraphLoss:
    """A graph, what is to be minimised on it, and the cores that work on that."""

    graph: SharedGraph
    objective: GraphObjective
    cores: ThreadPoolExecutor
    anchor: UnitRows | None = None  # rows that stand still in place of the table's own, for the agreement
    device_vectors: DeviceVectors | None = None  # with which the graph's people are to agree as well

    def compute_gradients(self, table: Floats, batch: Batch, people: Floats | None = None) -> BatchGradients:
        aims = self.objective
        users, items = (UnitRows.of(one) for one in self.graph.smooth(table, people))
        slope_users, slope_items = np.zeros_like(users.rows), np.zeros_like(items.rows)
        own = np.zeros_like(table)
        bpr = cl = 0.0
        if aims.bpr and len(batch.user):
            pairs = (batch.user, batch.liked, batch.other, aims.scale, 1 / len(batch.user))
            bpr = add_bpr_slopes(*pairs, users.rows, items.rows, slope_users, slope_items)
        if aims.lam1 and len(batch.items):
            some, mine = batch.items, self.anchor or UnitRows.of(table)
            cl, left, right = compute_infonce(mine.rows[some], items.rows[some], aims.tau, aims.lam1, self.cores)
            slope_items[some] += right
            if self.anchor is None:
                own[some] = left
                own = mine.backpropagate(own)
        if aims.lam1 and self.device_vectors is not None and len(self.device_vectors.place):
            some = self.device_vectors.place
            alike, _, right = compute_infonce(
                self.device_vectors.rows, users.rows[some], aims.tau, aims.lam1, self.cores
            )
            slope_users[some] += right
            cl += alike
        first, back = self.graph.backpropagate(users.backpropagate(slope_users), items.backpropagate(slope_items))
        own += back
        self._add_weight_decay(batch, table, own, people, first)
        return BatchGradients(first, own, bpr, cl)

    def _add_weight_decay(self, batch: Batch, table: Floats, own: Floats, people: Floats | None, first: Floats) -> None:
        """Adds the slopes of the squared lengths of the rows that a batch uses, each once."""
        used = [batch.items] if self.objective.lam1 else []
        used += [batch.liked, batch.other] if self.objective.bpr else []
        weight = np.float32(
            2 * self.objective.lam / max(1, len(batch.user) if self.objective.bpr else len(batch.items))
        )
        if weight and used:
            some = _collect_distinct(used, len(table))
            own[some] += weight * table[some]
            if people is not None and self.objective.bpr:
                some = _collect_distinct([batch.user], len(people))
                first[some] += weight * people[some]


def _collect_distinct(numbers: list[Longs], below: int) -> Longs:
    found = np.zeros(below, bool)
    for some in numbers:
        found[some] = True
    return np.flatnonzero(found)


@dataclass(frozen=True)
class RefinedTable:
    """What steps made of a table, and of the users' rows where these are learned."""

    table: Floats
    people: Floats | None
    bpr: float  # means over the steps
    cl: float


def refine_table(
    graph: SharedGraph,
    table: Floats,
    batches: Iterable[Batch],
    objective: GraphObjective,
    people: Floats | None = None,
    device_vectors: DeviceVectors | None = None,
) -> RefinedTable:
    """One step of Adam for every batch."""
    anchor = UnitRows.of(table) if objective.cl_grad == "anchor" else None
    rows, mine = AdamTable(table, objective.lr), None if people is None else AdamTable(people, objective.lr)
    losses = []
    with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
        descent = GraphLoss(graph, objective, cores, anchor, device_vectors)
        for batch in batches:
            found = descent.compute_gradients(rows.table, batch, None if mine is None else mine.table)
            rows.step(found.table)
            if mine is not None:
                mine.step(found.people)
            losses.append((found.bpr, found.cl))
    bpr, cl = np.mean(losses, axis=0) if losses else (0.0, 0.0)
    return RefinedTable(rows.table, None if mine is None else mine.table, float(bpr), float(cl))


@dataclass(frozen=True)
class BatchSizes:
    """How batches are cut."""

    edges: int = 8192
    items: int = 1024
    steps: int | None = None  # None: as many as one pass over the edges takes


def draw_batches(graph: SharedGraph, sizes: BatchSizes, keys: Keys) -> Iterator[Batch]:
    """Edges in an order drawn anew in every pass, a negative each, and some of the shared items in every step.

    `keys`: of orders, negatives and items.
    """
    user, liked = list_edges(graph)
    pairs = np.flatnonzero(count_unshared(graph)[user] > 0)
    shared, n = graph.shared_items, len(pairs)
    a_pass = max(1, math.ceil(n / sizes.edges))
    taken, order, other = 0, np.zeros(n, np.int64), np.zeros(0, np.int64)
    for step in range(a_pass if sizes.steps is None else sizes.steps):
        if step % a_pass == 0:
            turn = np.uint64(step // a_pass)
            shuffle_order(keys[0] + turn, np.zeros(1, np.uint64), np.array([0, n]), sizes.edges, order)
            other, taken = draw_negatives(graph, keys[1] + turn), 0
        some = pairs[order[taken : taken + sizes.edges]]
        taken += sizes.edges
        items = choose_distinct(keys[2] + np.uint64(step), len(shared), min(sizes.items, len(shared)))
        yield Batch(user[some], liked[some], other[some], shared[items].astype(np.int64))


def count_unshared(graph: SharedGraph) -> Longs:
    """How many items each user did not share."""
    return room_for_negatives(graph.lists.ptr, graph.lists.ids, graph.n_items)


def draw_negatives(graph: SharedGraph, key: np.uint64) -> Longs:
    """An item for every edge that its user did not share; of a user who shared everything, no matter which."""
    wanted = np.where(count_unshared(graph) > 0, graph.lists.counts(), 0)
    ptr = np.zeros(len(wanted) + 1, np.int64)
    np.cumsum(wanted, out=ptr[1:])
    item, label = np.empty(ptr[-1], np.int32), np.empty(ptr[-1], np.float32)
    nothing, none = np.zeros(len(ptr), np.int64), np.zeros(0, np.int32)
    lists = graph.lists
    draw_samples(
        threads_in_use(), key, graph.users, nothing, none, lists.ptr, lists.ids, ptr, graph.n_items, item, label
    )
    out = np.zeros(len(graph), np.int64)
    out[np.repeat(wanted > 0, lists.counts())] = item
    return out
