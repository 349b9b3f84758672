"""Draw each client's training samples of a round: positives, negatives, shuffled order, touched rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from tacita.kernels.hashing import below, choose, stream_of
from tacita.types import Floats, Ints, Keys, Longs


@njit(inline="always")
def slot(keys: Ints, item: Any) -> Any:
    """Where an item stands, or would stand, in a small open-addressed table (length a power of two)."""
    size = len(keys)
    at = (item * 40503) & (size - 1)
    while keys[at] != item and keys[at] >= 0:
        at = (at + 1) & (size - 1)
    return at


@njit(inline="always")
def table_size(n: int) -> int:
    size = 16
    while size < 2 * n:
        size *= 2
    return size


@njit(cache=True)
def room_for_negatives(ptr: Longs, excluded: Ints, n_items: int) -> Longs:
    """How many distinct items each user may get as negatives."""
    out = np.empty(len(ptr) - 1, np.int64)
    for u in range(len(out)):
        keys = np.full(table_size(ptr[u + 1] - ptr[u]), -1, np.int32)
        out[u] = n_items
        for k in range(ptr[u], ptr[u + 1]):
            at = slot(keys, excluded[k])
            if keys[at] < 0 and excluded[k] < n_items:
                keys[at] = excluded[k]
                out[u] -= 1
    return out


@njit(cache=True, parallel=True)
def draw_samples(
    key: np.uint64,
    owners: Keys,
    pos_ptr: Longs,
    pos_ids: Ints,
    ex_ptr: Longs,
    ex_ids: Ints,
    out_ptr: Longs,
    n_items: int,
    item: Ints,
    label: Floats,
) -> None:
    """Write every user's positives, then negatives up to out_ptr, uniform over the items it may get.

    A user who likes nearly everything is drawn from the listed remainder instead of by rejection.
    """
    for u in prange(len(owners)):
        stream = stream_of(key, owners[u])
        at = out_ptr[u]
        for k in range(pos_ptr[u], pos_ptr[u + 1]):
            item[at] = pos_ids[k]
            label[at] = 1.0
            at += 1
        n_excluded = ex_ptr[u + 1] - ex_ptr[u]
        keys = np.full(table_size(n_excluded), -1, np.int32)
        for k in range(ex_ptr[u], ex_ptr[u + 1]):
            keys[slot(keys, ex_ids[k])] = ex_ids[k]
        if at < out_ptr[u + 1] and 8 * (n_items - n_excluded) < n_items:
            rest = np.empty(n_items, np.int32)
            n_rest = 0
            for i in range(n_items):
                if keys[slot(keys, i)] < 0:
                    rest[n_rest] = i
                    n_rest += 1
            for k in range(out_ptr[u + 1] - at):
                item[at + k] = rest[below(stream, np.uint64(k), np.uint64(n_rest))]
                label[at + k] = 0.0
        else:
            counter = np.uint64(0)
            for k in range(at, out_ptr[u + 1]):
                pick = below(stream, counter, np.uint64(n_items))
                counter += np.uint64(1)
                while keys[slot(keys, pick)] >= 0:
                    pick = below(stream, counter, np.uint64(n_items))
                    counter += np.uint64(1)
                item[k] = pick
                label[k] = 0.0


@njit(cache=True, parallel=True)
def draw_distinct(
    key: np.uint64, owners: Keys, ex_ptr: Longs, ex_ids: Ints, room: Longs, out_ptr: Longs, item: Ints
) -> None:
    """Distinct items that the user may get: places among them, moved past the excluded ones."""
    for u in prange(len(owners)):
        places = choose(stream_of(key, owners[u]), room[u], out_ptr[u + 1] - out_ptr[u])
        excluded = np.unique(ex_ids[ex_ptr[u] : ex_ptr[u + 1]])
        for k in range(len(places)):
            at = places[k]
            for one in excluded:
                if one > at:
                    break
                at += 1
            item[out_ptr[u] + k] = at


@njit(cache=True, parallel=True)
def shuffle_order(key: np.uint64, owners: Keys, ptr: Longs, batch: int, order: Longs) -> None:
    """A permutation of each client's samples; the identity where one batch holds them all."""
    for c in prange(len(owners)):
        start, n = ptr[c], ptr[c + 1] - ptr[c]
        for k in range(n):
            order[start + k] = start + k
        if n > batch:
            stream = stream_of(key, owners[c])
            for k in range(n - 1):
                j = k + below(stream, np.uint64(k), np.uint64(n - k))
                held = order[start + k]
                order[start + k] = order[start + j]
                order[start + j] = held


@njit(cache=True, parallel=True)
def touch_rows(
    ptr: Longs, item: Ints, more_ptr: Longs, more: Ints, row_of: Ints, row_of_more: Ints, rows: Ints
) -> Longs:
    """Number each client's distinct items: sample k uses local row `row_of[k]`.

    `more` lists further items a part wants at hand (replay lists). `rows` has room for every sample and every
    further item; client c's distinct items start at ptr[c] + more_ptr[c]. Returns how many each client has.
    """
    n_clients = len(ptr) - 1
    counts = np.zeros(n_clients, np.int64)
    for c in prange(n_clients):
        base = ptr[c] + more_ptr[c]
        room = ptr[c + 1] + more_ptr[c + 1] - base
        size = table_size(room)
        keys = np.full(size, -1, np.int32)
        slots = np.empty(size, np.int32)
        n = 0
        for k in range(ptr[c], ptr[c + 1]):
            at = slot(keys, item[k])
            if keys[at] < 0:
                keys[at] = item[k]
                slots[at] = n
                rows[base + n] = item[k]
                n += 1
            row_of[k] = slots[at]
        for k in range(more_ptr[c], more_ptr[c + 1]):
            at = slot(keys, more[k])
            if keys[at] < 0:
                keys[at] = more[k]
                slots[at] = n
                rows[base + n] = more[k]
                n += 1
            row_of_more[k] = slots[at]
        counts[c] = n
    return counts
