"""Looking numbers up in ascending ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def among(places: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of the wanted numbers belongs in ascending ones, and whether it is there."""
    at = np.searchsorted(places, wanted.astype(places.dtype))  # of one kind, or all of them are copied
    there = at < len(places)
    there[there] = places[at[there]] == wanted[there]
    return at, there
