"""Semi-hard negatives: items near the person's vector or near what the person has (FRU, sharing spec C.5)."""

from __future__ import annotations

import math

import numpy as np

from tacita.core.flat_indices import expand_spans
from tacita.core.types import Bools, CohortView, Floats, Ints, Longs, Ragged
from tacita.kernels.hashing import uniforms
from tacita.kernels.pairs import dense_products

_SLICE = 256  # users whose distances to all items are held at once


def draw_mixed_negatives(view: CohortView, counts: Longs, vectors: Floats | None, share: float, key: np.uint64) -> Ints:
    """counts[u] items for every user, drawn from two pools: the share of items nearest to the user, and to the mean
    of its items. Without vectors in the space of items there is the second pool only."""
    n_users, out = len(counts), []
    squares = (view.items.astype(np.float64) ** 2).sum(1).astype(np.float32)
    for lo in range(0, n_users, _SLICE):
        some = np.arange(lo, min(n_users, lo + _SLICE))
        train, exclude = view.train.take(some), view.exclude.take(some)
        near = (
            [_average_lists(train, view.items)]
            if vectors is None
            else [_average_lists(train, view.items), vectors[some]]
        )
        pools = np.zeros((len(some), len(view.items)), bool)
        for centre in near:
            pools |= _mark_nearest(squares - 2 * centre @ view.items.T, exclude, share)
        item = np.nonzero(pools)[1].astype(np.int32)
        size = pools.sum(1)
        start, wanted = np.cumsum(size) - size, counts[some]
        drawn = uniforms(key, view.user_keys[some], int(wanted.max(initial=0)))
        owner = np.repeat(np.arange(len(some)), wanted)
        place = np.floor(drawn[owner, expand_spans(np.zeros_like(wanted), wanted)] * size[owner]).astype(np.int64)
        out.append(item[start[owner] + place])
    return np.concatenate(out) if out else np.zeros(0, np.int32)


def _average_lists(lists: Ragged, items: Floats) -> Floats:
    """The mean row of each list, added up in its order; of an empty one, zeros."""
    total = np.zeros((len(lists), items.shape[1]), np.float32)
    every, one = np.arange(len(items), dtype=np.int32), np.ones(len(lists.ids), np.float32)
    dense_products(lists.ptr, lists.ids, one, every, items, total)
    return np.asarray(total / np.maximum(lists.counts(), 1)[:, None], np.float32)


def _mark_nearest(distance: Floats, exclude: Ragged, share: float) -> Bools:
    """Marks the nearest share of all items that are not excluded."""
    n_items = distance.shape[1]
    most = min(n_items, max(1, math.ceil(share * n_items)))
    distance[exclude.rows(), exclude.ids] = np.inf
    place = np.argpartition(distance, most - 1, axis=1)[:, :most]
    marked = np.zeros(distance.shape, bool)
    np.put_along_axis(marked, place, np.isfinite(np.take_along_axis(distance, place, 1)), 1)
    return marked
