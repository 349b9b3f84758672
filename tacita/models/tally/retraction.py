"""Taking terms back from the sums of tally, and bringing an inverse along without a new solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tacita.core.types import AnyArray, Doubles, Longs, Ragged
from tacita.models.tally.solver import TILE
from tacita.models.tally.sums import PairShape, PairSums, count_repeats


class Replacement(NamedTuple):
    """What users tell of a block instead of what they told: two lists for each, and how each counts."""

    lists: Ragged  # (2 users) what was told, then what is left of it
    sign: Doubles  # (2 users,) -1, 1, ...
    repeat_change: Doubles  # (users, 2) by how much `repeats` changes


def compute_replacements(
    before: list[Ragged], after: list[Ragged], counted: Callable[[Ragged], Ragged], n: int
) -> list[Replacement]:
    """For every block, what some users take back and what they say again, of n items."""
    past, out = (Ragged.empty(0), Ragged.empty(0)), []
    for lists in zip(before, after, strict=True):
        was, now = (count_repeats(one, earlier, n) for one, earlier in zip(lists, past, strict=True))
        told, left = (counted(one) for one in lists)
        rows = np.concatenate([2 * told.rows(), 2 * left.rows() + 1])
        both = Ragged.from_pairs(rows, np.concatenate([told.ids, left.ids]), 2 * len(told))
        out.append(Replacement(both, np.tile([-1.0, 1.0], len(told)), now - was))
        past = past[0].join_rows(lists[0]), past[1].join_rows(lists[1])
    return out


def apply_change(sums: PairSums, change: Mapping[str, AnyArray], shape: PairShape) -> PairSums:
    """The sums after a change of fields `NAME.BLOCK`."""
    for index in sums.index.tolist():
        own = {name.partition(".")[0]: v for name, v in change.items() if name.rpartition(".")[2] == str(index)}
        if own["touched"].any() or own["pairs"].any() or own["repeats"].any():
            sums = sums.apply_change(index, own, shape)
    return sums.drop_empty_pairs()


def find_changed_items(change: Mapping[str, AnyArray], shape: PairShape) -> Longs:
    """The items that a change is about."""
    marked = np.zeros(shape.n_items, bool)
    for name, value in change.items():
        if name.startswith("pairs."):
            marked |= value.any(axis=0)
    return np.flatnonzero(marked)


def find_changed_places(items: AnyArray, old: PairSums, new: PairSums, shape: PairShape, least: int) -> Longs:
    """The places of G that a withdrawal of these items can change.

    They lie between the user's own items only, unless one of them is out in other blocks now.
    """
    shifted = np.flatnonzero((old.find_released_items(least) != new.find_released_items(least)).any(axis=0))
    return np.union1d(
        shape.encode_cross_pairs(items, items), shape.encode_cross_pairs(shifted, np.arange(shape.n_items))
    )


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
        return np.asarray(np.linalg.solve(self.core, self.vectors.T @ product[self.items]))

    def subtract_from(self, product: Doubles) -> None:
        """Bring P X along, in place, some rows at a time."""
        right = self.solve_right_factor(product)
        for lo in range(0, len(product), TILE):
            product[lo : lo + TILE] -= self.left_factor[lo : lo + TILE] @ right


def update_inverse(inverse: Doubles, row: Longs, col: Longs, change: Doubles) -> int:
    """Change entries of a matrix, given in its lower triangle, and its inverse in place (Woodbury).

    Returns the rank of the update; 0: nothing was done, a solve is cheaper or the only way.
    """
    found = compute_low_rank(inverse, row, col, change)
    if found is None:
        return 0
    found.subtract_from(inverse)
    return found.rank


def compute_low_rank(inverse: Doubles, row: Longs, col: Longs, change: Doubles) -> LowRankUpdate | None:
    """What a change of the matrix takes from its inverse; None: solve anew."""
    n, items = len(inverse), np.union1d(row, col)
    if not 0 < len(items) <= n // 4:
        return None
    small = np.zeros((len(items), len(items)))
    small[np.searchsorted(items, row), np.searchsorted(items, col)] = change
    values, vectors = np.linalg.eigh(small)  # it reads the lower triangle
    strong = np.abs(values) > 1e-13 * np.abs(values).max()
    values, vectors = values[strong], vectors[:, strong]
    moved = inverse[:, items] @ vectors  # (n, rank)
    core = np.diag(1 / values) + vectors.T @ moved[items]
    if (np.linalg.eigvalsh(core) > 0).sum() != (values > 0).sum():
        return None  # no longer positive definite
    return LowRankUpdate(items, vectors, core, moved)
