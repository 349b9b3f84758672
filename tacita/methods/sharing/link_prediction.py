"""Links that the graph of what people shared may lack: a small scorer proposes them (sharing spec C.2).

It learns from edges that are hidden from it for that purpose, and never proposes what is there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tacita.core.types import AnyArray, Bools, Floats, Ints, Keys, Longs, Ragged
from tacita.kernels.cosine import write_pair_features
from tacita.kernels.hashing import hash_owners
from tacita.kernels.sampling import draw_samples
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import AdamTable, UnitRows, count_unshared

_CROWD = 16  # people whose items are scored together


@dataclass(frozen=True)
class LinkPredictionOptions:
    """How the scorer is made, and how much it may propose."""

    hide: float = 0.2  # of the edges of everybody who is to be mended
    others: int = 4  # items that are not there, for each hidden edge
    hidden: int = 32  # units of the scorer's layer between
    lr: float = 0.01
    epochs: int = 10
    batch: int = 4096
    kappa: float = 0.5  # proposals for an edge that is there
    most: int = 20  # proposals for a person


@dataclass(frozen=True)
class ProposedLinks:
    """Edges that were proposed, and how likely each is."""

    user: Longs  # places in the graph
    item: Ints
    weight: Floats


class LinkScorer:
    """Two layers over what two vectors of length one have in common and where they differ; slopes by hand."""

    def __init__(self, dim: int, effort: LinkPredictionOptions, key: np.uint64) -> None:
        drawn = hash_owners(key, np.arange(2 * dim * effort.hidden + effort.hidden, dtype=np.uint64))
        start = (2 * (drawn >> np.uint64(11)) * 2.0**-53 - 1).astype(np.float32)
        first = start[: 2 * dim * effort.hidden].reshape(2 * dim, effort.hidden)
        second = start[2 * dim * effort.hidden :].reshape(1, -1)
        sizes = (2 * dim) ** -0.5, effort.hidden**-0.5
        shapes = [first * sizes[0], np.zeros((1, effort.hidden)), second * sizes[1], np.zeros((1, 1))]
        self.layers = [AdamTable(one.astype(np.float32), effort.lr) for one in shapes]

    def build_features(self, users: Floats, items: Floats) -> Floats:
        """The inputs for pairs, of about the size 1 whatever the width."""
        scale = np.float32(users.shape[-1] ** 0.5)
        return np.concatenate([scale * scale * users * items, scale * np.abs(users - items)], axis=-1)

    def logits(self, features: Floats) -> tuple[Floats, Floats]:
        first, shift, second, bias = (one.table for one in self.layers)
        between = features @ first
        between += shift
        np.maximum(between, 0, out=between)
        return between @ second[0] + bias[0, 0], between

    def step(self, features: Floats, label: Floats) -> None:
        """One step on the mean cross-entropy."""
        logits, between = self.logits(features)
        slope = ((1 / (1 + np.exp(-logits)) - label) / len(label)).astype(np.float32)[:, None]
        back = slope * self.layers[2].table * (between > 0)
        slopes = [
            features.T @ back,
            back.sum(0, keepdims=True),
            (slope * between).sum(0, keepdims=True),
            slope.sum(0)[None],
        ]
        for one, by in zip(self.layers, slopes, strict=True):
            one.step(np.ascontiguousarray(by, np.float32))


def propose_links(
    graph: SharedGraph, table: Floats, whom: Longs, effort: LinkPredictionOptions, key: np.uint64
) -> ProposedLinks | None:
    """Proposals for some people of a graph; None: nobody has enough to learn the scorer from."""
    mine = graph.lists.take(whom)
    hidden = _hide_edges(mine, graph.users[whom], effort.hide, key)
    if not hidden.any():
        return None
    places = np.repeat(whom, mine.counts())
    there = np.ones(len(graph), bool)
    there[_find_entries(graph.lists, whom)] = ~hidden
    rest = SharedGraph(graph.users, graph.lists.filter_entries(there), graph.n_items, graph.layers, graph.start)
    with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
        scorer = _train_scorer(graph, _compute_vectors(rest, table), places[hidden], mine.ids[hidden], effort, key)
        users, items = _compute_vectors(graph, table)
        cuts = [whom[at : at + _CROWD] for at in range(0, len(whom), _CROWD)]
        found = list(cores.map(lambda some: _propose_items(graph, scorer, users[some], items, some, effort), cuts))
    user, item, weight = (np.concatenate(one) for one in zip(*found, strict=True))
    return ProposedLinks(user, item.astype(np.int32), weight.astype(np.float32))


def _hash_pairs(key: np.uint64, sender: Keys, item: AnyArray) -> Keys:
    """A number for each pair of sender and item."""
    return hash_owners(key, hash_owners(key, sender) + item.astype(np.uint64))


def _find_entries(lists: Ragged, rows: Longs) -> Longs:
    """Where the entries of some rows are."""
    return Ragged(lists.ptr, np.arange(len(lists.ids), dtype=np.int32)).take(rows).ids.astype(np.int64)


def _compute_vectors(graph: SharedGraph, table: Floats) -> tuple[Floats, Floats]:
    users, items = graph.smooth(table)
    return UnitRows.of(users).rows, UnitRows.of(items).rows


def _hide_edges(lists: Ragged, senders: Keys, share: float, key: np.uint64) -> Bools:
    """Some edges of everybody who has two or more, never all of them, by draws of one's own."""
    n = lists.counts()
    wanted = np.where(n > 1, np.clip(np.rint(share * n), 1, np.maximum(n - 1, 1)), 0)
    rows = lists.rows()
    drawn = _hash_pairs(key, senders[rows], lists.ids)
    order = np.lexsort((drawn, rows))
    out: Bools = np.zeros(len(rows), bool)
    out[order] = np.arange(len(rows)) - lists.ptr[rows] < wanted[rows]
    return out


