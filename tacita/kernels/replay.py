"""Ranks of remembered items under local models, and draws from remembered lists."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tacita.core.types import Floats, Ints, Keys, Longs
from tacita.kernels.hashing import derive_stream, random_below, random_unit
from tacita.kernels.steps import dot, score_row


@njit(cache=True, parallel=True)
def compute_local_list_ranks(
    who: Ints,
    a: Floats,
    c: Floats,
    columns: Floats,
    row_start: Longs,
    row_item: Ints,
    rows: Floats,
    ptr: Longs,
    ids: Ints,
) -> Ints:
    """1-based rank of each listed item among all items, for client who[k] with its own version of some rows.

    Ties go to the smaller id, as in `find_best_items`, so an unchanged model gives each list its own order back.
    """
    n_items = columns.shape[1]
    out = np.empty(len(ids), np.int32)
    for k in prange(len(who)):
        u = who[k]
        score = np.empty(n_items, np.float32)
        score_row(a[k], c[k], columns, score)
        for r in range(row_start[u], row_start[u + 1]):
            score[row_item[r]] = dot(a[k], rows[r], c[k])
        for e in range(ptr[k], ptr[k + 1]):
            t = ids[e]
            s = score[t]
            higher = 0
            for i in range(n_items):
                higher += score[i] > s
            for i in range(t):
                higher += score[i] == s
            out[e] = higher + 1
    return out


@njit(cache=True)
def pick_distinct_positions(key: np.uint64, owners: Keys, length: int, count: Longs) -> Longs:
    """For each owner, count[k] distinct positions of [0, length), flat in owner order."""
    out = np.empty(count.sum(), np.int64)
    at = 0
    order = np.empty(length, np.int64)
    for k in range(len(owners)):
        stream = derive_stream(key, owners[k])
        for j in range(length):
            order[j] = j
        for j in range(count[k]):
            other = j + random_below(stream, np.uint64(j), np.uint64(length - j))
            swapped = order[j]
            order[j] = order[other]
            order[other] = swapped
            out[at] = order[j]
            at += 1
    return out


@njit(cache=True)
def draw_weighted_positions(key: np.uint64, owners: Keys, log_weight: Floats, n: int) -> Ints:
    """n positions per owner without replacement, probability proportional to exp(log_weight) (Gumbel top-n).

    Positions with weight -inf are never drawn; -1 fills up where too few are left.
    """
    width = log_weight.shape[1]
    out = np.full((len(owners), n), -1, np.int32)
    noisy = np.empty(width, np.float64)
    for k in range(len(owners)):
        stream = derive_stream(key, owners[k])
        for j in range(width):
            number = random_unit(stream, np.uint64(j)) + 1e-300
            noisy[j] = log_weight[k, j] - math.log(-math.log(number))
        for m in range(n):
            best = -1
            for j in range(width):
                if noisy[j] > -np.inf and (best < 0 or noisy[j] > noisy[best]):
                    best = j
            if best < 0:
                break
            out[k, m] = best
            noisy[best] = -np.inf
    return out
