"""Lists of items per row, stored flat, and the names of array types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacita.core.flat_indices import expand_spans, find_in_sorted

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Keys = NDArray[np.uint64]
Bools = NDArray[np.bool_]
AnyArray = NDArray[Any]
Arrays = dict[str, AnyArray]


def are_borders(ptr: AnyArray, n_entries: int) -> bool:
    """Whether borders cut so many entries into lists, as compiled loops trust.

    Borders are compared: a difference of numbers of 64 bits may run over and look right.
    """
    if len(ptr) == 0 or ptr[0] != 0 or ptr[-1] != n_entries:
        return False
    return bool((ptr[1:] >= ptr[:-1]).all())


@dataclass(frozen=True)
class Ragged:
    """One list of item ids per row, stored flat: row r is `ids[ptr[r]:ptr[r + 1]]`, oldest first."""

    ptr: Longs  # (rows + 1,)
    ids: Ints  # (entries,)
    values: Arrays = field(default_factory=dict)  # columns aligned with ids, such as "rating" and "time"

    @staticmethod
    def from_pairs(rows: AnyArray, ids: AnyArray, n_rows: int, values: Arrays | None = None) -> Ragged:
        """Group `ids` by row, keeping their order inside a row."""
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=n_rows)
        ptr = np.zeros(n_rows + 1, np.int64)
        np.cumsum(counts, out=ptr[1:])
        ordered_ids = np.ascontiguousarray(ids[order], np.int32)
        return Ragged(ptr, ordered_ids, _take_columns(values or {}, order))

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]]) -> Ragged:
        ptr = np.zeros(len(lists) + 1, np.int64)
        flat: list[int] = []
        for row, items in enumerate(lists):
            flat.extend(items)
            ptr[row + 1] = len(flat)
        return Ragged(ptr, np.asarray(flat, np.int32))

    @staticmethod
    def empty(n_rows: int) -> Ragged:
        ptr = np.zeros(n_rows + 1, np.int64)
        return Ragged(ptr, np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def row(self, r: int) -> Ints:
        start = self.ptr[r]
        end = self.ptr[r + 1]
        return self.ids[start:end]

    def counts(self) -> Longs:
        return np.diff(self.ptr)

    def rows(self) -> Ints:
        """The row of every entry."""
        row_numbers = np.arange(len(self), dtype=np.int32)
        return np.repeat(row_numbers, self.counts())

    def take(self, rows: AnyArray) -> Ragged:
        """The lists of some rows, in that order; the cost grows with their entries."""
        starts = self.ptr[rows]
        next_rows = np.asarray(rows) + 1
        ends = self.ptr[next_rows]
        return self.slice_entries(starts, ends - starts)

    def keep_rows(self, rows: Longs) -> Ragged:
        """The lists of some rows, ascending; the others become empty. The cost grows with what stays."""
        selected = self.take(rows)
        counts = np.zeros(len(self), np.int64)
        counts[rows] = selected.counts()
        ptr = np.concatenate([[0], np.cumsum(counts)])
        return Ragged(ptr, selected.ids, selected.values)

    def slice_entries(self, starts: Longs, counts: Longs) -> Ragged:
        """One list for each start: so many entries from it on, wherever lists begin and end."""
        ptr = np.concatenate([[0], np.cumsum(counts)])
        places = expand_spans(starts, counts)
        columns = _take_columns(self.values, places)
        return Ragged(ptr, self.ids[places], columns)

    def join_rows(self, other: Ragged) -> Ragged:
        """Row by row, this list followed by the other; a shorter operand counts as empty rows.

        A column stays if all entries have it, so lists without entries take none away.
        """
        n_rows = max(len(self), len(other))
        rows = np.concatenate([self.rows(), other.rows()])
        ids = np.concatenate([self.ids, other.ids])
        return Ragged.from_pairs(rows, ids, n_rows, self._join_columns(other))

    def _join_columns(self, other: Ragged) -> Arrays:
        """The columns that both lists have; those of one, where the other has no entries."""
        has_entries = len(self.ids) > 0
        other_has_entries = len(other.ids) > 0
        if not has_entries and not other_has_entries:
            return {}
        if not has_entries:
            return other.values
        if not other_has_entries:
            return self.values
        columns = {}
        for name, column in self.values.items():
            if name in other.values:
                columns[name] = np.concatenate([column, other.values[name]])
        return columns

    def filter_entries(self, stays: Bools) -> Ragged:
        """The same lists with some of their entries only."""
        n_before = np.append(0, np.cumsum(stays))
        ptr = n_before[self.ptr]
        columns = _take_columns(self.values, stays)
        return Ragged(ptr, self.ids[stays], columns)

    def sort_by_time(self) -> Ragged:
        """The same lists with their entries in order of time; unchanged where no times are known."""
        time = self.values.get("time")
        if time is None or self._is_ascending(time):
            return self
        order = np.lexsort((time, self.rows()))
        columns = _take_columns(self.values, order)
        return Ragged(self.ptr, self.ids[order], columns)

    def _is_ascending(self, column: AnyArray) -> bool:
        """Whether no entry of a list is below the one before it."""
        follows = column[1:] >= column[:-1]
        inner_starts = self.ptr[1:-1]
        has_both_sides = (inner_starts > 0) & (inner_starts < len(column))
        follows[inner_starts[has_both_sides] - 1] = True
        return bool(follows.all())

    def number_entries(self, n_items: int) -> Longs:
        """A number for every entry, the same for the same row and item."""
        rows = self.rows().astype(np.int64)
        return rows * n_items + self.ids

    def holds(self, rows: AnyArray, ids: AnyArray) -> Bools:
        """Whether each id is in the list of its row."""
        last_own = int(self.ids.max(initial=0))
        last_wanted = int(np.max(ids, initial=0))
        width = 1 + max(last_own, last_wanted)
        own_pairs = self.number_entries(width)
        own_pairs.sort()  # nearly in order: much faster than hashing
        wanted_rows = np.asarray(rows, np.int64)
        wanted_pairs = wanted_rows * width + ids
        _, is_held = find_in_sorted(own_pairs, wanted_pairs)
        return is_held


def _take_columns(columns: Arrays, places: AnyArray) -> Arrays:
    return {name: column[places] for name, column in columns.items()}


_ROWS_AT_ONCE = 500_000  # whose places in the joined lists are worked out together


def join_lists(lists: Sequence[Ragged], with_columns: bool = True) -> Ragged:
    """Row by row, each list followed by the next, as `join_rows` does for two, without sorting all entries."""
    n_rows = max((len(added) for added in lists), default=0)
    counts = np.zeros(n_rows, np.int64)
    for added in lists:
        counts[: len(added)] += added.counts()
    ptr = np.concatenate([[0], np.cumsum(counts)])
    ids = np.empty(int(ptr[-1]), np.int32)
    columns: Arrays = {}
    if with_columns:
        for name, kind in _list_common_columns(lists).items():
            columns[name] = np.empty(len(ids), kind)
    filled = ptr[:-1].copy()  # where the next list of each row begins
    for added in lists:
        for first in range(0, len(added), _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, len(added))
            n_entries = np.diff(added.ptr[first : last + 1])
            places = expand_spans(filled[first:last], n_entries)
            entries = slice(added.ptr[first], added.ptr[last])
            ids[places] = added.ids[entries]
            for name, column in columns.items():
                if len(places):
                    column[places] = added.values[name][entries]
            filled[first:last] += n_entries
    return Ragged(ptr, ids, columns)


def _list_common_columns(lists: Sequence[Ragged]) -> dict[str, np.dtype[Any]]:
    """The columns that all lists with entries have, and their kinds."""
    filled = [added for added in lists if len(added.ids)]
    if not filled:
        return {}
    first = filled[0]
    common = [name for name in first.values if all(name in added.values for added in filled)]
    return {name: np.result_type(*(added.values[name] for added in filled)) for name in common}
