"""Lengths of what clients send, in one pass over their rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Doubles, Floats, Ints


@njit(cache=True, fastmath={"reassoc"})
def square_rows(client: Ints, value: Floats, n_clients: int) -> Doubles:
    """The sum of squares of every client's rows, in double precision."""
    out = np.zeros(n_clients)
    for r in range(len(client)):
        some = 0.0
        for j in range(value.shape[1]):
            one = np.float64(value[r, j])
            some += one * one
        out[client[r]] += some
    return out
