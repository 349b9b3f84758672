"""NeuMF's and NeuNCF's towers, up and down again by hand: products by BLAS, everything between them in one pass.

A model is three vectors: a user's, an item's, and all that is shared, one after another in the order of
`compute_piece_offsets`. Rows hold the numbers that are multiplied first (NeuNCF has none), then those that climb. A
client's products are its own, so that numbers do not depend on other clients; the loops run on one core, for callers
that keep every core busy. Nothing may be reordered by the compiler (fastmath): a loop that is compiled with its
caller would round otherwise than the same loop when it is loaded by itself, and a first run otherwise than those that
find it compiled.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from tacita.core.types import Floats, Longs


@njit(cache=True)
def compute_piece_offsets(sizes: Longs, d: int, g: int) -> Longs:
    """Where each piece of the shared numbers begins.

    Two halves of the first layer, the deeper layers, a bias a layer, the output, its bias, the weights of products.
    """
    n = len(sizes)
    at = np.zeros(2 * n + 5, np.int64)
    at[1] = d * sizes[0]
    at[2] = 2 * at[1]
    for k in range(1, n):
        at[k + 2] = at[k + 1] + sizes[k - 1] * sizes[k]
    for k in range(n):
        at[n + k + 2] = at[n + k + 1] + sizes[k]
    at[2 * n + 2] = at[2 * n + 1] + sizes[n - 1]
    at[2 * n + 3] = at[2 * n + 2] + 1
    at[2 * n + 4] = at[2 * n + 3] + g
    return at


@njit(inline="always")
def view_matrix(flat: Floats, start: int, rows: int, columns: int) -> Floats:
    return flat[start : start + rows * columns].reshape((rows, columns))


@njit(inline="always")
def view_vector(flat: Floats, start: int, length: int) -> Floats:
    return flat[start : start + length]


@njit(nogil=True, cache=True, error_model="numpy")
def apply_relu(layer: Floats, bias: Floats) -> None:
    for i in range(layer.shape[0]):
        for j in range(layer.shape[1]):
            layer[i, j] = max(layer[i, j] + bias[j], np.float32(0.0))


@njit(nogil=True, cache=True, error_model="numpy")
def backprop_relu(slope: Floats, layer: Floats) -> None:
    for i in range(slope.shape[0]):
        for j in range(slope.shape[1]):
            slope[i, j] = slope[i, j] if layer[i, j] > 0 else np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def sum_columns(table: Floats, out: Floats) -> None:
    out[:] = 0
    for i in range(table.shape[0]):
        for j in range(table.shape[1]):
            out[j] += table[i, j]


@njit(nogil=True, cache=True, error_model="numpy")
def _compute_triple_dot(a: Floats, b: Floats, c: Floats) -> np.float32:
    # four sums in turn, so that no addition waits for the one before it
    s = np.float32(0.0)
    t = np.float32(0.0)
    u = np.float32(0.0)
    v = np.float32(0.0)
    whole = len(a) - len(a) % 4
    for j in range(0, whole, 4):
        s += a[j] * b[j] * c[j]
        t += a[j + 1] * b[j + 1] * c[j + 1]
        u += a[j + 2] * b[j + 2] * c[j + 2]
        v += a[j + 3] * b[j + 3] * c[j + 3]
    total = (s + t) + (u + v)
    for j in range(whole, len(a)):
        total += a[j] * b[j] * c[j]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def run_forward(
    flat: Floats,
    at: Longs,
    sizes: Longs,
    own: Floats,
    own_met: Floats,
    item: Floats,
    item_met: Floats,
    up: Floats,
    logit: Floats,
) -> None:
    """Logits of samples; own: (samples or 1, d), one user may stand for all. `up` keeps every layer's output."""
    n = item.shape[0]
    d = item.shape[1]
    layers = len(sizes)
    s = sizes[0]
    now = view_matrix(up, 0, n, s)
    np.dot(item, view_matrix(flat, at[1], d, s), now)
    biases = at[layers + 1 :]
    bias = view_vector(flat, biases[0], s)
    user = np.dot(own, view_matrix(flat, at[0], d, s))
    if len(own) == 1:
        apply_relu(now, user[0] + bias)
    else:
        now += user
        apply_relu(now, bias)
    start = n * s
    for k in range(1, layers):
        after = view_matrix(up, start, n, sizes[k])
        np.dot(now, view_matrix(flat, at[k + 1], sizes[k - 1], sizes[k]), after)
        apply_relu(after, view_vector(flat, biases[k], sizes[k]))
        start += n * sizes[k]
        now = after
    ends = at[2 * layers + 1 :]
    out = flat[ends[0] : ends[1]]
    out_bias = flat[ends[1]]
    product = flat[ends[2] : ends[3]]
    np.dot(now, out, logit)
    for i in range(n):
        user_met = own_met[0] if len(own_met) == 1 else own_met[i]
        logit[i] += out_bias + _compute_triple_dot(user_met, item_met[i], product)


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_elementwise_products(
    slope: Floats, product: Floats, own: Floats, item: Floats, d_product: Floats, d_own: Floats, d_item: Floats
) -> None:
    """Of the products: each pair of numbers meets with a weight."""
    d_product[:] = 0
    d_own[:] = 0
    for i in range(len(item)):
        u = 0 if len(own) == 1 else i
        for j in range(item.shape[1]):
            d_item[i, j] = slope[i] * own[u, j] * product[j]
            d_own[u, j] += slope[i] * item[i, j] * product[j]
            d_product[j] += slope[i] * own[u, j] * item[i, j]


