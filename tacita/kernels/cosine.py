"""Cosines of rows and their slopes: rows of length one, pairs that are to be ordered, and what two rows share."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tacita.core.types import Floats, Longs

_FAST = {"reassoc", "contract", "nsz"}
_LEAST = np.float32(1e-8)  # of a length, so that a row of zeros has cosine 0 with everything


@njit(cache=True, parallel=True, fastmath=_FAST)
def normalise_rows(table: Floats, unit: Floats, length: Floats) -> None:
    """unit = table / length, length = max(|row|, 1e-8)."""
    for r in prange(len(table)):
        square = np.float32(0.0)
        for j in range(table.shape[1]):
            square += table[r, j] * table[r, j]
        norm = np.float32(math.sqrt(square))
        length[r] = max(norm, _LEAST)
        for j in range(table.shape[1]):
            unit[r, j] = table[r, j] / length[r]


@njit(cache=True, parallel=True, fastmath=_FAST)
def backprop_unit_rows(unit: Floats, length: Floats, slope: Floats) -> None:
    """Turns slopes in rows of length one into those in the rows themselves, in place."""
    for r in prange(len(unit)):
        along = np.float32(0.0)
        if length[r] > _LEAST:
            for j in range(unit.shape[1]):
                along += unit[r, j] * slope[r, j]
        for j in range(unit.shape[1]):
            slope[r, j] = (slope[r, j] - along * unit[r, j]) / length[r]


@njit(cache=True, fastmath=_FAST)
def add_bpr_slopes(
    user: Longs,
    liked: Longs,
    other: Longs,
    scale: float,
    weight: float,
    users: Floats,
    items: Floats,
    slope_users: Floats,
    slope_items: Floats,
) -> float:
    """The sum of -log sigmoid(scale (u . v - u . w)) times weight; adds its slopes, pair by pair, on one core."""
    total = 0.0
    for k in range(len(user)):
        u = users[user[k]]
        v = items[liked[k]]
        w = items[other[k]]
        apart = np.float32(0.0)
        for j in range(users.shape[1]):
            apart += u[j] * (v[j] - w[j])
        x = float(scale * apart)
        total += math.log1p(math.exp(-abs(x))) + max(-x, 0.0)
        g = np.float32(-weight * scale / (1.0 + math.exp(x)))
        slope_user = slope_users[user[k]]
        slope_liked = slope_items[liked[k]]
        slope_other = slope_items[other[k]]
        for j in range(users.shape[1]):
            slope_user[j] += g * (v[j] - w[j])
            slope_liked[j] += g * u[j]
            slope_other[j] -= g * u[j]
    return weight * total


@njit(cache=True, nogil=True)
def write_pair_features(users: Floats, items: Floats, out: Floats) -> None:
    """out[u * items + i] = [s^2 u i, s |u - i|] for all pairs, s^2 being the width; one pass, on the caller's core."""
    n, dim = items.shape
    scale = np.float32(math.sqrt(dim))
    square = scale * scale
    for u in range(len(users)):
        for i in range(n):
            row = out[u * n + i]
            for j in range(dim):
                row[j] = square * users[u, j] * items[i, j]
                row[dim + j] = scale * abs(users[u, j] - items[i, j])
