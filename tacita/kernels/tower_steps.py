"""Steps of NeuMF and NeuNCF with Adam: all steps of some clients in one call. The tower is in kernels/tower.py."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.adam import adam_step_row, adam_step_used_rows
from tacita.kernels.tower import (
    compute_piece_offsets,
    gather_product_and_tower_rows,
    run_backward,
    run_forward,
    turn_logits_into_slopes,
)


@njit(nogil=True, cache=True)
def run_tower_steps(
    first: int,
    last: int,
    batch: int,
    g: int,
    sizes: Longs,
    turn_ptr: Longs,
    order: Longs,  # (epochs, turns)
    row_of: Ints,
    label: Floats,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    flat: Floats,  # (clients, shared)
    rate: Floats,  # (private width,)
    row_rate: Floats,  # (row width,)
    flat_rate: Floats,
    decay: np.float32,
    before: Longs,  # (clients,) steps so far; nobody: Adam's moments begin afresh, and what follows is empty
    all_steps: Longs,  # (rows,)
    all_mean: Floats,  # of the rows
    all_square: Floats,
    own_means: Floats,  # of the private vectors
    own_squares: Floats,
    flat_means: Floats,
    flat_squares: Floats,
) -> None:
    """All steps of clients first..last-1."""
    w = rows.shape[1]
    d = w - g
    at = compute_piece_offsets(sizes, d, g)
    many = sizes.sum()
    own = np.empty((1, d), np.float32)
    own_met = np.empty((1, g), np.float32)
    d_own = np.empty_like(own)
    d_own_met = np.empty_like(own_met)
    d_private = np.empty(w, np.float32)
    d_flat = np.empty(flat.shape[1], np.float32)
    for c in range(first, last):
        start = turn_ptr[c]
        n = turn_ptr[c + 1] - turn_ptr[c]
        own_rows = rows[row_start[c] : row_start[c + 1]]
        shared = flat[c]
        if len(before):
            a = row_start[c]
            b = row_start[c + 1]
            mean = all_mean[a:b]
            square = all_square[a:b]
            steps = all_steps[a:b]
            flat_mean = flat_means[c]
            flat_square = flat_squares[c]
            own_mean = own_means[c]
            own_square = own_squares[c]
            step = before[c]
        else:
            mean = np.zeros_like(own_rows)
            square = np.zeros_like(own_rows)
            steps = np.zeros(len(own_rows), np.int64)
            flat_mean = np.zeros_like(shared)
            flat_square = np.zeros_like(shared)
            own_mean = np.zeros(w, np.float32)
            own_square = np.zeros(w, np.float32)
            step = 0
        slot = np.full(len(own_rows), -1, np.int64)
        for epoch in range(len(order)):
            for begin in range(0, n, batch):
                m = min(batch, n - begin)
                used = np.empty(m, np.int64)
                wanted = np.empty(m, np.float32)
                for k in range(m):
                    sample = order[epoch, start + begin + k]
                    used[k] = row_of[sample]
                    wanted[k] = label[sample]
                own_met[0] = private[c, :g]
                own[0] = private[c, g:]
                item = np.empty((m, d), np.float32)
                item_met = np.empty((m, g), np.float32)
                gather_product_and_tower_rows(own_rows, used, item_met, item)
                up = np.empty(m * many, np.float32)
                logit = np.empty(m, np.float32)
                run_forward(shared, at, sizes, own, own_met, item, item_met, up, logit)
                turn_logits_into_slopes(logit, wanted, np.full(m, np.float32(1.0 / m)))
                d_item = np.empty_like(item)
                d_item_met = np.empty_like(item_met)
                run_backward(
                    shared,
                    at,
                    sizes,
                    own,
                    own_met,
                    item,
                    item_met,
                    up,
                    logit,
                    np.empty_like(up),
                    d_flat,
                    d_own,
                    d_own_met,
                    d_item,
                    d_item_met,
                )
                step += 1
                d_private[:g] = d_own_met[0]
                d_private[g:] = d_own[0]
                adam_step_row(private[c], d_private, own_mean, own_square, step, rate, decay)
                adam_step_row(shared, d_flat, flat_mean, flat_square, step, flat_rate, decay)
                slopes = np.concatenate((d_item_met, d_item), 1)
                adam_step_used_rows(used, slopes, slot, own_rows, mean, square, steps, row_rate, decay)