@njit(nogil=True, cache=True, error_model="numpy")
def run_backward(
    flat: Floats,
    at: Longs,
    sizes: Longs,
    own: Floats,
    own_met: Floats,
    item: Floats,
    item_met: Floats,
    up: Floats,
    slope: Floats,
    down: Floats,
    d_flat: Floats,
    d_own: Floats,
    d_own_met: Floats,
    d_item: Floats,
    d_item_met: Floats,
) -> None:
    """Slopes of all there is, from those of the logits and what `run_forward` wrote to `up`.

    `down` is scratch as large as `up`.
    """
    n = item.shape[0]
    d = item.shape[1]
    layers = len(sizes)
    k = layers - 1
    total = 0
    for j in range(k):
        total += sizes[j]
    start = n * total
    now = view_matrix(up, start, n, sizes[k])
    biases = at[layers + 1 :]
    ends = at[2 * layers + 1 :]
    out = flat[ends[0] : ends[1]]
    np.dot(slope, now, d_flat[ends[0] : ends[1]])
    d_flat[ends[1]] = slope.sum()
    back = view_matrix(down, start, n, sizes[k])
    for i in range(n):
        for j in range(sizes[k]):
            back[i, j] = slope[i] * out[j]
    backprop_relu(back, now)
    while k > 0:
        layer = view_matrix(flat, at[k + 1], sizes[k - 1], sizes[k])
        sum_columns(back, view_vector(d_flat, biases[k], sizes[k]))
        start -= n * sizes[k - 1]
        before = view_matrix(up, start, n, sizes[k - 1])
        further = view_matrix(down, start, n, sizes[k - 1])
        np.dot(before.T, back, view_matrix(d_flat, at[k + 1], sizes[k - 1], sizes[k]))
        np.dot(back, layer.T, further)
        backprop_relu(further, before)
        back = further
        k -= 1
    s = sizes[0]
    bias = view_vector(d_flat, biases[0], s)
    sum_columns(back, bias)
    np.dot(item.T, back, view_matrix(d_flat, at[1], d, s))
    item_layer = view_matrix(flat, at[1], d, s)
    np.dot(back, item_layer.T, d_item)
    user_back = bias.copy().reshape((1, s)) if len(own) == 1 else back
    user_layer = view_matrix(flat, at[0], d, s)
    np.dot(own.T, user_back, view_matrix(d_flat, at[0], d, s))
    np.dot(user_back, user_layer.T, d_own)
    product = flat[ends[2] : ends[3]]
    d_product = d_flat[ends[2] : ends[3]]
    _backprop_elementwise_products(slope, product, own_met, item_met, d_product, d_own_met, d_item_met)


@njit(nogil=True, cache=True, error_model="numpy")
def turn_logits_into_slopes(logit: Floats, label: Floats, weight: Floats) -> None:
    """Logits become the slopes of their weighted loss."""
    for i in range(len(logit)):
        probability = np.float32(1.0 / (1.0 + math.exp(-logit[i])))
        logit[i] = weight[i] * (probability - label[i])


