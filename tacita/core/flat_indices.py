"""Places in flat arrays: of consecutive spans, and of numbers among ascending ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]


def compute_offsets(counts: AnyArray) -> NDArray[np.int64]:
    """Where each of some consecutive groups begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def expand_spans(starts: AnyArray, counts: AnyArray) -> NDArray[np.int64]:
    """start, start + 1, ... of every span, one after the other."""
    ends = np.cumsum(counts)
    total = ends[-1] if len(ends) else 0
    offsets = starts - ends + counts
    return np.repeat(offsets, counts) + np.arange(total)


def find_in_sorted(places: AnyArray, wanted: AnyArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of the wanted numbers belongs in ascending ones, and whether it is among them."""
    same_kind = wanted.astype(places.dtype)  # otherwise numpy copies all of `places`
    at = np.searchsorted(places, same_kind)
    is_present = at < len(places)
    present_values = places[at[is_present]]
    is_present[is_present] = present_values == wanted[is_present]
    return at, is_present


def find_in_unsorted(keys: AnyArray, wanted: AnyArray) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each of the wanted numbers stands among the keys, and whether it does; 0 where it does not."""
    order = np.argsort(keys, kind="stable")
    at, is_present = find_in_sorted(keys[order], wanted)
    place = np.zeros(len(wanted), np.int64)
    place[is_present] = order[at[is_present]]
    return place, is_present
