"""Sums over pairs of items, of those before others too, and what sparse rows make of an item-item matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from tacita.core.types import AnyArray, Doubles, Floats, Ints, Longs


class ItemPlaces(NamedTuple):
    """Where each item stands in lists: entries `ptr[i]:ptr[i + 1]`, the first list first."""

    ptr: Longs
    owner: Longs  # the list
    place: Longs  # in that list


@njit(cache=True)
def find_item_places(ptr: Longs, item: Ints, n_items: int) -> ItemPlaces:
    """Where each item stands in some lists."""
    item_ptr = np.zeros(n_items + 1, np.int64)
    for i in item:
        item_ptr[i + 1] += 1
    for i in range(n_items):
        item_ptr[i + 1] += item_ptr[i]
    cursor = item_ptr[:-1].copy()
    owner = np.empty(len(item), np.int64)
    place = np.empty(len(item), np.int64)
    for u in range(len(ptr) - 1):
        for k in range(ptr[u], ptr[u + 1]):
            e = cursor[item[k]]
            owner[e] = u
            place[e] = k - ptr[u]
            cursor[item[k]] += 1
    return ItemPlaces(item_ptr, owner, place)


@njit(cache=True, parallel=True)
def add_pair_sums(
    inputs: Ints,
    holder_ptr: Longs,
    holder: Longs,
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
            added = weight[u]
            for k in range(user_ptr[u], user_ptr[u + 1]):
                row[item[k]] += added


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
def add_context_sums(
    by_item: ItemPlaces,
    ptr: Longs,
    item: AnyArray,
    start: Longs,
    factor: Doubles,
    both: Doubles,
    quantum: float,
    out: Doubles,
) -> None:
    """out += factor h h^T for every place of a list from its start on; h: what came before, by how long before.

    Two entries of a list meet in every h that holds both, so what they add is a difference of `both[d, k]`, the sum of
    the products of weights over 1..k places after the later of two entries d places apart. A row of the sum stays in
    the cache while it is added up. Numbers are whole multiples of the quantum: the sum is the same in any order.
    """
    window = len(both)
    per_quantum = 1 / quantum  # a power of two: exact
    item_ptr, owner, place_of = by_item
    for i in prange(len(item_ptr) - 1):
        row = out[i]
        for e in range(item_ptr[i], item_ptr[i + 1]):
            u = owner[e]
            place = place_of[e]
            first = ptr[u]
            n = ptr[u + 1] - first
            lowest = max(0, place - window + 1)
            highest = min(n - 1, place + window)
            for other in range(lowest, highest):  # the last entry of a list comes before nothing
                late = max(place, other)
                apart = late - min(place, other)
                least = max(start[u] - late, 1)
                last = min(window - apart, n - 1 - late)
                if last < least:
                    continue
                value = factor[u] * (both[apart, last] - both[apart, least - 1])
                row[item[first + other]] += np.rint(value * per_quantum) * quantum


@njit(cache=True, parallel=True)
def add_next_sums(
    by_item: ItemPlaces,
    ptr: Longs,
    item: AnyArray,
    start: Longs,
    factor: Doubles,
    fall: Doubles,
    quantum: float,
    out: Doubles,
) -> None:
    """out[i, j] += factor times the weight of i in what came before j, for every j of a list from its start on."""
    per_quantum = 1 / quantum
    item_ptr, owner, place_of = by_item
    for i in prange(len(item_ptr) - 1):
        row = out[i]
        for e in range(item_ptr[i], item_ptr[i + 1]):
            u = owner[e]
            place = place_of[e]
            first = ptr[u]
            n = ptr[u + 1] - first
            lowest = max(place + 1, start[u])
            highest = min(n, place + 1 + len(fall))
            for later in range(lowest, highest):
                weight = factor[u] * fall[later - place - 1]
                row[item[first + later]] += np.rint(weight * per_quantum) * quantum


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
