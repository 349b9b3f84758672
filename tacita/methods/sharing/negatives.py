"""Semi-hard negatives: items near the user's vector or near what the user has (FRU, sharing spec C.5)."""

from __future__ import annotations

import math

import numpy as np

from tacita.core.flat_indices import expand_spans
from tacita.core.types import Bools, CohortView, Floats, Ints, Longs, Ragged
from tacita.kernels.hashing import draw_uniforms
from tacita.kernels.pairs import add_dense_products

_SLICE = 256  # users whose distances to all items are held at once


def draw_mixed_negatives(view: CohortView, counts: Longs, vectors: Floats | None, share: float, key: np.uint64) -> Ints:
    """counts[u] items for every user, from two pools: the share of items nearest to the user, and to its items' mean.

    Without vectors in the space of items there is the second pool only.
    """
    n_users = len(counts)
    items = view.items.astype(np.float64)
    squares = items**2
    sums = squares.sum(1)
    lengths = sums.astype(np.float32)
    drawn = []
    for start in range(0, n_users, _SLICE):
        end = min(n_users, start + _SLICE)
        users = np.arange(start, end)
        pools = _mark_pool_items(view, users, vectors, lengths, share)
        n_drawn = counts[users]
        negatives = _draw_from_pools(view, users, pools, n_drawn, key)
        drawn.append(negatives)
    if not drawn:
        return np.zeros(0, np.int32)
    return np.concatenate(drawn)


def _mark_pool_items(view: CohortView, users: Longs, vectors: Floats | None, lengths: Floats, share: float) -> Bools:
    """(users, items) marks the items that may be drawn for some users."""
    items = view.items
    train = view.train.take(users)
    exclude = view.exclude.take(users)
    centres = [_average_lists(train, items)]
    if vectors is not None:
        centres.append(vectors[users])
    shape = (len(users), len(items))
    pools = np.zeros(shape, bool)
    for centre in centres:
        product = 2 * centre @ items.T
        distance = lengths - product
        pools |= _mark_nearest(distance, exclude, share)
    return pools


def _draw_from_pools(view: CohortView, users: Longs, pools: Bools, wanted: Longs, key: np.uint64) -> Ints:
    """So many items for each of some users, of the user's pool."""
    _, pool_items = np.nonzero(pools)
    sizes = pools.sum(1)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    user_keys = view.user_keys[users]
    most = int(wanted.max(initial=0))
    numbers = draw_uniforms(key, user_keys, most)
    places = np.arange(len(users))
    owner = np.repeat(places, wanted)
    zeros = np.zeros_like(wanted)
    turn = expand_spans(zeros, wanted)
    pool_size = sizes[owner]
    uniform = numbers[owner, turn]
    scaled = uniform * pool_size
    whole = np.floor(scaled)
    offset = whole.astype(np.int64)
    entry = starts[owner] + offset
    items = pool_items.astype(np.int32)
    return np.asarray(items[entry])


def _average_lists(lists: Ragged, items: Floats) -> Floats:
    """The mean row of each list, added up in its order; of an empty one, zeros."""
    n_items, width = items.shape
    shape = (len(lists), width)
    total = np.zeros(shape, np.float32)
    all_items = np.arange(n_items, dtype=np.int32)
    n_entries = len(lists.ids)
    ones = np.ones(n_entries, np.float32)
    add_dense_products(lists.ptr, lists.ids, ones, all_items, items, total)
    counts = lists.counts()
    divisor = np.maximum(counts, 1)
    means = total / divisor[:, None]
    return np.asarray(means, np.float32)


def _mark_nearest(distance: Floats, exclude: Ragged, share: float) -> Bools:
    """Marks the nearest share of all items that are not excluded."""
    n_items = distance.shape[1]
    wanted = math.ceil(share * n_items)
    wanted = max(1, wanted)
    most = min(n_items, wanted)
    rows = exclude.rows()
    distance[rows, exclude.ids] = np.inf
    last = most - 1
    order = np.argpartition(distance, last, axis=1)
    nearest = order[:, :most]
    nearest_distance = np.take_along_axis(distance, nearest, 1)
    is_allowed = np.isfinite(nearest_distance)
    marked = np.zeros(distance.shape, bool)
    np.put_along_axis(marked, nearest, is_allowed, 1)
    return marked
