"""RankPlace: which of a run's processes this one is, and how torchrun says so."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlace:
    """One process among those of a run."""

    rank: int
    size: int
    local_rank: int  # among those on this machine
    local_size: int


def read_launcher_place() -> RankPlace | None:
    """The place that torchrun gave this process; None: torchrun did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in names[:4])
    return RankPlace(rank, size, local_rank, local_size)
