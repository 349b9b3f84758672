"""The recurrent states of the interest model, up and down again by hand: a state is computed once for a batch.

`at` says where each piece of the flat shared parameters begins (see `PIECES`). The recurrence is a product of one
vector, which a plain loop does as well as BLAS. See kernels/interest.py for what the compiler may not do.
"""

from __future__ import annotations

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
)
USER, STATE, OUT, OUT_BIAS, GAPS, EVENT, EVENT_BIAS, IN, IN_BIAS, OWN, OWN_BIAS = range(11)
_UNIT = np.float32(1.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _step_gru(gate: Floats, share: Floats, own: Floats, h: Floats, trace: Floats, e: int) -> None:
    """One event of one person: `share` is the event's, `own` the state's; h becomes the next state.

    Keeps of event e what the way back needs: r, z, n, the state's share of n, and the state before.
    """
    d = len(h)
    for j in range(2 * d):
        total = share[j] + own[j]
        gate[j] = _UNIT / (_UNIT + np.exp(-total))
    for j in range(d):
        r = gate[j]
        z = gate[d + j]
        own_n = own[2 * d + j]
        fresh = np.tanh(share[2 * d + j] + r * own_n)
        trace[e, j] = r
        trace[e, d + j] = z
        trace[e, 2 * d + j] = fresh
        trace[e, 3 * d + j] = own_n
        trace[e, 4 * d + j] = h[j]
        h[j] = h[j] + (_UNIT - z) * (fresh - h[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _apply_affine(h: Floats, table: Floats, bias: Floats, out: Floats) -> None:
    """out = h table + bias."""
    out[:] = bias
    for k in range(len(h)):
        x = h[k]
        for j in range(table.shape[1]):
            out[j] += x * table[k, j]


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_gru(dh: Floats, trace: Floats, e: int, d_share: Floats, d_own: Floats, transposed: Floats) -> None:
    """The way back through one event: dh becomes the slope of the state before it."""
    d = len(dh)
    for j in range(d):
        r = trace[e, j]
        z = trace[e, d + j]
        n = trace[e, 2 * d + j]
        own_n = trace[e, 3 * d + j]
        before = trace[e, 4 * d + j]
        of_n = dh[j] * (_UNIT - z) * (_UNIT - n * n)
        of_r = of_n * own_n * r * (_UNIT - r)
        of_z = dh[j] * (before - n) * z * (_UNIT - z)
        d_share[e, j] = of_r
        d_own[e, j] = of_r
        d_share[e, d + j] = of_z
        d_own[e, d + j] = of_z
        d_share[e, 2 * d + j] = of_n
        d_own[e, 2 * d + j] = of_n * r
        dh[j] *= z
    for j in range(3 * d):
        x = d_own[e, j]
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
    for u in range(len(h)):
        h[u] = 0
        for e in range(ptr[u], ptr[u + 1]):
            _apply_affine(h[u], table, bias, own)
            share[e] += in_bias
            _step_gru(gate, share[e], own, h[u], trace, e)


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
            _backprop_gru(dh[u], trace, e, d_share, d_own, transposed)
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
def gather_events(
    at: Longs,
    g: int,
    users: Longs,
    context_ptr: Longs,
    context_row: Ints,
    rating: Floats,
    gap: Ints,
    rows: Floats,
    flat: Floats,
) -> Any:
    """What some people's states come from: where each one's events begin, their rows, numbers and buckets."""
    d = rows.shape[1]
    ptr = np.zeros(len(users) + 1, np.int64)
    for u in range(len(users)):
        user = users[u]
        ptr[u + 1] = ptr[u] + context_ptr[user + 1] - context_ptr[user]
    n = ptr[-1]
    read = np.empty(n, np.int64)
    bucket = np.empty(n, np.int64)
    events = np.empty((n, d + 1 + g), np.float32)
    for u in range(len(users)):
        first = context_ptr[users[u]]
        for k in range(ptr[u + 1] - ptr[u]):
            e = ptr[u] + k
            read[e] = context_row[first + k]
            bucket[e] = gap[first + k]
            events[e, :d] = rows[read[e]]
            events[e, d] = rating[first + k]
            events[e, d + 1 :] = view_vector(flat, at[GAPS] + bucket[e] * g, g)
    return ptr, read, events, bucket
