"""Where the wanted items stand in a full ranking, without sorting anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from tacita.core.types import Doubles, Floats, Ints, Keys, Longs
from tacita.kernels.hashing import derive_stream, draw_bits


@njit(inline="always")
def _comes_before(stream: np.uint64, i: int, t: int) -> Any:
    """The order of tied items: by a hash of (seed, user, item), never by id or by being wanted."""
    return draw_bits(stream, np.uint64(i)) < draw_bits(stream, np.uint64(t))


@njit(cache=True, parallel=True)
def write_full_ranks(
    scores: Floats,
    want_ptr: Longs,
    want: Ints,
    mask_ptr: Longs,
    mask: Ints,
    tie_key: np.uint64,
    owners: Keys,
    against: bool,
    ranks: Ints,
    candidates: Ints,
    luck: Doubles,
) -> None:
    """1-based rank of every wanted item among all unmasked items; 0 where the mask hides it.

    `against`: items that are not wanted come before a wanted one they tie with. Overwrites masked scores with -inf.
    `luck`: for each user, how many others the order of ties put before a wanted item, less half of those it tied with.
    """
    n_items = scores.shape[1]
    hidden = np.float32(-np.inf)
    for u in prange(len(owners)):
        row = scores[u]
        n_masked = 0
        for k in range(mask_ptr[u], mask_ptr[u + 1]):
            if mask[k] < n_items and row[mask[k]] != hidden:
                row[mask[k]] = hidden
                n_masked += 1
        candidates[u] = n_items - n_masked
        stream = derive_stream(tie_key, owners[u])
        for k in range(want_ptr[u], want_ptr[u + 1]):
            t = want[k]
            s = row[t]
            if s == hidden:
                ranks[k] = 0
                continue
            higher = 0
            tied = 0
            for i in range(n_items):
                higher += row[i] > s
                tied += row[i] == s
            if tied > 1 and against:
                higher += tied - 1
                for j in range(want_ptr[u], want_ptr[u + 1]):
                    if row[want[j]] == s and want[j] != t and not _comes_before(stream, want[j], t):
                        higher -= 1
            elif tied > 1:
                before = 0
                for i in range(n_items):
                    if row[i] == s and i != t and _comes_before(stream, i, t):
                        before += 1
                higher += before
                others = tied - 1
                for j in range(want_ptr[u], want_ptr[u + 1]):
                    if row[want[j]] == s and want[j] != t:
                        others -= 1
                        before -= _comes_before(stream, want[j], t)
                luck[u] += before - 0.5 * others
            ranks[k] = higher + 1


@njit(cache=True, parallel=True)
def write_sampled_ranks(
    scores: Floats,
    want_ptr: Longs,
    want: Ints,
    other_ptr: Longs,
    other: Ints,
    tie_key: np.uint64,
    owners: Keys,
    against: bool,
    ranks: Ints,
    candidates: Ints,
    luck: Doubles,
) -> None:
    """Rank of every wanted item among the wanted and the user's sampled ones; `against`, `luck` as in full ranks."""
    for u in prange(len(owners)):
        row = scores[u]
        stream = derive_stream(tie_key, owners[u])
        candidates[u] = want_ptr[u + 1] - want_ptr[u] + other_ptr[u + 1] - other_ptr[u]
        for k in range(want_ptr[u], want_ptr[u + 1]):
            t = want[k]
            higher = 0
            for j in range(want_ptr[u], want_ptr[u + 1]):
                i = want[j]
                if row[i] > row[t] or (row[i] == row[t] and i != t and _comes_before(stream, i, t)):
                    higher += 1
            for j in range(other_ptr[u], other_ptr[u + 1]):
                i = other[j]
                if row[i] > row[t] or (row[i] == row[t] and i != t and (against or _comes_before(stream, i, t))):
                    higher += 1
                if row[i] == row[t] and i != t and not against:
                    luck[u] += 0.5 if _comes_before(stream, i, t) else -0.5
            ranks[k] = higher + 1


@njit(cache=True, parallel=True)
def compute_list_ranks(scores: Floats, ptr: Longs, ids: Ints) -> Ints:
    """1-based rank of each listed item among all items of its row; ties go to the smaller id."""
    n_items = scores.shape[1]
    out = np.empty(len(ids), np.int32)
    for u in prange(len(ptr) - 1):
        for k in range(ptr[u], ptr[u + 1]):
            t = ids[k]
            s = scores[u, t]
            higher = 0
            for i in range(n_items):
                higher += scores[u, i] > s
            for i in range(t):
                higher += scores[u, i] == s
            out[k] = higher + 1
    return out


@njit(cache=True, parallel=True)
def find_best_items(scores: Floats, k: int) -> tuple[Ints, Floats]:
    """The k best items of every row, best first, ties to the smaller id: one pass with a small sorted list."""
    n_users, n_items = scores.shape
    top = np.zeros((n_users, k), np.int32)
    value = np.full((n_users, k), -np.inf, np.float32)
    for u in prange(n_users):
        filled = 0
        for i in range(n_items):
            s = scores[u, i]
            if filled == k and not s > value[u, k - 1]:
                continue
            at = filled if filled < k else k - 1
            while at > 0 and s > value[u, at - 1]:
                value[u, at] = value[u, at - 1]
                top[u, at] = top[u, at - 1]
                at -= 1
            value[u, at] = s
            top[u, at] = i
            if filled < k:
                filled += 1
    return top, value
