"""The server's own steps on a table, through the graph of what was shared (sharing spec A.7).

They rank positives above negatives (BPR) and make rows agree with what the graph makes of them (InfoNCE). Both are
losses of cosines, minimised by Adam with fresh moments. Gradients are worked out by hand: first in rows of length one,
then lengths and the graph are taken back once for the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, Bools, Floats, Keys, Longs, ServerState
from tacita.kernels.adam import adam_step_rows
from tacita.kernels.cosine import add_bpr_slopes, backprop_unit_rows, normalise_rows
from tacita.kernels.edge_draws import assign_edge_batches, draw_edge_negatives, hash_numbers
from tacita.kernels.hashing import draw_uniforms
from tacita.kernels.sampling import count_possible_negatives, draw_samples
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.methods.sharing.graph import SharedGraph, list_edge_ends

_PIECE = 128  # rows of a softmax that one core computes; the same for any number of cores, so that sums are the same


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
    def normalise(table: Floats) -> UnitRows:
        rows = np.empty(table.shape, np.float32)
        n_rows = len(table)
        length = np.empty(n_rows, np.float32)
        normalise_rows(table, rows, length)
        return UnitRows(rows, length)

    def backpropagate(self, gradient: Floats) -> Floats:
        """The gradient in the rows as they were; it takes the place of the argument."""
        backprop_unit_rows(self.rows, self.length, gradient)
        return gradient


class AdamTable:
    """A table that moves, with moments that live as long as this object."""

    def __init__(self, table: Floats, lr: float) -> None:
        n_rows = len(table)
        self.table = np.array(table, np.float32)
        self.mean = np.zeros_like(self.table)
        self.square = np.zeros_like(self.table)
        self.all = np.arange(n_rows)
        self.steps = np.zeros(n_rows, np.int64)
        width = self.table.shape[1]
        self.rate = np.full(width, lr, np.float32)

    def take_step(self, gradient: Floats) -> None:
        no_decay = np.float32(0.0)
        moments = (self.mean, self.square, self.steps)
        adam_step_rows(self.all, gradient, self.table, *moments, self.rate, no_decay)


def compute_infonce_with_gradients(
    own: Floats, views: Floats, tau: float, weight: float, cores: ThreadPoolExecutor
) -> tuple[float, Floats, Floats]:
    """InfoNCE of two views of the same items, in rows of length one: its mean, and gradients times `weight` in both.

    The denominator has every item of the batch, the item itself as well.
    """
    n_rows = len(own)
    divisor = tau * n_rows
    factor = np.float32(weight / divisor)
    inverse_tau = np.float32(1 / tau)

    def compute_piece(start: int) -> tuple[AnyArray, Floats, Floats]:
        end = start + _PIECE
        piece = own[start:end]
        scaled = piece * inverse_tau
        products = scaled @ views.T
        logits = np.asarray(products, np.float32)
        rows = np.arange(len(piece))
        itself = (rows, start + rows)
        diagonal = logits[itself]
        own_logits = diagonal.astype(np.float64)
        largest = logits.max(1)
        logits -= largest[:, None]
        np.exp(logits, out=logits)
        total = logits.sum(1)
        scale = factor / total
        logits *= scale[:, None]
        logits[itself] -= factor
        loss = -own_logits + largest
        loss += np.log(total)
        own_gradient = logits @ views
        view_gradient = logits.T @ piece
        return loss, own_gradient, view_gradient

    starts = range(0, n_rows, _PIECE)
    pieces = list(cores.map(compute_piece, starts))
    losses = np.concatenate([piece[0] for piece in pieces])
    own_gradient = np.concatenate([piece[1] for piece in pieces])
    view_gradient = pieces[0][2]
    for piece in pieces[1:]:
        view_gradient = view_gradient + piece[2]
    return float(losses.mean()), own_gradient, view_gradient


@dataclass(frozen=True)
class BatchGradients:
    """Gradients of one batch's loss."""

    people: Floats  # in the users' first vectors
    table: Floats
    bpr: float  # the losses themselves
    cl: float


@dataclass(frozen=True)
class DeviceVectors:
    """Vectors that some users' own devices have for them, of length one."""

    place: Longs  # in the graph
    rows: Floats


