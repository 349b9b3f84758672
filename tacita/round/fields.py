"""PartFields: what travels because of a part, declared before anything does, so that arrivals can be checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from tacita.core.types import AnyArray, Arrays, Ragged
from tacita.messages import Spec


@dataclass(frozen=True)
class ArraySpec:
    """What an array of a broadcast looks like."""

    shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    least: float = -np.inf
    fewer_rows: bool = False  # it may be of an earlier, smaller catalogue

    def fits(self, array: AnyArray) -> bool:
        if array.dtype != self.dtype or array.ndim != len(self.shape):
            return False
        rows_fit = array.shape == self.shape
        if self.fewer_rows:
            rows_fit = array.shape[1:] == self.shape[1:] and len(array) <= self.shape[0]
        in_range = array.dtype.kind != "f" or bool(np.isfinite(array).all() and (array >= self.least).all())
        return rows_fit and in_range


@dataclass(frozen=True)
class PartFields:
    """What a part sends up beside the learner's own fields, and what it reads of a broadcast."""

    extra: tuple[Spec, ...] = ()  # what `after_training` or `encode` may add to an upload
    after_encoding: Callable[[Spec], Spec] | None = None  # a field as it leaves; noise makes its bounds wider
    whole_table: bool = False  # every client sends its whole table, not only the rows it touched
    common: Mapping[str, ArraySpec] | None = None  # arrays that a broadcast may hold; None: none
    requires_all: bool = False  # all of `common` come together
    per_client: Mapping[str, tuple[int, ...]] | None = None  # columns of single clients' lists -> shape of an entry
    read_lists: Callable[[Ragged], Ragged] | None = None  # such lists as devices read them

    def accepts_common(self, arrays: Arrays) -> bool:
        """Whether what came as a broadcast is safe to compute with."""
        specs = self.common or {}
        if self.requires_all and arrays.keys() != specs.keys():
            return False
        return all(name in specs and specs[name].fits(array) for name, array in arrays.items())

    def accepts_lists(self, lists: Ragged) -> bool:
        """Whether lists for single clients are safe to compute with; their items are in range already."""
        columns = self.per_client or {}
        if lists.values.keys() != columns.keys():
            return False
        return all(
            column.dtype == np.float32 and column.shape == (len(lists.ids), *columns[name])
            for name, column in lists.values.items()
        )
