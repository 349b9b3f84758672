"""The retraction reader: what one person took back, from the releases before and after it.

Who leaves takes x x^T out of G, so P changes by a matrix of rank one, (P x)(P x)^T up to a factor; one item taken back
changes it by rank two. The reader fits such a matrix to the entries that are known in both releases, which completes
the cut ones, and solves with P: that gives x. An item that is no longer out at all lost a contributor: it is named by
that alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs
from tacita.research.audit.reconstruction import mark_two_sided, rebuild_inverse

SWEEPS = 30  # of fitting a matrix of low rank
MAX_FALLS = 10  # falls that are looked at, by size and by ratio
FLOOR = 0.02  # of the largest entry: what is less counts as this
JITTER = 1e-9  # added to P, relative to its largest entry, so that it can be solved with


@dataclass(frozen=True)
class InverseChange:
    """What happened to P between two releases, over the items that are in both."""

    items: Longs
    before: Doubles  # P of the first release, without the items that are no longer out
    moved: Doubles  # zero where it is not known
    known: Bools
    gone: Bools  # (catalogue,) items that are no longer out

    @staticmethod
    def of(weights: Floats, later: Floats) -> InverseChange:
        """From B before and after; the same entries tell the scale of both, or scales would seem to move."""
        out, still = ((one != 0).any(axis=0) for one in (weights, later))
        place = np.flatnonzero(out)
        weights, later = weights[np.ix_(place, place)], later[np.ix_(place, place)]
        lost = ~still[place]
        sure = mark_two_sided(weights)
        common = sure & mark_two_sided(later)
        before = rebuild_inverse(weights, common | (sure & (lost[:, None] | lost[None, :])))
        after = rebuild_inverse(later, common)
        items, one, other = np.intersect1d(before.items, after.items, return_indices=True)
        first, last = before.inverse[np.ix_(one, one)], after.inverse[np.ix_(other, other)]
        if lost.any():  # P over fewer items is a Schur complement
            away = np.flatnonzero(lost[before.items])
            across, inner = before.inverse[np.ix_(away, one)], before.inverse[np.ix_(away, away)]
            first = first - across.T @ np.linalg.lstsq(inner, across, rcond=None)[0]
        known = before.known[np.ix_(one, one)] & after.known[np.ix_(other, other)]
        scale = float(np.median(np.diag(first) / np.diag(last)))  # most diagonals hardly move
        return InverseChange(place[items], first, np.where(known, last * scale - first, 0.0), known, out & ~still)

    def solve(self, columns: Doubles) -> Doubles:
        """P^-1 times columns."""
        regular = self.before + JITTER * self.before.max() * np.eye(len(self.before))
        return np.asarray(scipy.linalg.solve(regular, columns, check_finite=False))


def fit_low_rank(change: InverseChange, rank: int) -> tuple[Doubles, Doubles]:
    """Two thin matrices whose product is the change wherever it is known (alternating least squares)."""
    start = np.random.default_rng(0).normal(size=len(change.moved))
    _, right = scipy.sparse.linalg.eigsh(change.moved, k=rank, which="LM", v0=start)
    known, left = change.known.astype(np.float64), right
    for _ in range(SWEEPS):
        left = _least_squares(change.moved, known, right)
        right = _least_squares(change.moved, known, left)
    return left, right


def _least_squares(moved: Doubles, known: Doubles, other: Doubles) -> Doubles:
    """Each row of one side, given the other, from the entries of the row that are known."""
    rank = other.shape[1]
    products = (other[:, :, None] * other[:, None, :]).reshape(len(other), -1)
    normal = (known @ products).reshape(-1, rank, rank)
    size = np.trace(normal, axis1=1, axis2=2).max()
    normal += 1e-12 * max(size, 1e-300) * np.eye(rank)
    return np.asarray(np.linalg.solve(normal, (moved @ other)[:, :, None])[:, :, 0])


def read_leaver(weights: Floats, later: Floats) -> Bools:
    """The history of one who left between two releases: all above one of the largest falls, which fits best."""
    change = InverseChange.of(weights, later)
    guess = change.gone.copy()
    if len(change.items) < 3 or not change.moved.any():
        return guess
    left, _ = fit_low_rank(change, 1)
    x = change.solve(left)[:, 0]
    x = x if x.sum() > 0 else -x
    order = np.argsort(-x, kind="stable")
    half = max(1, len(order) // 2)
    size = np.maximum(x[order[: half + 1]], FLOOR * x[order[0]])
    falls = size[:-1] - size[1:], size[:-1] / size[1:]
    ends = np.unique(np.concatenate([np.argsort(-fall, kind="stable")[:MAX_FALLS] + 1 for fall in falls]))
    end = min(ends, key=lambda end: _misfit(change, order[:end]))
    guess[change.items[order[:end]]] = True
    return guess


def _misfit(change: InverseChange, chosen: Longs) -> float:
    """What a history leaves of the change, where it is known: (P x)(P x)^T with the best factor is taken away."""
    made = change.before[:, chosen].sum(axis=1)
    square = float((made**2) @ (change.known @ made**2))
    return -(float(made @ change.moved @ made) ** 2) / max(square, 1e-300)


def read_item(weights: Floats, later: Floats) -> int:
    """The one item that somebody took back between two releases; -1: nothing moved."""
    change = InverseChange.of(weights, later)
    if change.gone.any():
        return int(np.flatnonzero(change.gone)[0])
    if len(change.items) < 4 or not change.moved.any():
        return -1
    left, right = (change.solve(side) for side in fit_low_rank(change, 2))
    weight = np.einsum("ir,rs,is->i", left, right.T @ right, left)  # of each row of the change of G
    return int(change.items[int(weight.argmax())])
