"""P and G as a reader of B rebuilds them, and how well guesses fit histories.

P is symmetric and B = I - P / diag(P), so B_ji / B_ij gives diag(P) up to one factor, along a tree of entries that were
kept on both sides; then P follows wherever one side was kept, and is taken for zero elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from tacita.core.sparse import matrix_of_cells
from tacita.core.types import AnyArray, Bools, Doubles, Floats, Longs, Ragged

NEARLY_READ = 0.9  # overlap of a guess with a history (Jaccard) that counts as nearly read


@dataclass(frozen=True)
class RebuiltInverse:
    """P between the items that are out, up to one factor."""

    items: Longs  # ascending
    inverse: Doubles  # P, zero where both sides were cut
    known: Bools  # which entries of it are known
    released: Bools  # (catalogue,) items that are in B at all

    @property
    def n_items(self) -> int:
        return len(self.released)


def mark_two_sided(weights: Floats) -> Bools:
    """Entries that were kept on both sides: these tell the scale."""
    return np.asarray((weights != 0) & (weights.T != 0))


def rebuild_inverse(weights: Floats, scaled: Bools | None = None) -> RebuiltInverse:
    """P from B as it was sent; scaled: the entries that may tell the scale, all by default."""
    out = np.asarray((weights != 0).any(axis=0))
    if not out.any():
        return RebuiltInverse(np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros((0, 0), bool), out)
    items = np.flatnonzero(out)
    given = weights[np.ix_(items, items)].astype(np.float64)
    row, col = np.nonzero((mark_two_sided(weights) if scaled is None else scaled)[np.ix_(items, items)])
    both = np.abs(given[row, col] * given[col, row])
    graph = matrix_of_cells(row, col, 1 / both, given.shape)  # of strong entries: they are exact
    tree = scipy.sparse.csgraph.minimum_spanning_tree(graph)
    root = int(np.bincount(row, both, minlength=1).argmax())
    order, parent = scipy.sparse.csgraph.breadth_first_order(tree, root, directed=False)
    diagonal = np.zeros(len(given))  # of P, up to a factor
    diagonal[root] = 1.0
    for child in order[1:]:
        up = parent[child]
        diagonal[child] = diagonal[up] * given[child, up] / given[up, child]
    diagonal[diagonal == 0] = diagonal.max()  # not reached: cut because it is rare, where P is 1 / ridge or little less
    inverse = -given * diagonal[None, :]
    sides = (given != 0) + (given.T != 0).astype(float)  # an entry that was cut on one side is known from the other
    inverse = (inverse + inverse.T) / np.maximum(sides, 1)
    inverse[np.diag_indices(len(items))] = diagonal
    told = sides > 0
    np.fill_diagonal(told, True)
    return RebuiltInverse(items, inverse, told, out)


def rebuild_gram(weights: Floats, ridge: float, most_popular: float) -> Doubles:
    """G over the catalogue, for a reader who knows the ridge and the largest count."""
    found = rebuild_inverse(weights)
    regular = np.linalg.inv(found.inverse)
    regular *= (most_popular + ridge) / regular.diagonal().max(initial=1e-300)
    gram = np.zeros((found.n_items, found.n_items))  # what is not in B has the ridge alone
    gram[np.ix_(found.items, found.items)] = regular - ridge * np.eye(len(regular))
    return gram


def compute_row_overlap(guesses: Bools, histories: Bools) -> Doubles:
    """Jaccard overlap of each guess with the history in the same row."""
    either = (guesses | histories).sum(axis=1)
    return np.asarray((guesses & histories).sum(axis=1) / np.maximum(either, 1))


def compute_best_overlap(guesses: Bools, histories: Bools) -> Doubles:
    """How well each history that is not empty is guessed: its best overlap (Jaccard) with any guess."""
    histories = histories[histories.any(axis=1)]
    if len(guesses) == 0:
        return np.zeros(len(histories))
    common = histories.astype(np.float32) @ guesses.astype(np.float32).T
    either = histories.sum(axis=1)[:, None] + guesses.sum(axis=1)[None, :] - common
    return np.asarray((common / either).max(axis=1), np.float64)


def as_sets(lists: Ragged, n_items: int) -> Bools:
    """Lists as rows of a (users, items) table."""
    sets = np.zeros((len(lists), n_items), bool)
    sets[lists.rows(), lists.ids] = True
    return sets


def as_lists(sets: AnyArray) -> Ragged:
    """Rows of a (users, items) table as lists."""
    rows, ids = np.nonzero(sets)
    return Ragged.from_pairs(rows, ids.astype(np.int32), len(sets))
