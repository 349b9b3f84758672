"""Links that the graph of what users shared may lack: a small scorer proposes them (sharing spec C.2).

It learns from edges that are hidden from it for that purpose, and never proposes an edge of the graph.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tacita.core.types import AnyArray, Bools, Floats, Ints, Keys, Longs, Ragged
from tacita.kernels.cosine import write_pair_features
from tacita.kernels.hashing import hash_owners
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import AdamTable, UnitRows, count_unshared_items, draw_unshared_items

_CROWD = 16  # users whose items are scored together


@dataclass(frozen=True)
class LinkPredictionOptions:
    """How the scorer is trained, and how much it may propose."""

    hide: float = 0.2  # of the edges of all users who are to be mended
    others: int = 4  # items without an edge, for each hidden edge
    hidden: int = 32  # units of the scorer's layer between
    lr: float = 0.01
    epochs: int = 10
    batch: int = 4096
    kappa: float = 0.5  # proposals for an edge of the graph
    most: int = 20  # proposals for a user


@dataclass(frozen=True)
class ProposedLinks:
    """Proposed edges, and how likely each is."""

    user: Longs  # places in the graph
    item: Ints
    weight: Floats


@dataclass(frozen=True)
class LinkVectors:
    """Vectors of length one, as a graph makes them."""

    users: Floats
    items: Floats

    @staticmethod
    def compute(graph: SharedGraph, table: Floats) -> LinkVectors:
        users, items = graph.propagate_and_average(table)
        unit_users = UnitRows.normalise(users)
        unit_items = UnitRows.normalise(items)
        return LinkVectors(unit_users.rows, unit_items.rows)


class LinkScorer:
    """Two layers over what two vectors of length one have in common and where they differ; gradients by hand."""

    def __init__(self, dim: int, options: LinkPredictionOptions, key: np.uint64) -> None:
        n_inputs = 2 * dim
        n_hidden = options.hidden
        n_first = n_inputs * n_hidden
        n_numbers = n_first + n_hidden
        numbers = np.arange(n_numbers, dtype=np.uint64)
        drawn = hash_owners(key, numbers)
        high_bits = drawn >> np.uint64(11)
        doubled = 2 * high_bits
        fraction = doubled * 2.0**-53
        centred = fraction - 1
        start = centred.astype(np.float32)
        first_numbers = start[:n_first]
        first = first_numbers.reshape(n_inputs, n_hidden)
        second_numbers = start[n_first:]
        second = second_numbers.reshape(1, -1)
        tables = [
            first * n_inputs**-0.5,
            np.zeros((1, n_hidden)),
            second * n_hidden**-0.5,
            np.zeros((1, 1)),
        ]
        self.layers = [AdamTable(table.astype(np.float32), options.lr) for table in tables]

    def build_features(self, users: Floats, items: Floats) -> Floats:
        """The inputs for pairs, of about the size 1 whatever the width."""
        width = users.shape[-1]
        scale = np.float32(width**0.5)
        squared_scale = scale * scale
        product = squared_scale * users * items
        difference = np.abs(users - items)
        distance = scale * difference
        return np.concatenate([product, distance], axis=-1)

    def compute_logits(self, features: Floats) -> tuple[Floats, Floats]:
        """The logits of pairs, and the values of the layer between."""
        first, shift, second, bias = [layer.table for layer in self.layers]
        hidden = features @ first
        hidden += shift
        np.maximum(hidden, 0, out=hidden)
        products = hidden @ second[0]
        logits = products + bias[0, 0]
        return logits, hidden

    def train_step(self, features: Floats, label: Floats) -> None:
        """One step on the mean cross-entropy."""
        logits, hidden = self.compute_logits(features)
        odds = np.exp(-logits)
        probability = 1 / (1 + odds)
        n_samples = len(label)
        residual = (probability - label) / n_samples
        slope = residual.astype(np.float32)
        by_logit = slope[:, None]
        is_active = hidden > 0
        second = self.layers[2].table
        by_hidden = by_logit * second * is_active
        by_second = by_logit * hidden
        gradients = [
            features.T @ by_hidden,
            by_hidden.sum(0, keepdims=True),
            by_second.sum(0, keepdims=True),
            by_logit.sum(0)[None],
        ]
        for layer, gradient in zip(self.layers, gradients, strict=True):
            slopes = np.ascontiguousarray(gradient, np.float32)
            layer.take_step(slopes)


def propose_links(
    graph: SharedGraph, table: Floats, whom: Longs, options: LinkPredictionOptions, key: np.uint64
) -> ProposedLinks | None:
    """Proposals for some users of a graph; None: none of them has enough to learn the scorer from."""
    lists = graph.lists.take(whom)
    senders = graph.users[whom]
    is_hidden = _hide_edges(lists, senders, options.hide, key)
    if not is_hidden.any():
        return None
    places = np.repeat(whom, lists.counts())
    remaining = _remove_edges(graph, whom, is_hidden)
    with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
        hidden_users = places[is_hidden]
        hidden_items = lists.ids[is_hidden]
        hidden_edges = (hidden_users, hidden_items)
        remaining_vectors = LinkVectors.compute(remaining, table)
        scorer = _train_scorer(graph, remaining_vectors, hidden_edges, options, key)
        vectors = LinkVectors.compute(graph, table)
        starts = range(0, len(whom), _CROWD)
        crowds = [whom[start : start + _CROWD] for start in starts]

        def propose_for_users(users: Longs) -> tuple[Longs, Longs, Floats]:
            return _propose_items(graph, scorer, vectors, users, options)

        proposals = list(cores.map(propose_for_users, crowds))
    users, items, chances = zip(*proposals, strict=True)
    user = np.concatenate(users)
    item = np.concatenate(items).astype(np.int32)
    weight = np.concatenate(chances).astype(np.float32)
    return ProposedLinks(user, item, weight)


def _remove_edges(graph: SharedGraph, whom: Longs, is_hidden: Bools) -> SharedGraph:
    """The graph without some edges of some users."""
    stays = np.ones(len(graph), bool)
    entries = _locate_row_entries(graph.lists, whom)
    stays[entries] = ~is_hidden
    lists = graph.lists.filter_entries(stays)
    return SharedGraph(graph.users, lists, graph.n_items, graph.layers, graph.start)


def _hash_pairs(key: np.uint64, sender: Keys, item: AnyArray) -> Keys:
    """A number for each pair of sender and item."""
    senders = hash_owners(key, sender)
    streams = senders + item.astype(np.uint64)
    return hash_owners(key, streams)


def _locate_row_entries(lists: Ragged, rows: Longs) -> Longs:
    """Where the entries of some rows are."""
    n_edges = len(lists.ids)
    numbers = np.arange(n_edges, dtype=np.int32)
    numbered = Ragged(lists.ptr, numbers)
    entries = numbered.take(rows).ids
    return entries.astype(np.int64)


def _hide_edges(lists: Ragged, senders: Keys, share: float, key: np.uint64) -> Bools:
    """Some edges of each user who has two or more, never all of them, by draws of the user's own."""
    counts = lists.counts()
    limit = np.maximum(counts - 1, 1)
    rounded = np.rint(share * counts)
    hidden = np.clip(rounded, 1, limit)
    has_several = counts > 1
    wanted = np.where(has_several, hidden, 0)
    rows = lists.rows()
    row_senders = senders[rows]
    drawn = _hash_pairs(key, row_senders, lists.ids)
    order = np.lexsort((drawn, rows))
    numbers = np.arange(len(rows))
    rank = numbers - lists.ptr[rows]
    n_edges = len(rows)
    is_hidden: Bools = np.zeros(n_edges, bool)
    row_limit = wanted[rows]
    is_hidden[order] = rank < row_limit
    return is_hidden


