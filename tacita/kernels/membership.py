"""Whether items are in their users' lists, without sorting either."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Bools, Ints, Longs


@njit(cache=True)
def mark_listed(n_items: int, ptr: Longs, ids: Ints, other_ptr: Longs, other_ids: Ints) -> Bools:
    """For every entry of lists, one a user, whether the user's other list has the item."""
    out = np.zeros(len(ids), np.bool_)
    marked = np.zeros(n_items, np.bool_)
    for u in range(len(ptr) - 1):
        others = other_ids[other_ptr[u] : other_ptr[u + 1]]
        if len(others) == 0:
            continue
        marked[others] = True
        out[ptr[u] : ptr[u + 1]] = marked[ids[ptr[u] : ptr[u + 1]]]
        marked[others] = False
    return out
