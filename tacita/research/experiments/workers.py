"""Workers: where independent jobs run, and how many at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tacita.core.errors import TacitaError
from tacita.research.experiments.process_pool import run_in_processes

Job = TypeVar("Job")
Result = TypeVar("Result")

LOCAL = "local"
RAY = "ray"
RAY_ADDRESS = re.compile(r"(ray://)?[\w.-]+:\d+", re.ASCII)


@dataclass(frozen=True)
class Workers:
    """Processes of this machine, or of a Ray cluster."""

    count: int = 0  # at once; 0: one per core
    place: str = LOCAL

    def __post_init__(self) -> None:
        is_known = self.place in (LOCAL, RAY) or RAY_ADDRESS.fullmatch(self.place)
        if not is_known:
            raise TacitaError(f"--on is local, ray or ray://HOST:PORT, and '{self.place[:100]}' is none of these.")

    def run(self, work: Callable[[Job], Result], jobs: list[Job]) -> Iterator[Result]:
        """The results of the jobs, finished ones first."""
        if self.place == LOCAL:
            return run_in_processes(work, jobs, self.count)
        from tacita.research.experiments.ray_pool import run_on_ray

        address = None if self.place == RAY else self.place
        return run_on_ray(work, jobs, address, self.count)


THIS_MACHINE = Workers()
"""A process for each core."""