def _train_scorer(
    graph: SharedGraph,
    vectors: LinkVectors,
    hidden_edges: tuple[Longs, Ints],
    options: LinkPredictionOptions,
    key: np.uint64,
) -> LinkScorer:
    """The scorer after some epochs on hidden edges and, for each, some items without an edge."""
    liked_user, liked_item = hidden_edges
    negative_key = key + np.uint64(1)
    start_key = key + np.uint64(2)
    n_others = options.others
    other_user, other_item = _draw_negatives(graph, liked_user, n_others, negative_key)
    user = np.concatenate([liked_user, other_user])
    item = np.concatenate([liked_item, other_item])
    ones = np.ones(len(liked_user))
    zeros = np.zeros(len(other_item))
    labels = np.append(ones, zeros)
    label = labels.astype(np.float32)
    width = vectors.users.shape[1]
    scorer = LinkScorer(width, options, start_key)
    n_samples = len(user)
    numbers = np.arange(n_samples, dtype=np.uint64)
    for epoch in range(options.epochs):
        offset = np.uint64(3 + epoch)
        epoch_key = key + offset
        drawn = hash_owners(epoch_key, numbers)
        order = np.argsort(drawn)
        for start in range(0, len(order), options.batch):
            end = start + options.batch
            batch = order[start:end]
            users = vectors.users[user[batch]]
            items = vectors.items[item[batch]]
            features = scorer.build_features(users, items)
            scorer.train_step(features, label[batch])
    return scorer


