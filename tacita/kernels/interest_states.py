"""The recurrent states of the interest model, up and down again by hand: a state is computed once for a batch.

`at` says where each piece of the flat shared parameters begins (see `PIECES`). The recurrence is a product of one
vector, which a plain loop does as well as BLAS. See kernels/interest.py for what the compiler may not do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.tower import sum_columns, view_matrix, view_vector

PIECES = (
    "user_layer",
    "state_layer",
    "out",
    "out_bias",
    "gaps",
    "event_layer",
    "event_bias",
    "gru_in",
    "gru_in_bias",
    "gru_state",
    "gru_state_bias",
    "state_centre",
)
USER, STATE, OUT, OUT_BIAS, GAPS, EVENT, EVENT_BIAS, IN, IN_BIAS, OWN, OWN_BIAS, CENTRE = range(12)
_UNIT = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF = np.float32(0.5)
_TAYLOR_3 = np.float32(1 / 6)
_TAYLOR_4 = np.float32(1 / 24)
_TAYLOR_5 = np.float32(1 / 120)
_TAYLOR_6 = np.float32(1 / 720)
_TAYLOR_7 = np.float32(1 / 5040)
_MOST_EXPONENT = np.float32(87.0)  # beyond it exp has no single-precision number
_LOG2_E = np.float32(1 / math.log(2))
_LN2_UPPER = np.float32(0.693359375)  # log(2) in two pieces: the first has so few bits that products are exact
_LN2_LOWER = np.float32(math.log(2) - 0.693359375)


@njit(nogil=True, cache=True, error_model="numpy")
def _exponentiate(x: Floats, bits: Ints) -> None:
    """x becomes exp(x): a power of two by its bits, times a polynomial; vector instructions do many at once.

    The polynomial is Taylor's on |r| <= log(2) / 2, where its eighth term is below a rounding of 1.
    """
    for j in range(len(x)):
        bounded = min(max(x[j], -_MOST_EXPONENT), _MOST_EXPONENT)
        power = np.floor(bounded * _LOG2_E + _HALF)
        r = bounded - power * _LN2_UPPER
        r -= power * _LN2_LOWER
        total = _TAYLOR_7
        total = total * r + _TAYLOR_6
        total = total * r + _TAYLOR_5
        total = total * r + _TAYLOR_4
        total = total * r + _TAYLOR_3
        total = total * r + _HALF
        total = total * r + _UNIT
        x[j] = total * r + _UNIT
        bits[j] = (np.int32(power) + np.int32(127)) << np.int32(23)
    scale = bits.view(np.float32)
    for j in range(len(x)):
        x[j] *= scale[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _step_gru(gate: Floats, bits: Ints, share: Floats, own: Floats, h: Floats, trace: Floats) -> None:
    """One event of one person: `share` is the event's, `own` the state's; h becomes the next state.

    Keeps in the event's trace what the way back needs: r, z, n, the state's share of n, and the state before.
    """
    d = len(h)
    for j in range(2 * d):
        gate[j] = -(share[j] + own[j])
    _exponentiate(gate, bits)
    for j in range(2 * d):
        trace[j] = _UNIT / (_UNIT + gate[j])
    fresh = gate[:d]
    for j in range(d):
        fresh[j] = _TWO * (share[2 * d + j] + trace[j] * own[2 * d + j])
    _exponentiate(fresh, bits[:d])
    for j in range(d):
        n = _UNIT - _TWO / (_UNIT + fresh[j])  # tanh
        trace[2 * d + j] = n
        trace[3 * d + j] = own[2 * d + j]
        trace[4 * d + j] = h[j]
        h[j] += (_UNIT - trace[d + j]) * (n - h[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _apply_affine(h: Floats, table: Floats, bias: Floats, out: Floats) -> None:
    """out = h table + bias."""
    out[:] = bias
    for k in range(len(h)):
        x = h[k]
        for j in range(table.shape[1]):
            out[j] += x * table[k, j]


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_gru(dh: Floats, trace: Floats, d_share: Floats, d_own: Floats, transposed: Floats) -> None:
    """The way back through one event: dh becomes the slope of the state before it."""
    d = len(dh)
    for j in range(d):
        r = trace[j]
        z = trace[d + j]
        n = trace[2 * d + j]
        own_n = trace[3 * d + j]
        before = trace[4 * d + j]
        of_n = dh[j] * (_UNIT - z) * (_UNIT - n * n)
        of_r = of_n * own_n * r * (_UNIT - r)
        of_z = dh[j] * (before - n) * z * (_UNIT - z)
        d_share[j] = of_r
        d_own[j] = of_r
        d_share[d + j] = of_z
        d_own[d + j] = of_z
        d_share[2 * d + j] = of_n
        d_own[2 * d + j] = of_n * r
        dh[j] *= z
    for j in range(3 * d):
        x = d_own[j]
        for k in range(d):
            dh[k] += x * transposed[j, k]


@njit(nogil=True, cache=True, error_model="numpy")
def compute_states(
    flat: Floats, at: Longs, g: int, ptr: Longs, events: Floats, h: Floats, x: Floats, trace: Floats
) -> None:
    """h of every person from its events (events, d + 1 + g); `x` and `trace` keep what the way back needs."""
    d = h.shape[1]
    wide = 3 * d
    event_layer = view_matrix(flat, at[EVENT], d + 1 + g, d)
    event_bias = view_vector(flat, at[EVENT_BIAS], d)
    np.dot(events, event_layer, x)
    for e in range(len(x)):
        for j in range(d):
            x[e, j] += event_bias[j]
    share = np.dot(x, view_matrix(flat, at[IN], d, wide))
    in_bias = view_vector(flat, at[IN_BIAS], wide)
    table = view_matrix(flat, at[OWN], d, wide)
    bias = view_vector(flat, at[OWN_BIAS], wide)
    own = np.empty(wide, np.float32)
    gate = np.empty(2 * d, np.float32)
    bits = np.empty(2 * d, np.int32)
    for u in range(len(h)):
        state = h[u]
        state[:] = 0
        for e in range(ptr[u], ptr[u + 1]):
            _apply_affine(state, table, bias, own)
            event = share[e]
            for j in range(wide):
                event[j] += in_bias[j]
            _step_gru(gate, bits, event, own, state, trace[e])


@njit(nogil=True, cache=True, error_model="numpy")
def backprop_states(
    flat: Floats,
    at: Longs,
    g: int,
    ptr: Longs,
    events: Floats,
    bucket: Longs,
    x: Floats,
    trace: Floats,
    dh: Floats,
    d_flat: Floats,
) -> Floats:
    """Slopes of all that the states come from; returns those of the events' rows."""
    n = len(x)
    d = dh.shape[1]
    wide = 3 * d
    d_share = np.empty((n, wide), np.float32)
    d_own = np.empty((n, wide), np.float32)
    own_layer = view_matrix(flat, at[OWN], d, wide)
    in_layer = view_matrix(flat, at[IN], d, wide)
    event_layer = view_matrix(flat, at[EVENT], d + 1 + g, d)
    transposed = np.ascontiguousarray(own_layer.T)
    for u in range(len(dh)):
        for e in range(ptr[u + 1] - 1, ptr[u] - 1, -1):
            _backprop_gru(dh[u], trace[e], d_share[e], d_own[e], transposed)
    before = np.ascontiguousarray(trace[:, 4 * d :])
    np.dot(before.T, d_own, view_matrix(d_flat, at[OWN], d, wide))
    sum_columns(d_own, view_vector(d_flat, at[OWN_BIAS], wide))
    np.dot(x.T, d_share, view_matrix(d_flat, at[IN], d, wide))
    sum_columns(d_share, view_vector(d_flat, at[IN_BIAS], wide))
    dx = np.dot(d_share, in_layer.T)
    np.dot(events.T, dx, view_matrix(d_flat, at[EVENT], d + 1 + g, d))
    sum_columns(dx, view_vector(d_flat, at[EVENT_BIAS], d))
    d_events = np.dot(dx, event_layer.T)
    for e in range(n):
        first = at[GAPS] + bucket[e] * g
        for j in range(g):
            d_flat[first + j] += d_events[e, d + 1 + j]
    return np.ascontiguousarray(d_events[:, :d])


