"""Taking terms back from the sums of tally, and bringing an inverse along without a new solve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tacita.core.types import AnyArray, Arrays, Doubles, Longs, Ragged
from tacita.models.statistic_model import BlockLists, FieldSums
from tacita.models.tally.solver import TILE
from tacita.models.tally.sums import PairShape, PairSums, count_repeats


class Replacement(NamedTuple):
    """New lists of a block in place of old ones: two lists for each user, and how each counts."""

    lists: Ragged  # (2 users) the old list, then the new one
    sign: Doubles  # (2 users,) -1, 1, ...
    repeat_change: Doubles  # (users, 2) by how much `repeats` changes


def compute_replacements(
    old_lists: BlockLists, new_lists: BlockLists, select_counted: Callable[[Ragged], Ragged], n_items: int
) -> list[Replacement]:
    """For every block, the old lists that some users take back and the new ones in their place."""
    old_past = Ragged.empty(0)
    new_past = Ragged.empty(0)
    replacements = []
    for old, new in zip(old_lists, new_lists, strict=True):
        old_repeats = count_repeats(old, old_past, n_items)
        new_repeats = count_repeats(new, new_past, n_items)
        repeat_change = new_repeats - old_repeats
        lists = interleave_lists(select_counted(old), select_counted(new))
        sign = np.tile([-1.0, 1.0], len(old))
        replacements.append(Replacement(lists, sign, repeat_change))
        old_past = old_past.join_rows(old)
        new_past = new_past.join_rows(new)
    return replacements


def interleave_lists(old: Ragged, new: Ragged) -> Ragged:
    """Two lists for every user, the old one and the new one."""
    old_rows = 2 * old.rows()
    new_rows = 2 * new.rows() + 1
    rows = np.concatenate([old_rows, new_rows])
    ids = np.concatenate([old.ids, new.ids])
    return Ragged.from_pairs(rows, ids, 2 * len(old))


def compute_changed_sums(sums: PairSums, change: FieldSums, shape: PairShape) -> PairSums:
    """The sums after a change of fields `NAME.BLOCK`."""
    for index in sums.index.tolist():
        own = _select_block_fields(change, index)
        changes_any = any(own[name].any() for name in ("touched", "pairs", "repeats"))
        if changes_any:
            sums = sums.with_block_change(index, own, shape)
    return sums.drop_empty_pairs()


def _select_block_fields(change: FieldSums, index: int) -> Arrays:
    """The fields of one block, by their names alone."""
    fields = {}
    for name, value in change.items():
        field, _, block = name.partition(".")
        if block == str(index):
            fields[field] = value
    return fields


def find_changed_items(change: FieldSums, shape: PairShape) -> Longs:
    """The items that a change is about."""
    is_changed = np.zeros(shape.n_items, bool)
    for name, value in change.items():
        if name.startswith("pairs."):
            is_changed |= value.any(axis=0)
    return np.flatnonzero(is_changed)


def find_changed_places(items: AnyArray, old: PairSums, new: PairSums, shape: PairShape, least: int) -> Longs:
    """The places of G that a withdrawal of these items can change.

    They lie between the user's own items only, unless one of them is out in other blocks now.
    """
    was_out = old.find_released_items(least)
    is_out = new.find_released_items(least)
    is_shifted = (was_out != is_out).any(axis=0)
    shifted = np.flatnonzero(is_shifted)
    everything = np.arange(shape.n_items)
    own_pairs = shape.encode_cross_pairs(items, items)
    shifted_pairs = shape.encode_cross_pairs(shifted, everything)
    return np.union1d(own_pairs, shifted_pairs)


@dataclass(frozen=True)
class LowRankUpdate:
    """What a change of a symmetric matrix A takes from its inverse P: P E^T core^-1 E P, E of few rows."""

    items: Longs  # where E is not 0
    vectors: Doubles  # (items, rank) E^T there
    core: Doubles  # (rank, rank)
    left_factor: Doubles  # (n, rank) P E^T

    @property
    def rank(self) -> int:
        return len(self.core)

    def solve_right_factor(self, product: Doubles) -> Doubles:
        """core^-1 E P X, from P X before the change."""
        projected = self.vectors.T @ product[self.items]
        return np.asarray(np.linalg.solve(self.core, projected))

    def subtract_in_place(self, product: Doubles) -> None:
        """Bring P X along, in place, some rows at a time."""
        right_factor = self.solve_right_factor(product)
        for lo in range(0, len(product), TILE):
            rows = slice(lo, lo + TILE)
            product[rows] -= self.left_factor[rows] @ right_factor


def update_inverse_in_place(inverse: Doubles, row: Longs, col: Longs, change: Doubles) -> int:
    """Change entries of a matrix, given in its lower triangle, and its inverse in place (Woodbury).

    Returns the rank of the update; 0: nothing was done, a solve is cheaper or the only way.
    """
    update = compute_low_rank(inverse, row, col, change)
    if update is None:
        return 0
    update.subtract_in_place(inverse)
    return update.rank


def compute_low_rank(inverse: Doubles, row: Longs, col: Longs, change: Doubles) -> LowRankUpdate | None:
    """What a change of the matrix takes from its inverse; None: a new solve is needed, or cheaper."""
    items = np.union1d(row, col)
    n_items = len(items)
    if not 0 < n_items <= len(inverse) // 4:
        return None
    small = np.zeros((n_items, n_items))
    small_row = np.searchsorted(items, row)
    small_col = np.searchsorted(items, col)
    small[small_row, small_col] = change
    values, vectors = np.linalg.eigh(small)  # it reads the lower triangle
    size = np.abs(values)
    is_strong = size > 1e-13 * size.max()
    values = values[is_strong]
    vectors = vectors[:, is_strong]
    moved = inverse[:, items] @ vectors  # (n, rank)
    inner = vectors.T @ moved[items]
    core = np.diag(1 / values) + inner
    core_values = np.linalg.eigvalsh(core)
    stays_definite = _count_positive(core_values) == _count_positive(values)
    if not stays_definite:
        return None
    return LowRankUpdate(items, vectors, core, moved)


def _count_positive(values: Doubles) -> int:
    is_positive = values > 0
    return int(is_positive.sum())
