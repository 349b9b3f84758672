"""Vectors that pass along the edges of a graph, and inner products of two vectors each."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tacita.core.types import Floats, Ints, Longs

_FAST = {"reassoc", "contract", "nsz"}


@njit(cache=True, parallel=True, fastmath=_FAST)
def propagate_rows(ptr: Longs, to: Ints, weight: Floats, start: Floats, now: Floats, out: Floats) -> None:
    """out = start + A now, a node at a time, so that threads change no bit."""
    width = start.shape[1]
    for r in prange(len(ptr) - 1):
        row = out[r]
        row[:] = start[r]
        k = ptr[r]
        end = ptr[r + 1]
        while k + 4 <= end:  # four at a time: `row` is written a quarter as often
            a = now[to[k]]
            b = now[to[k + 1]]
            c = now[to[k + 2]]
            d = now[to[k + 3]]
            wa = weight[k]
            wb = weight[k + 1]
            wc = weight[k + 2]
            wd = weight[k + 3]
            for j in range(width):
                row[j] += (wa * a[j] + wb * b[j]) + (wc * c[j] + wd * d[j])
            k += 4
        while k < end:
            x = now[to[k]]
            w = weight[k]
            for j in range(width):
                row[j] += w * x[j]
            k += 1


@njit(cache=True)
def add_bce_slopes(first: Longs, second: Longs, label: Floats, weight: Floats, table: Floats, slope: Floats) -> None:
    """Adds the slopes of weighted BCE of logits first . second to `slope`, pair by pair."""
    width = table.shape[1]
    for k in range(len(first)):
        a = table[first[k]]
        b = table[second[k]]
        logit = np.float32(0.0)
        for j in range(width):
            logit += a[j] * b[j]
        probability = 1.0 / (1.0 + math.exp(-logit))
        g = np.float32(weight[k] * (probability - label[k]))
        for j in range(width):
            slope[first[k], j] += g * b[j]
            slope[second[k], j] += g * a[j]
