"""Work that is spread over the cores, a process each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from tacita.core.errors import TacitaError

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
        except BrokenProcessPool:
            raise TacitaError(
                "a worker ended before its job was done, maybe for lack of memory; what is finished is kept: run the "
                "command again with fewer --workers."
            ) from None
        finally:
            for future in futures:
                future.cancel()
