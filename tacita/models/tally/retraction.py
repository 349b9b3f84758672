"""Taking terms back from the sums of tally, and bringing an inverse along without a new solve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tacita.core.types import AnyArray, Doubles, Longs, Ragged
from tacita.models.tally.solver import TILE
from tacita.models.tally.sums import Shape, Sums, Terms, told_again


def told_instead(
    sums: Sums,
    before: list[Ragged],
    after: list[Ragged],
    terms_of: Callable[[Ragged], Terms],
    shape: Shape,
    weighted: bool,
) -> Sums:
    """The sums had some users told, block by block, `after` instead of `before`."""
    past = Ragged.empty(0), Ragged.empty(0)
    for index, lists in enumerate(zip(before, after, strict=True)):
        if index in sums.index and any(len(one.ids) for one in lists):
            was, now = (told_again(one, p, shape.n_items).sum(axis=0) for one, p in zip(lists, past, strict=True))
            gone, come = (terms_of(one) for one in lists)
            sums = sums.exchanged(index, gone, come, now - was, shape, weighted)
        past = past[0].joined(lists[0]), past[1].joined(lists[1])
    return sums.tidied()


def may_differ(items: AnyArray, old: Sums, new: Sums, shape: Shape, least: int) -> Longs:
    """The places of G that a withdrawal of these items can change.

    They lie between the user's own items only, unless one of them is out in other blocks now.
    """
    shifted = np.flatnonzero((old.openings(least) != new.openings(least)).any(axis=0))
    return np.union1d(shape.around(items, items), shape.around(shifted, np.arange(shape.n_items)))


def update_inverse(inverse: Doubles, row: Longs, col: Longs, change: Doubles) -> int:
    """Change entries of a matrix, given in its lower triangle, and its inverse in place (Woodbury).

    Returns the rank of the update; 0: nothing was done, a solve is cheaper or the only way.
    """
    n, items = len(inverse), np.union1d(row, col)
    if not 0 < len(items) <= n // 4:
        return 0
    small = np.zeros((len(items), len(items)))
    small[np.searchsorted(items, row), np.searchsorted(items, col)] = change
    values, vectors = np.linalg.eigh(small)  # it reads the lower triangle
    strong = np.abs(values) > 1e-13 * np.abs(values).max()
    values, vectors = values[strong], vectors[:, strong]
    if len(values) > n // 8:
        return 0
    moved = inverse[:, items] @ vectors  # (n, rank)
    core = np.diag(1 / values) + vectors.T @ moved[items]
    if (np.linalg.eigvalsh(core) > 0).sum() != (values > 0).sum():
        return 0  # no longer positive definite
    back = np.linalg.solve(core, moved.T)
    for lo in range(0, n, TILE):
        inverse[lo : lo + TILE] -= moved[lo : lo + TILE] @ back
    return len(values)
