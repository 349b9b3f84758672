"""Lengths of what clients send, and of how far they moved, in one pass over their rows."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Doubles, Floats, Ints, Longs


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


@njit(cache=True, fastmath={"reassoc"})
def square_moves(row_start: Longs, row_item: Ints, rows: Floats, items: Floats) -> Doubles:
    """The sum of squares of how far every client's rows have moved from the table, in double precision."""
    out = np.zeros(len(row_start) - 1)
    for c in range(len(out)):
        for r in range(row_start[c], row_start[c + 1]):
            source = items[row_item[r]]
            for j in range(rows.shape[1]):
                one = np.float64(rows[r, j]) - np.float64(source[j])
                out[c] += one * one
    return out


@njit(cache=True)
def shorten_moves(factor: Doubles, row_start: Longs, row_item: Ints, rows: Floats, items: Floats) -> None:
    """Multiply how far a client's rows have moved from the table, in place; a factor of 1 leaves them bit for bit."""
    for c in range(len(factor)):
        if factor[c] != 1.0:
            for r in range(row_start[c], row_start[c + 1]):
                source = items[row_item[r]]
                for j in range(rows.shape[1]):
                    rows[r, j] = np.float32(source[j] + factor[c] * (np.float64(rows[r, j]) - source[j]))
