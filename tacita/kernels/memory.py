"""Write to and read from the devices' memories of errors: a ring of (item, label, base) per user."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.sampling import choose_table_size, find_slot
from tacita.kernels.steps import _FAST, dot, score_row


@njit(cache=True, parallel=True, fastmath=_FAST)
def compute_sample_logits(user_ptr: Longs, a: Floats, c: Floats, base: Longs, row_of: Ints, rows: Floats) -> Floats:
    """Logit of every sample under its user's reading (a, c) and its client's own rows, which start at base[user]."""
    out = np.empty(user_ptr[-1], np.float32)
    for u in prange(len(user_ptr) - 1):
        for k in range(user_ptr[u], user_ptr[u + 1]):
            out[k] = dot(a[u], rows[base[u] + row_of[k]], c[u])
    return out


@njit(cache=True, parallel=True)
def store_large_errors(
    user_ptr: Longs,
    item: Ints,
    label: Floats,
    guess: Floats,
    threshold: float,
    held_item: Ints,
    held_label: Floats,
    held_base: Floats,
    position: Ints,
) -> None:
    """Write the samples whose error exceeds the threshold, in place; an item has one entry, its newest.

    First known entries are renewed where they stand, then new items overwrite the oldest entries in turn.
    """
    size = held_item.shape[1]
    for u in prange(len(user_ptr) - 1):
        lo = user_ptr[u]
        hi = user_ptr[u + 1]
        keys = np.full(choose_table_size(hi - lo), -1, np.int32)
        newest = np.empty(len(keys), np.int64)
        for k in range(lo, hi):
            if abs(label[k] - guess[k]) > threshold:
                at = find_slot(keys, item[k])
                keys[at] = item[k]
                newest[at] = k
        for e in range(size):
            if held_item[u, e] < 0:
                continue
            at = find_slot(keys, held_item[u, e])
            if keys[at] >= 0 and newest[at] >= 0:
                held_label[u, e] = label[newest[at]]
                held_base[u, e] = guess[newest[at]]
                newest[at] = -1
        for k in range(lo, hi):
            at = find_slot(keys, item[k])
            if keys[at] >= 0 and newest[at] == k:
                e = position[u]
                held_item[u, e] = item[k]
                held_label[u, e] = label[k]
                held_base[u, e] = guess[k]
                position[u] = (e + 1) % size


@njit(cache=True, parallel=True)
def correct_by_similar_errors(
    base: Floats,  # (users, items) predictions to correct
    normal: Floats,  # (items, width) normalised rows
    columns: Floats,  # (width, remembered items) normalised rows of what anybody remembers
    ptr: Longs,  # (users + 1,) entries of each user
    place: Ints,  # (entries,) column of the entry's item
    label: Floats,
    entry_base: Floats,
    neighbours: int,
    tau: float,
    weight: float,
    gate: float,
) -> Floats:
    """y + weight * error in [0, 1], the error told by the user's entries most similar to the item.

    Similarities are made one item at a time and used for all users, so memory stays small; of equally similar
    entries the earlier ones count.
    """
    n_users, n_items = base.shape
    out = np.empty((n_users, n_items), np.float32)
    for i in prange(n_items):
        alike = np.empty(columns.shape[1], np.float32)
        score_row(normal[i], np.float32(0.0), columns, alike)
        near = np.empty(neighbours, np.float32)
        which = np.empty(neighbours, np.int64)
        for u in range(n_users):
            n = 0
            least = np.float32(-np.inf)
            for e in range(ptr[u], ptr[u + 1]):
                s = alike[place[e]]
                if not s > least:
                    continue
                at = n if n < neighbours else n - 1
                while at > 0 and s > near[at - 1]:
                    near[at] = near[at - 1]
                    which[at] = which[at - 1]
                    at -= 1
                near[at] = s
                which[at] = e
                if n < neighbours:
                    n += 1
                if n == neighbours:
                    least = near[n - 1]
            total = 0.0
            mean_label = 0.0
            mean_base = 0.0
            for j in range(n):
                w = math.exp((near[j] - near[0]) / tau)  # relative to the nearest: cannot overflow
                total += w
                mean_label += w * label[which[j]]
                mean_base += w * entry_base[which[j]]
            y = base[u, i]
            if n > 0:
                mean_label /= total
                mean_base /= total
                error = gate * (mean_label - y) + (1.0 - gate) * (mean_label - mean_base)
                y = min(1.0, max(0.0, y + weight * error))
            out[u, i] = y
    return out
