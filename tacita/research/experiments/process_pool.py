"""Work that is spread over the cores, a process each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_in_processes(work: Callable[[Job], Result], jobs: list[Job], workers: int = 0) -> Iterator[Result]:
    """The results of the jobs, finished ones first; a single worker is this process."""
    if not jobs:
        return
    n = min(workers or os.cpu_count() or 1, len(jobs))
    if n == 1:
        yield from map(work, jobs)
        return
    with ProcessPoolExecutor(n, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
