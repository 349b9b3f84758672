"""The sums behind `tally`: pairs of items told together, block by block, so that a term can be taken back exactly.

Only pairs that somebody told are stored. A pair's place never changes while the catalogue grows: the lower triangle
row by row, or, where a large catalogue is read through some inputs, column by column.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.errors import TacitaError
from tacita.core.flat_indices import find_in_sorted
from tacita.core.sparse import SparseSum
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Ints, Longs, Ragged
from tacita.kernels.pairs import lower_entries
from tacita.messages import QUANTUM, Total


@dataclass(frozen=True)
class PairShape:
    """Which pairs there are: of all items, or of some inputs with all items."""

    n_items: int
    inputs: Ints | None = None

    @staticmethod
    def from_inputs(n_items: int, inputs: AnyArray) -> PairShape:
        return PairShape(n_items, inputs if len(inputs) else None)

    @property
    def n_inputs(self) -> int:
        return self.n_items if self.inputs is None else len(self.inputs)

    def extract_entries(self, matrix: Any) -> tuple[Longs, Doubles]:
        """Places, ascending, and values of what is not zero in a dense or sparse (inputs, items) matrix."""
        if self.inputs is None and isinstance(matrix, np.ndarray):
            return lower_entries(matrix)
        found = scipy.sparse.coo_array(matrix.matrix() if isinstance(matrix, SparseSum) else matrix)
        row, col, value = found.row.astype(np.int64), found.col.astype(np.int64), found.data
        if self.inputs is None:
            lower = row >= col
            row, col, value = row[lower], col[lower], value[lower]
            at = row * (row + 1) // 2 + col
        else:
            at = col * self.n_inputs + row
        if (at[1:] > at[:-1]).all():
            return at, value
        order = np.argsort(at)
        return at[order], value[order]

    def decode_pairs(self, at: AnyArray) -> tuple[Longs, Longs]:
        """Input (its number among the inputs) and item of each place."""
        at = at.astype(np.int64)
        if self.inputs is not None:
            return at % self.n_inputs, at // self.n_inputs
        if len(at) > 1 and (at[1:] >= at[:-1]).all():  # rows follow each other: find where each begins
            n = int((np.sqrt(8.0 * at[-1] + 1) - 1) / 2) + 2
            first = np.arange(n + 1, dtype=np.int64)
            row = np.repeat(first[:-1], np.diff(np.searchsorted(at, first * (first + 1) // 2)))
        else:
            row = ((np.sqrt(8.0 * at + 1) - 1) / 2).astype(np.int64)
            row -= row * (row + 1) // 2 > at  # the root may have been rounded up
        return row, at - row * (row + 1) // 2

    def encode_cross_pairs(self, items: AnyArray, others: AnyArray) -> Longs:
        """Places in the triangle of every pair of one of the items with one of the others, ascending."""
        one, other = (side.astype(np.int64) for side in np.broadcast_arrays(items[:, None], others[None, :]))
        row, col = np.maximum(one, other), np.minimum(one, other)
        return np.unique(row * (row + 1) // 2 + col)

    def build_input_triangle(self, where: Longs, values: Doubles) -> Doubles:
        """The lower triangle between the inputs of a catalogue that is read through inputs."""
        assert self.inputs is not None
        row, col = self.decode_pairs(where)
        number = np.full(self.n_items, self.n_inputs)  # of an item among the inputs; none: above every row
        number[self.inputs] = np.arange(self.n_inputs)
        lower = number[col] <= row
        out = np.zeros((self.n_inputs, self.n_inputs))
        out[row[lower], number[col[lower]]] = values[lower]
        return out

    def build_columns(self, where: Longs, values: Doubles, lo: int, hi: int) -> Doubles:
        """Items lo..hi against all inputs, of a catalogue that is read through inputs."""
        among = slice(*np.searchsorted(where, [lo * self.n_inputs, hi * self.n_inputs]))
        out = np.zeros((hi - lo, self.n_inputs))
        out.reshape(-1)[where[among] - lo * self.n_inputs] = values[among]
        return out


@dataclass(frozen=True)
class PairSums:
    """What was told in every block. Each number is a sum over users, so it can be masked, merged and taken back."""

    index: Longs  # (blocks,) number of the block in the stream
    ptr: Longs  # (blocks + 1,) entries of each block
    at: AnyArray  # (entries,) place of the pair, ascending inside a block
    total: Doubles  # (entries,) sum of the users' terms
    count: Doubles  # (entries,) contributors; empty: the same as total
    touched: Doubles  # (blocks, items) contributors of each item
    repeats: Doubles  # (blocks, 2) items told again in a later block, and chances of that times items

    @staticmethod
    def from_arrays(arrays: Arrays | None) -> PairSums:
        if arrays is None:
            none, zeros = np.zeros(0), np.zeros(1, np.int64)
            return PairSums(zeros[:0], zeros, zeros[:0], none, none, np.zeros((0, 0)), np.zeros((0, 2)))
        return PairSums(*(arrays[one.name] for one in fields(PairSums)))

    def arrays(self) -> Arrays:
        return {one.name: getattr(self, one.name) for one in fields(PairSums)}

    def block_entries(self, k: int) -> tuple[Longs, Doubles, Doubles]:
        span = slice(self.ptr[k], self.ptr[k + 1])
        total = self.total[span]
        return self.at[span], total, self.count[span] if len(self.count) else total

    def with_block(self, index: int, total: Total, shape: PairShape) -> PairSums:
        """These sums and one more block, in which the catalogue may have grown."""
        at, value = shape.extract_entries(total["pairs"])
        count = value[:0]
        if "count" in total.sums:
            row, col = shape.decode_pairs(at)
            count = total["count"][row, col]  # of these very pairs: who counts others is not heard
        fits = np.int32 if shape.n_inputs * shape.n_items < 2**31 else np.int64
        touched = np.zeros((len(self.index) + 1, shape.n_items))
        touched[:-1, : self.touched.shape[1]] = self.touched
        touched[-1] = total["touched"]
        return replace(
            self,
            index=np.append(self.index, index),
            ptr=np.append(self.ptr, self.ptr[-1] + len(at)),
            at=np.concatenate([self.at.astype(fits), at.astype(fits)]),
            total=np.concatenate([self.total, value]),
            count=np.concatenate([self.count, count]),
            touched=touched,
            repeats=np.concatenate([self.repeats, total["repeats"][None]]),
        )

    def apply_change(self, index: int, change: Mapping[str, AnyArray], shape: PairShape) -> PairSums:
        """The sums after what some users told in a block changed; what nobody tells any more is left to `tidied`."""
        k = int(np.flatnonzero(self.index == index)[0])
        held = self
        for name in ("pairs", "count"):
            if name in change:
                places, value = shape.extract_entries(change[name])
                held = held._insert_places(k, places[value > 0])
        sides = {"total": held.total.copy(), "count": held.count.copy()}
        for name, side in (("pairs", "total"), ("count", "count")):
            if name in change:
                places, value = shape.extract_entries(change[name])
                found, told = find_in_sorted(held.at[held.ptr[k] : held.ptr[k + 1]], places)
                if not told.all():
                    raise TacitaError("what is to be taken back was never told; nothing was changed.")
                sides[side][held.ptr[k] + found] += value
        touched, told_again = self.touched.copy(), self.repeats.copy()
        touched[k] += change["touched"]
        told_again[k] += change["repeats"]
        return replace(held, total=sides["total"], count=sides["count"], touched=touched, repeats=told_again)

    def _insert_places(self, k: int, places: Longs) -> PairSums:
        """The same sums with an entry for each of the places in a block."""
        lo, hi = self.ptr[k], self.ptr[k + 1]
        found, known = find_in_sorted(self.at[lo:hi], places)
        if known.all():
            return self
        fresh = ~known
        where = lo + found[fresh]
        return replace(
            self,
            ptr=self.ptr + int(fresh.sum()) * (np.arange(len(self.ptr)) > k),
            at=np.insert(self.at, where, places[fresh].astype(self.at.dtype)),
            total=np.insert(self.total, where, 0.0),
            count=np.insert(self.count, where, 0.0) if len(self.count) else self.count,
        )

    def drop_empty_pairs(self) -> PairSums:
        """The same sums without pairs that nobody tells any more."""
        kept = (self.count if len(self.count) else self.total) > QUANTUM / 2
        if kept.all():
            return self
        left = np.concatenate([[0], np.cumsum([kept[lo:hi].sum() for lo, hi in itertools.pairwise(self.ptr)])])
        count = self.count[kept] if len(self.count) else self.count
        return replace(self, ptr=left, at=self.at[kept], total=self.total[kept], count=count)

    def find_released_items(self, least: int) -> Bools:
        """(blocks, items) which items are out in each block: enough contributors since they were out before."""
        contributors = np.zeros(self.touched.shape[1])
        out = np.zeros(self.touched.shape, bool)
        for k, touched in enumerate(self.touched):
            contributors += touched
            out[k] = contributors >= least
            contributors[out[k]] = 0
        return out

    def sum_released(
        self, shape: PairShape, decay: float, min_item: int, min_pair: int, where: Longs | None = None
    ) -> Doubles:
        """G, the decayed sum of what is out, at the given places or over the whole triangle.

        An increment is out once its two items and the pair itself have had enough contributors since their last
        release; until then it waits, and ages like the rest.
        """
        size = shape.n_items * (shape.n_items + 1) // 2 if where is None else len(where)
        least = max(1, min_item, min_pair)  # nobody contributes to a pair without its items
        gram = np.zeros(size)
        pending, waiting = (np.zeros(size if least > 1 else 0) for _ in range(2))
        openings = self.find_released_items(least)
        for k, fade in enumerate(decay ** np.diff(self.index, prepend=self.index[:1])):
            at, total, count = self.block_entries(k)
            if where is not None:
                found, here = find_in_sorted(at, where)
                at, total, count = np.flatnonzero(here), total[found[here]], count[found[here]]
            if fade != 1:
                gram *= fade
                pending *= fade
            if least == 1:
                gram[at] += total
                continue
            pending[at] += total
            waiting[at] += count
            enough = openings[k]
            ready = np.flatnonzero(waiting >= min_pair if min_pair > 1 else waiting > 0)
            row, col = shape.decode_pairs(ready if where is None else where[ready])
            out = ready[enough[row if shape.inputs is None else shape.inputs[row]] & enough[col]]
            gram[out] += pending[out]
            pending[out] = waiting[out] = 0
        return gram

    def places(self) -> Longs:
        """Where anything was told, ascending."""
        return (np.unique(self.at) if len(self.index) > 1 else self.at).astype(np.int64)

    def estimate_repeat_habit(self, n_items: int) -> int:
        """1 where people come back to items more often than chance would have it, -1 where not, 0: not known."""
        came, chances = self.repeats.sum(axis=0)
        return 0 if chances == 0 else 1 if came * n_items > chances else -1


def count_repeats(train: Ragged, history: Ragged | None, n_items: int) -> Doubles:
    """(users, 2) how many items each told again, and what chance would make of that times the number of items."""
    if history is None or len(history.ids) == 0:
        return np.zeros((len(train), 2))
    told, known = (one.rows().astype(np.int64) * n_items + one.ids for one in (train, history))
    known = np.unique(known)
    again = np.bincount(train.rows()[np.isin(told, known)], minlength=len(train))
    per_user = np.bincount(known // n_items, minlength=len(train))[: len(train)]
    return np.stack([again, per_user * train.counts()], axis=1).astype(np.float64)
