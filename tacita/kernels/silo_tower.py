"""A tower over the samples of several people, up and down again by hand: what NeuMF and NeuNCF need in silos.

The numbers of a model lie as kernels/tower.py says. What the first layer gets of a person is computed once a person,
not once a sample. Loops run on one core and keep their order, so a client's numbers do not depend on other clients.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Floats, Longs
from tacita.kernels.adam import adam_step_vector
from tacita.kernels.products import multiply_matrices, transpose_matrix
from tacita.kernels.tower import view_matrix, view_vector


@njit(nogil=True, cache=True, error_model="numpy")
def _dot(a: Floats, b: Floats) -> np.float32:
    # four sums in turn, so that no addition waits for the one before it
    s = np.float32(0.0)
    t = np.float32(0.0)
    u = np.float32(0.0)
    v = np.float32(0.0)
    whole = len(a) - len(a) % 4
    for j in range(0, whole, 4):
        s += a[j] * b[j]
        t += a[j + 1] * b[j + 1]
        u += a[j + 2] * b[j + 2]
        v += a[j + 3] * b[j + 3]
    total = (s + t) + (u + v)
    for j in range(whole, len(a)):
        total += a[j] * b[j]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _add_scaled(target: Floats, factor: np.float32, source: Floats) -> None:
    for j in range(len(target)):
        target[j] += factor * source[j]


@njit(nogil=True, cache=True, error_model="numpy")
def _activate_layer(layer: Floats, bias: Floats) -> None:
    """A layer's products become its output."""
    for i in range(layer.shape[0]):
        row = layer[i]
        for j in range(len(row)):
            row[j] = max(row[j] + bias[j], np.float32(0.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _activate_first_layer(layer: Floats, people: Floats, person: Longs) -> None:
    """The same of the first layer, where the bias is each person's own."""
    for i in range(layer.shape[0]):
        row = layer[i]
        offset = people[person[i]]
        for j in range(len(row)):
            row[j] = max(row[j] + offset[j], np.float32(0.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_layer(slope: Floats, layer: Floats, d_bias: Floats) -> None:
    """Slopes of a layer's output become those of its products, and add up to those of its bias."""
    d_bias[:] = 0
    for i in range(slope.shape[0]):
        row = slope[i]
        output = layer[i]
        for j in range(len(row)):
            row[j] = row[j] if output[j] > 0 else np.float32(0.0)
        for j in range(len(row)):
            d_bias[j] += row[j]


@njit(nogil=True, cache=True, error_model="numpy")
def run_silo_forward(
    flat: Floats, at: Longs, sizes: Longs, g: int, people: Floats, person: Longs, item: Floats, up: Floats
) -> Floats:
    """Logits of samples; `person` says which of the people a sample belongs to. `up` keeps every layer's output."""
    n, width = item.shape
    d = width - g
    n_layers = len(sizes)
    biases = at[n_layers + 1 :]
    ends = at[2 * n_layers + 1 :]
    before_layer = np.empty((len(people), sizes[0]), np.float32)
    multiply_matrices(people[:, g:], view_matrix(flat, at[0], d, sizes[0]), before_layer)
    bias = view_vector(flat, biases[0], sizes[0])
    for p in range(len(people)):
        _add_scaled(before_layer[p], np.float32(1.0), bias)
    layer = view_matrix(up, 0, n, sizes[0])
    multiply_matrices(item[:, g:], view_matrix(flat, at[1], d, sizes[0]), layer)
    _activate_first_layer(layer, before_layer, person)
    start = n * sizes[0]
    for k in range(1, n_layers):
        above = view_matrix(up, start, n, sizes[k])
        multiply_matrices(layer, view_matrix(flat, at[k + 1], sizes[k - 1], sizes[k]), above)
        _activate_layer(above, view_vector(flat, biases[k], sizes[k]))
        start += n * sizes[k]
        layer = above
    out = flat[ends[0] : ends[1]]
    weighted = people[:, :g] * flat[ends[2] : ends[3]]
    logit = np.empty(n, np.float32)
    for i in range(n):
        logit[i] = flat[ends[1]] + _dot(layer[i], out) + _dot(item[i, :g], weighted[person[i]])
    return logit


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_transposed(a: Floats, matrix: Floats, out: Floats, scratch: Floats) -> None:
    """out = a @ matrix.T"""
    turned = view_matrix(scratch, 0, matrix.shape[1], matrix.shape[0])
    transpose_matrix(matrix, turned)
    multiply_matrices(a, turned, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _move_piece(
    adam: bool,
    flat: Floats,
    begin: int,
    slopes: Floats,
    first: Floats,
    second: Floats,
    rate: np.float32,
    factor: np.float32,
    decay: np.float32,
) -> None:
    """One step of a piece of the shared numbers: by Adam, or, under pFedMe, down the slope and towards the local model.

    Adam: `first` and `second` are its moments and `factor` its correction. pFedMe: `first` is the local model and
    `factor` how strongly it pulls.
    """
    end = begin + len(slopes)
    piece = flat[begin:end]
    if adam:
        adam_step_vector(piece, slopes, first[begin:end], second[begin:end], factor, rate, decay)
    else:
        step_towards(piece, slopes, first[begin:end], rate, factor)


@njit(nogil=True, cache=True, error_model="numpy")
def step_towards(personal: Floats, slope: Floats, own: Floats, rate: np.float32, lam: np.float32) -> None:
    """pFedMe's step of a personal vector down its slope and towards the local one."""
    for j in range(len(personal)):
        personal[j] -= rate * (slope[j] + lam * (personal[j] - own[j]))


@njit(nogil=True, cache=True, error_model="numpy")
def run_silo_backward(
    flat: Floats,
    at: Longs,
    sizes: Longs,
    g: int,
    people: Floats,
    person: Longs,
    item: Floats,
    up: Floats,
    slope: Floats,
    down: Floats,
    d_people: Floats,
    d_item: Floats,
    adam: bool,
    first: Floats,
    second: Floats,
    rates: Floats,
    factor: np.float32,
    decay: np.float32,
) -> None:
    """From the slopes of logits to those of people's vectors and samples' rows, and one step of all that is shared.

    A piece moves as soon as its slopes are there and nothing reads what it was: they are still in the cache. `down` is
    scratch as large as `up`; rates are one a piece.
    """
    n, width = item.shape
    d = width - g
    k = len(sizes) - 1
    biases = at[k + 2 :]
    ends = at[2 * k + 3 :]
    start = n * (sizes.sum() - sizes[k])
    layer = view_matrix(up, start, n, sizes[k])
    back = view_matrix(down, start, n, sizes[k])
    out = flat[ends[0] : ends[1]]
    largest = max(d * sizes[0], sizes.max())
    for j in range(k):
        largest = max(largest, sizes[j] * sizes[j + 1])
    turned = np.empty(largest, np.float32)
    slopes = np.empty(largest, np.float32)
    d_out = slopes[: sizes[k]]
    d_out[:] = 0
    for i in range(n):
        _add_scaled(d_out, slope[i], layer[i])
        for j in range(sizes[k]):
            back[i, j] = slope[i] * out[j]
    _move_piece(adam, flat, ends[0], d_out, first, second, rates[2 * k + 3], factor, decay)
    slopes[0] = slope.sum()
    _move_piece(adam, flat, ends[1], slopes[:1], first, second, rates[2 * k + 4], factor, decay)
    d_bias = slopes[: sizes[k]]
    _backprop_layer(back, layer, d_bias)
    _move_piece(adam, flat, biases[k], d_bias, first, second, rates[2 + 2 * k], factor, decay)
    while k > 0:
        start -= n * sizes[k - 1]
        below = view_matrix(up, start, n, sizes[k - 1])
        further = view_matrix(down, start, n, sizes[k - 1])
        _multiply_transposed(back, view_matrix(flat, at[k + 1], sizes[k - 1], sizes[k]), further, turned)
        d_layer = slopes[: sizes[k - 1] * sizes[k]]
        multiply_matrices(below.T, back, d_layer.reshape((sizes[k - 1], sizes[k])))
        _move_piece(adam, flat, at[k + 1], d_layer, first, second, rates[k + 1], factor, decay)
        k -= 1
        d_bias = slopes[: sizes[k]]
        _backprop_layer(further, below, d_bias)
        _move_piece(adam, flat, biases[k], d_bias, first, second, rates[1 + len(sizes) + k], factor, decay)
        back = further
    s = sizes[0]
    _multiply_transposed(back, view_matrix(flat, at[1], d, s), d_item[:, g:], turned)
    d_layer = slopes[: d * s]
    multiply_matrices(item[:, g:].T, back, d_layer.reshape((d, s)))
    _move_piece(adam, flat, at[1], d_layer, first, second, rates[1], factor, decay)
    of_people = np.zeros((len(people), s), np.float32)
    for i in range(n):
        _add_scaled(of_people[person[i]], np.float32(1.0), back[i])
    _multiply_transposed(of_people, view_matrix(flat, at[0], d, s), d_people[:, g:], turned)
    multiply_matrices(people[:, g:].T, of_people, d_layer.reshape((d, s)))
    _move_piece(adam, flat, at[0], d_layer, first, second, rates[0], factor, decay)
    d_product = slopes[:g]
    _backprop_elementwise_products(flat[ends[2] : ends[3]], people, person, item, slope, d_product, d_people, d_item)
    _move_piece(adam, flat, ends[2], d_product, first, second, rates[len(rates) - 1], factor, decay)


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_elementwise_products(
    product: Floats,
    people: Floats,
    person: Longs,
    item: Floats,
    slope: Floats,
    d_product: Floats,
    d_people: Floats,
    d_item: Floats,
) -> None:
    """Of the numbers that are multiplied: slopes of their weights, and of the first numbers of vectors and rows."""
    g = len(product)
    weighted = people[:, :g] * product
    met = np.zeros((len(people), g), np.float32)  # of each person, the slopes of what its rows are multiplied with
    for i in range(len(item)):
        p = person[i]
        _add_scaled(met[p], slope[i], item[i, :g])
        for j in range(g):
            d_item[i, j] = slope[i] * weighted[p, j]
    d_product[:] = 0
    for p in range(len(people)):
        for j in range(g):
            d_people[p, j] = met[p, j] * product[j]
            d_product[j] += met[p, j] * people[p, j]