def _train_scorer(
    graph: SharedGraph,
    vectors: tuple[Floats, Floats],
    user: Longs,
    item: Ints,
    effort: LinkPredictionOptions,
    key: np.uint64,
) -> LinkScorer:
    """The scorer after some epochs on hidden edges and, for each, some items that are not there."""
    other_user, other = _draw_negatives(graph, user, effort.others, key + np.uint64(1))
    who, what = np.concatenate([user, other_user]), np.concatenate([item, other])
    label = np.append(np.ones(len(user)), np.zeros(len(other))).astype(np.float32)
    scorer, numbers = LinkScorer(vectors[0].shape[1], effort, key + np.uint64(2)), np.arange(len(who), dtype=np.uint64)
    for epoch in range(effort.epochs):
        order = np.argsort(hash_owners(key + np.uint64(3 + epoch), numbers))
        for at in range(0, len(order), effort.batch):
            some = order[at : at + effort.batch]
            scorer.step(scorer.build_features(vectors[0][who[some]], vectors[1][what[some]]), label[some])
    return scorer


def _draw_negatives(graph: SharedGraph, user: Longs, each: int, key: np.uint64) -> tuple[Longs, Ints]:
    """Items that a person did not share, so many for each of some edges."""
    lists = graph.lists
    wanted = np.where(count_unshared(graph) > 0, each * np.bincount(user, minlength=len(lists)), 0)
    ptr = np.append(0, np.cumsum(wanted))
    item, label = np.empty(ptr[-1], np.int32), np.empty(ptr[-1], np.float32)
    nothing, none = np.zeros(len(ptr), np.int64), np.zeros(0, np.int32)
    draw_samples(
        threads_in_use(), key, graph.users, nothing, none, lists.ptr, lists.ids, ptr, graph.n_items, item, label
    )
    return np.repeat(np.arange(len(lists)), wanted), item


def _propose_items(
    graph: SharedGraph, scorer: LinkScorer, users: Floats, items: Floats, some: Longs, effort: LinkPredictionOptions
) -> tuple[Longs, Longs, Floats]:
    """The likeliest items of a few people that are not there."""
    n, own = graph.n_items, graph.lists.take(some)
    met = np.empty((len(some) * n, 2 * items.shape[1]), np.float32)
    write_pair_features(users, items, met)
    chance = np.asarray(1 / (1 + np.exp(-scorer.logits(met)[0])), np.float32).reshape(len(some), n)
    chance[own.rows(), own.ids] = -1.0
    allowed = np.minimum(effort.most, np.rint(effort.kappa * own.counts())).astype(np.int64)
    row, item = _select_likeliest(chance, min(effort.most, n))
    first = np.arange(len(row)) - np.searchsorted(row, row) < allowed[row]
    return some[row[first]], item[first], chance[row[first], item[first]]


def _select_likeliest(chance: Floats, k: int) -> tuple[Longs, Longs]:
    """Rows and items of the k largest chances of each row above one half, largest first, ties to the smaller item."""
    at = chance.shape[1] - k
    least = np.partition(chance, at, axis=1)[:, at] if k else np.full(len(chance), 2.0)
    row, item = np.nonzero((chance >= least[:, None]) & (chance > 0.5))
    order = np.lexsort((item, -chance[row, item], row))
    row, item = row[order], item[order]
    first = np.arange(len(row)) - np.searchsorted(row, row) < k
    return row[first], item[first]
