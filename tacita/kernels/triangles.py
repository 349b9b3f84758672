"""Lower triangles of symmetric matrices, packed row by row, whole or as the entries that are not zero."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from tacita.core.types import AnyArray, Bools, Doubles, Floats, Ints, Longs


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


@njit(cache=True)
def number_lower_entries(ptr: Ints, column: Ints) -> Longs:
    """The place of every entry of a sparse matrix that has none above its diagonal."""
    at = np.empty(len(column), np.int64)
    for i in range(len(ptr) - 1):
        first = i * (i + 1) // 2
        for e in range(ptr[i], ptr[i + 1]):
            at[e] = first + column[e]
    return at


@njit(cache=True, parallel=True)
def add_at_places(at: AnyArray, value: Doubles, out: Doubles) -> None:
    """out[at] += value; no place occurs twice."""
    for e in prange(len(at)):
        out[at[e]] += value[e]


@njit(cache=True, parallel=True)
def release_pairs_of_items(
    is_out: Bools, min_pair: int, pending: Doubles, contributors: Doubles, gram: Doubles
) -> None:
    """Move what waits into gram, for pairs of items that are out and with enough contributors; packed triangles."""
    for i in prange(len(is_out)):
        if not is_out[i]:
            continue
        first = i * (i + 1) // 2
        for j in range(i + 1):
            place = first + j
            if not is_out[j] or contributors[place] <= 0:
                continue
            if min_pair > 1 and contributors[place] < min_pair:
                continue
            gram[place] += pending[place]
            pending[place] = 0
            contributors[place] = 0


@njit(cache=True, parallel=True)
def join_triangles(below: Doubles, above: Doubles, n: int) -> Doubles:
    """A matrix from its packed lower triangle, and from a packed triangle that is turned to be above the diagonal."""
    square = np.empty((n, n))
    for i in prange(n):
        for j in range(i + 1):
            square[i, j] = below[i * (i + 1) // 2 + j]
        for j in range(i + 1, n):
            square[i, j] = above[j * (j + 1) // 2 + i]
    return square


class LowerRows(NamedTuple):
    """The rows of a sparse lower triangle."""

    ptr: Longs
    column: Ints
    value: AnyArray


@njit(cache=True)
def list_lower_rows(at: AnyArray, value: Doubles, n: int, is_out: Bools) -> LowerRows:
    """What is not zero in the triangle, of items that are out, from ascending places in it."""
    ptr = np.zeros(n + 1, np.int64)
    column = np.empty(len(at), np.int32)
    released = np.empty(len(at))
    k = 0
    i = 0
    first = 0  # place of the row
    for e in range(len(at)):
        while at[e] > first + i:
            i += 1
            first += i
            ptr[i] = k
        j = at[e] - first
        if value[e] != 0 and is_out[i] and is_out[j]:
            column[k] = j
            released[k] = value[e]
            k += 1
    ptr[i + 1 :] = k
    return LowerRows(ptr, column[:k], released[:k])


@njit(cache=True)
def sum_symmetric_rows(rows: LowerRows) -> Doubles:
    """The row sums of a symmetric matrix, from its lower triangle."""
    n = len(rows.ptr) - 1
    own = np.zeros(n)
    mirrored = np.zeros(n)
    for i in range(n):
        for e in range(rows.ptr[i], rows.ptr[i + 1]):
            own[i] += rows.value[e]
            if rows.column[e] != i:
                mirrored[rows.column[e]] += rows.value[e]
    return own + mirrored


@njit(cache=True, parallel=True)
def normalise_lower_rows(rows: LowerRows, root: Doubles) -> LowerRows:
    """Every entry divided by what its row and its column have in `root`, in single precision."""
    scaled = np.empty(len(rows.column), np.float32)
    for i in prange(len(root)):
        for e in range(rows.ptr[i], rows.ptr[i + 1]):
            scaled[e] = rows.value[e] / (root[i] * root[rows.column[e]])
    return LowerRows(rows.ptr, rows.column, scaled)


@njit(cache=True)
def mirror_lower_rows(rows: LowerRows) -> tuple[Longs, Ints, Floats]:
    """The rows of a symmetric sparse matrix, each in the order of its columns, from its lower triangle."""
    ptr, column, value = rows
    n = len(ptr) - 1
    whole_ptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        for e in range(ptr[i], ptr[i + 1]):
            whole_ptr[i + 1] += 1
            if column[e] != i:
                whole_ptr[column[e] + 1] += 1
    for i in range(n):
        whole_ptr[i + 1] += whole_ptr[i]
    cursor = whole_ptr[:-1].copy()
    whole_column = np.empty(whole_ptr[n], np.int32)
    whole_value = np.empty(whole_ptr[n], np.float32)
    for i in range(n):  # rows above i have been given their lower part, and are given their upper part in order
        for e in range(ptr[i], ptr[i + 1]):
            j = column[e]
            whole_column[cursor[i]] = j
            whole_value[cursor[i]] = value[e]
            cursor[i] += 1
            if j != i:
                whole_column[cursor[j]] = i
                whole_value[cursor[j]] = value[e]
                cursor[j] += 1
    return whole_ptr, whole_column, whole_value


@njit(cache=True, parallel=True)
def keep_largest_per_row(ptr: Longs, column: Ints, value: Floats, keep: int) -> tuple[Longs, Ints, Floats]:
    """Rows of a sparse matrix with their `keep` largest entries off the diagonal, as large up to rounding is as large;
    0: all."""
    n = len(ptr) - 1
    least = np.zeros(n, np.float32)
    kept_ptr = np.zeros(n + 1, np.int64)
    for i in prange(n):
        n_entries = ptr[i + 1] - ptr[i]
        if 0 < keep < n_entries:
            sizes = np.abs(value[ptr[i] : ptr[i + 1]])
            for e in range(n_entries):
                if column[ptr[i] + e] == i:
                    sizes[e] = 0.0
            place = n_entries - keep
            least[i] = np.partition(sizes, place)[place] * np.float32(1 - 1e-6)
        for e in range(ptr[i], ptr[i + 1]):
            kept_ptr[i + 1] += column[e] != i and abs(value[e]) >= least[i]
    for i in range(n):
        kept_ptr[i + 1] += kept_ptr[i]
    kept_column = np.empty(kept_ptr[n], np.int32)
    kept_value = np.empty(kept_ptr[n], np.float32)
    for i in prange(n):
        k = kept_ptr[i]
        for e in range(ptr[i], ptr[i + 1]):
            if column[e] != i and abs(value[e]) >= least[i]:
                kept_column[k] = column[e]
                kept_value[k] = value[e]
                k += 1
    return kept_ptr, kept_column, kept_value
