"""Sums over pairs of items, and what sparse rows make of an item-item matrix: the two loops of a linear model."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from tacita.core.types import AnyArray, Doubles, Floats, Ints, Longs


@njit(cache=True, parallel=True)
def pair_sums(
    inputs: Ints,
    holder_ptr: Longs,
    holder: Ints,
    user_ptr: Longs,
    item: AnyArray,
    weight: Doubles,
    out: Doubles,
) -> None:
    """out[r, j] += the weight of everybody who has both inputs[r] and j.

    Users who have item i are `holder[holder_ptr[i]:holder_ptr[i + 1]]`, ascending; a row stays in the cache while it
    is added up, and is added up in the same order whatever the number of threads.
    """
    for r in prange(len(inputs)):
        i = inputs[r]
        row = out[r]
        for h in range(holder_ptr[i], holder_ptr[i + 1]):
            u = holder[h]
            for k in range(user_ptr[u], user_ptr[u + 1]):
                row[item[k]] += weight[u]


@njit(cache=True, parallel=True)
def sparse_products(
    ptr: Longs, item: Ints, weight: Floats, row_of: Ints, b_ptr: Ints, b_col: AnyArray, b_value: Floats, out: Floats
) -> None:
    """out[u] += weight times the sparse row of B of each of u's items; row_of: -1 where B has none."""
    for u in prange(len(ptr) - 1):
        row = out[u]
        for k in range(ptr[u], ptr[u + 1]):
            b = row_of[item[k]]
            if b < 0:
                continue
            w = weight[k]
            for e in range(b_ptr[b], b_ptr[b + 1]):
                row[b_col[e]] += w * b_value[e]


@njit(cache=True, parallel=True)
def dense_products(ptr: Longs, item: Ints, weight: Floats, row_of: Ints, b: Floats, out: Floats) -> None:
    """out[u, :known] += weight times the row of B of each of u's items; row_of: -1 where B has none."""
    known = b.shape[1]
    for u in prange(len(ptr) - 1):
        row = out[u]
        for k in range(ptr[u], ptr[u + 1]):
            r = row_of[item[k]]
            if r < 0:
                continue
            w = weight[k]
            for j in range(known):
                row[j] += w * b[r, j]


@njit(cache=True, parallel=True)
def lower_entries(square: Doubles) -> tuple[Longs, Doubles]:
    """Places in the triangle, row by row, and values of what is not zero at or below the diagonal."""
    n = len(square)
    ptr = np.zeros(n + 1, np.int64)
    for i in prange(n):
        found = 0
        for j in range(i + 1):
            found += square[i, j] != 0
        ptr[i + 1] = found
    for i in range(n):
        ptr[i + 1] += ptr[i]
    at, value = np.empty(ptr[n], np.int64), np.empty(ptr[n])
    for i in prange(n):
        k = ptr[i]
        for j in range(i + 1):
            if square[i, j] != 0:
                at[k] = i * (i + 1) // 2 + j
                value[k] = square[i, j]
                k += 1
    return at, value


@njit(cache=True, parallel=True)
def sparse_times(ptr: Ints, column: Ints, value: Floats, right: Floats, out: Floats) -> None:
    """out = A right, A sparse by rows; every row is added up in the same order whatever the number of threads."""
    width = right.shape[1]
    for r in prange(len(ptr) - 1):
        row = out[r]
        row[:] = 0.0
        for e in range(ptr[r], ptr[r + 1]):
            other, v = right[column[e]], value[e]
            for j in range(width):
                row[j] += v * other[j]


@njit(cache=True, parallel=True)
def row_cuts(ptr: Ints, size: Floats, keep: int) -> Floats:
    """The size of the `keep`-th largest entry of each row; 0 where a row has no more entries than that."""
    n = len(ptr) - 1
    out = np.zeros(n, np.float32)
    for r in prange(n):
        held = ptr[r + 1] - ptr[r]
        if held > keep:
            out[r] = np.partition(size[ptr[r] : ptr[r + 1]], held - keep)[held - keep]
    return out