def _draw_negatives(graph: SharedGraph, user: Longs, each: int, key: np.uint64) -> tuple[Longs, Ints]:
    """Items that a user did not share, so many for each of some edges."""
    n_users = len(graph.lists)
    edges = np.bincount(user, minlength=n_users)
    has_negatives = count_unshared_items(graph) > 0
    n_wanted = each * edges
    wanted = np.where(has_negatives, n_wanted, 0)
    item = draw_unshared_items(graph, wanted, key)
    users = np.arange(n_users)
    owner = np.repeat(users, wanted)
    return owner, item


def _propose_items(
    graph: SharedGraph, scorer: LinkScorer, vectors: LinkVectors, users: Longs, options: LinkPredictionOptions
) -> tuple[Longs, Longs, Floats]:
    """The likeliest items of a few users that have no edge to them."""
    n_users = len(users)
    n_items = graph.n_items
    edges = graph.lists.take(users)
    width = vectors.items.shape[1]
    n_rows = n_users * n_items
    shape = (n_rows, 2 * width)
    features = np.empty(shape, np.float32)
    user_vectors = vectors.users[users]
    write_pair_features(user_vectors, vectors.items, features)
    logits, _ = scorer.compute_logits(features)
    odds = np.exp(-logits)
    probability = 1 / (1 + odds)
    chances = np.asarray(probability, np.float32)
    chance = chances.reshape(n_users, n_items)
    rows = edges.rows()
    chance[rows, edges.ids] = -1.0
    share = options.kappa * edges.counts()
    wanted = np.rint(share)
    allowed = np.minimum(options.most, wanted)
    allowed = allowed.astype(np.int64)
    most = min(options.most, n_items)
    row, item = _select_likeliest(chance, most)
    rank = _rank_in_row(row)
    is_allowed = rank < allowed[row]
    row = row[is_allowed]
    item = item[is_allowed]
    value = chance[row, item]
    return users[row], item, value


def _select_likeliest(chance: Floats, k: int) -> tuple[Longs, Longs]:
    """Rows and items of the k largest chances of each row above one half, largest first, ties to the smaller item."""
    n_rows, n_items = chance.shape
    threshold = np.full(n_rows, 2.0)
    if k:
        place = n_items - k
        partitioned = np.partition(chance, place, axis=1)
        threshold = partitioned[:, place]
    is_large = chance >= threshold[:, None]
    is_likely = chance > 0.5
    is_proposed = is_large & is_likely
    row, item = np.nonzero(is_proposed)
    likely_chance = chance[row, item]
    descending = -likely_chance
    order = np.lexsort((item, descending, row))
    row = row[order]
    item = item[order]
    is_first = _rank_in_row(row) < k
    return row[is_first], item[is_first]


def _rank_in_row(row: Longs) -> Longs:
    """The place of every entry among those of its row; rows ascend."""
    starts = np.searchsorted(row, row)
    numbers = np.arange(len(row))
    return np.asarray(numbers - starts)
