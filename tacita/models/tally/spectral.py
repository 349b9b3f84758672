"""The graph of items behind a sum: how it is normalised, its leading axes, and few entries of it.

Everything is sparse but the axes. Nothing here draws by chance: the same sum gives the same filter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse

from tacita.core.draws import Draws
from tacita.core.sparse import matrix_of_rows
from tacita.core.types import Doubles, Floats
from tacita.kernels.hashing import draw_normals
from tacita.kernels.pairs import multiply_sparse
from tacita.kernels.triangles import (
    LowerRows,
    keep_largest_per_row,
    mirror_lower_rows,
    normalise_lower_rows,
    sum_symmetric_rows,
)

MAX_DENSE = 1024  # items of a graph whose axes are read from it as a dense matrix
BLOCK_WIDTH = 16  # axes that grow together: the fewer, the more steps the same room takes, and the better they are
OVERSAMPLING = 2.5  # directions that are looked at for each axis


class ItemGraph(NamedTuple):
    """D^-1/2 G D^-1/2, D the row sums of G, and the square roots of D."""

    matrix: scipy.sparse.csr_array  # (items, items) symmetric, single precision
    root: Doubles  # (items,) 0 where an item has no neighbour, not even itself


def build_item_graph(rows: LowerRows) -> ItemGraph:
    """From the lower triangle of G. Where a term is x x^T / |x|, D counts the users of each item."""
    degree = sum_symmetric_rows(rows)
    root = np.sqrt(np.maximum(degree, 0.0))
    scaled = normalise_lower_rows(rows, root)
    ptr, column, value = mirror_lower_rows(scaled)
    matrix = matrix_of_rows(ptr, column, value, len(root))
    return ItemGraph(matrix, root)


def find_leading_axes(matrix: scipy.sparse.csr_array, wanted: int) -> Floats:
    """(items, axes) eigenvectors of the largest eigenvalues of a symmetric matrix, as far as a block Krylov space
    has them: those near the last may be mixtures of what lies beside them."""
    n = matrix.shape[0]
    wanted = min(wanted, n)
    is_small = n <= max(MAX_DENSE, 4 * wanted)
    if is_small:
        dense = matrix.toarray().astype(np.float64)
        vectors = _find_largest_eigenvectors(dense, wanted)
        return np.ascontiguousarray(vectors, np.float32)
    n_directions = OVERSAMPLING * wanted
    n_blocks = np.ceil(n_directions / BLOCK_WIDTH)
    depth = max(4, int(n_blocks))
    basis, image = _build_krylov_basis(matrix, depth)
    small = (basis.T @ image).astype(np.float64)
    symmetric = (small + small.T) / 2
    vectors = _find_largest_eigenvectors(symmetric, wanted)
    axes = basis @ vectors.astype(np.float32)
    return np.ascontiguousarray(axes)


def _find_largest_eigenvectors(matrix: Doubles, wanted: int) -> Doubles:
    """The eigenvectors of the largest eigenvalues, the largest first."""
    n = len(matrix)
    places = [n - wanted, n - 1]
    _, vectors = scipy.linalg.eigh(matrix, subset_by_index=places)
    return np.asarray(vectors[:, ::-1])


def _build_krylov_basis(matrix: scipy.sparse.csr_array, depth: int) -> tuple[Floats, Floats]:
    """An orthonormal basis, block by block, and what the matrix makes of it."""
    n = matrix.shape[0]
    width = depth * BLOCK_WIDTH
    basis = np.zeros((n, width), np.float32)
    image = np.zeros((n, width), np.float32)
    key = Draws(0).public("filter-axes")
    rows = np.arange(n, dtype=np.uint64)
    block = draw_normals(key, rows, BLOCK_WIDTH)
    for start in range(0, width, BLOCK_WIDTH):
        own = slice(start, start + BLOCK_WIDTH)
        earlier = basis[:, :start]
        block = _orthonormalise(block, earlier)
        block = _orthonormalise(block, earlier)  # once leaves some of what is there already
        basis[:, own] = block
        columns = np.ascontiguousarray(basis[:, own])
        block = np.empty_like(columns)
        multiply_sparse(matrix.indptr, matrix.indices, matrix.data, columns, block)
        image[:, own] = block
    return basis, image


def _orthonormalise(block: Floats, earlier: Floats) -> Floats:
    """An orthonormal basis of what a block has beside the earlier directions."""
    heights = earlier.T @ block
    along = earlier @ heights
    vectors, _ = scipy.linalg.qr(block - along, mode="economic", check_finite=False)
    return np.asarray(vectors)


def keep_largest_per_column(matrix: scipy.sparse.csr_array, keep: int) -> scipy.sparse.csr_array:
    """A symmetric matrix without its diagonal and with the `keep` largest entries of each column only; 0: all."""
    ptr, column, value = keep_largest_per_row(matrix.indptr, matrix.indices, matrix.data, keep)
    rest = matrix_of_rows(ptr, column, value, matrix.shape[1])
    if not keep:
        return rest
    return rest.T.tocsr()  # rows were cut for columns
