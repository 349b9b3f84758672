"""Lengths of what clients send, and of how far they moved, in one pass over their rows."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from tacita.core.types import Doubles, Floats, Ints, Longs

_SHARES = 8  # of the rows, for any number of threads: what is shared out does not follow the machine


@njit(cache=True, parallel=True, fastmath={"reassoc"})
def sum_row_squares(client: Ints, value: Floats, n_clients: int) -> Doubles:
    """The sum of squares of every client's rows, in double precision.

    Threads take whole clients where their rows lie together, so each sum runs in the order of its rows.
    """
    out = np.zeros(n_clients)
    shares = _SHARES
    for r in range(1, len(client)):
        if client[r] < client[r - 1]:
            shares = 1
    for share in prange(shares):
        begin = _find_share_start(client, share, shares)
        end = _find_share_start(client, share + 1, shares)
        for r in range(begin, end):
            square = 0.0
            for j in range(value.shape[1]):
                number = np.float64(value[r, j])
                square += number * number
            out[client[r]] += square
    return out


@njit(inline="always")
def _find_share_start(client: Ints, share: int, shares: int) -> int:
    """Where a share of the rows begins: at the first row of a client."""
    r = share * len(client) // shares
    while 0 < r < len(client) and client[r] == client[r - 1]:
        r += 1
    return r


@njit(cache=True, fastmath={"reassoc"})
def sum_move_squares(row_start: Longs, row_item: Ints, rows: Floats, items: Floats) -> Doubles:
    """The sum of squares of how far every client's rows have moved from the table, in double precision."""
    out = np.zeros(len(row_start) - 1)
    for c in range(len(out)):
        for r in range(row_start[c], row_start[c + 1]):
            source = items[row_item[r]]
            for j in range(rows.shape[1]):
                move = np.float64(rows[r, j]) - np.float64(source[j])
                out[c] += move * move
    return out


@njit(cache=True)
def scale_moves(factor: Doubles, row_start: Longs, row_item: Ints, rows: Floats, items: Floats) -> None:
    """Multiply how far a client's rows have moved from the table, in place; a factor of 1 leaves them bit for bit."""
    for c in range(len(factor)):
        if factor[c] != 1.0:
            for r in range(row_start[c], row_start[c + 1]):
                source = items[row_item[r]]
                for j in range(rows.shape[1]):
                    move = np.float64(rows[r, j]) - source[j]
                    rows[r, j] = np.float32(source[j] + factor[c] * move)
