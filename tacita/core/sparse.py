"""Sparse matrices by rows: from lists, from flat rows, from single cells, and sums of them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import scipy.sparse

from tacita.core.types import AnyArray, Ragged

Matrix: TypeAlias = scipy.sparse.csr_array


def matrix_of_lists(lists: Ragged, width: int) -> Matrix:
    """1 for every entry of a list, in its row; an entry that a list has twice is stored twice."""
    ones = np.ones(len(lists.ids))
    return matrix_of_rows(lists.ptr, lists.ids, ones, width)


def matrix_of_rows(ptr: AnyArray, column: AnyArray, value: AnyArray, width: int) -> Matrix:
    n_rows = len(ptr) - 1
    shape = (n_rows, width)
    return Matrix((value, column, ptr), shape=shape)


def matrix_of_cells(row: AnyArray, column: AnyArray, value: AnyArray, shape: tuple[int, int]) -> Matrix:
    """Repeated cells are added up."""
    places = (row, column)
    return Matrix((value, places), shape=shape)


class SparseSum:
    """A sum of sparse matrices of one shape, in pieces, each more than twice the next: adding stays cheap."""

    def __init__(self, shape: tuple[int, ...], pieces: tuple[Matrix, ...] = ()) -> None:
        self.shape = shape
        self.pieces = pieces

    def __add__(self, other: SparseSum | Matrix) -> SparseSum:
        pieces = list(self.pieces)
        added = other.pieces if isinstance(other, SparseSum) else (other,)
        for piece in added:
            while pieces and pieces[-1].nnz <= 2 * piece.nnz:
                before = pieces.pop()
                piece = before + piece
            pieces.append(piece)
        return SparseSum(self.shape, tuple(pieces))

    def matrix(self) -> Matrix:
        """The whole sum, each row in the order of its columns."""
        total = Matrix(self.shape)
        for piece in reversed(self.pieces):
            total = total + piece
        total.eliminate_zeros()
        total.sort_indices()
        return total

    def any(self) -> bool:
        total = self.matrix()
        return bool(total.nnz)
