"""The peeling reader: histories that stand alone in a whole, uncut sum.

It knows the settings, sees B of every block, and knows how many have the most popular item (B fixes G only up to that
scale). The difference of two rebuilt G is what a block added. The reader reads it in these ways:

lone item: an item whose consumers all have the same other items, as when there is one: its row is their history;
lone pair: a pair with the smallest count: what goes with both of it is a history if it all goes together;
peeling: the reader subtracts a history that fits from the whole sum, and reads the rest, which is now easier;
column: the largest entries of a column of B, as they are, which needs no whole B.

Cuts stop it, because it needs exact sums. That says nothing about the null-space reader, which does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.linalg

from tacita.core.types import Bools, Doubles, Floats, Longs

COUNT_TOLERANCE = 0.25  # counts that differ by less than this are the same to the reader
MAX_PAIRS_PER_ITEM = 20  # lone pairs of an item that the reader tries, those with the fewest common items first
MAX_PASSES = 30  # of peeling, at most
JITTER = 0.05  # added to what is peeled, so that it can be inverted
PAIRS_AT_ONCE = 4096


def guess_histories(added: Doubles) -> Bools:
    """Sets of items (guesses, items) that a reader takes for somebody's history in what a block added."""
    present = added > 0.5
    counts = np.diag(added)
    difference = np.abs(added - counts[:, None])
    same_count = difference < COUNT_TOLERANCE
    all_alike = (same_count | ~present).all(axis=1)
    lone_items = (counts > 0.5) & all_alike
    guesses = [present[lone_items]]
    first, second = _find_lone_pairs(added, present)
    for start in range(0, len(first), PAIRS_AT_ONCE):
        chunk = slice(start, start + PAIRS_AT_ONCE)
        with_first = present[first[chunk]]
        with_second = present[second[chunk]]
        with_both = with_first & with_second
        guesses.append(_keep_cliques(with_both, present))
    return np.unique(np.concatenate(guesses), axis=0)


def _find_lone_pairs(added: Doubles, present: Bools) -> tuple[Longs, Longs]:
    """Of every item the pairs that one person has, and those with the smallest count of all."""
    n_items = len(added)
    pairs = np.where(present, added, np.inf)
    np.fill_diagonal(pairs, np.inf)
    of_one_person = np.abs(pairs - 1) < COUNT_TOLERANCE
    smallest = pairs.min(initial=np.inf)
    lone = of_one_person | (pairs < smallest + COUNT_TOLERANCE)
    weights = present.astype(np.float32)
    common = weights @ weights
    lone_common = np.where(lone, common, np.inf)
    order = np.argsort(lone_common, axis=1, kind="stable")
    partners = order[:, :MAX_PAIRS_PER_ITEM]
    n_partners = partners.shape[1]
    item = np.repeat(np.arange(n_items), n_partners)
    partner = partners.ravel()
    is_lone = lone[item, partner]
    item = item[is_lone]
    partner = partner[is_lone]
    lower = np.minimum(item, partner)
    upper = np.maximum(item, partner)
    codes = np.unique(lower * n_items + upper)
    return codes // n_items, codes % n_items


def _keep_cliques(sets: Bools, present: Bools) -> Bools:
    """The sets in which every item goes with every other."""
    n_partners = present.sum(axis=0)[None, :]
    too_many = len(present) + 1
    set_partners = np.where(sets, n_partners, too_many)
    rarest = set_partners.argmin(axis=1)
    missing = sets & ~present[rarest]
    is_refuted = missing.any(axis=1)  # most are refuted by their rarest item
    sets = sets[~is_refuted]
    counts = sets.astype(np.float32) @ present.astype(np.float32)
    size = sets.sum(axis=1)
    is_whole = counts == size[:, None]
    goes_with_all = is_whole | ~sets
    is_clique: Bools = goes_with_all.all(axis=1) & (size > 1)
    return sets[is_clique]


def peel_histories(added: Doubles) -> Bools:
    """All guesses, while those that fit are subtracted from the sum pass by pass: then others stand alone."""
    remaining = added.copy()
    guesses = guess_histories(added)
    all_guesses = guesses
    for _ in range(MAX_PASSES):
        if len(guesses) == 0:
            break
        fits = _mark_fitting(remaining, guesses)
        if fits is None:
            break
        n_subtracted = _subtract_histories(remaining, guesses[fits])
        if n_subtracted == 0:
            break
        guesses = guess_histories(remaining)
        more_guesses = np.concatenate([all_guesses, guesses])
        all_guesses = np.unique(more_guesses, axis=0)
    return all_guesses


def _mark_fitting(remaining: Doubles, guesses: Bools) -> Bools | None:
    """Which guesses fit the sum; None: what was rebuilt is no such sum.

    If G is a sum of x x^T, each x of it has x^T G^-1 x <= 1; a wrong guess hardly ever has.
    """
    symmetric = (remaining + remaining.T) / 2
    jitter = JITTER * np.eye(len(remaining))
    try:
        factor = np.linalg.cholesky(symmetric + jitter)
    except np.linalg.LinAlgError:
        return None
    columns = guesses.T.astype(np.float64)
    solved = scipy.linalg.solve_triangular(factor, columns, lower=True)
    squared_lengths = (solved**2).sum(axis=0)
    return np.asarray(squared_lengths < 1.01)


def _subtract_histories(remaining: Doubles, histories: Bools) -> int:
    """Take each history out, if all of it is still there; how many were."""
    n_subtracted = 0
    for history in histories:
        place: Any = np.ix_(history, history)
        if remaining[place].min() >= 0.5:
            remaining[place] -= 1
            n_subtracted += 1
    return n_subtracted


def guess_from_columns(weights: Floats) -> Bools:
    """An item and what is positive in its column of B: all of it, and down to the largest fall."""
    n_items = len(weights)
    guesses = []
    for item, column in enumerate(weights.T):
        n_positive = np.count_nonzero(column > 0)
        largest_first = np.argsort(-column, kind="stable")
        order = largest_first[:n_positive]
        falling = column[order].astype(np.float64)
        for size in _cut_sizes(falling):
            guess = np.zeros(n_items, bool)
            guess[order[:size]] = True
            guess[item] = True
            guesses.append(guess)
    if not guesses:
        return np.zeros((0, n_items), bool)
    return np.unique(guesses, axis=0)


def _cut_sizes(falling: Doubles) -> Iterator[int]:
    """All entries, and those before the largest fall, by ratio and by difference."""
    if len(falling) == 0:
        return
    yield len(falling)
    upper = falling[:-1]
    lower = falling[1:]
    if len(upper):
        by_ratio = upper / lower
        by_difference = upper - lower
        yield int(by_ratio.argmax()) + 1
        yield int(by_difference.argmax()) + 1
