"""The retraction reader: what one person took back, from the releases before and after it.

A leaver takes x x^T out of G, so P changes by a matrix of rank one, (P x)(P x)^T up to a factor; one item taken back
changes it by rank two. The reader fits such a matrix to the entries that are known in both releases, which completes
the cut ones, and solves with P: that gives x. An item that is no longer out lost a contributor: that alone names it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs
from tacita.research.audit.reconstruction import RebuiltInverse, mark_two_sided, rebuild_inverse

SWEEPS = 30  # of fitting a matrix of low rank
MAX_FALLS = 10  # falls that the reader tries, by size and by ratio
FLOOR = 0.02  # of the largest entry: what is less counts as this
JITTER = 1e-9  # added to P, relative to its largest entry, so that it can be solved with
TINY = 1e-300


@dataclass(frozen=True)
class InverseChange:
    """What happened to P between two releases, over the items that are in both."""

    items: Longs
    before: Doubles  # P of the first release, without the items that are no longer out
    moved: Doubles  # zero where it is not known
    known: Bools
    gone: Bools  # (catalogue,) items that are no longer out

    @staticmethod
    def from_releases(weights: Floats, later: Floats) -> InverseChange:
        """From B before and after; the same entries tell the scale of both, or scales would seem to move."""
        is_out = (weights != 0).any(axis=0)
        stays_out = (later != 0).any(axis=0)
        catalogue_items = np.flatnonzero(is_out)
        inner = np.ix_(catalogue_items, catalogue_items)
        is_lost = ~stays_out[catalogue_items]
        weights = weights[inner]
        later = later[inner]
        before, after = _rebuild_both(weights, later, is_lost)
        items, place_before, place_after = np.intersect1d(before.items, after.items, return_indices=True)
        inner_before = np.ix_(place_before, place_before)
        inner_after = np.ix_(place_after, place_after)
        first = before.inverse[inner_before]
        last = after.inverse[inner_after]
        if is_lost.any():
            first = _remove_lost_items(before, place_before, is_lost)
        known = before.known[inner_before] & after.known[inner_after]
        ratios = np.diag(first) / np.diag(last)
        scale = float(np.median(ratios))  # most diagonals hardly move
        difference = last * scale - first
        return InverseChange(
            items=catalogue_items[items],
            before=first,
            moved=np.where(known, difference, 0.0),
            known=known,
            gone=is_out & ~stays_out,
        )

    def solve_columns(self, columns: Doubles) -> Doubles:
        """P^-1 times columns."""
        jitter = JITTER * self.before.max()
        jitters = jitter * np.eye(len(self.before))
        regular = self.before + jitters
        solution = scipy.linalg.solve(regular, columns, check_finite=False)
        return np.asarray(solution)

    @property
    def is_still(self) -> bool:
        return not self.moved.any()


def _rebuild_both(weights: Floats, later: Floats, is_lost: Bools) -> tuple[RebuiltInverse, RebuiltInverse]:
    """P of both releases, with scales from common entries; those of lost items are in the first release alone."""
    two_sided = mark_two_sided(weights)
    common = two_sided & mark_two_sided(later)
    of_lost = is_lost[:, None] | is_lost[None, :]
    lost_entries = two_sided & of_lost
    before = rebuild_inverse(weights, common | lost_entries)
    after = rebuild_inverse(later, common)
    return before, after


def _remove_lost_items(release: RebuiltInverse, places: Longs, is_lost: Bools) -> Doubles:
    """P over fewer items is a Schur complement."""
    lost = np.flatnonzero(is_lost[release.items])
    inner = release.inverse[np.ix_(lost, lost)]
    across = release.inverse[np.ix_(lost, places)]
    solution = np.linalg.lstsq(inner, across, rcond=None)[0]
    remaining = release.inverse[np.ix_(places, places)]
    return remaining - across.T @ solution


def fit_low_rank(change: InverseChange, rank: int) -> tuple[Doubles, Doubles]:
    """Two thin matrices whose product is the change wherever it is known (alternating least squares)."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=len(change.moved))
    _, columns = scipy.sparse.linalg.eigsh(change.moved, k=rank, which="LM", v0=start)
    known = change.known.astype(np.float64)
    rows = columns
    for _ in range(SWEEPS):
        rows = _solve_least_squares(change.moved, known, columns)
        columns = _solve_least_squares(change.moved, known, rows)
    return rows, columns


def _solve_least_squares(moved: Doubles, known: Doubles, fixed: Doubles) -> Doubles:
    """Each row of one factor while the other is fixed, from the entries of the row that are known."""
    rank = fixed.shape[1]
    outer = fixed[:, :, None] * fixed[:, None, :]
    products = outer.reshape(len(fixed), -1)
    sums = known @ products
    normal = sums.reshape(-1, rank, rank)
    size = np.trace(normal, axis1=1, axis2=2).max()
    jitter = 1e-12 * max(size, TINY)
    normal += jitter * np.eye(rank)
    target = (moved @ fixed)[:, :, None]
    solution = np.linalg.solve(normal, target)
    return np.asarray(solution[:, :, 0])


def guess_leaver_history(weights: Floats, later: Floats) -> Bools:
    """The history of one who left between two releases: all above one of the largest falls, which fits best."""
    change = InverseChange.from_releases(weights, later)
    guess = change.gone.copy()
    if len(change.items) < 3 or change.is_still:
        return guess
    factor, _ = fit_low_rank(change, 1)
    solution = change.solve_columns(factor)
    x = solution[:, 0]
    if not x.sum() > 0:
        x = -x
    order = np.argsort(-x, kind="stable")
    falling = x[order]
    best_size = min(_list_candidate_sizes(falling), key=lambda size: _measure_misfit(change, order[:size]))
    best_items = change.items[order[:best_size]]
    guess[best_items] = True
    return guess


def _list_candidate_sizes(falling: Doubles) -> Longs:
    """Where a falling sequence of entries falls most, by difference and by ratio, within its first half."""
    half = max(1, len(falling) // 2)
    floor = FLOOR * falling[0]
    entries = np.maximum(falling[: half + 1], floor)
    upper = entries[:-1]
    lower = entries[1:]
    differences = upper - lower
    ratios = upper / lower
    by_difference = np.argsort(-differences, kind="stable")
    by_ratio = np.argsort(-ratios, kind="stable")
    largest_falls = [by_difference[:MAX_FALLS], by_ratio[:MAX_FALLS]]
    ends = np.concatenate(largest_falls)
    return np.unique(ends + 1)


def _measure_misfit(change: InverseChange, chosen: Longs) -> float:
    """What a history leaves of the change, where it is known, after (P x)(P x)^T with the best factor is subtracted."""
    product = change.before[:, chosen].sum(axis=1)
    squares = product**2
    norm = float(squares @ (change.known @ squares))
    overlap = float(product @ change.moved @ product)
    return -(overlap**2) / max(norm, TINY)


def guess_withdrawn_item(weights: Floats, later: Floats) -> int:
    """The one item that somebody took back between two releases; -1: nothing moved."""
    change = InverseChange.from_releases(weights, later)
    if change.gone.any():
        return int(np.flatnonzero(change.gone)[0])
    if len(change.items) < 4 or change.is_still:
        return -1
    row_factor, column_factor = fit_low_rank(change, 2)
    rows = change.solve_columns(row_factor)
    columns = change.solve_columns(column_factor)
    inner = columns.T @ columns
    row_weights = np.einsum("ir,rs,is->i", rows, inner, rows)  # of each row of the change of G
    strongest = int(row_weights.argmax())
    return int(change.items[strongest])
