"""Sparse matrices by rows: from lists, from rows that are stored flat, and from single cells."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from tacita.core.types import AnyArray, Ragged


def matrix_of_lists(lists: Ragged, width: int) -> scipy.sparse.csr_array:
    """1 for every entry of a list, in its row; what a list names twice is there twice."""
    return matrix_of_rows(lists.ptr, lists.ids, np.ones(len(lists.ids)), width)


def matrix_of_rows(ptr: AnyArray, column: AnyArray, value: AnyArray, width: int) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array((value, column, ptr), shape=(len(ptr) - 1, width))


def matrix_of_cells(row: AnyArray, column: AnyArray, value: AnyArray, shape: tuple[int, int]) -> scipy.sparse.csr_array:
    """Cells that are given twice are added up."""
    return scipy.sparse.csr_array((value, (row, column)), shape=shape)
