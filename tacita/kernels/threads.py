"""How many cores the compiled loops use."""

from __future__ import annotations

import numba


def most_threads() -> int:
    return int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def threads_in_use() -> int:
    return int(numba.get_num_threads())


def set_threads(n: int) -> None:
    numba.set_num_threads(n)
