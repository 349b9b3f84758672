"""Fused local training for backbones whose logit is affine in the item row: s = a . q + c.

MF reads a = p, PFedRec a = w and c = b, the one-layer NCF a = w_q and c = w_p . p + b. One loop serves all three;
only the update of the private parameters differs. Sums are reassociated for speed, identically on every call.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from tacita.core.types import Bools, Doubles, Floats, Ints, Longs
from tacita.kernels.lanes import LANES, add_lanes
from tacita.kernels.threads import find_share_start

MF = 0
PFEDREC = 1
NCF = 2
_FAST = {"reassoc", "contract", "nsz"}


@njit(inline="always")
def _read_private_vector(kind: int, private: Floats, d: int, a: Floats) -> Any:
    """Copy the reading vector into `a` and return the offset c."""
    if kind == MF:
        for j in range(d):
            a[j] = private[j]
        return np.float32(0.0)
    if kind == PFEDREC:
        for j in range(d):
            a[j] = private[j]
        return private[d]
    for j in range(d):
        a[j] = private[2 * d + j]
    c = private[3 * d]
    for j in range(d):  # alone: beside a store the order of the sum would depend on where the arrays lie
        c += private[j] * private[d + j]
    return c


@njit(inline="always")
def _step_private(kind: int, private: Floats, d: int, rate: Floats, grad: Floats, grad_c: Any) -> None:
    if kind == MF:
        for j in range(d):
            private[j] -= rate[j] * grad[j]
    elif kind == PFEDREC:
        for j in range(d):
            private[j] -= rate[j] * grad[j]
        private[d] -= rate[d] * grad_c
    else:
        for j in range(d):
            p = private[j]
            w = private[d + j]
            private[j] = p - rate[j] * grad_c * w
            private[d + j] = w - rate[d + j] * grad_c * p
            private[2 * d + j] -= rate[2 * d + j] * grad[j]
        private[3 * d] -= rate[3 * d] * grad_c


@njit(cache=True, parallel=True, fastmath=_FAST)
def run_affine_steps(
    shares: int,
    kind: int,
    two_phases: bool,
    first_step: int,
    last_step: int,
    first_phase: int,
    last_phase: int,
    batch: int,
    ptr: Longs,
    order: Longs,  # (epochs, samples)
    row_of: Ints,
    label: Floats,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    rate: Floats,  # (private width,) learning rates
    item_rate: float,
    extra_ptr: Longs,
    extra_row: Ints,
    extra_label: Floats,
    extra_weight: Floats,
    whole: bool,
    row_item: Ints,
    items: Floats,
) -> None:
    """Run SGD steps first_step..last_step of every client, in place on `rows` and `private`.

    With two phases (PFedRec) phase 0 moves the private parameters and phase 1, after a second forward pass,
    the rows; otherwise both move at once from the values before the step. `whole`: the rows are taken from the table
    first, and how far they have moved is left, all while a client's rows are in the cache.
    """
    d = rows.shape[1]
    for share in prange(shares):
        begin = find_share_start(ptr, share, shares)
        end = find_share_start(ptr, share + 1, shares)
        most = 0
        for c in range(begin, end):
            n = ptr[c + 1] - ptr[c]
            n_extra = extra_ptr[c + 1] - extra_ptr[c]
            most = max(most, min(batch, n) + n_extra)
        residual = np.empty(most, np.float32)
        at = np.empty(most, np.int64)  # the row of each sample of the batch, extras last
        a = np.empty(d, np.float32)
        grad = np.empty(d, np.float32)
        for c in range(begin, end):
            n = ptr[c + 1] - ptr[c]
            per_epoch = (n + batch - 1) // batch
            first_extra = extra_ptr[c]
            n_extra = extra_ptr[c + 1] - first_extra
            base = row_start[c]
            if whole:
                for r in range(base, row_start[c + 1]):
                    row = rows[r]
                    source = items[row_item[r]]
                    for j in range(d):
                        row[j] = source[j]
            n_steps = order.shape[0] * per_epoch
            for step in range(first_step, min(last_step, n_steps)):
                epoch = step // per_epoch
                lo = ptr[c] + (step % per_epoch) * batch
                size = min(batch, ptr[c + 1] - lo)
                for phase in range(first_phase, last_phase):
                    offset = _read_private_vector(kind, private[c], d, a)
                    grad[:] = 0.0
                    grad_c = np.float32(0.0)
                    scale = np.float32(1.0 / size)
                    for k in range(size):
                        at[k] = base + row_of[order[epoch, lo + k]]
                    for e in range(n_extra):
                        at[size + e] = base + extra_row[first_extra + e]
                    for k in range(size + n_extra):
                        row = rows[at[k]]
                        s = offset
                        for j in range(d):
                            s += a[j] * row[j]
                        residual[k] = s
                    for k in range(size):
                        p = np.float32(1.0) / (np.float32(1.0) + math.exp(-residual[k]))
                        residual[k] = scale * (p - label[order[epoch, lo + k]])
                    for e in range(n_extra):
                        p = np.float32(1.0) / (np.float32(1.0) + math.exp(-residual[size + e]))
                        extra = first_extra + e
                        residual[size + e] = extra_weight[extra] * (p - extra_label[extra])
                    if not two_phases or phase == 0:
                        for k in range(size + n_extra):
                            row = rows[at[k]]
                            r = residual[k]
                            grad_c += r
                            for j in range(d):
                                grad[j] += r * row[j]
                    if not two_phases or phase == 1:
                        for k in range(size + n_extra):
                            row = rows[at[k]]
                            move = np.float32(item_rate * residual[k])
                            for j in range(d):
                                row[j] -= move * a[j]
                    if not two_phases or phase == 0:
                        _step_private(kind, private[c], d, rate, grad, grad_c)
            if whole:
                for r in range(base, row_start[c + 1]):
                    row = rows[r]
                    source = items[row_item[r]]
                    for j in range(d):
                        row[j] -= source[j]


@njit(inline="always")
def dot(a: Floats, q: Floats, c: Any) -> Any:
    """c + a . q, added up from left to right: the same bits as in `score_row`."""
    s = c
    for j in range(len(a)):
        s += a[j] * q[j]
    return s


@njit(inline="always")
def score_row(a: Floats, c: Any, columns: Floats, out: Floats) -> None:
    """One user's logits for all items, from the transposed table: vectorised over items, exact per item."""
    d, n_items = columns.shape
    tile = 2048
    for lo in range(0, n_items, tile):
        hi = min(n_items, lo + tile)
        some = out[lo:hi]
        some[:] = c
        for j in range(d):
            weight = a[j]
            column = columns[j, lo:hi]
            for i in range(hi - lo):
                some[i] += weight * column[i]


