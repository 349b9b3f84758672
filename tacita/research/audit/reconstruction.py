"""P and G as a reader of B rebuilds them, and how well guesses fit histories.

P is symmetric and B = I - P / diag(P), so B_ji / B_ij gives diag(P) up to one factor. The reader follows a tree of
entries that survive on both sides. Then P follows wherever one side survives, and counts as zero elsewhere.
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
    """Entries that survive on both sides: these tell the scale."""
    is_released = weights != 0
    return np.asarray(is_released & is_released.T)


def rebuild_inverse(weights: Floats, scaled: Bools | None = None) -> RebuiltInverse:
    """P from B as it was sent; scaled: the entries that may tell the scale, all by default."""
    released = np.asarray((weights != 0).any(axis=0))
    if not released.any():
        no_items = np.zeros(0, np.int64)
        no_entries = np.zeros((0, 0))
        return RebuiltInverse(no_items, no_entries, no_entries.astype(bool), released)
    items = np.flatnonzero(released)
    inner = np.ix_(items, items)
    matrix = weights[inner].astype(np.float64)
    if scaled is None:
        scaled = mark_two_sided(weights)
    diagonal = _rebuild_diagonal(matrix, scaled[inner])
    is_released = matrix != 0
    sides = is_released + is_released.T.astype(float)  # an entry that was cut on one side is known from the other
    inverse = -matrix * diagonal[None, :]
    both_sides = inverse + inverse.T
    inverse = both_sides / np.maximum(sides, 1)
    inverse[np.diag_indices(len(items))] = diagonal
    known = sides > 0
    np.fill_diagonal(known, True)
    return RebuiltInverse(items, inverse, known, released)


def _rebuild_diagonal(matrix: Doubles, scaled: Bools) -> Doubles:
    """The diagonal of P up to a factor, along the tree of the strongest entries, which are exact."""
    row, col = np.nonzero(scaled)
    products = matrix[row, col] * matrix[col, row]
    strength = np.abs(products)
    graph = matrix_of_cells(row, col, 1 / strength, matrix.shape)
    tree = scipy.sparse.csgraph.minimum_spanning_tree(graph)
    row_strength = np.bincount(row, strength, minlength=1)
    root = int(row_strength.argmax())
    order, parents = scipy.sparse.csgraph.breadth_first_order(tree, root, directed=False)
    diagonal = np.zeros(len(matrix))
    diagonal[root] = 1.0
    for child in order[1:]:
        parent = parents[child]
        below = matrix[child, parent]
        above = matrix[parent, child]
        diagonal[child] = diagonal[parent] * below / above
    # an item that the tree does not reach was cut because it is rare: its P is 1 / ridge or little less
    diagonal[diagonal == 0] = diagonal.max()
    return diagonal


def rebuild_gram(weights: Floats, ridge: float, most_popular: float) -> Doubles:
    """G over the catalogue, for a reader who knows the ridge and the largest count."""
    rebuilt = rebuild_inverse(weights)
    regular = np.linalg.inv(rebuilt.inverse)
    largest = regular.diagonal().max(initial=1e-300)
    regular *= (most_popular + ridge) / largest
    gram = np.zeros((rebuilt.n_items, rebuilt.n_items))  # what is not in B has the ridge alone
    inner = np.ix_(rebuilt.items, rebuilt.items)
    ridges = ridge * np.eye(len(regular))
    gram[inner] = regular - ridges
    return gram


def compute_row_overlap(guesses: Bools, histories: Bools) -> Doubles:
    """Jaccard overlap of each guess with the history in the same row."""
    common = (guesses & histories).sum(axis=1)
    either = (guesses | histories).sum(axis=1)
    return np.asarray(common / np.maximum(either, 1))


def compute_best_overlap(guesses: Bools, histories: Bools) -> Doubles:
    """How well each history that is not empty is guessed: its best overlap (Jaccard) with any guess."""
    has_items = histories.any(axis=1)
    histories = histories[has_items]
    if len(guesses) == 0:
        return np.zeros(len(histories))
    history_weights = histories.astype(np.float32)
    guess_weights = guesses.astype(np.float32)
    common = history_weights @ guess_weights.T
    history_size = histories.sum(axis=1)[:, None]
    guess_size = guesses.sum(axis=1)[None, :]
    either = history_size + guess_size - common
    overlap = common / either
    return np.asarray(overlap.max(axis=1), np.float64)


def sets_to_lists(sets: AnyArray) -> Ragged:
    """Rows of a (users, items) table as lists."""
    rows, ids = np.nonzero(sets)
    item_ids = ids.astype(np.int32)
    return Ragged.from_pairs(rows, item_ids, len(sets))
