"""How many cores the compiled loops use, and how they share out the work."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numba
import numpy as np
import scipy.linalg  # so that its BLAS, which compiled products call, is there to be found  # noqa: F401
from numba import njit
from threadpoolctl import ThreadpoolController

from tacita.core.types import Longs


def most_threads() -> int:
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def threads_in_use() -> int:
    return int(numba.get_num_threads())


def set_threads(n: int) -> None:
    numba.set_num_threads(n)


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def one_core_each() -> AbstractContextManager[Any]:
    """Inside it a matrix product stays on the core that asks for it: for callers that keep all cores busy."""
    found: AbstractContextManager[Any] = _libraries().limit(limits=1, user_api="blas")
    return found


@njit(inline="always")
def first_of(ptr: Longs, share: int, shares: int) -> Any:
    """Where one share of the lists begins, if all shares are to hold about as many entries."""
    if share == shares:
        return len(ptr) - 1
    return np.searchsorted(ptr, share * ptr[-1] // shares)
