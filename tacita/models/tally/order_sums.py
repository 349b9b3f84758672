"""What follows what, as sums: for every place in users' lists, what came before it with itself and with the item.

G' = sum of h h^T and C' = sum of h e^T, h the items before a place, older ones weighing less. Both are kept block by
block, like the pairs of `sums`: G' and the two triangles of C' are three `PairSums` that share their contributors. All
numbers are whole multiples of a quantum, so a retraction leaves no rounding behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Arrays, Doubles, Longs, Ragged
from tacita.kernels.triangles import join_triangles
from tacita.messages import Total
from tacita.models.statistic_model import FieldSums
from tacita.models.tally.sums import PairShape, PairSums
from tacita.models.tally.weights import count_entry_ages

CONTEXTS = "contexts"  # the field of G'
NEXT = "next"  # the field of C'
ITEM_OWNERS = "held"  # the field of who has each item in a list that counts
SIDES = ("contexts", "after", "before")  # G'; C' at and below its diagonal; C' above it, turned
SIDE_ARRAYS = ("ptr", "at", "total")  # what a side has of its own
GRID = 2.0**-12  # of the weights by age; products are whole numbers of its square, the quantum of exact sums


def compute_age_weights(fold: float, window: int) -> Doubles:
    """What an item weighs 1, 2, ... places before: less by 1/e every `fold` places."""
    ages = np.arange(window)
    weights = np.exp(-ages / fold)
    steps = np.rint(weights / GRID)
    return steps * GRID


@dataclass(frozen=True)
class OrderSums:
    """The three sums of all blocks."""

    sides: dict[str, PairSums]

    @staticmethod
    def from_arrays(arrays: Arrays | None) -> OrderSums:
        if arrays is None or ITEM_OWNERS not in arrays:
            empty = PairSums.from_arrays(None)
            return OrderSums(dict.fromkeys(SIDES, empty))
        index = arrays["index"]
        no_repeats = np.zeros((len(index), 2))
        shared = {
            "index": index,
            "count": np.zeros(0),
            "touched": arrays[ITEM_OWNERS],
            "repeats": no_repeats,
        }
        sides = {}
        for side in SIDES:
            own = {}
            for name in SIDE_ARRAYS:
                own[name] = arrays[f"{side}.{name}"]
            sides[side] = PairSums(**shared, **own)
        return OrderSums(sides)

    def to_arrays(self) -> Arrays:
        arrays = {ITEM_OWNERS: self.sides["contexts"].touched}
        for side, sums in self.sides.items():
            for name in SIDE_ARRAYS:
                arrays[f"{side}.{name}"] = getattr(sums, name)
        return arrays

    def with_block(self, index: int, total: FieldSums, shape: PairShape) -> OrderSums:
        sides = {}
        for side, sums in self.sides.items():
            fields = _to_pair_fields(side, total)
            sides[side] = sums.with_block(index, Total(fields), shape)
        return OrderSums(sides)

    def with_change(self, change: FieldSums, shape: PairShape) -> OrderSums:
        """The sums after a change of fields `NAME.BLOCK`."""
        order = self
        for index in self.sides["contexts"].index.tolist():
            own = _select_block_change(change, index)
            changes_any = any(value.any() for value in own.values())
            if changes_any:
                order = order._with_block_change(index, own, shape)
        sides = {}
        for side, sums in order.sides.items():
            sides[side] = sums.drop_empty_pairs()
        return OrderSums(sides)

    def _with_block_change(self, index: int, change: FieldSums, shape: PairShape) -> OrderSums:
        sides = {}
        for side, sums in self.sides.items():
            fields = _to_pair_fields(side, change)
            sides[side] = sums.with_block_change(index, fields, shape)
        return OrderSums(sides)

    def sum_released(
        self, side: str, shape: PairShape, decay: float, least: int, where: Longs | None = None
    ) -> Doubles:
        """What is out of one side: at some places, or its whole triangle."""
        sums = self.sides[side]
        return sums.sum_released(shape, decay, least, 0, where)

    def sum_followers(self, shape: PairShape, decay: float, least: int) -> Doubles:
        """C' as it is out, whole."""
        after = self.sum_released("after", shape, decay, least)
        before = self.sum_released("before", shape, decay, least)
        return join_triangles(after, before, shape.n_items)


