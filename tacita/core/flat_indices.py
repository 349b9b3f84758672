"""Places in flat arrays: those of spans one after the other, and those of numbers among ascending ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]


def expand_spans(starts: AnyArray, counts: AnyArray) -> NDArray[np.int64]:
    """start, start + 1, ... of every span, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def find_in_sorted(places: AnyArray, wanted: AnyArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of the wanted numbers belongs in ascending ones, and whether it is there."""
    at = np.searchsorted(places, wanted.astype(places.dtype))  # of one kind, or all of them are copied
    there = at < len(places)
    there[there] = places[at[there]] == wanted[there]
    return at, there
