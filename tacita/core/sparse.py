"""Sparse matrices by rows: from lists, from flat rows, from single cells, and sums of them."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from tacita.core.types import AnyArray, Ragged


def matrix_of_lists(lists: Ragged, width: int) -> scipy.sparse.csr_array:
    """1 for every entry of a list, in its row; an entry that a list has twice is stored twice."""
    ones = np.ones(len(lists.ids))
    return matrix_of_rows(lists.ptr, lists.ids, ones, width)


def matrix_of_rows(ptr: AnyArray, column: AnyArray, value: AnyArray, width: int) -> scipy.sparse.csr_array:
    n_rows = len(ptr) - 1
    return scipy.sparse.csr_array((value, column, ptr), shape=(n_rows, width))


def matrix_of_cells(row: AnyArray, column: AnyArray, value: AnyArray, shape: tuple[int, int]) -> scipy.sparse.csr_array:
    """Repeated cells are added up."""
    return scipy.sparse.csr_array((value, (row, column)), shape=shape)


class SparseSum:
    """A sum of sparse matrices of one shape, in pieces, each more than twice the next: adding stays cheap."""

    def __init__(self, shape: tuple[int, ...], pieces: tuple[scipy.sparse.csr_array, ...] = ()) -> None:
        self.shape = shape
        self.pieces = pieces

    def __add__(self, other: SparseSum | scipy.sparse.csr_array) -> SparseSum:
        pieces = list(self.pieces)
        added = other.pieces if isinstance(other, SparseSum) else (other,)
        for piece in added:
            pieces.append(piece)
            while len(pieces) > 1 and pieces[-2].nnz <= 2 * pieces[-1].nnz:
                last = pieces.pop()
                pieces[-1] = pieces[-1] + last
        return SparseSum(self.shape, tuple(pieces))

    def matrix(self) -> scipy.sparse.csr_array:
        """The whole sum, each row in the order of its columns."""
        total = scipy.sparse.csr_array(self.shape)
        for piece in reversed(self.pieces):
            total = total + piece
        total.eliminate_zeros()
        total.sort_indices()
        return total

    def any(self) -> bool:
        return bool(self.matrix().nnz)