@njit(cache=True, parallel=True)
def compute_affine_scores(a: Floats, c: Floats, columns: Floats) -> Floats:
    """Logits of every user for every item; each number depends on its user and item alone, not on the chunk."""
    out = np.empty((len(a), columns.shape[1]), np.float32)
    for u in prange(len(a)):
        score_row(a[u], c[u], columns, out[u])
    return out


@njit(cache=True, parallel=True, fastmath=_FAST)
def add_own_row_logits(a: Floats, row_start: Longs, row_item: Ints, moved: Floats, out: Floats) -> None:
    """Add what a user's own version of a row changes in its logit."""
    d = moved.shape[1]
    for u in prange(len(a)):
        for r in range(row_start[u], row_start[u + 1]):
            s = np.float32(0.0)
            for j in range(d):
                s += a[u, j] * moved[r, j]
            out[u, row_item[r]] += s


@njit(cache=True, parallel=True)
def gather_rows(row_item: Ints, items: Floats, rows: Floats) -> None:
    """Copy rows from the table."""
    for r in prange(len(rows)):
        source = items[row_item[r]]
        target = rows[r]
        for j in range(rows.shape[1]):
            target[j] = source[j]


@njit(cache=True, parallel=True)
def pull_rows_to_target(
    active: Bools, row_start: Longs, row_item: Ints, rows: Floats, target: Floats, k: float
) -> None:
    """x <- (x + k target) / (1 + k) on the rows of active clients that have a target, in place."""
    keep = np.float32(1.0 / (1.0 + k))
    take = np.float32(k / (1.0 + k))
    for c in prange(len(active)):
        if active[c]:
            for r in range(row_start[c], row_start[c + 1]):
                if row_item[r] < len(target):
                    wanted = target[row_item[r]]
                    row = rows[r]
                    for j in range(len(row)):
                        row[j] = keep * row[j] + take * wanted[j]


@njit(cache=True, parallel=True)
def subtract_background(client: Ints, item: Ints, value: Floats, share: Doubles, table: Floats, items: Floats) -> None:
    """Take share * (table - items) off the uploaded rows that have an entry in the table, in place."""
    for r in prange(len(item)):
        i = item[r]
        if i < len(table):
            s = np.float32(share[client[r]])
            old = table[i]
            now = items[i]
            row = value[r]
            for j in range(len(row)):
                row[j] -= s * (old[j] - now[j])


@njit(cache=True, parallel=True)
def subtract_table_rows(row_item: Ints, rows: Floats, items: Floats) -> None:
    """Turn local rows into how far they have moved from the table, in place."""
    for r in prange(len(rows)):
        source = items[row_item[r]]
        target = rows[r]
        for j in range(rows.shape[1]):
            target[j] -= source[j]


@njit(cache=True, parallel=True)
def add_weighted_rows(
    client: Ints, item: Ints, value: Floats, weight: Doubles, total: Doubles, row_weight: Doubles
) -> None:
    """Add weighted upload rows to the running total.

    Threads take blocks of columns, so each sum runs in client order whatever the thread count or chunking.
    """
    d = value.shape[1]
    source = np.ascontiguousarray(value)
    for block in prange((d + LANES - 1) // LANES):
        lo = LANES * block
        for r in range(len(item)):
            w = weight[client[r]]
            if w > 0:
                i = item[r]
                if block == 0:
                    row_weight[i] += w
                if d - lo >= LANES:
                    add_lanes(total, i, source, r, lo, w)
                else:
                    for j in range(lo, d):
                        total[i, j] += w * source[r, j]
