"""Jobs on a Ray cluster, a core each.

Ray sends jobs and results as pickles, so every host of the cluster has to be trusted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tacita.core.errors import TacitaError

Job = TypeVar("Job")
Result = TypeVar("Result")

MOST_RETRIES = 5
"""Of a job whose worker or host died."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def run_on_ray(
    work: Callable[[Job], Result], jobs: list[Job], address: str | None = None, workers: int = 0
) -> Iterator[Result]:
    """The results of the jobs, finished ones first. `address`: of a running cluster; None: one on this machine."""
    if not jobs:
        return
    ray = _import_ray()
    _connect(ray, address, workers)
    try:
        task = ray.remote(num_cpus=1, max_retries=MOST_RETRIES, retry_exceptions=False)(work)
        most_at_once = workers or len(jobs)
        waiting = list(reversed(jobs))
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < most_at_once:
                running.append(task.remote(waiting.pop()))
            ready, running = ray.wait(running, num_returns=1)
            for reference in ready:
                yield _fetch_result(ray, reference)
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about accelerators
    try:
        import ray
    except ImportError:
        raise TacitaError("--on ray needs Ray; install it with `pip install 'tacita[cluster]'`.") from None
    return ray


def _connect(ray: Any, address: str | None, workers: int) -> None:
    """Join a cluster, or start one whose ports only this machine reaches."""
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": ONE_THREAD},
    }
    if address is None:
        cores = workers or os.cpu_count() or 1
        options |= {"address": "local", "num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        place = address or "this machine"
        raise TacitaError(
            f"no Ray cluster answers at {place} ({_shorten(error)}); start one with `ray start`."
        ) from None


def _fetch_result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.as_instanceof_cause()
        if isinstance(cause, TacitaError):
            raise TacitaError(str(error.cause)) from None
        raise
    except ray.exceptions.RayError as error:
        raise TacitaError(
            f"a job was lost with its worker ({_shorten(error)}); finished cells are kept, so run the command again."
        ) from None


def _shorten(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
