"""What follows what, as sums: for every place in people's lists, what came before it with itself and with the item.

G' = sum of h h^T and C' = sum of h e^T, h the items before a place, older ones weighing less. Both are kept block by
block, like the pairs of `sums`: G' and the two triangles of C' are three `Sums` that share their contributors. All
numbers are whole multiples of a quantum, so what is taken back leaves no rounding behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tacita.core.types import AnyArray, Arrays, Doubles, Longs, Ragged
from tacita.messages import Total
from tacita.models.tally.solver import unpack_triangle
from tacita.models.tally.sums import PairShape, PairSums

CONTEXTS, NEXT, HELD = "contexts", "next", "held"  # its fields: G', C', and who has each item in a list that counts
SIDES = ("contexts", "after", "before")  # G'; C' at and below its diagonal; C' above it, turned
GRID = 2.0**-12  # of the weights by age; products are whole numbers of its square, the quantum of exact sums


def compute_age_weights(fold: float, window: int) -> Doubles:
    """What an item weighs 1, 2, ... places before: less by 1/e every `fold` places."""
    return np.asarray(np.rint(np.exp(-np.arange(window) / fold) / GRID) * GRID)


@dataclass(frozen=True)
class OrderSums:
    """The three sums of all blocks."""

    sides: dict[str, PairSums]

    @staticmethod
    def from_arrays(arrays: Arrays | None) -> OrderSums:
        if arrays is None or "held" not in arrays:
            return OrderSums({side: PairSums(**PairSums.from_arrays(None).arrays()) for side in SIDES})
        shared = {
            "index": arrays["index"],
            "count": np.zeros(0),
            "touched": arrays[HELD],
            "repeats": np.zeros((len(arrays["index"]), 2)),
        }
        return OrderSums(
            {side: PairSums(**shared, **{n: arrays[f"{side}.{n}"] for n in ("ptr", "at", "total")}) for side in SIDES}
        )

    def arrays(self) -> Arrays:
        own = {f"{side}.{n}": getattr(one, n) for side, one in self.sides.items() for n in ("ptr", "at", "total")}
        return {HELD: self.sides["contexts"].touched, **own}

    def with_block(self, index: int, total: Mapping[str, AnyArray], shape: PairShape) -> OrderSums:
        return OrderSums(
            {
                side: one.with_block(index, Total(_to_pair_fields(side, total)), shape)
                for side, one in self.sides.items()
            }
        )

    def apply_change(self, change: Mapping[str, AnyArray], shape: PairShape) -> OrderSums:
        """The sums after a change of fields `NAME.BLOCK`."""
        sides = dict(self.sides)
        for index in sides["contexts"].index.tolist():
            own = {name: change[f"{name}.{index}"] for name in (CONTEXTS, NEXT, HELD)}
            if any(value.any() for value in own.values()):
                sides = {
                    side: one.apply_change(index, _to_pair_fields(side, own), shape) for side, one in sides.items()
                }
        return OrderSums({side: one.drop_empty_pairs() for side, one in sides.items()})

    def sum_released(
        self, side: str, shape: PairShape, decay: float, least: int, where: Longs | None = None
    ) -> Doubles:
        """What is out of one side: at some places, or its whole triangle."""
        return self.sides[side].sum_released(shape, decay, least, 0, where)

    def sum_followers(self, shape: PairShape, decay: float, least: int) -> Doubles:
        """C' as it is out, whole."""
        after = np.tril(unpack_triangle(self.sum_released("after", shape, decay, least)))
        before = np.tril(unpack_triangle(self.sum_released("before", shape, decay, least)), -1)
        return np.asarray(after + before.T)


def _to_pair_fields(side: str, fields: Mapping[str, AnyArray]) -> Arrays:
    """One side in the words of `Sums`."""
    matrix = fields[CONTEXTS if side == "contexts" else NEXT]
    if side == "before":
        matrix = np.ascontiguousarray(matrix.T)
        np.fill_diagonal(matrix, 0.0)
    return {"pairs": matrix, "touched": fields[HELD], "repeats": np.zeros(2)}


def find_reordered_items(change: Mapping[str, AnyArray], n_items: int) -> Longs:
    """The items that a change of these fields is about."""
    marked = np.zeros(n_items, bool)
    for name, value in change.items():
        if name.partition(".")[0] in (CONTEXTS, NEXT):
            marked |= value.any(axis=0) | value.any(axis=1)
    return np.flatnonzero(marked)


@dataclass(frozen=True)
class HistoryLines:
    """People's lists with what came before them: places from `start` on are told in this block."""

    lists: Ragged
    start: Longs

    @staticmethod
    def from_blocks(train: Ragged, history: Ragged | None, window: int) -> HistoryLines:
        """What a block adds: its items after the latest ones of earlier blocks, as far back as anybody looks.

        Who has nothing in the block adds nothing, and needs no list.
        """
        here = train.counts() > 0
        past = Ragged.empty(len(train)) if history is None else history.join_rows(Ragged.empty(len(train)))
        past = select_latest_entries(Ragged(past.ptr, past.ids), window)
        past = past.filter_entries(here[past.rows()])
        return HistoryLines(past.join_rows(Ragged(train.ptr, train.ids)), past.counts())

    def distinct_items(self) -> Ragged:
        """The items that any sum of the block is about, once for each person."""
        width = 1 + int(self.lists.ids.max(initial=0))
        one = np.unique(self.lists.rows().astype(np.int64) * width + self.lists.ids)
        return Ragged.from_pairs(one // width, one % width, len(self.lists))


def select_latest_entries(lists: Ragged, most: int) -> Ragged:
    """The last entries of every list."""
    counts = lists.counts()
    age = np.repeat(lists.ptr[1:], counts) - 1 - np.arange(len(lists.ids))
    return lists.filter_entries(age < most)


def interleave_signed(lines: list[tuple[HistoryLines, float]]) -> tuple[HistoryLines, Doubles, Longs]:
    """Several lines of the same people, one after the other for each: the lines, their signs and their people."""
    n = len(lines[0][0].lists)
    each = len(lines)
    rows = np.concatenate([each * one.lists.rows() + k for k, (one, _) in enumerate(lines)])
    ids = np.concatenate([one.lists.ids for one, _ in lines])
    start = np.stack([one.start for one, _ in lines], axis=1).reshape(-1)
    merged = HistoryLines(Ragged.from_pairs(rows, ids, each * n), start)
    return merged, np.tile([sign for _, sign in lines], n), np.repeat(np.arange(n), each)
