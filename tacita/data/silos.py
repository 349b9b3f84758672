"""Which silo people live in where silos differ by taste (LIPM's low, medium and high degrees; spec E.6).

Every person has a label: the genre that most of their training items have, or, where a source says nothing of genres, a
cluster of people who chose the same items. Every silo draws the shares of its labels from a Dirichlet distribution and
takes people in turn with the others, by these shares, as long as there are any; so silos are of the same size. It is
the experimenter's doing, before anybody trains: nothing of it is known to the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import scipy.special

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Doubles, Keys, Longs, Ragged
from tacita.data.features import load_stream_features
from tacita.kernels.hashing import choose_distinct, hash_owners, uniforms

SKEW_ALPHAS = {"low": 10.0, "medium": 1.0, "high": 0.1}
CLUSTERS = 18  # as many as MovieLens has genres


@dataclass(frozen=True)
class SiloAssignment:
    """The silo of every person, and how much silos differ."""

    silo: Longs  # (users,)
    label: Longs  # (users,)
    by: str  # what labels are: "genres" or "clusters"
    divergence: float  # Jensen-Shannon, in bits, of a silo's labels from everybody's: the mean over silos


def assign_silos(stream: BlockStream, silos: int, skew: str | float, draws: Draws) -> SiloAssignment:
    """People spread over silos to a degree of difference; everybody's label is of the block they come in."""
    alpha = SKEW_ALPHAS[skew] if isinstance(skew, str) else float(skew)
    if alpha <= 0:
        raise TacitaError(f"train.skew = {skew} is no parameter of a Dirichlet distribution; use a number above 0.")
    if silos < 2:
        raise TacitaError("train.skew says how silos differ; set train.silos to 2 or more.")
    lists = collect_first_items(stream)
    try:
        label, by = label_by_genre(stream, lists), "genres"
    except TacitaError:
        label, by = label_by_cluster(lists, stream.n_items, draws), "clusters"
    silo = spread_users(label, silos, alpha, stream.user_keys, draws)
    return SiloAssignment(silo, label, by, measure_divergence(label, silo))


def collect_first_items(stream: BlockStream) -> Ragged:
    """The training items of everybody's first block with any."""
    rows, ids, known = [], [], np.zeros(stream.n_users, bool)
    for block in stream.blocks:
        fresh = ~known[: block.n_users][block.train.rows()]
        rows.append(block.train.rows()[fresh])
        ids.append(block.train.ids[fresh])
        known[: block.n_users] |= block.train.counts() > 0
    return Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), stream.n_users)


def label_by_genre(stream: BlockStream, lists: Ragged) -> Longs:
    """The genre that most items of each list have; of several, the first by name. Without any, the most frequent."""
    told = load_stream_features(stream).by_item
    genres = sorted({genre for one in told.values() for genre in one.genres})
    if not genres:
        raise TacitaError(f"dataset {stream.name} says nothing of genres.")
    number = {genre: n for n, genre in enumerate(genres)}
    has = np.zeros((stream.n_items, len(genres)))
    for n, item in enumerate(stream.item_ids):
        if item in told:
            has[n, [number[genre] for genre in told[item].genres]] = 1
    counts = np.zeros((len(lists), len(genres)))
    np.add.at(counts, lists.rows(), has[lists.ids])
    label = counts.argmax(1)
    label[counts.sum(1) == 0] = counts.sum(0).argmax()
    return np.asarray(label, np.int64)


def label_by_cluster(lists: Ragged, n_items: int, draws: Draws) -> Longs:
    """Clusters of people by what they chose: k-means on the leading directions of the matrix of choices."""
    n, k = len(lists), min(CLUSTERS, len(lists) - 1, n_items - 1)
    matrix = scipy.sparse.csr_matrix((np.ones(len(lists.ids)), lists.ids, lists.ptr), shape=(n, n_items))
    start = uniforms(draws.public("silo-svd"), np.zeros(1, np.uint64), min(n, n_items))[0].astype(np.float64)
    u, s, _ = scipy.sparse.linalg.svds(matrix, k=k, v0=start)
    points = u * s
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    centres = points[np.sort(choose_distinct(draws.public("silo-centres"), n, k))]
    label = np.zeros(n, np.int64)
    for _ in range(50):
        nearest = (points @ centres.T - 0.5 * (centres**2).sum(1)).argmax(1)
        if np.array_equal(nearest, label):
            break
        label = nearest
        total = np.zeros_like(centres)
        np.add.at(total, label, points)
        size = np.bincount(label, minlength=k)
        centres = np.where(size[:, None] > 0, total / np.maximum(size, 1)[:, None], centres)
    return np.asarray(label, np.int64)


def draw_label_shares(silos: int, n_labels: int, alpha: float, draws: Draws) -> Doubles:
    """A draw from a Dirichlet distribution for every silo: gamma variables, by the inverse of their distribution."""
    drawn = uniforms(draws.public("silo-shares"), np.arange(silos, dtype=np.uint64), n_labels).astype(np.float64)
    gamma = scipy.special.gammaincinv(alpha, np.clip(drawn, 2.0**-25, 1 - 2.0**-25))
    return np.asarray(gamma / gamma.sum(1, keepdims=True))


def spread_users(label: Longs, silos: int, alpha: float, user_keys: Keys, draws: Draws) -> Longs:
    """Silos take a person each in turn: a label by the silo's shares among those left, then anybody who has it."""
    n_labels = int(label.max(initial=0)) + 1
    shares = draw_label_shares(silos, n_labels, alpha, draws)
    order = np.lexsort((hash_owners(draws.public("silo-people"), user_keys[: len(label)]), label))
    queue = Ragged.from_pairs(label[order], order, n_labels)  # of every label, its people in an order of chance
    at, left = queue.ptr[:-1].copy(), queue.counts()
    picks = uniforms(draws.public("silo-picks"), np.zeros(1, np.uint64), len(label))[0]
    silo = np.zeros(len(label), np.int64)
    for n, pick in enumerate(picks.tolist()):
        chance = shares[n % silos] * (left > 0)
        total = chance.sum()
        reached = np.cumsum(chance / total if total > 1e-12 else left / left.sum())
        which = int(np.searchsorted(reached, pick * reached[-1], side="right"))
        which = which if which < n_labels and left[which] else int(np.flatnonzero(left)[-1])
        silo[queue.ids[at[which]]] = n % silos
        at[which] += 1
        left[which] -= 1
    return silo


def measure_divergence(label: Longs, silo: Longs) -> float:
    """How far a silo's labels are from everybody's: Jensen-Shannon divergence in bits, the mean over silos."""
    table = np.zeros((int(silo.max(initial=0)) + 1, int(label.max(initial=0)) + 1))
    np.add.at(table, (silo, label), 1.0)
    own = table / np.maximum(table.sum(1, keepdims=True), 1)
    whole = np.broadcast_to(table.sum(0) / table.sum(), own.shape)
    each = _entropy((own + whole) / 2) - (_entropy(own) + _entropy(whole)) / 2
    return float(each[table.sum(1) > 0].mean())


def _entropy(shares: Doubles) -> Doubles:
    return np.asarray(-(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1))
