"""The graph of items behind a sum: how it is normalised, its leading axes, and few entries of it.

Everything is sparse but the axes. Nothing here draws by chance: the same sum gives the same filter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse

from tacita.core.draws import Draws
from tacita.core.sparse import matrix_of_cells, matrix_of_rows
from tacita.core.types import AnyArray, Doubles, Floats, Longs
from tacita.kernels.hashing import normals
from tacita.kernels.pairs import find_row_thresholds, multiply_sparse

MAX_DENSE = 1024  # items of a graph whose axes are read from it as a dense matrix
BLOCK_WIDTH = 16  # axes that grow together: the fewer, the more steps the same room takes, and the better they are
OVERSAMPLING = 2.5  # directions that are looked at for each axis


class ItemGraph(NamedTuple):
    """D^-1/2 G D^-1/2, D the row sums of G, and the square roots of D."""

    matrix: scipy.sparse.csr_array  # (items, items) symmetric, single precision
    root: Doubles  # (items,) 0 where an item has no neighbour, not even itself


def build_item_graph(row: Longs, column: Longs, value: Doubles, n_items: int) -> ItemGraph:
    """From the lower triangle of G, row by row. Where a term is x x^T / |x|, D counts the people of each item."""
    own = row == column
    degree = np.bincount(row, weights=value, minlength=n_items)
    degree += np.bincount(column[~own], weights=value[~own], minlength=n_items)
    root = np.sqrt(np.maximum(degree, 0.0))
    scaled = (value / (root[row] * root[column])).astype(np.float32)
    ptr = np.searchsorted(row, np.arange(n_items + 1))
    lower = matrix_of_rows(ptr, column.astype(np.int32), scaled, n_items)
    diagonal = matrix_of_cells(row[own], row[own], scaled[own], (n_items, n_items))
    return ItemGraph((lower + lower.T.tocsr() - diagonal).tocsr(), root)


def leading_axes(matrix: scipy.sparse.csr_array, wanted: int) -> Floats:
    """(items, axes) eigenvectors of the largest eigenvalues of a symmetric matrix, as far as a block Krylov space
    has them: those near the last may be mixtures of what lies beside them."""
    n = matrix.shape[0]
    wanted = min(wanted, n)
    if n <= max(MAX_DENSE, 4 * wanted):
        _, vectors = scipy.linalg.eigh(matrix.toarray().astype(np.float64), subset_by_index=[n - wanted, n - 1])
        return np.ascontiguousarray(vectors[:, ::-1], np.float32)
    depth = max(4, int(np.ceil(OVERSAMPLING * wanted / BLOCK_WIDTH)))
    basis, image = (np.zeros((n, depth * BLOCK_WIDTH), np.float32) for _ in range(2))
    block = normals(Draws(0).public("filter-axes"), np.arange(n, dtype=np.uint64), BLOCK_WIDTH)
    for step in range(depth):
        own, done = slice(step * BLOCK_WIDTH, (step + 1) * BLOCK_WIDTH), basis[:, : step * BLOCK_WIDTH]
        for _ in range(2):  # once leaves some of what is there already
            block = scipy.linalg.qr(block - done @ (done.T @ block), mode="economic", check_finite=False)[0]
        basis[:, own] = block
        block = np.empty_like(basis[:, own], order="C")
        multiply_sparse(matrix.indptr, matrix.indices, matrix.data, np.ascontiguousarray(basis[:, own]), block)
        image[:, own] = block
    small = (basis.T @ image).astype(np.float64)
    size = len(small)
    _, vectors = scipy.linalg.eigh((small + small.T) / 2, subset_by_index=[size - wanted, size - 1])
    return np.ascontiguousarray(basis @ vectors[:, ::-1].astype(np.float32))


def keep_largest(matrix: scipy.sparse.csr_array, keep: int) -> scipy.sparse.csr_array:
    """The matrix without its diagonal and with the `keep` largest entries of each column only; 0: all."""
    row = np.repeat(np.arange(matrix.shape[0], dtype=np.int32), np.diff(matrix.indptr))
    stays: AnyArray = row != matrix.indices
    if keep:
        size = np.where(stays, np.abs(matrix.data), 0.0).astype(np.float32)
        stays &= size >= find_row_thresholds(matrix.indptr, size, keep)[row] * (
            1 - 1e-6
        )  # as large up to rounding is as large
    ptr = np.append(0, np.cumsum(stays))[matrix.indptr]
    cut = matrix_of_rows(ptr, matrix.indices[stays], matrix.data[stays], matrix.shape[1])
    return cut if not keep else cut.T.tocsr()  # it is symmetric, so rows were cut for columns
