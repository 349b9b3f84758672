"""Steps of a user's own star under cosine BPR with Adam, slopes by hand: all steps of some clients in one call.

What the compiler may reorder is compiled into `run_ego_steps` itself: see kernels/tower.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tacita.core.types import Bools, Floats, Ints, Longs
from tacita.kernels.adam import adam_step_row, adam_step_row_at, compute_bias_correction

_FAST = {"nsz", "arcp", "contract", "afn", "reassoc"}
_TINY = np.float32(1e-24)
_HALF = np.float32(0.5)


@njit(inline="always")
def _dot(a: Floats, b: Floats) -> np.float32:
    total = np.float32(0.0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@njit(inline="always")
def _mix_item_with_user(rows: Floats, r: int, passed: Floats, inside: bool, v: Floats) -> np.float32:
    """The item of a row as the star has it; returns its squared length."""
    total = np.float32(0.0)
    share = np.float32(1.0) if inside else np.float32(0.0)
    for j in range(len(v)):
        v[j] = _HALF * rows[r, j] + share * passed[j]
        total += v[j] * v[j]
    return total


@njit(inline="always")
def _add_cosine_slopes(
    slope: np.float32,
    user: Floats,
    length: np.float32,
    v: Floats,
    square: np.float32,
    product: np.float32,
    inside: bool,
    r: int,
    d_user: Floats,
    d_passed: Floats,
    d_rows: Floats,
) -> None:
    """Adds the slopes of one cosine: in the user, in the row, and in what the user passes to its items."""
    whole = length * square + _TINY
    by = slope / np.sqrt(whole)
    back = by * product / whole
    to_v = back * length
    to_user = back * square
    for j in range(len(v)):
        d_user[j] += by * v[j] - to_user * user[j]
        d_rows[r, j] += _HALF * (by * user[j] - to_v * v[j])
    if inside:
        for j in range(len(v)):
            d_passed[j] += by * user[j] - to_v * v[j]


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def run_ego_steps(
    first: int,
    last: int,
    batch: int,
    scale: np.float32,
    l2: np.float32,
    passes: bool,
    turn_ptr: Longs,
    order: Longs,  # (epochs, turns) the negative of each pair
    partner: Longs,
    weight: Floats,  # (samples,) of a pair, at its negative
    row_of: Ints,
    inside: Bools,
    context_ptr: Longs,
    context_row: Ints,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    rate: Floats,
    row_rate: Floats,
    decay: np.float32,
) -> None:
    """All steps of clients first..last-1, each with Adam's moments begun afresh."""
    d = rows.shape[1]
    user, passed, v, w, d_user, d_passed, d_own = np.zeros((7, d), np.float32)
    own_mean, own_square = np.zeros((2, d), np.float32)
    most = 0
    for c in range(first, last):
        most = max(most, row_start[c + 1] - row_start[c])
    grad, mean, square = np.zeros((3, most, d), np.float32)  # once: fresh memory costs as much as the steps
    steps = np.zeros(most, np.int64)
    used = np.empty(most, np.int64)
    state = np.zeros(most, np.int8)
    for c in range(first, last):
        start = turn_ptr[c]
        n = turn_ptr[c + 1] - turn_ptr[c]
        own_rows = rows[row_start[c] : row_start[c + 1]]
        own = private[c]
        read = context_row[context_ptr[c] : context_ptr[c + 1]]
        mean[: len(own_rows)] = 0.0
        square[: len(own_rows)] = 0.0
        steps[: len(own_rows)] = 0
        own_mean[:] = 0.0
        own_square[:] = 0.0
        corrected = np.array(
            [compute_bias_correction(max(1, k)) for k in range(len(order) * ((n + batch - 1) // batch) + 1)]
        )
        share = np.float32(0.5 / math.sqrt(max(1, len(read))))
        give = share if passes else np.float32(0.0)
        step = 0
        for epoch in range(len(order)):
            for begin in range(0, n, batch):
                m = min(batch, n - begin)
                for j in range(d):
                    user[j] = _HALF * own[j]
                    passed[j] = give * own[j]
                    d_user[j] = np.float32(0.0)
                    d_passed[j] = np.float32(0.0)
                for r in read:
                    for j in range(d):
                        user[j] += share * own_rows[r, j]
                length = _dot(user, user)
                n_used = 0
                for k in range(m):
                    low = order[epoch, start + begin + k]
                    high = partner[low]
                    below = row_of[low]
                    above = row_of[high]
                    square_v = _mix_item_with_user(own_rows, below, passed, inside[low], v)
                    square_w = _mix_item_with_user(own_rows, above, passed, inside[high], w)
                    product_v = _dot(user, v)
                    product_w = _dot(user, w)
                    cosine_v = product_v / np.sqrt(length * square_v + _TINY)
                    cosine_w = product_w / np.sqrt(length * square_w + _TINY)
                    wrong = np.float32(1.0) + np.exp(scale * (cosine_w - cosine_v))
                    slope = weight[low] * scale / (np.float32(m) * wrong)
                    for r in (below, above):
                        if state[r] == 0:
                            state[r] = 1
                            used[n_used] = r
                            n_used += 1
                    _add_cosine_slopes(
                        slope, user, length, v, square_v, product_v, inside[low], below, d_user, d_passed, grad
                    )
                    _add_cosine_slopes(
                        -slope, user, length, w, square_w, product_w, inside[high], above, d_user, d_passed, grad
                    )
                shrink = np.float32(2.0) * l2 / np.float32(m)
                for k in range(n_used):  # of what is only read nothing is held back
                    r = used[k]
                    for j in range(d):
                        grad[r, j] += shrink * own_rows[r, j]
                for r in read:
                    if state[r] == 0:
                        state[r] = 1
                        used[n_used] = r
                        n_used += 1
                    for j in range(d):
                        grad[r, j] += share * d_user[j]
                for j in range(d):
                    d_own[j] = _HALF * d_user[j] + give * d_passed[j] + shrink * own[j]
                step += 1
                adam_step_row(own, d_own, own_mean, own_square, step, rate, decay)
                for k in range(n_used):
                    r = used[k]
                    state[r] = 0
                    steps[r] += 1
                    adam_step_row_at(r, own_rows, grad, mean, square, corrected[steps[r]], row_rate, decay)
                    for j in range(d):
                        grad[r, j] = np.float32(0.0)
