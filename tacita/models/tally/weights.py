"""B, the matrix of tally: from the inverse to what the server sends and stores, and what a device computes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Arrays, Doubles, Floats, Ints, Longs, Ragged
from tacita.kernels.pairs import add_dense_products, add_sparse_products
from tacita.models.tally.solver import TILE, solve_diagonal_columns
from tacita.models.tally.sums import PairShape


def compute_weights(inverse: Doubles, gram: Doubles, where: Longs | None, shape: PairShape, keep: int) -> Any:
    """B: zero-diagonal columns for the inputs, plain ridge columns for everything else; few entries a column."""
    if shape.inputs is None or where is None:
        return _compute_whole_weights(inverse, shape.n_items, keep)
    single = inverse.astype(np.float32)
    columns = ColumnTiles(keep, shape.n_inputs)
    for lo in range(0, shape.n_items, TILE):
        hi = min(lo + TILE, shape.n_items)
        counts = shape.build_columns(where, gram, lo, hi)
        tile = np.dot(counts.astype(np.float32), single)
        first, last = np.searchsorted(shape.inputs, [lo, hi])
        own = shape.inputs[first:last] - lo
        tile[own] = solve_diagonal_columns(inverse, first, last)
        columns.append_tile(tile)
    return columns.join_tiles()


def _compute_whole_weights(inverse: Doubles, n_items: int, keep: int) -> Any:
    """B with all items as inputs."""
    columns = ColumnTiles(keep, n_items)
    for lo in range(0, n_items, TILE):
        hi = min(lo + TILE, n_items)
        columns.append_tile(solve_diagonal_columns(inverse, lo, hi))
    return columns.join_tiles()


class ColumnTiles:
    """The columns of a matrix, tile by tile as rows, of which few entries stay; sparse where that is smaller."""

    def __init__(self, keep: int, n_rows: int) -> None:
        self.keep = keep
        self.is_sparse = 0 < keep < n_rows / 2  # a matrix that is not much cut is smaller as it is
        self.tiles: list[Any] = []

    def append_tile(self, tile: AnyArray) -> None:
        rows = sparsify_columns(tile, self.keep).astype(np.float32)
        if self.is_sparse:
            rows = scipy.sparse.csr_array(rows)
        self.tiles.append(rows)

    def join_tiles(self) -> Any:
        if not self.is_sparse:
            whole = np.vstack(self.tiles)
            return np.ascontiguousarray(whole.T)
        columns = scipy.sparse.vstack(self.tiles, format="csr")
        return columns.T.tocsr()


def sparsify_columns(columns: AnyArray, keep: int) -> AnyArray:
    """Only the `keep` largest entries of each column, given as rows; as large up to rounding is as large."""
    width = columns.shape[1]
    if keep == 0 or keep >= width:
        return columns
    size = np.abs(columns)
    rank = width - keep
    partitioned = np.partition(size, rank, axis=1)
    smallest = partitioned[:, rank]
    threshold = smallest[:, None] * (1 - 1e-6)
    columns[size < threshold] = 0.0
    return columns


def pack_weights(weights: Any) -> Arrays:
    """B as the server sends and stores it: whole, or row by row the columns that are not zero."""
    n_items = weights.shape[1]
    known = np.array([n_items], np.int32)
    if scipy.sparse.issparse(weights):
        ptr = weights.indptr.astype(np.int32)
        column = weights.indices.astype(np.int32)
        return {"weights": weights.data, "column": column, "ptr": ptr, "known": known}
    none = np.zeros(0, np.int32)
    return {"weights": weights, "column": none, "ptr": none, "known": known}


def unpack_weights(heads: Arrays) -> Any:
    """B (inputs, known items) as it was sent, dense or sparse."""
    weights = heads["weights"]
    if weights.ndim == 2:
        return weights
    known = int(heads["known"][0])
    return matrix_of_rows(heads["ptr"], heads["column"], weights, known)


def unpack_dense_weights(heads: Arrays) -> Floats:
    return _to_dense(unpack_weights(heads))


def _to_dense(matrix: Any) -> Floats:
    if scipy.sparse.issparse(matrix):
        matrix = matrix.toarray()
    return np.asarray(matrix)


def read_item_column(heads: Arrays, item: int, n_items: int) -> Floats:
    """The weight of every item for one item; 0 for items that are no input, or came too late for B."""
    matrix = unpack_weights(heads)
    weights = np.zeros(n_items, np.float32)
    if item >= matrix.shape[1]:
        return weights
    columns = _to_dense(matrix[:, [item]])
    column = columns[:, 0]
    rows = _list_input_items(heads["inputs"], len(column))
    weights[rows] = column.astype(np.float32)
    return weights


def _list_input_items(inputs: Ints, n_items: int) -> Any:
    """The items that B has a row for: the inputs, or the first items where all are inputs."""
    if len(inputs):
        return inputs
    return slice(0, n_items)


def compute_recency_weights(lists: Ragged, recency: float) -> Floats:
    """What each entry counts: the newest of a list 1, one that is `recency` items older 1/e."""
    n_entries = len(lists.ids)
    if not recency:
        return np.ones(n_entries, np.float32)
    ages = count_entry_ages(lists)
    weight = np.exp(-ages / recency)
    return weight.astype(np.float32)


def count_entry_ages(lists: Ragged) -> Longs:
    """How many entries of the same list are newer than each entry."""
    ends = np.repeat(lists.ptr[1:], lists.counts())
    places = np.arange(len(lists.ids))
    return ends - 1 - places


def add_products(lists: Ragged, weight: Floats, heads: Arrays, scores: Floats) -> None:
    """Add x B to the scores, x a list with weights; items that are no input, or came too late for B, add nothing."""
    inputs = heads["inputs"]
    weights = heads["weights"]
    is_dense = weights.ndim == 2
    known = int(heads["known"][0])
    if is_dense:
        known = weights.shape[1]
    n_rows = len(inputs) or known
    n_items = scores.shape[1]
    row_of = np.full(n_items, -1, np.int32)
    rows = _list_input_items(inputs, known)
    row_of[rows] = np.arange(n_rows)
    if is_dense:
        add_dense_products(lists.ptr, lists.ids, weight, row_of, weights, scores)
    else:
        column = heads["column"].view(np.uint32)  # never negative, which the loop need not check then
        add_sparse_products(lists.ptr, lists.ids, weight, row_of, heads["ptr"], column, weights, scores)
