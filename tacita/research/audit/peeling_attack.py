"""The peeling reader: histories that stand alone in a whole, uncut sum.

It knows the settings, sees B of every block, and knows how many have the most popular item (B fixes G only up to that
scale). The difference of two rebuilt G is what a block added. It is read in these ways:

lone item: an item whose consumers all have the same other items, as when there is one: its row is their history;
lone pair: a pair with the smallest count: what goes with both of it is a history if it all goes together;
peeling: a history that fits the whole sum is taken out of it, and the rest, now easier, is read again;
column: the largest entries of a column of B, as they are, which needs no whole B.

Cuts stop it, because it needs exact sums. That says nothing about the null-space reader, which does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs

COUNT_TOLERANCE = 0.25  # counts that differ by less than this are the same to the reader
MAX_PAIRS_PER_ITEM = 20  # lone pairs of an item that are looked at, those with the fewest common items first
MAX_PASSES = 30  # of peeling, at most
JITTER = 0.05  # added to what is peeled, so that it can be inverted


def guess_histories(added: Doubles) -> Bools:
    """Sets of items (guesses, items) that a reader takes for somebody's history in what a block added."""
    there, own = added > 0.5, np.diag(added)
    alike = (np.abs(added - own[:, None]) < COUNT_TOLERANCE) | ~there
    found = [there[(own > 0.5) & alike.all(axis=1)]]
    one, other = _find_lone_pairs(added, there)
    for lo in range(0, len(one), 4096):
        some = slice(lo, lo + 4096)
        found.append(_keep_cliques(there[one[some]] & there[other[some]], there))
    return np.unique(np.concatenate(found), axis=0)


def _find_lone_pairs(added: Doubles, present: Bools) -> tuple[Longs, Longs]:
    """Of every item the pairs that one person has, and those with the smallest count of all."""
    pairs = np.where(present, added, np.inf)
    np.fill_diagonal(pairs, np.inf)
    lone = (np.abs(pairs - 1) < COUNT_TOLERANCE) | (pairs < pairs.min(initial=np.inf) + COUNT_TOLERANCE)
    common = present.astype(np.float32) @ present.astype(np.float32)
    order = np.argsort(np.where(lone, common, np.inf), axis=1, kind="stable")[:, :MAX_PAIRS_PER_ITEM]
    one = np.repeat(np.arange(len(added)), order.shape[1])
    other = order.ravel()
    one, other = one[lone[one, other]], other[lone[one, other]]
    found = np.unique(np.minimum(one, other) * len(added) + np.maximum(one, other))
    return found // len(added), found % len(added)


def _keep_cliques(sets: Bools, present: Bools) -> Bools:
    """The sets in which every item goes with every other."""
    rarest = np.where(sets, present.sum(axis=0)[None, :], len(present) + 1).argmin(axis=1)
    sets = sets[~(sets & ~present[rarest]).any(axis=1)]  # most are refuted by their rarest item
    counts = sets.astype(np.float32) @ present.astype(np.float32)
    size = sets.sum(axis=1)
    whole: Bools = ((counts == size[:, None]) | ~sets).all(axis=1) & (size > 1)
    return np.asarray(sets[whole])


def peel_histories(added: Doubles) -> Bools:
    """All guesses, with those that fit the sum taken out of it again and again: then others stand alone.

    If G is a sum of x x^T, each x of it has x^T G^-1 x <= 1; a wrong guess hardly ever has.
    """
    left, found = added.copy(), guess_histories(added)
    guesses = found
    for _ in range(MAX_PASSES):
        if len(guesses) == 0:
            break
        try:
            factor = np.linalg.cholesky((left + left.T) / 2 + JITTER * np.eye(len(left)))
        except np.linalg.LinAlgError:  # what was rebuilt is no such sum
            break
        sizes = scipy.linalg.solve_triangular(factor, guesses.T.astype(np.float64), lower=True)
        sure = [np.ix_(one, one) for one in guesses[(sizes**2).sum(axis=0) < 1.01]]
        sure = [place for place in sure if _subtract_history(left, place)]
        if not sure:
            break
        guesses = guess_histories(left)
        found = np.unique(np.concatenate([found, guesses]), axis=0)
    return found


def _subtract_history(remaining: Doubles, place: Any) -> bool:
    """Take one history out, if all of it is still there."""
    if remaining[place].min() < 0.5:
        return False
    remaining[place] -= 1
    return True


def guess_from_columns(weights: Floats) -> Bools:
    """An item and what is positive in its column of B: all of it, and down to the largest fall."""
    found = []
    for item, column in enumerate(weights.T):
        order = np.argsort(-column, kind="stable")[: np.count_nonzero(column > 0)]
        if len(order) == 0:
            continue
        size = column[order].astype(np.float64)
        falls = (size[:-1] / size[1:]), (size[:-1] - size[1:])
        for last in (len(order), *(int(fall.argmax()) + 1 for fall in falls if len(fall))):
            guess = np.zeros(len(weights), bool)
            guess[order[:last]] = guess[item] = True
            found.append(guess)
    return np.unique(found, axis=0) if found else np.zeros((0, len(weights)), bool)