@dataclass(frozen=True)
class GraphLoss:
    """A graph, what is to be minimised on it, and the cores that work on that."""

    graph: SharedGraph
    objective: GraphObjective
    cores: ThreadPoolExecutor
    anchor: UnitRows | None = None  # rows that stand still in place of the table's own, for the agreement
    device_vectors: DeviceVectors | None = None  # with which the graph's users are to agree as well

    def compute_gradients(self, table: Floats, batch: Batch, people: Floats | None = None) -> BatchGradients:
        user_vectors, item_vectors = self.graph.propagate_and_average(table, people)
        users = UnitRows.normalise(user_vectors)
        items = UnitRows.normalise(item_vectors)
        user_gradient = np.zeros_like(users.rows)
        item_gradient = np.zeros_like(items.rows)
        bpr = self._add_ranking_gradients(batch, users, items, user_gradient, item_gradient)
        cl, table_gradient = self._add_agreement_gradients(batch, table, items, item_gradient)
        cl += self._add_device_agreement_gradients(users, user_gradient)
        user_gradient = users.backpropagate(user_gradient)
        item_gradient = items.backpropagate(item_gradient)
        people_gradient, through_graph = self.graph.backpropagate(user_gradient, item_gradient)
        table_gradient += through_graph
        self._add_weight_decay(batch, table, table_gradient, people, people_gradient)
        return BatchGradients(people_gradient, table_gradient, bpr, cl)

    def _add_ranking_gradients(
        self, batch: Batch, users: UnitRows, items: UnitRows, user_gradient: Floats, item_gradient: Floats
    ) -> float:
        """Add the gradients of the ranking loss in the graph's vectors; returns the loss."""
        n_pairs = len(batch.user)
        if not self.objective.bpr or not n_pairs:
            return 0.0
        share = 1 / n_pairs
        pairs = (batch.user, batch.liked, batch.other, self.objective.scale, share)
        return add_bpr_slopes(*pairs, users.rows, items.rows, user_gradient, item_gradient)

    def _add_agreement_gradients(
        self, batch: Batch, table: Floats, items: UnitRows, item_gradient: Floats
    ) -> tuple[float, Floats]:
        """Add the gradient of rows' agreement with the graph in its vectors; returns the loss and that in the table."""
        table_gradient = np.zeros_like(table)
        places = batch.items
        objective = self.objective
        if not objective.lam1 or not len(places):
            return 0.0, table_gradient
        rows = self.anchor or UnitRows.normalise(table)
        views = items.rows[places]
        loss, row_gradient, view_gradient = compute_infonce_with_gradients(
            rows.rows[places], views, objective.tau, objective.lam1, self.cores
        )
        item_gradient[places] += view_gradient
        if self.anchor is None:
            table_gradient[places] = row_gradient
            table_gradient = rows.backpropagate(table_gradient)
        return loss, table_gradient

    def _add_device_agreement_gradients(self, users: UnitRows, user_gradient: Floats) -> float:
        """Add the gradient of the agreement of users' vectors with those of their devices; returns the loss."""
        objective = self.objective
        vectors = self.device_vectors
        if vectors is None or not len(vectors.place):
            return 0.0
        if not objective.lam1:
            return 0.0
        views = users.rows[vectors.place]
        loss, _, view_gradient = compute_infonce_with_gradients(
            vectors.rows, views, objective.tau, objective.lam1, self.cores
        )
        user_gradient[vectors.place] += view_gradient
        return loss

    def _add_weight_decay(
        self, batch: Batch, table: Floats, table_gradient: Floats, people: Floats | None, people_gradient: Floats
    ) -> None:
        """Add the gradients of the squared lengths of the rows that a batch uses, each once."""
        objective = self.objective
        used = []
        size = len(batch.items)
        if objective.lam1:
            used += [batch.items]
        if objective.bpr:
            used += [batch.liked, batch.other]
            size = len(batch.user)
        size = max(1, size)
        share = 2 * objective.lam / size
        weight = np.float32(share)
        if not weight or not used:
            return
        items = _collect_distinct(used, len(table))
        item_rows = table[items]
        table_gradient[items] += weight * item_rows
        if people is not None and objective.bpr:
            n_users = len(people)
            users = _collect_distinct([batch.user], n_users)
            user_rows = people[users]
            people_gradient[users] += weight * user_rows


def _collect_distinct(numbers: list[Longs], below: int) -> Longs:
    is_used = np.zeros(below, bool)
    for places in numbers:
        is_used[places] = True
    return np.flatnonzero(is_used)


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
    anchor = None
    if objective.cl_grad == "anchor":
        anchor = UnitRows.normalise(table)
    item_rows = AdamTable(table, objective.lr)
    user_rows = None
    if people is not None:
        user_rows = AdamTable(people, objective.lr)
        people = user_rows.table
    losses = []
    with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
        graph_loss = GraphLoss(graph, objective, cores, anchor, device_vectors)
        for batch in batches:
            gradients = graph_loss.compute_gradients(item_rows.table, batch, people)
            item_rows.take_step(gradients.table)
            if user_rows is not None:
                user_rows.take_step(gradients.people)
            losses.append((gradients.bpr, gradients.cl))
    bpr, cl = 0.0, 0.0
    if losses:
        bpr, cl = np.mean(losses, axis=0)
    table = item_rows.table
    return RefinedTable(table, people, float(bpr), float(cl))


@dataclass(frozen=True)
class BatchSizes:
    """How batches are cut."""

    edges: int = 8192
    items: int = 1024
    steps: int | None = None  # None: as many as one pass over the edges takes


