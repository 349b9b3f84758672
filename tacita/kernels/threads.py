"""How many cores the compiled loops use, and how they share out the work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numba
import numpy as np
import scipy.linalg  # so that its BLAS, which compiled products call, is there to be found  # noqa: F401
from numba import njit
from threadpoolctl import ThreadpoolController

from tacita.core.types import Longs

_MIN_PARALLEL = 16384  # numbers that are worth a thread


def max_threads() -> int:
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def threads_in_use() -> int:
    return int(numba.get_num_threads())


def set_threads(n: int) -> None:
    numba.set_num_threads(n)


@cache
def _find_blas_libraries() -> ThreadpoolController:
    return ThreadpoolController()


def limit_library_threads(n: int) -> AbstractContextManager[Any]:
    """From now on, or inside it, libraries use so many cores, too: for one of several processes of a run."""
    limit: AbstractContextManager[Any] = _find_blas_libraries().limit(limits=n)
    return limit


def limit_blas_threads() -> AbstractContextManager[Any]:
    """Inside it a matrix product stays on the core that asks for it: for callers that keep all cores busy."""
    limit: AbstractContextManager[Any] = _find_blas_libraries().limit(limits=1, user_api="blas")
    return limit


def run_in_shares(work: Callable[[slice], Any], n: int) -> None:
    """Work on 0..n, cut where it is much: for numpy's own loops, which use one core each and do not hold others up."""
    shares = threads_in_use() if n >= _MIN_PARALLEL else 1
    ends = [n * k // shares // 64 * 64 for k in range(shares)] + [n]  # loops over several at once begin alike
    cuts = [slice(*both) for both in itertools.pairwise(ends)]
    if shares == 1:
        work(cuts[0])
        return
    with ThreadPoolExecutor(shares - 1) as others:
        started = [others.submit(work, cut) for cut in cuts[1:]]
        work(cuts[0])
        for future in started:
            future.result()


@njit(inline="always")
def find_share_start(ptr: Longs, share: int, shares: int) -> Any:
    """Where one share of the lists begins, if all shares are to hold about as many entries."""
    if share == shares:
        return len(ptr) - 1
    return np.searchsorted(ptr, share * ptr[-1] // shares)
