"""Adam on some rows of a table, a row at a time: moments, bias correction and decay act on the rows of a step only.

Numbers are those of torch's SparseAdam with a count of steps per row (Kingma and Ba 2015). The loops run on one core,
for callers that keep every core busy themselves.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tacita.core.types import Floats, Longs

_KEEP = np.float32(0.9)
_TAKE = np.float32(0.1)
_KEEP_SQUARE = np.float32(0.999)
_TAKE_SQUARE = np.float32(0.001)
_EPS = np.float32(1e-8)


@njit(nogil=True, cache=True, error_model="numpy")
def compute_bias_correction(steps: int) -> np.float32:
    """What a step is multiplied by, because moments begin at zero."""
    square_bias = 1.0 - 0.999**steps
    mean_bias = 1.0 - 0.9**steps
    return np.float32(math.sqrt(square_bias) / mean_bias)


@njit(nogil=True, cache=True, error_model="numpy")
def adam_step_row(
    row: Floats, grad: Floats, mean: Floats, square: Floats, steps: int, rate: Floats, decay: np.float32
) -> None:
    """One step of one row, its step number `steps`."""
    scale = compute_bias_correction(steps)
    for j in range(len(row)):
        slope = grad[j] + decay * row[j]
        mean[j] = _KEEP * mean[j] + _TAKE * slope
        square[j] = _KEEP_SQUARE * square[j] + _TAKE_SQUARE * (slope * slope)
        row[j] -= rate[j] * scale * mean[j] / (np.sqrt(square[j]) + _EPS)


@njit(nogil=True, cache=True, error_model="numpy")
def adam_step_row_at(
    r: int, rows: Floats, grad: Floats, mean: Floats, square: Floats, scale: np.float32, rate: Floats, decay: np.float32
) -> None:
    """The same for row r of some arrays, its correction at hand: neither views nor powers are made."""
    for j in range(rows.shape[1]):
        slope = grad[r, j] + decay * rows[r, j]
        mean[r, j] = _KEEP * mean[r, j] + _TAKE * slope
        square[r, j] = _KEEP_SQUARE * square[r, j] + _TAKE_SQUARE * (slope * slope)
        rows[r, j] -= rate[j] * scale * mean[r, j] / (np.sqrt(square[r, j]) + _EPS)


@njit(nogil=True, cache=True, error_model="numpy")
def adam_step_vector(
    vector: Floats,
    grad: Floats,
    mean: Floats,
    square: Floats,
    scale: np.float32,
    rate: np.float32,
    decay: np.float32,
) -> None:
    """The same for numbers with one rate, their correction at hand."""
    for j in range(len(vector)):
        slope = grad[j] + decay * vector[j]
        mean[j] = _KEEP * mean[j] + _TAKE * slope
        square[j] = _KEEP_SQUARE * square[j] + _TAKE_SQUARE * (slope * slope)
        vector[j] -= rate * scale * mean[j] / (np.sqrt(square[j]) + _EPS)


@njit(cache=True, nogil=True)
def adam_step_rows(
    some: Longs,
    grad: Floats,
    table: Floats,
    mean: Floats,
    square: Floats,
    steps: Longs,
    rate: Floats,
    decay: np.float32,
) -> None:
    """One step of the rows `some`, each given once, by a slope for each of them."""
    for k in range(len(some)):
        r = some[k]
        steps[r] += 1
        adam_step_row(table[r], grad[k], mean[r], square[r], steps[r], rate, decay)


@njit(cache=True, nogil=True)
def adam_step_used_rows(
    used: Longs,
    grad: Floats,
    slot: Longs,
    table: Floats,
    mean: Floats,
    square: Floats,
    steps: Longs,
    rate: Floats,
    decay: np.float32,
) -> None:
    """One step of the rows that a batch uses: gradients of its samples add up, in their order, per row.

    `slot` is scratch as long as the table, -1 everywhere, before and after.
    """
    first = np.empty(len(used), np.int64)
    total = np.empty(grad.shape, np.float32)
    n = 0
    for k in range(len(used)):
        at = slot[used[k]]
        if at < 0:
            slot[used[k]] = n
            first[n] = used[k]
            total[n] = grad[k]
            n += 1
        else:
            for j in range(grad.shape[1]):
                total[at, j] += grad[k, j]
    for k in range(n):
        r = first[k]
        slot[r] = -1
        steps[r] += 1
        adam_step_row(table[r], total[k], mean[r], square[r], steps[r], rate, decay)
