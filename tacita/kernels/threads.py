"""How many cores the compiled loops use, and how they share out the work."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import njit

from tacita.core.types import Longs


def most_threads() -> int:
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def threads_in_use() -> int:
    return int(numba.get_num_threads())


def set_threads(n: int) -> None:
    numba.set_num_threads(n)


@njit(inline="always")
def first_of(ptr: Longs, share: int, shares: int) -> Any:
    """Where one share of the lists begins, if all shares are to hold about as many entries."""
    if share == shares:
        return len(ptr) - 1
    return np.searchsorted(ptr, share * ptr[-1] // shares)