def _select_block_change(change: FieldSums, index: int) -> Arrays:
    """The fields of one block, by their names alone."""
    fields = {}
    for name in (CONTEXTS, NEXT, ITEM_OWNERS):
        fields[name] = change[f"{name}.{index}"]
    return fields


def _to_pair_fields(side: str, fields: FieldSums) -> Arrays:
    """One side in the fields of `PairSums`."""
    name = CONTEXTS if side == "contexts" else NEXT
    matrix = fields[name]
    if side == "before":
        matrix = np.ascontiguousarray(matrix.T)
        np.fill_diagonal(matrix, 0.0)
    owners = fields[ITEM_OWNERS]
    return {"pairs": matrix, "touched": owners, "repeats": np.zeros(2)}


def find_reordered_items(change: FieldSums, n_items: int) -> Longs:
    """The items that a change of these fields is about."""
    is_changed = np.zeros(n_items, bool)
    for name, value in change.items():
        field = name.partition(".")[0]
        if field in (CONTEXTS, NEXT):
            is_changed |= value.any(axis=0)
            is_changed |= value.any(axis=1)
    return np.flatnonzero(is_changed)


@dataclass(frozen=True)
class HistoryLines:
    """Users' lists with what came before them: places from `start` on belong to this block."""

    lists: Ragged
    start: Longs

    @staticmethod
    def from_blocks(train: Ragged, history: Ragged | None, window: int) -> HistoryLines:
        """What a block adds: its items after the latest ones of earlier blocks, as far back as the window reaches.

        Who has nothing in the block adds nothing, and needs no list.
        """
        past = Ragged.empty(len(train))
        if history is not None:
            past = history.join_rows(past)
        bare_past = Ragged(past.ptr, past.ids)
        bare_train = Ragged(train.ptr, train.ids)
        latest = select_latest_entries(bare_past, window)
        takes_part = train.counts() > 0
        counts = takes_part[latest.rows()]
        latest = latest.filter_entries(counts)
        lists = latest.join_rows(bare_train)
        return HistoryLines(lists, latest.counts())

    def list_distinct_items(self) -> Ragged:
        """The items that any sum of the block is about, once for each user."""
        ids = self.lists.ids
        width = 1 + int(ids.max(initial=0))
        keys = np.unique(self.lists.number_entries(width))
        user, item = np.divmod(keys, width)
        return Ragged.from_pairs(user, item, len(self.lists))


def select_latest_entries(lists: Ragged, most: int) -> Ragged:
    """The last entries of every list."""
    is_late = count_entry_ages(lists) < most
    return lists.filter_entries(is_late)


def interleave_signed_lines(lines: list[tuple[HistoryLines, float]]) -> tuple[HistoryLines, Doubles, Longs]:
    """Several lines of the same users, one after the other for each: the lines, their signs and their users."""
    n_lines = len(lines)
    rows, ids, starts, signs = [], [], [], []
    for k, (line, line_sign) in enumerate(lines):
        users = line.lists.rows()
        rows.append(n_lines * users + k)
        ids.append(line.lists.ids)
        starts.append(line.start)
        signs.append(line_sign)
    n_users = len(starts[0])
    row = np.concatenate(rows)
    item = np.concatenate(ids)
    lists = Ragged.from_pairs(row, item, n_lines * n_users)
    start = np.stack(starts, axis=1).reshape(-1)
    sign = np.tile(signs, n_users)
    user = np.repeat(np.arange(n_users), n_lines)
    return HistoryLines(lists, start), sign, user
