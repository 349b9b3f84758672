"""Assigns users to silos that differ by taste (LIPM's low, medium and high degrees; spec E.6).

Every user has a label: the genre that most of their training items have. Where a source has no genres, the label is a
cluster of users who chose the same items. Every silo draws the shares of its labels from a Dirichlet distribution.
Silos take users in turn, by these shares, as long as there are any; so silos are of the same size. The experimenter
does this before training starts; the model does not know of it.
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
    """The silo of every user, and how much silos differ."""

    silo: Longs  # (users,)
    label: Longs  # (users,)
    by: str  # what labels are: "genres" or "clusters"
    divergence: float  # Jensen-Shannon, in bits, of a silo's labels from all labels: the mean over silos


def assign_silos(stream: BlockStream, silos: int, skew: str | float, draws: Draws) -> SiloAssignment:
    """Users spread over silos to a degree of difference; a user's label is of the block they come in."""
    alpha = SKEW_ALPHAS[skew] if isinstance(skew, str) else float(skew)
    if alpha <= 0:
        raise TacitaError(f"train.skew = {skew} is no parameter of a Dirichlet distribution; use a number above 0.")
    if silos < 2:
        raise TacitaError("train.skew says how silos differ; set train.silos to 2 or more.")
    lists = collect_first_items(stream)
    try:
        label = label_by_genre(stream, lists)
        by = "genres"
    except TacitaError:
        label = label_by_cluster(lists, stream.n_items, draws)
        by = "clusters"
    silo = spread_users(label, silos, alpha, stream.user_keys, draws)
    divergence = measure_divergence(label, silo)
    return SiloAssignment(silo, label, by, divergence)


def collect_first_items(stream: BlockStream) -> Ragged:
    """The training items of each user's first block with any."""
    users = []
    items = []
    is_known = np.zeros(stream.n_users, bool)
    for block in stream.blocks:
        user = block.train.rows()
        is_new = ~is_known[user]
        users.append(user[is_new])
        items.append(block.train.ids[is_new])
        is_known[: block.n_users] |= block.train.counts() > 0
    all_users = np.concatenate(users)
    all_items = np.concatenate(items)
    return Ragged.from_pairs(all_users, all_items, stream.n_users)


def label_by_genre(stream: BlockStream, lists: Ragged) -> Longs:
    """The genre that most items of each list have; of several, the first by name. Without any, the most frequent."""
    features = load_stream_features(stream).by_item
    names: set[str] = set()
    for feature in features.values():
        names.update(feature.genres)
    if not names:
        raise TacitaError(f"dataset {stream.name} says nothing of genres.")
    genres = sorted(names)
    number = {genre: n for n, genre in enumerate(genres)}
    has_genre = np.zeros((stream.n_items, len(genres)))
    for row, item in enumerate(stream.item_ids):
        if item in features:
            numbers = [number[genre] for genre in features[item].genres]
            has_genre[row, numbers] = 1
    counts = np.zeros((len(lists), len(genres)))
    np.add.at(counts, lists.rows(), has_genre[lists.ids])
    label = counts.argmax(1)
    has_none = counts.sum(1) == 0
    label[has_none] = counts.sum(0).argmax()
    return np.asarray(label, np.int64)


def label_by_cluster(lists: Ragged, n_items: int, draws: Draws) -> Longs:
    """Clusters of users by what they chose: k-means on the leading directions of the matrix of choices."""
    n = len(lists)
    k = min(CLUSTERS, n - 1, n_items - 1)
    points = _project_users(lists, n_items, k, draws)
    first_centres = choose_distinct(draws.public("silo-centres"), n, k)
    centres = points[np.sort(first_centres)]
    label = np.zeros(n, np.int64)
    for _ in range(50):
        half_norms = 0.5 * (centres**2).sum(1)
        closeness = points @ centres.T - half_norms
        nearest = closeness.argmax(1)
        if np.array_equal(nearest, label):
            break
        label = nearest
        total = np.zeros_like(centres)
        np.add.at(total, label, points)
        size = np.bincount(label, minlength=k)[:, None]
        means = total / np.maximum(size, 1)
        centres = np.where(size > 0, means, centres)
    return np.asarray(label, np.int64)


