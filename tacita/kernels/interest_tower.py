"""The tower over the states of the interest model, up and down again by hand: products over all samples are BLAS's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tacita.core.types import Floats, Longs
from tacita.kernels.interest_states import OUT, OUT_BIAS, STATE, USER
from tacita.kernels.tower import (
    apply_relu,
    backprop_relu,
    sum_columns,
    turn_logits_into_slopes,
    view_matrix,
    view_vector,
)

_SMALL = np.float32(1e-8)


@njit(nogil=True, cache=True, error_model="numpy")
def _activate_first_layer(layer: Floats, people: Floats, person: Longs, bias: Floats) -> None:
    """What the first layer gets of each sample's person and its bias, and what remains above 0."""
    for i in range(layer.shape[0]):
        own = people[person[i]]
        for j in range(layer.shape[1]):
            layer[i, j] = max(layer[i, j] + own[j] + bias[j], np.float32(0.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _run_forward(
    flat: Floats,
    at: Longs,
    layers: Longs,
    biases: Longs,
    sizes: Longs,
    people: Floats,
    person: Longs,
    item: Floats,
    up: Floats,
    logit: Floats,
) -> None:
    """Logits of samples; `people`: what the first layer gets of each person and state, `person` whose sample it is."""
    n, d = item.shape
    now = view_matrix(up, 0, n, sizes[0])
    np.dot(item, view_matrix(flat, layers[0], d, sizes[0]), now)
    _activate_first_layer(now, people, person, view_vector(flat, biases[0], sizes[0]))
    start = n * sizes[0]
    for k in range(1, len(sizes)):
        after = view_matrix(up, start, n, sizes[k])
        np.dot(now, view_matrix(flat, layers[k], sizes[k - 1], sizes[k]), after)
        apply_relu(after, view_vector(flat, biases[k], sizes[k]))
        start += n * sizes[k]
        now = after
    np.dot(now, view_vector(flat, at[OUT], sizes[-1]), logit)
    logit += flat[at[OUT_BIAS]]


@njit(nogil=True, cache=True, error_model="numpy")
def _run_backward(
    flat: Floats,
    at: Longs,
    layers: Longs,
    biases: Longs,
    sizes: Longs,
    item: Floats,
    person: Longs,
    up: Floats,
    slope: Floats,
    d_flat: Floats,
    d_people: Floats,
) -> Floats:
    """Slopes of the tower and of what people put into it; returns those of the samples' rows."""
    n, d = item.shape
    k = len(sizes) - 1
    start = n * (sizes.sum() - sizes[k])
    now = view_matrix(up, start, n, sizes[k])
    out = view_vector(flat, at[OUT], sizes[k])
    np.dot(slope, now, view_vector(d_flat, at[OUT], sizes[k]))
    d_flat[at[OUT_BIAS]] = slope.sum()
    back = np.empty((n, sizes[k]), np.float32)
    for i in range(n):
        for j in range(sizes[k]):
            back[i, j] = slope[i] * out[j]
    backprop_relu(back, now)
    while k > 0:
        layer = view_matrix(flat, layers[k], sizes[k - 1], sizes[k])
        sum_columns(back, view_vector(d_flat, biases[k], sizes[k]))
        start -= n * sizes[k - 1]
        before = view_matrix(up, start, n, sizes[k - 1])
        np.dot(before.T, back, view_matrix(d_flat, layers[k], sizes[k - 1], sizes[k]))
        further = np.dot(back, layer.T)
        backprop_relu(further, before)
        back = further
        k -= 1
    sum_columns(back, view_vector(d_flat, biases[0], sizes[0]))
    np.dot(item.T, back, view_matrix(d_flat, layers[0], d, sizes[0]))
    d_people[:] = 0
    for i in range(n):
        own = d_people[person[i]]
        for j in range(sizes[0]):
            own[j] += back[i, j]
    first_layer = view_matrix(flat, layers[0], d, sizes[0])
    d_item: Floats = np.dot(back, first_layer.T)
    return d_item


@njit(nogil=True, cache=True, error_model="numpy")
def _add_cosine_slopes(p: Floats, h: Floats, mu: np.float32, dp: Floats, dh: Floats) -> None:
    """Adds the slopes of mu (1 - cos(p, h)); what has no length has no direction."""
    pp = np.float32(0.0)
    hh = np.float32(0.0)
    ph = np.float32(0.0)
    for j in range(len(p)):
        pp += p[j] * p[j]
        hh += h[j] * h[j]
        ph += p[j] * h[j]
    length_p = np.float32(max(math.sqrt(pp), 1e-8))
    length_h = np.float32(max(math.sqrt(hh), 1e-8))
    lengths = length_p * length_h
    cos = ph / lengths
    turns_p = cos / pp if pp > _SMALL * _SMALL else np.float32(0.0)
    turns_h = cos / hh if hh > _SMALL * _SMALL else np.float32(0.0)
    for j in range(len(p)):
        dp[j] -= mu * (h[j] / lengths - turns_p * p[j])
        dh[j] -= mu * (p[j] / lengths - turns_h * h[j])


@njit(nogil=True, cache=True, error_model="numpy")
def compute_batch_slopes(
    flat: Floats,
    at: Longs,
    layers: Longs,
    biases: Longs,
    sizes: Longs,
    mu: np.float32,
    p: Floats,
    h: Floats,
    person: Longs,
    item: Floats,
    label: Floats,
    d_flat: Floats,
) -> Any:
    """Slopes of one batch's loss: of the people's vectors and states and of the samples' rows; fills d_flat's tower.

    A person has a state for each fold, one after another; `person` says which of all states a sample reads.
    """
    n, d = item.shape
    n_people = len(p)
    n_folds = len(h) // n_people
    user_layer = view_matrix(flat, at[USER], d, sizes[0])
    state_layer = view_matrix(flat, at[STATE], d, sizes[0])
    people = np.dot(h, state_layer)
    of_person = np.dot(p, user_layer)
    for u in range(n_people):
        for f in range(n_folds):
            people[u * n_folds + f] += of_person[u]
    up = np.empty(n * sizes.sum(), np.float32)
    logit = np.empty(n, np.float32)
    _run_forward(flat, at, layers, biases, sizes, people, person, item, up, logit)
    turn_logits_into_slopes(logit, label, np.full(n, np.float32(1.0 / n)))
    d_people = np.empty_like(people)
    d_item = _run_backward(flat, at, layers, biases, sizes, item, person, up, logit, d_flat, d_people)
    np.dot(h.T, d_people, view_matrix(d_flat, at[STATE], d, sizes[0]))
    dh = np.dot(d_people, state_layer.T)
    for u in range(n_people):
        of_person[u] = d_people[u * n_folds]
        for f in range(1, n_folds):
            of_person[u] += d_people[u * n_folds + f]
    np.dot(p.T, of_person, view_matrix(d_flat, at[USER], d, sizes[0]))
    dp = np.dot(of_person, user_layer.T)
    strength = mu / np.float32(len(h))
    for u in range(n_people):
        for f in range(n_folds):
            _add_cosine_slopes(p[u], h[u * n_folds + f], strength, dp[u], dh[u * n_folds + f])
    return dp, dh, d_item