@njit(nogil=True, cache=True)
def gather_product_and_tower_rows(rows: Floats, which: Longs, met: Floats, item: Floats) -> None:
    """Rows of a table, in two: what is multiplied, and what climbs."""
    g = met.shape[1]
    w = rows.shape[1]
    for i in range(len(which)):
        r = which[i]
        for j in range(g):
            met[i, j] = rows[r, j]
        for j in range(g, w):
            item[i, j - g] = rows[r, j]


@njit(nogil=True, cache=True)
def compute_tower_slopes(
    flat: Floats,
    sizes: Longs,
    g: int,
    users: Floats,
    items: Floats,
    user: Longs,
    item: Longs,
    label: Floats,
    weight: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Of the loss of some samples, in their users' rows, their items' rows and all that is shared."""
    n = len(user)
    w = items.shape[1]
    d = w - g
    at = compute_piece_offsets(sizes, d, g)
    own = np.empty((n, d), np.float32)
    own_met = np.empty((n, g), np.float32)
    item_climb = np.empty((n, d), np.float32)
    item_met = np.empty((n, g), np.float32)
    gather_product_and_tower_rows(users, user, own_met, own)
    gather_product_and_tower_rows(items, item, item_met, item_climb)
    up = np.empty(n * sizes.sum(), np.float32)
    logit = np.empty(n, np.float32)
    run_forward(flat, at, sizes, own, own_met, item_climb, item_met, up, logit)
    turn_logits_into_slopes(logit, label, weight)
    down = np.empty_like(up)
    d_flat = np.empty_like(flat)
    d_own = np.empty_like(own)
    d_own_met = np.empty_like(own_met)
    d_climb = np.empty_like(item_climb)
    d_item_met = np.empty_like(item_met)
    run_backward(
        flat,
        at,
        sizes,
        own,
        own_met,
        item_climb,
        item_met,
        up,
        logit,
        down,
        d_flat,
        d_own,
        d_own_met,
        d_climb,
        d_item_met,
    )
    return np.concatenate((d_own_met, d_own), 1), np.concatenate((d_item_met, d_climb), 1), d_flat


@njit(nogil=True, cache=True)
def compute_tower_logits(
    flat: Floats, sizes: Longs, g: int, users: Floats, items: Floats, user: Longs, item: Longs
) -> Floats:
    """Logits of aligned samples, or of one user's with all of them."""
    n = len(item)
    w = items.shape[1]
    d = w - g
    own = np.empty((len(user), d), np.float32)
    own_met = np.empty((len(user), g), np.float32)
    item_climb = np.empty((n, d), np.float32)
    item_met = np.empty((n, g), np.float32)
    gather_product_and_tower_rows(users, user, own_met, own)
    gather_product_and_tower_rows(items, item, item_met, item_climb)
    up = np.empty(n * sizes.sum(), np.float32)
    logit = np.empty(n, np.float32)
    run_forward(flat, compute_piece_offsets(sizes, d, g), sizes, own, own_met, item_climb, item_met, up, logit)
    return logit


@njit(nogil=True, cache=True)
def write_tower_row_logits(
    first: int,
    last: int,
    g: int,
    sizes: Longs,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    flat: Floats,
    out: Floats,
) -> None:
    """Logits of every local row of clients first..last-1, each under its own model."""
    for c in range(first, last):
        begin = row_start[c]
        end = row_start[c + 1]
        own_rows = rows[begin:end]
        user = np.full(1, c)
        all_rows = np.arange(len(own_rows))
        out[begin:end] = compute_tower_logits(flat[c], sizes, g, private, own_rows, user, all_rows)


@njit(nogil=True, cache=True)
def write_catalogue_logits(
    flat: Floats, sizes: Longs, g: int, users: Floats, items: Floats, tile: int, out: Floats
) -> None:
    """Logits (users, items) in tiles of one shape: items are filled up to a number of whole ones."""
    for begin in range(0, out.shape[1], tile):
        n = min(tile, out.shape[1] - begin)
        some = np.arange(begin, begin + tile)
        for u in range(len(users)):
            logits = compute_tower_logits(flat, sizes, g, users, items, np.full(1, u), some)
            out[u, begin : begin + n] = logits[:n]
