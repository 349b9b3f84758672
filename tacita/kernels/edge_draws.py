"""Draws that belong to an edge or an item, not to its place: who withdraws leaves all other draws as they were."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from tacita.core.types import Bools, Ints, Keys, Longs
from tacita.kernels.hashing import derive_stream, draw_bits, random_below
from tacita.kernels.sampling import mark_items
from tacita.kernels.threads import find_share_start


@njit(cache=True)
def assign_edge_batches(key: np.uint64, owners: Keys, ptr: Longs, ids: Ints, n_batches: int) -> Longs:
    """The batch of every edge, drawn by its owner and its item."""
    batch = np.empty(len(ids), np.int64)
    for u in range(len(owners)):
        stream = derive_stream(key, owners[u])
        for k in range(ptr[u], ptr[u + 1]):
            batch[k] = random_below(stream, np.uint64(ids[k]), np.uint64(n_batches))
    return batch


@njit(cache=True, parallel=True)
def draw_edge_negatives(
    shares: int, key: np.uint64, owners: Keys, ptr: Longs, ids: Ints, n_items: int, negative: Longs
) -> None:
    """Write for every edge an item to which its owner has no edge; of an owner who has all, nothing is written."""
    for share in prange(shares):
        excluded = np.zeros(n_items, np.bool_)
        first_owner = find_share_start(ptr, share, shares)
        last_owner = find_share_start(ptr, share + 1, shares)
        for u in range(first_owner, last_owner):
            own = ids[ptr[u] : ptr[u + 1]]
            n_allowed = n_items - len(own)
            if n_allowed == 0:
                continue
            mark_items(excluded, own, True)
            owner_stream = derive_stream(key, owners[u])
            if 8 * n_allowed < n_items:
                allowed = np.flatnonzero(~excluded)
                for k in range(ptr[u], ptr[u + 1]):
                    stream = derive_stream(owner_stream, np.uint64(ids[k]))
                    negative[k] = allowed[random_below(stream, np.uint64(0), np.uint64(n_allowed))]
            else:
                for k in range(ptr[u], ptr[u + 1]):
                    stream = derive_stream(owner_stream, np.uint64(ids[k]))
                    negative[k] = _draw_allowed_item(stream, excluded)
            mark_items(excluded, own, False)


@njit(inline="always")
def _draw_allowed_item(stream: np.uint64, excluded: Bools) -> np.int64:
    n_items = np.uint64(len(excluded))
    counter = np.uint64(0)
    item = random_below(stream, counter, n_items)
    while excluded[item]:
        counter += np.uint64(1)
        item = random_below(stream, counter, n_items)
    return item


@njit(cache=True)
def hash_numbers(key: np.uint64, numbers: Ints) -> Keys:
    """A hash of every number; the order of the hashes is a drawn order of the numbers."""
    hashes = np.empty(len(numbers), np.uint64)
    for i in range(len(numbers)):
        hashes[i] = draw_bits(key, np.uint64(numbers[i]))
    return hashes
