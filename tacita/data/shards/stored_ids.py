"""Raw ids of many people as one column, instead of a Python text each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import polars as pl

from tacita.core.types import Longs


def are_side_by_side(places: Longs) -> bool:
    """Whether each of some places follows the one before without a gap."""
    return bool(len(places)) and bool((np.diff(places) == 1).all())


class StoredIds(Sequence[str]):
    """Raw ids in the order of their numbers."""

    def __init__(self, column: pl.Series) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self._column[index].to_list())
        raw_id: str = self._column[index]
        return raw_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._column.to_list())

    def take(self, places: Longs) -> StoredIds:
        """The ids at some places, in that order; without a copy where they stand side by side."""
        if are_side_by_side(places):
            return StoredIds(self._column.slice(int(places[0]), len(places)))
        return StoredIds(self._column.gather(places))


def take_ids(ids: Sequence[str], places: Longs) -> Sequence[str]:
    """The ids at some places, in that order."""
    if isinstance(ids, StoredIds):
        return ids.take(places)
    return tuple([ids[place] for place in places.tolist()])
