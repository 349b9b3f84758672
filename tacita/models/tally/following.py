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
from tacita.fields import Total
from tacita.models.tally.solver import lower_triangle
from tacita.models.tally.sums import Shape, Sums

CONTEXTS, NEXT, HELD = "contexts", "next", "held"  # its fields: G', C', and who has each item in a list that counts
SIDES = ("contexts", "after", "before")  # G'; C' at and below its diagonal; C' above it, turned
GRID = 2.0**-12  # of the weights by age; products are whole numbers of its square, the quantum of exact sums


def falling(fold: float, window: int) -> Doubles:
    """What an item weighs 1, 2, ... places before: less by 1/e every `fold` places."""
    return np.asarray(np.rint(np.exp(-np.arange(window) / fold) / GRID) * GRID)


@dataclass(frozen=True)
class Order:
    """The three sums of all blocks."""

    sides: dict[str, Sums]

    @staticmethod
    def read(arrays: Arrays | None) -> Order:
        if arrays is None or "held" not in arrays:
            return Order({side: Sums(**Sums.read(None).arrays()) for side in SIDES})
        shared = {
            "index": arrays["index"],
            "count": np.zeros(0),
            "touched": arrays[HELD],
            "repeats": np.zeros((len(arrays["index"]), 2)),
        }
        return Order(
            {side: Sums(**shared, **{n: arrays[f"{side}.{n}"] for n in ("ptr", "at", "total")}) for side in SIDES}
        )

    def arrays(self) -> Arrays:
        own = {f"{side}.{n}": getattr(one, n) for side, one in self.sides.items() for n in ("ptr", "at", "total")}
        return {HELD: self.sides["contexts"].touched, **own}

    def with_block(self, index: int, total: Mapping[str, AnyArray], shape: Shape) -> Order:
        return Order(
            {side: one.with_block(index, Total(_like_pairs(side, total)), shape) for side, one in self.sides.items()}
        )

    def without(self, change: Mapping[str, AnyArray], shape: Shape) -> Order:
        """The sums after a change of fields `NAME.BLOCK`."""
        sides = dict(self.sides)
        for index in sides["contexts"].index.tolist():
            own = {name: change[f"{name}.{index}"] for name in (CONTEXTS, NEXT, HELD)}
            if any(value.any() for value in own.values()):
                sides = {side: one.exchanged(index, _like_pairs(side, own), shape) for side, one in sides.items()}
        return Order({side: one.tidied() for side, one in sides.items()})

    def released(self, side: str, shape: Shape, decay: float, least: int, where: Longs | None = None) -> Doubles:
        """What is out of one side: at some places, or its whole triangle."""
        return self.sides[side].released(shape, decay, least, 0, where)

    def followers(self, shape: Shape, decay: float, least: int) -> Doubles:
        """C' as it is out, whole."""
        after = np.tril(lower_triangle(self.released("after", shape, decay, least)))
        before = np.tril(lower_triangle(self.released("before", shape, decay, least)), -1)
        return np.asarray(after + before.T)


def _like_pairs(side: str, fields: Mapping[str, AnyArray]) -> Arrays:
    """One side in the words of `Sums`."""
    matrix = fields[CONTEXTS if side == "contexts" else NEXT]
    if side == "before":
        matrix = np.ascontiguousarray(matrix.T)
        np.fill_diagonal(matrix, 0.0)
    return {"pairs": matrix, "touched": fields[HELD], "repeats": np.zeros(2)}


def items_of_change(change: Mapping[str, AnyArray], n_items: int) -> Longs:
    """The items that a change of these fields is about."""
    marked = np.zeros(n_items, bool)
    for name, value in change.items():
        if name.partition(".")[0] in (CONTEXTS, NEXT):
            marked |= value.any(axis=0) | value.any(axis=1)
    return np.flatnonzero(marked)


@dataclass(frozen=True)
class Lines:
    """People's lists with what came before them: places from `start` on are told in this block."""

    lists: Ragged
    start: Longs

    @staticmethod
    def of(train: Ragged, history: Ragged | None, window: int) -> Lines:
        """What a block adds: its items after the latest ones of earlier blocks, as far back as anybody looks.

        Who has nothing in the block adds nothing, and needs no list.
        """
        here = train.counts() > 0
        past = Ragged.empty(len(train)) if history is None else history.joined(Ragged.empty(len(train)))
        past = latest(Ragged(past.ptr, past.ids), window)
        past = past.where(here[past.rows()])
        return Lines(past.joined(Ragged(train.ptr, train.ids)), past.counts())

    def held(self) -> Ragged:
        """The items that any sum of the block is about, once for each person."""
        width = 1 + int(self.lists.ids.max(initial=0))
        one = np.unique(self.lists.rows().astype(np.int64) * width + self.lists.ids)
        return Ragged.from_pairs(one // width, one % width, len(self.lists))


def latest(lists: Ragged, most: int) -> Ragged:
    """The last entries of every list."""
    counts = lists.counts()
    age = np.repeat(lists.ptr[1:], counts) - 1 - np.arange(len(lists.ids))
    return lists.where(age < most)


def with_sign(lines: list[tuple[Lines, float]]) -> tuple[Lines, Doubles, Longs]:
    """Several lines of the same people, one after the other for each: the lines, their signs and their people."""
    n = len(lines[0][0].lists)
    each = len(lines)
    rows = np.concatenate([each * one.lists.rows() + k for k, (one, _) in enumerate(lines)])
    ids = np.concatenate([one.lists.ids for one, _ in lines])
    start = np.stack([one.start for one, _ in lines], axis=1).reshape(-1)
    merged = Lines(Ragged.from_pairs(rows, ids, each * n), start)
    return merged, np.tile([sign for _, sign in lines], n), np.repeat(np.arange(n), each)
