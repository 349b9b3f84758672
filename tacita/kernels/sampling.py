"""Draw each client's training samples of a round: positives, negatives, shuffled order, touched rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from tacita.core.types import Bools, Floats, Ints, Keys, Longs
from tacita.kernels.hashing import choose_distinct, derive_stream, random_below
from tacita.kernels.threads import find_share_start


@njit(inline="always")
def find_slot(keys: Ints, item: Any) -> Any:
    """Where an item stands, or would stand, in a small open-addressed table (length a power of two)."""
    size = len(keys)
    at = (item * 40503) & (size - 1)
    while keys[at] != item and keys[at] >= 0:
        at = (at + 1) & (size - 1)
    return at


@njit(inline="always")
def choose_table_size(n: int) -> int:
    size = 16
    while size < 2 * n:
        size *= 2
    return size


@njit(cache=True)
def count_possible_negatives(ptr: Longs, excluded: Ints, n_items: int) -> Longs:
    """How many distinct items each user may get as negatives."""
    out = np.empty(len(ptr) - 1, np.int64)
    for u in range(len(out)):
        keys = np.full(choose_table_size(ptr[u + 1] - ptr[u]), -1, np.int32)
        out[u] = n_items
        for k in range(ptr[u], ptr[u + 1]):
            at = find_slot(keys, excluded[k])
            if keys[at] < 0 and excluded[k] < n_items:
                keys[at] = excluded[k]
                out[u] -= 1
    return out


@njit(cache=True, parallel=True)
def draw_samples(
    shares: int,
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
    for share in prange(shares):
        never = np.zeros(n_items, np.bool_)
        first_user = find_share_start(out_ptr, share, shares)
        last_user = find_share_start(out_ptr, share + 1, shares)
        for u in range(first_user, last_user):
            stream = derive_stream(key, owners[u])
            at = out_ptr[u]
            end = out_ptr[u + 1]
            for k in range(pos_ptr[u], pos_ptr[u + 1]):
                item[at] = pos_ids[k]
                label[at] = 1.0
                at += 1
            for k in range(at, end):
                label[k] = 0.0
            mark_items(never, ex_ids[ex_ptr[u] : ex_ptr[u + 1]], True)
            n_allowed = n_items - (ex_ptr[u + 1] - ex_ptr[u])
            if at < end and 8 * n_allowed < n_items:
                rest = np.flatnonzero(~never)
                for k in range(end - at):
                    place = random_below(stream, np.uint64(k), np.uint64(len(rest)))
                    item[at + k] = rest[place]
            else:
                counter = np.uint64(0)
                while at < end:  # a pick that may not be is written over by the next: no branch to mispredict
                    pick = random_below(stream, counter, np.uint64(n_items))
                    counter += np.uint64(1)
                    item[at] = pick
                    at += not never[pick]
            mark_items(never, ex_ids[ex_ptr[u] : ex_ptr[u + 1]], False)


@njit(inline="always")
def mark_items(marks: Bools, items: Ints, as_: bool) -> None:
    for i in items:
        if i < len(marks):
            marks[i] = as_


@njit(cache=True, parallel=True)
def draw_distinct_items(
    key: np.uint64, owners: Keys, ex_ptr: Longs, ex_ids: Ints, room: Longs, out_ptr: Longs, item: Ints
) -> None:
    """Distinct items that the user may get: places among them, moved past the excluded ones."""
    for u in prange(len(owners)):
        stream = derive_stream(key, owners[u])
        n_wanted = out_ptr[u + 1] - out_ptr[u]
        places = choose_distinct(stream, room[u], n_wanted)
        excluded = np.unique(ex_ids[ex_ptr[u] : ex_ptr[u + 1]])
        for k in range(len(places)):
            at = places[k]
            for item_id in excluded:
                if item_id > at:
                    break
                at += 1
            item[out_ptr[u] + k] = at


@njit(cache=True, parallel=True)
def shuffle_client_samples(key: np.uint64, owners: Keys, ptr: Longs, batch: int, order: Longs) -> None:
    """A permutation of each client's samples; the identity where one batch holds them all."""
    for c in prange(len(owners)):
        start = ptr[c]
        n = ptr[c + 1] - ptr[c]
        for k in range(n):
            order[start + k] = start + k
        if n > batch:
            stream = derive_stream(key, owners[c])
            for k in range(n - 1):
                j = k + random_below(stream, np.uint64(k), np.uint64(n - k))
                swapped = order[start + k]
                order[start + k] = order[start + j]
                order[start + j] = swapped


