"""pFedMe's two moves on some rows of a table, in place (Dinh, Tran and Nguyen 2020). The loops run on one core."""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Floats, Longs


@njit(cache=True, nogil=True)
def step_personal_rows(
    rows: Longs, slope: Floats, personal: Floats, own: Floats, rate: np.float32, lam: np.float32
) -> None:
    """A step of the personal rows down their slopes and towards the local ones."""
    for k in range(len(rows)):
        r = rows[k]
        for j in range(personal.shape[1]):
            distance = personal[r, j] - own[r, j]
            personal[r, j] -= rate * (slope[k, j] + lam * distance)


@njit(cache=True, nogil=True)
def move_local_rows(rows: Longs, personal: Floats, own: Floats, share: np.float32) -> None:
    """The local rows go that share of the way to the personal ones."""
    for k in range(len(rows)):
        r = rows[k]
        for j in range(own.shape[1]):
            own[r, j] -= share * (own[r, j] - personal[r, j])
