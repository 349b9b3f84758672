"""Steps of FedPerGNN with Adam, slopes by hand: all steps of some clients in one call. Formulas: models/fedpergnn.py.

What is shared lies in one vector: W1, W2, W3 (two halves), W4, W5 (two halves), W6, v and w (two halves each), bias.
What the compiler may reorder is compiled into `run_pergnn_steps` itself: see kernels/tower.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.adam import adam_step_row, adam_step_row_at, adam_step_vector, compute_bias_correction

_FAST = {"nsz", "arcp", "contract", "afn", "reassoc"}
_BENT = np.float32(0.2)  # of LeakyReLU below 0
_MIDDLE = np.float32(0.6)  # its slope at 0
_ZERO = np.float32(0.0)
_UNIT = np.float32(1.0)


@njit(inline="always")
def _dot(a: Floats, b: Floats) -> np.float32:
    total = np.float32(0.0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@njit(inline="always")
def _add(factor: np.float32, source: Floats, target: Floats) -> None:
    for j in range(len(target)):
        target[j] += factor * source[j]


@njit(inline="always")
def _add_before(x: Floats, matrix: Floats, out: Floats) -> None:
    """out += x W"""
    for i in range(len(x)):
        for j in range(len(out)):
            out[j] += x[i] * matrix[i, j]


@njit(inline="always")
def _write_after(matrix: Floats, y: Floats, out: Floats) -> None:
    """out = W y"""
    for i in range(len(out)):
        total = np.float32(0.0)
        for j in range(len(y)):
            total += matrix[i, j] * y[j]
        out[i] = total


@njit(inline="always")
def _add_outer(x: Floats, y: Floats, matrix: Floats) -> None:
    for i in range(len(x)):
        for j in range(len(y)):
            matrix[i, j] += x[i] * y[j]


@njit(inline="always")
def _leaky_relu(x: np.float32) -> np.float32:
    return x if x > _ZERO else _BENT * x


@njit(inline="always")
def _compute_leaky_relu_slope(x: np.float32) -> np.float32:
    if x == _ZERO:
        return _MIDDLE
    return _UNIT if x > _ZERO else _BENT


@njit(inline="always")
def _softmax_in_place(force: Floats) -> None:
    """Softmax, in place."""
    top = np.float32(-np.inf)
    for k in range(len(force)):
        top = max(top, force[k])
    total = np.float32(0.0)
    for k in range(len(force)):
        force[k] = np.float32(math.exp(force[k] - top))
        total += force[k]
    for k in range(len(force)):
        force[k] /= total


@njit(inline="always")
def _backprop_softmax_in_place(share: Floats, slope: Floats) -> None:
    """Slopes of shares become those of what softmax was taken of, in place."""
    mean = np.float32(0.0)
    for k in range(len(share)):
        mean += share[k] * slope[k]
    for k in range(len(share)):
        slope[k] = share[k] * (slope[k] - mean)


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def run_pergnn_steps(
    first: int,
    last: int,
    batch_ptr: Longs,
    batch_start: Longs,  # (epochs, batches + 1)
    order: Longs,  # (epochs, turns)
    row_of: Ints,
    label: Floats,
    context_ptr: Longs,
    context_row: Ints,
    neighbours: Floats,  # (entries, most, width)
    n_neighbours: Longs,  # (entries,)
    row_start: Longs,
    rows: Floats,
    private: Floats,
    flats: Floats,  # (clients, shared)
    rate: Floats,
    row_rate: Floats,
    flat_rate: np.float32,
    decay: np.float32,
) -> None:
    """All steps of clients first..last-1, each one person, with Adam's moments begun afresh."""
    d = rows.shape[1]
    most_near = neighbours.shape[1]
    area = d * d
    most_rows = 0
    most_read = 0
    most_steps = 0
    most_batch = 0
    for c in range(first, last):
        most_rows = max(most_rows, row_start[c + 1] - row_start[c])
        most_read = max(most_read, context_ptr[c + 1] - context_ptr[c])
        most_steps = max(most_steps, batch_ptr[c + 1] - batch_ptr[c])
        for epoch in range(len(order)):
            for b in range(batch_ptr[c], batch_ptr[c + 1]):
                most_batch = max(most_batch, batch_start[epoch, b + 1] - batch_start[epoch, b])
    corrected = np.array([compute_bias_correction(max(1, k)) for k in range(most_steps * len(order) + 1)])
    grad = np.zeros((most_rows, d), np.float32)
    mean = np.empty((most_rows, d), np.float32)
    square = np.empty((most_rows, d), np.float32)
    steps = np.empty(most_rows, np.int64)
    used = np.empty(most_rows, np.int64)
    is_used = np.zeros(most_rows, np.bool_)
    d_flat = np.empty(flats.shape[1], np.float32)
    flat_mean = np.empty(flats.shape[1], np.float32)
    flat_square = np.empty(flats.shape[1], np.float32)
    own_mean = np.empty(d, np.float32)
    own_square = np.empty(d, np.float32)
    near = np.empty((most_read, d), np.float32)
    d_near = np.empty(d, np.float32)
    near_share = np.empty((most_read, most_near), np.float32)
    near_bend = np.empty((most_read, most_near), np.float32)
    d_force = np.empty(most_near, np.float32)
    share = np.empty(most_read, np.float32)
    bend = np.empty(most_read, np.float32)
    d_share = np.empty(most_read, np.float32)
    slope = np.empty(most_batch, np.float32)
    # vectors of the model, named as in models/fedpergnn.py, and their slopes
    user = np.empty(d, np.float32)
    to_item = np.empty(d, np.float32)
    to_near = np.empty(d, np.float32)
    row_side = np.empty(d, np.float32)
    to_row = np.empty(d, np.float32)
    near_side = np.empty(d, np.float32)
    to_mean = np.empty(d, np.float32)
    row_sum = np.empty(d, np.float32)
    near_sum = np.empty(d, np.float32)
    row_hidden = np.empty(d, np.float32)
    near_hidden = np.empty(d, np.float32)
    around = np.empty(d, np.float32)
    g = np.empty(d, np.float32)
    vector = np.empty(d, np.float32)
    d_vector = np.empty(d, np.float32)
    d_g = np.empty(d, np.float32)
    d_around = np.empty(d, np.float32)
    d_user = np.empty(d, np.float32)
    d_row_hidden = np.empty(d, np.float32)
    d_near_hidden = np.empty(d, np.float32)
    d_row_sum = np.empty(d, np.float32)
    d_near_sum = np.empty(d, np.float32)
    d_to_row = np.empty(d, np.float32)
    d_to_mean = np.empty(d, np.float32)
    d_to_item = np.empty(d, np.float32)
    d_to_near = np.empty(d, np.float32)
    d_side = np.empty(d, np.float32)
    d_own = np.empty(d, np.float32)
    dw1 = d_flat[:area].reshape((d, d))
    dw2 = d_flat[area : 2 * area].reshape((d, d))
    dw3_near = d_flat[2 * area : 3 * area].reshape((d, d))
    dw3_row = d_flat[3 * area : 4 * area].reshape((d, d))
    dw4 = d_flat[4 * area : 5 * area].reshape((d, d))
    dw5_around = d_flat[5 * area : 6 * area].reshape((d, d))
    dw5_user = d_flat[6 * area : 7 * area].reshape((d, d))
    dw6 = d_flat[7 * area : 8 * area].reshape((d, d))
    vectors = 8 * area
    for c in range(first, last):
        own_rows = rows[row_start[c] : row_start[c + 1]]
        own = private[c]
        entry = context_ptr[c]
        read = context_row[entry : context_ptr[c + 1]]
        n_read = len(read)
        flat = flats[c]
        w1 = flat[:area].reshape((d, d))
        w2 = flat[area : 2 * area].reshape((d, d))
        w3_near = flat[2 * area : 3 * area].reshape((d, d))
        w3_row = flat[3 * area : 4 * area].reshape((d, d))
        w4 = flat[4 * area : 5 * area].reshape((d, d))
        w5_around = flat[5 * area : 6 * area].reshape((d, d))
        w5_user = flat[6 * area : 7 * area].reshape((d, d))
        w6 = flat[7 * area : 8 * area].reshape((d, d))
        v_item = flat[vectors : vectors + d]
        v_near = flat[vectors + d : vectors + 2 * d]
        w_user = flat[vectors + 2 * d : vectors + 3 * d]
        w_item = flat[vectors + 3 * d : vectors + 4 * d]
        d_v_item = d_flat[vectors : vectors + d]
        d_v_near = d_flat[vectors + d : vectors + 2 * d]
        d_w_user = d_flat[vectors + 2 * d : vectors + 3 * d]
        d_w_item = d_flat[vectors + 3 * d : vectors + 4 * d]
        mean[: len(own_rows)] = _ZERO
        square[: len(own_rows)] = _ZERO
        steps[: len(own_rows)] = 0
        flat_mean[:] = _ZERO
        flat_square[:] = _ZERO
        own_mean[:] = _ZERO
        own_square[:] = _ZERO
        step = 0
        for epoch in range(len(order)):
            for b in range(batch_ptr[c], batch_ptr[c + 1]):
                begin = batch_start[epoch, b]
                m = batch_start[epoch, b + 1] - begin
                d_flat[:] = _ZERO
                n_used = 0
                # forward: the user, its items' neighbours, its items, and the vector that meets rows
                user[:] = _ZERO
                _add_before(own, w4, user)
                _write_after(w1, v_item, to_item)
                _write_after(w2, v_near, to_near)
                _write_after(w3_row, w_item, row_side)
                _write_after(w1, row_side, to_row)
                _write_after(w3_near, w_item, near_side)
                _write_after(w2, near_side, to_mean)
                user_part = _dot(w_user, user)
                for i in range(n_read):
                    row = own_rows[read[i]]
                    count = n_neighbours[entry + i]
                    item_part = _dot(row, to_item)
                    near[i] = _ZERO
                    for k in range(count):
                        force = item_part + _dot(neighbours[entry + i, k], to_near)
                        near_bend[i, k] = _compute_leaky_relu_slope(force)
                        near_share[i, k] = _leaky_relu(force)
                    _softmax_in_place(near_share[i, :count])
                    for k in range(count):
                        _add(near_share[i, k], neighbours[entry + i, k], near[i])
                    force = user_part + _dot(row, to_row) + _dot(near[i], to_mean)
                    bend[i] = _compute_leaky_relu_slope(force)
                    share[i] = _leaky_relu(force)
                _softmax_in_place(share[:n_read])
                row_sum[:] = _ZERO
                near_sum[:] = _ZERO
                for i in range(n_read):
                    _add(share[i], own_rows[read[i]], row_sum)
                    _add(share[i], near[i], near_sum)
                row_hidden[:] = _ZERO
                near_hidden[:] = _ZERO
                around[:] = _ZERO
                g[:] = _ZERO
                _add_before(row_sum, w1, row_hidden)
                _add_before(near_sum, w2, near_hidden)
                _add_before(row_hidden, w3_row, around)
                _add_before(near_hidden, w3_near, around)
                _add_before(around, w5_around, g)
                _add_before(user, w5_user, g)
                _write_after(w6, g, vector)
                # the samples
                bias = flat[vectors + 4 * d]
                d_bias = _ZERO
                for k in range(m):
                    sample = order[epoch, begin + k]
                    logit = _dot(vector, own_rows[row_of[sample]]) + bias
                    chance = _UNIT / (_UNIT + np.float32(math.exp(-logit)))
                    slope[k] = (chance - label[sample]) / np.float32(m)
                    d_bias += slope[k]
                d_vector[:] = _ZERO
                for k in range(m):
                    r = row_of[order[epoch, begin + k]]
                    if not is_used[r]:
                        is_used[r] = True
                        used[n_used] = r
                        n_used += 1
                    _add(slope[k], own_rows[r], d_vector)
                    _add(slope[k], vector, grad[r])
                # backward
                d_flat[vectors + 4 * d] = d_bias
                _add_outer(d_vector, g, dw6)
                d_g[:] = _ZERO
                _add_before(d_vector, w6, d_g)
                _add_outer(around, d_g, dw5_around)
                _add_outer(user, d_g, dw5_user)
                _write_after(w5_around, d_g, d_around)
                _write_after(w5_user, d_g, d_user)
                _add_outer(row_hidden, d_around, dw3_row)
                _add_outer(near_hidden, d_around, dw3_near)
                _write_after(w3_row, d_around, d_row_hidden)
                _write_after(w3_near, d_around, d_near_hidden)
                _add_outer(row_sum, d_row_hidden, dw1)
                _add_outer(near_sum, d_near_hidden, dw2)
                _write_after(w1, d_row_hidden, d_row_sum)
                _write_after(w2, d_near_hidden, d_near_sum)
                for i in range(n_read):
                    d_share[i] = _dot(d_row_sum, own_rows[read[i]]) + _dot(d_near_sum, near[i])
                _backprop_softmax_in_place(share[:n_read], d_share[:n_read])
                d_user_part = _ZERO
                d_to_row[:] = _ZERO
                d_to_mean[:] = _ZERO
                d_to_item[:] = _ZERO
                d_to_near[:] = _ZERO
                for i in range(n_read):
                    r = read[i]
                    row = own_rows[r]
                    count = n_neighbours[entry + i]
                    d_item_force = d_share[i] * bend[i]
                    d_user_part += d_item_force
                    _add(d_item_force, row, d_to_row)
                    _add(d_item_force, near[i], d_to_mean)
                    for j in range(d):
                        d_near[j] = share[i] * d_near_sum[j] + d_item_force * to_mean[j]
                    for k in range(count):
                        d_force[k] = _dot(d_near, neighbours[entry + i, k])
                    _backprop_softmax_in_place(near_share[i, :count], d_force[:count])
                    d_item_part = _ZERO
                    for k in range(count):
                        d_force[k] *= near_bend[i, k]
                        d_item_part += d_force[k]
                        _add(d_force[k], neighbours[entry + i, k], d_to_near)
                    _add(d_item_part, row, d_to_item)
                    if not is_used[r]:
                        is_used[r] = True
                        used[n_used] = r
                        n_used += 1
                    for j in range(d):
                        grad[r, j] += share[i] * d_row_sum[j] + d_item_force * to_row[j] + d_item_part * to_item[j]
                _add(d_user_part, user, d_w_user)
                _add(d_user_part, w_user, d_user)
                _add_outer(d_to_row, row_side, dw1)
                d_side[:] = _ZERO
                _add_before(d_to_row, w1, d_side)
                _add_outer(d_side, w_item, dw3_row)
                _add_before(d_side, w3_row, d_w_item)
                _add_outer(d_to_mean, near_side, dw2)
                d_side[:] = _ZERO
                _add_before(d_to_mean, w2, d_side)
                _add_outer(d_side, w_item, dw3_near)
                _add_before(d_side, w3_near, d_w_item)
                _add_outer(d_to_item, v_item, dw1)
                _add_before(d_to_item, w1, d_v_item)
                _add_outer(d_to_near, v_near, dw2)
                _add_before(d_to_near, w2, d_v_near)
                _add_outer(own, d_user, dw4)
                _write_after(w4, d_user, d_own)
                # the step
                step += 1
                adam_step_row(own, d_own, own_mean, own_square, step, rate, decay)
                adam_step_vector(flat, d_flat, flat_mean, flat_square, corrected[step], flat_rate, decay)
                for k in range(n_used):
                    r = used[k]
                    is_used[r] = False
                    steps[r] += 1
                    adam_step_row_at(r, own_rows, grad, mean, square, corrected[steps[r]], row_rate, decay)
                    grad[r] = _ZERO