@njit(cache=True, parallel=True)
def number_client_rows(
    shares: int,
    n_items: int,
    ptr: Longs,
    item: Ints,
    more_ptr: Longs,
    more: Ints,
    row_of: Ints,
    row_of_more: Ints,
    rows: Ints,
) -> Longs:
    """Number each client's distinct items: sample k uses local row `row_of[k]`.

    `more` lists further items a part wants at hand (replay lists). `rows` has room for every sample and every
    further item; client c's distinct items start at ptr[c] + more_ptr[c]. Returns how many each client has.
    """
    counts = np.zeros(len(ptr) - 1, np.int64)
    for share in prange(shares):
        begin = find_share_start(ptr, share, shares)
        end = find_share_start(ptr, share + 1, shares)
        direct = n_items <= 64 * (ptr[end] - ptr[begin])  # a place for every item is cheap beside so many samples
        place = np.full(n_items if direct else 0, -1, np.int32)
        for c in range(begin, end):
            own = slice(ptr[c], ptr[c + 1])
            further = slice(more_ptr[c], more_ptr[c + 1])
            own_rows = rows[own.start + further.start : own.stop + further.stop]
            if direct:
                n = _number_rows(place, item[own], own_rows, 0, row_of[own])
                n = _number_rows(place, more[further], own_rows, n, row_of_more[further])
                for k in range(n):
                    place[own_rows[k]] = -1
            else:
                keys = np.full(choose_table_size(len(own_rows)), -1, np.int32)
                slots = np.empty(len(keys), np.int32)
                n = _number_hashed(keys, slots, item[own], own_rows, 0, row_of[own])
                n = _number_hashed(keys, slots, more[further], own_rows, n, row_of_more[further])
            counts[c] = n
    return counts


@njit(inline="always")
def _number_rows(place: Ints, items: Ints, rows: Ints, n: int, row_of: Ints) -> int:
    """Number the items that have no place yet from n on; without branches, since nobody can foresee repeats."""
    for k in range(len(items)):
        i = items[k]
        at = place[i]
        is_new = at < 0
        at = n if is_new else at
        place[i] = at
        row_of[k] = at
        rows[n] = i
        n += is_new
    return n


@njit(inline="always")
def _number_hashed(keys: Ints, slots: Ints, items: Ints, rows: Ints, n: int, row_of: Ints) -> int:
    for k in range(len(items)):
        at = find_slot(keys, items[k])
        if keys[at] < 0:
            keys[at] = items[k]
            slots[at] = n
            rows[n] = items[k]
            n += 1
        row_of[k] = slots[at]
    return n


@njit(cache=True)
def pack_rows(start: Longs, row_start: Longs, padded: Ints, row_item: Ints) -> None:
    """Each client's distinct items, which begin at `start` with gaps between clients, one after the other."""
    for c in range(len(row_start) - 1):
        n = row_start[c + 1] - row_start[c]
        row_item[row_start[c] : row_start[c + 1]] = padded[start[c] : start[c] + n]


@njit(cache=True)
def draw_folds(key: np.uint64, owner_keys: Keys, owner: Ints, item: Ints, n_folds: int) -> Ints:
    """The fold of every item, from 0 on: the same wherever it is listed, and drawn for its owner alone."""
    fold = np.empty(len(item), np.int32)
    for k in range(len(item)):
        stream = derive_stream(key, owner_keys[owner[k]])
        fold[k] = random_below(stream, np.uint64(item[k]), np.uint64(n_folds))
    return fold