def _project_users(lists: Ragged, n_items: int, k: int, draws: Draws) -> Doubles:
    """Users as points of length 1 in the k leading directions of the matrix of choices."""
    n = len(lists)
    ones = np.ones(len(lists.ids))
    matrix = scipy.sparse.csr_matrix((ones, lists.ids, lists.ptr), shape=(n, n_items))
    owner = np.zeros(1, np.uint64)
    start = uniforms(draws.public("silo-svd"), owner, min(n, n_items))[0]
    u, s, _ = scipy.sparse.linalg.svds(matrix, k=k, v0=start.astype(np.float64))
    points = u * s
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    points /= np.maximum(norms, 1e-12)
    return np.asarray(points)


def draw_label_shares(silos: int, n_labels: int, alpha: float, draws: Draws) -> Doubles:
    """A draw from a Dirichlet distribution for every silo: gamma variables, by the inverse of their distribution."""
    silo_numbers = np.arange(silos, dtype=np.uint64)
    uniform = uniforms(draws.public("silo-shares"), silo_numbers, n_labels)
    quantiles = np.clip(uniform.astype(np.float64), 2.0**-25, 1 - 2.0**-25)
    gamma = scipy.special.gammaincinv(alpha, quantiles)
    shares = gamma / gamma.sum(1, keepdims=True)
    return np.asarray(shares)


def spread_users(label: Longs, silos: int, alpha: float, user_keys: Keys, draws: Draws) -> Longs:
    """Silos take a user each in turn: a label by the silo's shares among those left, then any user who has it."""
    n_users = len(label)
    n_labels = int(label.max(initial=0)) + 1
    shares = draw_label_shares(silos, n_labels, alpha, draws)
    chance = hash_owners(draws.public("silo-people"), user_keys[:n_users])
    order = np.lexsort((chance, label))
    queues = Ragged.from_pairs(label[order], order, n_labels)  # the users of each label, in an order of chance
    next_place = queues.ptr[:-1].copy()
    remaining = queues.counts()
    owner = np.zeros(1, np.uint64)
    picks = uniforms(draws.public("silo-picks"), owner, n_users)[0]
    silo = np.zeros(n_users, np.int64)
    for n, pick in enumerate(picks.tolist()):
        silo_number = n % silos
        picked = _pick_label(shares[silo_number], remaining, pick)
        user = queues.ids[next_place[picked]]
        silo[user] = silo_number
        next_place[picked] += 1
        remaining[picked] -= 1
    return silo


def _pick_label(shares: Doubles, remaining: Longs, pick: float) -> int:
    """A label by a silo's shares among those with users; by what remains where the shares leave none."""
    chance = shares * (remaining > 0)
    total = chance.sum()
    if total > 1e-12:
        reached = np.cumsum(chance / total)
    else:
        reached = np.cumsum(remaining / remaining.sum())
    picked = int(np.searchsorted(reached, pick * reached[-1], side="right"))
    if picked < len(remaining) and remaining[picked]:
        return picked
    return int(np.flatnonzero(remaining)[-1])


def measure_divergence(label: Longs, silo: Longs) -> float:
    """How far a silo's labels are from all labels: Jensen-Shannon divergence in bits, the mean over silos."""
    n_silos = int(silo.max(initial=0)) + 1
    n_labels = int(label.max(initial=0)) + 1
    table = np.zeros((n_silos, n_labels))
    np.add.at(table, (silo, label), 1.0)
    sizes = table.sum(1, keepdims=True)
    own = table / np.maximum(sizes, 1)
    overall = table.sum(0) / table.sum()
    overall = np.broadcast_to(overall, own.shape)
    mixed = _entropy((own + overall) / 2)
    separate = (_entropy(own) + _entropy(overall)) / 2
    divergence = mixed - separate
    has_users = table.sum(1) > 0
    return float(divergence[has_users].mean())


def _entropy(shares: Doubles) -> Doubles:
    logs = np.log2(np.where(shares > 0, shares, 1))
    return np.asarray(-(shares * logs).sum(1))
