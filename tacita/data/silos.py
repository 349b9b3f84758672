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
from tacita.core.types import BlockStream, Doubles, Floats, Keys, Longs, Ragged
from tacita.data.features import load_stream_features
from tacita.kernels.hashing import choose_distinct, draw_uniforms, hash_owners

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
    if isinstance(skew, str):
        alpha = SKEW_ALPHAS[skew]
    else:
        alpha = float(skew)
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
    silo = assign_users_to_silos(label, silos, alpha, stream.user_keys, draws)
    divergence = measure_label_divergence(label, silo)
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
        is_known[user] = True
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
    n_genres = len(genres)
    has_genre = np.zeros((stream.n_items, n_genres))
    for row, item in enumerate(stream.item_ids):
        if item not in features:
            continue
        for genre in features[item].genres:
            column = genres.index(genre)
            has_genre[row, column] = 1
    counts = np.zeros((len(lists), n_genres))
    entry_genres = has_genre[lists.ids]
    np.add.at(counts, lists.rows(), entry_genres)
    label = counts.argmax(1)
    has_none = counts.sum(1) == 0
    totals = counts.sum(0)
    label[has_none] = totals.argmax()
    return np.asarray(label, np.int64)


def label_by_cluster(lists: Ragged, n_items: int, draws: Draws) -> Longs:
    """Clusters of users by what they chose: k-means on the leading directions of the matrix of choices."""
    n = len(lists)
    k = min(CLUSTERS, n - 1, n_items - 1)
    points = _project_users(lists, n_items, k, draws)
    centres_key = draws.public("silo-centres")
    first_centres = choose_distinct(centres_key, n, k)
    centres = points[np.sort(first_centres)]
    label = np.zeros(n, np.int64)
    for _ in range(50):
        norms = (centres**2).sum(1)
        half_norms = 0.5 * norms
        closeness = points @ centres.T - half_norms
        nearest = closeness.argmax(1)
        if np.array_equal(nearest, label):
            break
        label = nearest
        total = np.zeros_like(centres)
        np.add.at(total, label, points)
        size = np.bincount(label, minlength=k)
        size = size[:, None]
        means = total / np.maximum(size, 1)
        is_used = size > 0
        centres = np.where(is_used, means, centres)
    return np.asarray(label, np.int64)


def _project_users(lists: Ragged, n_items: int, k: int, draws: Draws) -> Doubles:
    """Users as points of length 1 in the k leading directions of the matrix of choices."""
    shape = (len(lists), n_items)
    ones = np.ones(len(lists.ids))
    cells = (ones, lists.ids, lists.ptr)
    matrix = scipy.sparse.csr_matrix(cells, shape=shape)
    start_key = draws.public("silo-svd")
    start = _draw_uniforms(start_key, min(shape))
    start = start.astype(np.float64)
    u, s, _ = scipy.sparse.linalg.svds(matrix, k=k, v0=start)
    points = u * s
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    points /= np.maximum(norms, 1e-12)
    return np.asarray(points)


def _draw_uniforms(key: np.uint64, n: int) -> Floats:
    """Uniform numbers that belong to no user."""
    owner = np.zeros(1, np.uint64)
    rows = draw_uniforms(key, owner, n)
    return np.asarray(rows[0])


def draw_label_shares(silos: int, n_labels: int, alpha: float, draws: Draws) -> Doubles:
    """A draw from a Dirichlet distribution for every silo: gamma variables, by the inverse of their distribution."""
    silo_numbers = np.arange(silos, dtype=np.uint64)
    key = draws.public("silo-shares")
    quantiles = draw_uniforms(key, silo_numbers, n_labels)
    quantiles = quantiles.astype(np.float64)
    margin = 2.0**-25
    quantiles = np.clip(quantiles, margin, 1 - margin)
    gamma = scipy.special.gammaincinv(alpha, quantiles)
    shares = gamma / gamma.sum(1, keepdims=True)
    return np.asarray(shares)


def assign_users_to_silos(label: Longs, silos: int, alpha: float, user_keys: Keys, draws: Draws) -> Longs:
    """Silos take a user each in turn: a label by the silo's shares among those left, then any user who has it."""
    n_users = len(label)
    n_labels = int(label.max(initial=0)) + 1
    shares = draw_label_shares(silos, n_labels, alpha, draws)
    order_key = draws.public("silo-people")
    chance = hash_owners(order_key, user_keys[:n_users])
    order = np.lexsort((chance, label))
    queues = Ragged.from_pairs(label[order], order, n_labels)  # the users of each label, in an order of chance
    next_place = queues.ptr[:-1].copy()
    remaining = queues.counts()
    picks_key = draws.public("silo-picks")
    picks = _draw_uniforms(picks_key, n_users)
    silo = np.zeros(n_users, np.int64)
    for n, pick in enumerate(picks.tolist()):
        silo_number = n % silos
        picked = _pick_label(shares[silo_number], remaining, pick)
        place = next_place[picked]
        user = queues.ids[place]
        silo[user] = silo_number
        next_place[picked] += 1
        remaining[picked] -= 1
    return silo


def _pick_label(shares: Doubles, remaining: Longs, pick: float) -> int:
    """A label by a silo's shares among those with users; by what remains where the shares leave none."""
    has_users = remaining > 0
    chance = shares * has_users
    total = chance.sum()
    if total > 1e-12:
        probability = chance / total
    else:
        probability = remaining / remaining.sum()
    reached = np.cumsum(probability)
    target = pick * reached[-1]
    picked = int(np.searchsorted(reached, target, side="right"))
    if picked < len(remaining) and has_users[picked]:
        return picked
    last = np.flatnonzero(has_users)[-1]
    return int(last)


def measure_label_divergence(label: Longs, silo: Longs) -> float:
    """How far a silo's labels are from all labels: Jensen-Shannon divergence in bits, the mean over silos."""
    n_silos = int(silo.max(initial=0)) + 1
    n_labels = int(label.max(initial=0)) + 1
    table = np.zeros((n_silos, n_labels))
    np.add.at(table, (silo, label), 1.0)
    sizes = table.sum(1, keepdims=True)
    own = table / np.maximum(sizes, 1)
    overall = table.sum(0) / table.sum()
    overall = np.broadcast_to(overall, own.shape)
    mixture = (own + overall) / 2
    separate = _compute_entropy(own) + _compute_entropy(overall)
    divergence = _compute_entropy(mixture) - separate / 2
    has_users = table.sum(1) > 0
    mean = divergence[has_users].mean()
    return float(mean)


def _compute_entropy(shares: Doubles) -> Doubles:
    positive = np.where(shares > 0, shares, 1)
    terms = shares * np.log2(positive)
    return np.asarray(-terms.sum(1))
