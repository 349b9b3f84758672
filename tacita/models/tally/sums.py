"""The sums behind `tally`: pairs of items that users have together, block by block, so that terms can be taken back.

Only pairs that some user has are stored. A pair's place never changes while the catalogue grows: the lower triangle
row by row, or, where a large catalogue is read through some inputs, column by column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from tacita.core.errors import TacitaError
from tacita.core.flat_indices import find_in_sorted
from tacita.core.sparse import SparseSum
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Ints, Longs, Ragged
from tacita.kernels.triangles import (
    add_at_places,
    list_lower_entries,
    number_lower_entries,
    release_pairs_of_items,
)
from tacita.messages import QUANTUM, Total
from tacita.models.statistic_model import FieldSums

Entries = tuple[Longs, Doubles]
"""Places of pairs, ascending, and a value each."""


@dataclass(frozen=True)
class PairShape:
    """Which pairs there are: of all items, or of some inputs with all items."""

    n_items: int
    inputs: Ints | None = None

    @staticmethod
    def from_inputs(n_items: int, inputs: AnyArray) -> PairShape:
        if len(inputs) == 0:
            return PairShape(n_items)
        return PairShape(n_items, inputs)

    @property
    def n_inputs(self) -> int:
        if self.inputs is None:
            return self.n_items
        return len(self.inputs)

    def extract_entries(self, matrix: AnyArray | SparseSum) -> Entries:
        """The entries of a dense (inputs, items) matrix or of a sparse lower triangle that are not zero."""
        if isinstance(matrix, SparseSum):
            triangle = matrix.matrix()
            return number_lower_entries(triangle.indptr, triangle.indices), triangle.data
        if self.inputs is None:
            return list_lower_entries(matrix)
        cells = scipy.sparse.coo_array(matrix)
        row = cells.row.astype(np.int64)
        col = cells.col.astype(np.int64)
        places = col * self.n_inputs + row
        return _sort_entries(places, cells.data)

    def decode_pairs(self, at: AnyArray) -> tuple[Longs, Longs]:
        """Input (its number among the inputs) and item of each place."""
        at = at.astype(np.int64)
        if self.inputs is not None:
            item, number = np.divmod(at, self.n_inputs)
            return number, item
        row = _find_triangle_rows(at)
        column = at - count_triangle(row)
        return row, column

    def encode_cross_pairs(self, items: AnyArray, others: AnyArray) -> Longs:
        """Places in the triangle of every pair of one of the items with one of the others, ascending."""
        first = items[:, None].astype(np.int64)
        second = others[None, :].astype(np.int64)
        larger = np.maximum(first, second)
        smaller = np.minimum(first, second)
        places = number_triangle_places(larger, smaller)
        return np.unique(places)

    def build_input_triangle(self, where: Longs, values: Doubles) -> Doubles:
        """The lower triangle between the inputs of a catalogue that is read through inputs."""
        assert self.inputs is not None
        n_inputs = self.n_inputs
        row, col = self.decode_pairs(where)
        number = np.full(self.n_items, n_inputs)  # of an item among the inputs; none: above every row
        number[self.inputs] = np.arange(n_inputs)
        column = number[col]
        is_lower = column <= row
        triangle = np.zeros((n_inputs, n_inputs))
        lower_row = row[is_lower]
        lower_column = column[is_lower]
        triangle[lower_row, lower_column] = values[is_lower]
        return triangle

    def build_columns(self, where: Longs, values: Doubles, lo: int, hi: int) -> Doubles:
        """Items lo..hi against all inputs, of a catalogue that is read through inputs."""
        n_inputs = self.n_inputs
        start = lo * n_inputs
        end = hi * n_inputs
        first, last = np.searchsorted(where, [start, end])
        places = where[first:last] - start
        flat = np.zeros(end - start)
        flat[places] = values[first:last]
        return flat.reshape(hi - lo, n_inputs)


def number_triangle_places(row: Longs, col: Longs) -> Longs:
    """Places in a lower triangle, row by row."""
    start: Longs = count_triangle(row)
    return start + col


def count_triangle(n: Any) -> Any:
    """How many entries a lower triangle of n rows has."""
    return n * (n + 1) // 2


def _sort_entries(places: Longs, value: Doubles) -> Entries:
    is_ascending = (places[1:] > places[:-1]).all()
    if is_ascending:
        return places, value
    order = np.argsort(places)
    return places[order], value[order]


def _find_triangle_rows(at: Longs) -> Longs:
    """The row of each place in a lower triangle."""
    is_ascending = len(at) > 1 and (at[1:] >= at[:-1]).all()
    if is_ascending:  # rows follow each other: find where each begins
        last_row = int(_compute_fractional_row(at[-1]))
        rows = np.arange(last_row + 3, dtype=np.int64)
        starts = np.searchsorted(at, count_triangle(rows))
        sizes = np.diff(starts)
        return np.repeat(rows[:-1], sizes)
    row: Longs = _compute_fractional_row(at).astype(np.int64)
    row -= count_triangle(row) > at  # the root may have been rounded up
    return row


def _compute_fractional_row(at: Any) -> Any:
    """The row in which a place of a lower triangle lies, with a fraction."""
    root = np.sqrt(8.0 * at + 1)
    return (root - 1) / 2


@dataclass(frozen=True)
class PairSums:
    """The sums of every block. Each number is a sum over users, so it can be masked, merged and taken back."""

    index: Longs  # (blocks,) number of the block in the stream
    ptr: Longs  # (blocks + 1,) entries of each block
    at: AnyArray  # (entries,) place of the pair, ascending inside a block
    total: Doubles  # (entries,) sum of the users' terms
    count: Doubles  # (entries,) contributors; empty: the same as total
    touched: Doubles  # (blocks, items) contributors of each item
    repeats: Doubles  # (blocks, 2) items that came again in a later block, and chances of that times items

    @staticmethod
    def from_arrays(arrays: Arrays | None) -> PairSums:
        if arrays is not None:
            columns = [arrays[field.name] for field in fields(PairSums)]
            return PairSums(*columns)
        return PairSums(
            index=np.zeros(0, np.int64),
            ptr=np.zeros(1, np.int64),
            at=np.zeros(0, np.int64),
            total=np.zeros(0),
            count=np.zeros(0),
            touched=np.zeros((0, 0)),
            repeats=np.zeros((0, 2)),
        )

    def to_arrays(self) -> Arrays:
        arrays = {}
        for field in fields(PairSums):
            arrays[field.name] = getattr(self, field.name)
        return arrays

    @property
    def contributors(self) -> Doubles:
        """(entries,) contributors of each pair."""
        if len(self.count):
            return self.count
        return self.total

    def _find_block_slice(self, k: int) -> slice:
        """The entries of a block."""
        start = self.ptr[k]
        end = self.ptr[k + 1]
        return slice(start, end)

    def read_block_entries(self, k: int) -> BlockEntries:
        """Places, sums and contributors of a block."""
        span = self._find_block_slice(k)
        return BlockEntries(self.at[span], self.total[span], self.contributors[span])

    def with_block(self, index: int, total: Total, shape: PairShape) -> PairSums:
        """These sums and one more block, in which the catalogue may have grown."""
        at, value = shape.extract_entries(total["pairs"])
        count = value[:0]
        if "count" in total.sums:
            row, col = shape.decode_pairs(at)
            count = total["count"][row, col]  # of these very pairs: counts of other pairs are left out
        n_pairs = shape.n_inputs * shape.n_items
        fits = np.int32 if n_pairs < 2**31 else np.int64
        places = [self.at.astype(fits, copy=False), at.astype(fits, copy=False)]
        n_blocks, n_before = self.touched.shape
        touched = np.zeros((n_blocks + 1, shape.n_items))
        touched[:-1, :n_before] = self.touched
        touched[-1] = total["touched"]
        repeats = total["repeats"][None]
        end = self.ptr[-1] + len(at)
        return replace(
            self,
            index=np.append(self.index, index),
            ptr=np.append(self.ptr, end),
            at=np.concatenate(places),
            total=np.concatenate([self.total, value]),
            count=np.concatenate([self.count, count]),
            touched=touched,
            repeats=np.concatenate([self.repeats, repeats]),
        )

    def with_block_change(self, index: int, change: FieldSums, shape: PairShape) -> PairSums:
        """The sums after the terms of some users in a block changed; `drop_empty_pairs` removes what is 0 then."""
        k = self.index.tolist().index(index)
        entries = {}
        for name in ("pairs", "count"):
            if name in change:
                entries[name] = shape.extract_entries(change[name])
        sums = self
        for places, value in entries.values():
            added = places[value > 0]
            sums = sums._insert_places(k, added)
        total = sums.total.copy()
        count = sums.count.copy()
        if "pairs" in entries:
            sums._add_entries(k, entries["pairs"], total)
        if "count" in entries:
            sums._add_entries(k, entries["count"], count)
        touched = self.touched.copy()
        touched[k] += change["touched"]
        repeats = self.repeats.copy()
        repeats[k] += change["repeats"]
        return replace(sums, total=total, count=count, touched=touched, repeats=repeats)

    def _add_entries(self, k: int, entries: Entries, column: Doubles) -> None:
        """Add entries of a block to a column, in place; every one must be a pair of the block."""
        places, value = entries
        span = self._find_block_slice(k)
        offset, is_known = find_in_sorted(self.at[span], places)
        if not is_known.all():
            raise TacitaError("what is to be taken back was never told; nothing was changed.")
        column[span.start + offset] += value

    def _insert_places(self, k: int, places: Longs) -> PairSums:
        """The same sums with an entry for each of the places in a block."""
        span = self._find_block_slice(k)
        offset, is_known = find_in_sorted(self.at[span], places)
        if is_known.all():
            return self
        is_new = ~is_known
        where = span.start + offset[is_new]
        new_places = places[is_new].astype(self.at.dtype)
        ptr = self.ptr.copy()
        ptr[k + 1 :] += len(new_places)
        count = self.count
        if len(count):
            count = np.insert(count, where, 0.0)
        return replace(
            self,
            ptr=ptr,
            at=np.insert(self.at, where, new_places),
            total=np.insert(self.total, where, 0.0),
            count=count,
        )

    def drop_empty_pairs(self) -> PairSums:
        """The same sums without pairs that no user has any more."""
        stays = self.contributors > QUANTUM / 2
        if stays.all():
            return self
        n_before = np.append(0, np.cumsum(stays))
        count = self.count
        if len(count):
            count = count[stays]
        return replace(
            self,
            ptr=n_before[self.ptr],
            at=self.at[stays],
            total=self.total[stays],
            count=count,
        )

    def find_released_items(self, least: int) -> Bools:
        """(blocks, items) which items are out in each block: enough contributors since they were out before."""
        n_items = self.touched.shape[1]
        contributors = np.zeros(n_items)
        is_out = np.zeros(self.touched.shape, bool)
        for k, touched in enumerate(self.touched):
            contributors += touched
            is_out[k] = contributors >= least
            contributors[is_out[k]] = 0
        return is_out

    def sum_released(
        self, shape: PairShape, decay: float, min_item: int, min_pair: int, where: Longs | None = None
    ) -> Doubles:
        """G, the decayed sum of what is out, at the given places or over the whole triangle.

        An increment is out once its two items and the pair itself have had enough contributors since their last
        release; until then it waits, and ages like the rest.
        """
        least = max(1, min_item, min_pair)  # who contributes to a pair contributes to its items
        release = _ReleasedSum(shape, where, min_pair, waits=least > 1)
        is_out = self.find_released_items(least)
        first = self.index[:1]
        ages = np.diff(self.index, prepend=first)
        for k, fade in enumerate(decay**ages):
            release.fade(fade)
            release.add_or_hold_block(self._read_entries_at(k, where))
            release.release_pairs(is_out[k])
        return release.gram

    def _read_entries_at(self, k: int, where: Longs | None) -> BlockEntries:
        """The entries of a block, or those at some places, numbered by these."""
        entries = self.read_block_entries(k)
        if where is None:
            return entries
        place, is_known = find_in_sorted(entries.at, where)
        known = place[is_known]
        numbers = np.flatnonzero(is_known)
        return BlockEntries(numbers, entries.total[known], entries.contributors[known])

    def list_places(self) -> Longs:
        """The places of all pairs, ascending."""
        at = self.at
        if len(self.index) > 1:
            at = np.unique(at)
        return at.astype(np.int64)

    def estimate_repeat_habit(self, n_items: int) -> int:
        """1 where users come back to items more often than chance would have it, -1 where not, 0: not known."""
        repeats, chances = self.repeats.sum(axis=0)
        if chances == 0:
            return 0
        is_habit = repeats * n_items > chances
        return 1 if is_habit else -1


class BlockEntries(NamedTuple):
    """The pairs of a block."""

    at: Longs  # places
    total: Doubles  # sums
    contributors: Doubles


class _ReleasedSum:
    """G while blocks are added: what is out, and the increments that wait for contributors."""

    def __init__(self, shape: PairShape, where: Longs | None, min_pair: int, waits: bool) -> None:
        self.shape = shape
        self.where = where
        self.min_pair = min_pair
        self.waits = waits
        size = count_triangle(shape.n_items) if where is None else len(where)
        n_waiting = size if waits else 0
        self.gram = np.zeros(size)
        self.pending = np.zeros(n_waiting)  # sums that wait
        self.contributors = np.zeros(n_waiting)  # of each since its last release

    def fade(self, factor: float) -> None:
        if factor != 1:
            self.gram *= factor
            self.pending *= factor

    def add_or_hold_block(self, entries: BlockEntries) -> None:
        at = entries.at
        if not self.waits:
            add_at_places(at, entries.total, self.gram)
            return
        add_at_places(at, entries.total, self.pending)
        add_at_places(at, entries.contributors, self.contributors)

    def release_pairs(self, is_out: Bools) -> None:
        """Add what waits long enough, of items that are out, to G."""
        if not self.waits:
            return
        if self.where is None:
            release_pairs_of_items(is_out, self.min_pair, self.pending, self.contributors, self.gram)
            return
        if self.min_pair > 1:
            has_enough = self.contributors >= self.min_pair
        else:
            has_enough = self.contributors > 0
        ready = np.flatnonzero(has_enough)
        row, col = self.shape.decode_pairs(self.where[ready])
        item: AnyArray = row
        if self.shape.inputs is not None:
            item = self.shape.inputs[row]
        both_out = is_out[item] & is_out[col]
        released = ready[both_out]
        self.gram[released] += self.pending[released]
        self.pending[released] = 0
        self.contributors[released] = 0


def count_repeats(train: Ragged, history: Ragged | None, n_items: int) -> Doubles:
    """(users, 2) how many items each user has again, and what chance would make of that times the number of items."""
    n_users = len(train)
    if history is None or len(history.ids) == 0:
        return np.zeros((n_users, 2))
    current = train.number_entries(n_items)
    earlier = np.unique(history.number_entries(n_items))
    is_repeat = np.isin(current, earlier)
    repeating_user = train.rows()[is_repeat]
    repeats = np.bincount(repeating_user, minlength=n_users)
    earlier_user = earlier // n_items
    n_earlier = np.bincount(earlier_user, minlength=n_users)[:n_users]
    chances = n_earlier * train.counts()
    counts = np.stack([repeats, chances], axis=1)
    return counts.astype(np.float64)