def draw_batch_keys(draws: Draws, name: str, server: ServerState) -> Keys:
    """The keys of orders, negatives and items for a part's steps on the server in one round."""
    keys = []
    for purpose in ("order", "other", "items"):
        key = draws.public(f"{name}-{purpose}", server.block, server.round)
        keys.append(key)
    return np.array(keys)


def draw_batches(graph: SharedGraph, sizes: BatchSizes, keys: Keys) -> Iterator[Batch]:
    """Edges in batches that are drawn in every pass, a negative each, and some of the shared items in every step.

    `keys`: of batches, negatives and items. All three are drawn by user and item, never by position, so a withdrawn
    edge leaves the draws of all others as they were. Batches hold `sizes.edges` edges on average, or fewer.
    """
    batch_key, negative_key, item_key = keys
    user, liked = list_edge_ends(graph)
    has_negatives = count_unshared_items(graph)[user] > 0
    n_pairs = int(has_negatives.sum())
    n_batches = math.ceil(n_pairs / sizes.edges)
    steps_in_pass = max(1, n_batches)
    n_steps = steps_in_pass if sizes.steps is None else sizes.steps
    batches: list[Longs] = []
    other = np.zeros(0, np.int64)
    for step in range(n_steps):
        pass_number, step_in_pass = divmod(step, steps_in_pass)
        if step_in_pass == 0:
            turn = np.uint64(pass_number)
            batches = _split_edges(graph, has_negatives, batch_key + turn, steps_in_pass)
            other = draw_negatives(graph, negative_key + turn)
        edges = batches[step_in_pass]
        items = choose_shared_items(graph, item_key + np.uint64(step), sizes.items)
        yield Batch(user[edges], liked[edges], other[edges], items)


def _split_edges(graph: SharedGraph, is_used: Bools, key: np.uint64, n_batches: int) -> list[Longs]:
    """The edges of every batch."""
    lists = graph.lists
    batch = assign_edge_batches(key, graph.users, lists.ptr, lists.ids, n_batches)
    edges = np.flatnonzero(is_used)
    batch_of_edge = batch[edges]
    order = np.argsort(batch_of_edge, kind="stable")
    numbers = np.arange(1, n_batches)
    cuts = np.searchsorted(batch_of_edge[order], numbers)
    return np.split(edges[order], cuts)


def choose_shared_items(graph: SharedGraph, key: np.uint64, n_wanted: int) -> Longs:
    """Some of the items with an edge, or all of them: those whose hashes come first."""
    shared_items = graph.shared_items
    n_chosen = min(n_wanted, len(shared_items))
    hashes = hash_numbers(key, shared_items)
    order = np.argsort(hashes)
    chosen = shared_items[order[:n_chosen]]
    return chosen.astype(np.int64)


def count_unshared_items(graph: SharedGraph) -> Longs:
    """How many items each user did not share."""
    lists = graph.lists
    return count_possible_negatives(lists.ptr, lists.ids, graph.n_items)


def draw_negatives(graph: SharedGraph, key: np.uint64) -> Longs:
    """An item for every edge that its user did not share; of a user who shared everything, no matter which."""
    lists = graph.lists
    negatives = np.zeros(len(graph), np.int64)
    n_threads = threads_in_use()
    draw_edge_negatives(n_threads, key, graph.users, lists.ptr, lists.ids, graph.n_items, negatives)
    return negatives


def draw_unshared_items(graph: SharedGraph, wanted: Longs, key: np.uint64) -> AnyArray:
    """So many items for each user of a graph that the user did not share, flat in the order of users."""
    n_ends = len(wanted) + 1
    ends = np.zeros(n_ends, np.int64)
    np.cumsum(wanted, out=ends[1:])
    total = ends[-1]
    item = np.empty(total, np.int32)
    label = np.empty(total, np.float32)
    n_ends = len(ends)
    no_positives = np.zeros(n_ends, np.int64)
    no_items = np.zeros(0, np.int32)
    lists = graph.lists
    n_threads = threads_in_use()
    draw_samples(
        n_threads,
        key,
        graph.users,
        no_positives,
        no_items,
        lists.ptr,
        lists.ids,
        ends,
        graph.n_items,
        item,
        label,
    )
    return item


# Rows that the server learns itself


def draw_xavier_rows(key: np.uint64, owners: Keys, width: int) -> Floats:
    """Rows as Xavier's start draws them."""
    fan = 1 + width
    bound = math.sqrt(6 / fan)
    unit = draw_uniforms(key, owners, width)
    drawn = 2 * unit - 1
    rows = bound * drawn
    return rows.astype(np.float32)


def overwrite_known_rows(rows: Floats, owners: Keys, known_owners: Keys, known_rows: Floats) -> None:
    """Write the rows of known owners over those of the same owners."""
    _, place, known = np.intersect1d(owners, known_owners, assume_unique=True, return_indices=True)
    rows[place] = known_rows[known]
