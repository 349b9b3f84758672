"""Sums over pairs of items, of those before others too, and what sparse rows make of an item-item matrix."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from tacita.core.types import AnyArray, Doubles, Floats, Ints, Longs


@njit(cache=True, parallel=True)
def add_pair_sums(
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
def add_sparse_products(
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
def add_dense_products(ptr: Longs, item: Ints, weight: Floats, row_of: Ints, b: Floats, out: Floats) -> None:
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
def list_lower_entries(square: Doubles) -> tuple[Longs, Doubles]:
    """Places in the triangle, row by row, and values of what is not zero at or below the diagonal."""
    n = len(square)
    ptr = np.zeros(n + 1, np.int64)
    for i in prange(n):
        n_entries = 0
        for j in range(i + 1):
            n_entries += square[i, j] != 0
        ptr[i + 1] = n_entries
    for i in range(n):
        ptr[i + 1] += ptr[i]
    at = np.empty(ptr[n], np.int64)
    value = np.empty(ptr[n])
    for i in prange(n):
        k = ptr[i]
        for j in range(i + 1):
            if square[i, j] != 0:
                at[k] = i * (i + 1) // 2 + j
                value[k] = square[i, j]
                k += 1
    return at, value


@njit(cache=True, parallel=True)
def add_context_sums(
    ptr: Longs, item: Ints, start: Longs, factor: Doubles, both: Doubles, quantum: float, n_threads: int, out: Doubles
) -> None:
    """out += factor h h^T for every place of a list from its start on; h: what came before, by how long before.

    Two entries of a list meet in every h that holds both, so what they add is a difference of `both[d, k]`, the sum of
    the products of weights over 1..k places after the later of two entries d places apart. Numbers are whole multiples
    of the quantum: the sum is the same in any order, so each thread takes the rows that are its own.
    """
    window = len(both)
    for thread in prange(n_threads):
        for u in range(len(ptr) - 1):
            first = ptr[u]
            n = ptr[u + 1] - ptr[u]
            for late in range(n - 1):
                least = max(start[u] - late, 1)
                most = n - 1 - late
                for apart in range(min(window, late + 1)):
                    last = min(window - apart, most)
                    if last < least:
                        continue
                    i = item[first + late]
                    j = item[first + late - apart]
                    has_row = i % n_threads == thread
                    has_column = j % n_threads == thread
                    if not (has_row or has_column):
                        continue
                    value = factor[u] * (both[apart, last] - both[apart, least - 1])
                    value = np.rint(value / quantum) * quantum
                    if has_row:
                        out[i, j] += value
                    if has_column and apart > 0:
                        out[j, i] += value


@njit(cache=True, parallel=True)
def add_next_sums(
    ptr: Longs, item: Ints, start: Longs, factor: Doubles, fall: Doubles, quantum: float, n_threads: int, out: Doubles
) -> None:
    """out[i, j] += factor times the weight of i in what came before j, for every j of a list from its start on."""
    for thread in prange(n_threads):
        for u in range(len(ptr) - 1):
            first = ptr[u]
            n = ptr[u + 1] - ptr[u]
            for place in range(start[u], n):
                for age in range(min(len(fall), place)):
                    i = item[first + place - 1 - age]
                    if i % n_threads == thread:
                        j = item[first + place]
                        multiples = np.rint(factor[u] * fall[age] / quantum)
                        out[i, j] += multiples * quantum


def sum_lag_products(fall: Doubles) -> Doubles:
    """[d, k]: the sum over j = 1..k of the weights j and j + d places back, multiplied."""
    out = np.zeros((len(fall), len(fall) + 1))
    for apart in range(len(fall)):
        product = fall[: len(fall) - apart] * fall[apart:]
        out[apart, 1 : len(product) + 1] = np.cumsum(product)
    return out


@njit(cache=True, parallel=True)
def multiply_sparse(ptr: Ints, column: Ints, value: Floats, right: Floats, out: Floats) -> None:
    """out = A right, A sparse by rows; every row is added up in the same order whatever the number of threads."""
    width = right.shape[1]
    for r in prange(len(ptr) - 1):
        row = out[r]
        row[:] = 0.0
        for e in range(ptr[r], ptr[r + 1]):
            other = right[column[e]]
            v = value[e]
            for j in range(width):
                row[j] += v * other[j]


@njit(cache=True, parallel=True)
def find_row_thresholds(ptr: Ints, size: Floats, keep: int) -> Floats:
    """The size of the `keep`-th largest entry of each row; 0 where a row has no more entries than that."""
    n = len(ptr) - 1
    out = np.zeros(n, np.float32)
    for r in prange(n):
        n_entries = ptr[r + 1] - ptr[r]
        if n_entries > keep:
            place = n_entries - keep
            sizes = size[ptr[r] : ptr[r + 1]]
            out[r] = np.partition(sizes, place)[place]
    return out