@njit(nogil=True, cache=True, error_model="numpy")
def add_to_total_and_centre(flat: Floats, at: Longs, h: Floats, total: Floats) -> None:
    """Adds the states to `total`, and takes the centre from them, where the model has one."""
    first = at[CENTRE]
    if first < 0:
        return
    for u in range(len(h)):
        for j in range(h.shape[1]):
            total[j] += h[u, j]
            h[u, j] -= flat[first + j]


@njit(nogil=True, cache=True, error_model="numpy")
def gather_events(
    at: Longs,
    g: int,
    n_folds: int,
    users: Longs,
    context_ptr: Longs,
    context_row: Ints,
    rating: Floats,
    gap: Ints,
    fold: Ints,
    rows: Floats,
    flat: Floats,
) -> Any:
    """What some people's states come from: where each one's events begin, their rows, numbers and buckets.

    A person has a state for each of `n_folds` folds, one after another, of the events outside that fold; if there is
    one fold, of all events.
    """
    d = rows.shape[1]
    ptr = np.zeros(len(users) * n_folds + 1, np.int64)
    most = 0
    for u in range(len(users)):
        most += n_folds * (context_ptr[users[u] + 1] - context_ptr[users[u]])
    place = np.empty(most, np.int64)
    n = 0
    for u in range(len(users)):
        for f in range(n_folds):
            for k in range(context_ptr[users[u]], context_ptr[users[u] + 1]):
                if n_folds == 1 or fold[k] != f:
                    place[n] = k
                    n += 1
            ptr[u * n_folds + f + 1] = n
    read = np.empty(n, np.int64)
    bucket = np.empty(n, np.int64)
    events = np.empty((n, d + 1 + g), np.float32)
    for e in range(n):
        k = place[e]
        read[e] = context_row[k]
        bucket[e] = gap[k]
        for j in range(d):
            events[e, j] = rows[read[e], j]
        events[e, d] = rating[k]
        first = at[GAPS] + bucket[e] * g
        for j in range(g):
            events[e, d + 1 + j] = flat[first + j]
    return ptr, read, events, bucket


@njit(nogil=True, cache=True, error_model="numpy")
def compute_user_states(
    flat: Floats,
    at: Longs,
    g: int,
    context_ptr: Longs,
    context_row: Ints,
    rating: Floats,
    gap: Ints,
    rows: Floats,
    h: Floats,
) -> None:
    """h of every person of all events, under one model; a person at a time, so that no shape follows the others."""
    d = rows.shape[1]
    no_folds = np.zeros(0, np.int32)
    user = np.empty(1, np.int64)
    for u in range(len(h)):
        user[0] = u
        ptr, _, events, _ = gather_events(at, g, 1, user, context_ptr, context_row, rating, gap, no_folds, rows, flat)
        x = np.empty((len(events), d), np.float32)
        trace = np.empty((len(events), 5 * d), np.float32)
        compute_states(flat, at, g, ptr, events, h[u : u + 1], x, trace)
