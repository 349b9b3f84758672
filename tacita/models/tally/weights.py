"""B, the matrix of tally: from the inverse to what is sent and stored, and what a device computes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.sparse import matrix_of_rows
from tacita.core.types import AnyArray, Arrays, Doubles, Floats, Longs, Ragged
from tacita.kernels.pairs import dense_products, sparse_products
from tacita.models.tally.solver import TILE, zero_diagonal_columns
from tacita.models.tally.sums import PairShape


def compute_weights(inverse: Doubles, gram: Doubles, where: Longs | None, shape: PairShape, keep: int) -> Any:
    """B: zero-diagonal columns for the inputs, plain ridge columns for everything else; few entries a column."""
    tiles = []
    cut = 0 < keep < shape.n_inputs / 2  # a matrix that is not much cut is smaller as it is
    single = inverse.astype(np.float32) if shape.inputs is not None else inverse
    for lo in range(0, shape.n_items, TILE):
        hi = min(lo + TILE, shape.n_items)
        if shape.inputs is None or where is None:
            tile: AnyArray = zero_diagonal_columns(inverse, lo, hi)
        else:
            tile = np.dot(shape.build_columns(where, gram, lo, hi).astype(np.float32), single)
            first, last = np.searchsorted(shape.inputs, [lo, hi])
            tile[shape.inputs[first:last] - lo] = zero_diagonal_columns(inverse, first, last)
        tile = sparsify_columns(tile, keep).astype(np.float32)
        tiles.append(scipy.sparse.csr_array(tile) if cut else tile)
    return scipy.sparse.vstack(tiles, format="csr").T.tocsr() if cut else np.ascontiguousarray(np.vstack(tiles).T)


def sparsify_columns(columns: AnyArray, keep: int) -> AnyArray:
    """Only the `keep` largest entries of each column, given as rows; as large up to rounding is as large."""
    width = columns.shape[1]
    if keep == 0 or keep >= width:
        return columns
    size = np.abs(columns)
    cut = np.partition(size, width - keep, axis=1)[:, width - keep]
    columns[size < cut[:, None] * (1 - 1e-6)] = 0.0
    return columns


def pack_weights(weights: Any) -> Arrays:
    """B as it is sent and stored: whole, or row by row the columns that are not zero."""
    none = np.zeros(0, np.int32)
    known = np.array([weights.shape[1]], np.int32)
    if scipy.sparse.issparse(weights):
        ptr, column = weights.indptr.astype(np.int32), weights.indices.astype(np.int32)
        return {"weights": weights.data, "column": column, "ptr": ptr, "known": known}
    return {"weights": weights, "column": none, "ptr": none, "known": known}


def unpack_weights(heads: Arrays) -> Any:
    """B (inputs, known items) from what was sent, dense or sparse."""
    if heads["weights"].ndim == 2:
        return heads["weights"]
    return matrix_of_rows(heads["ptr"], heads["column"], heads["weights"], int(heads["known"][0]))


def unpack_dense_weights(heads: Arrays) -> Floats:
    found = unpack_weights(heads)
    return np.asarray(found.toarray() if scipy.sparse.issparse(found) else found)


def read_column(heads: Arrays, item: int, n_items: int) -> Floats:
    """What every item says for one item; items that are no input, or came too late for B, say nothing."""
    matrix, said = unpack_weights(heads), np.zeros(n_items, np.float32)
    if item >= matrix.shape[1]:
        return said
    column = matrix[:, [item]]
    dense = np.asarray(column.toarray() if scipy.sparse.issparse(column) else column, np.float32)[:, 0]
    said[heads["inputs"] if len(heads["inputs"]) else slice(0, len(dense))] = dense
    return said


def recency_weights(lists: Ragged, recency: float) -> Floats:
    """What each entry counts: the newest of a list 1, one that is `recency` items older 1/e."""
    age = np.repeat(lists.ptr[1:], lists.counts()) - 1 - np.arange(len(lists.ids))
    weight = np.exp(-age / recency) if recency else np.ones(len(lists.ids))
    return weight.astype(np.float32)


def add_products(lists: Ragged, weight: Floats, heads: Arrays, scores: Floats) -> None:
    """Add x B to the scores, x a list with weights; items that are no input, or came too late for B, say nothing."""
    inputs, dense = heads["inputs"], heads["weights"].ndim == 2
    known = heads["weights"].shape[1] if dense else int(heads["known"][0])
    row_of = np.full(scores.shape[1], -1, np.int32)
    row_of[inputs if len(inputs) else slice(0, known)] = np.arange(len(inputs) or known)
    if dense:
        dense_products(lists.ptr, lists.ids, weight, row_of, heads["weights"], scores)
    else:
        column = heads["column"].view(np.uint32)  # never negative, which the loop need not check then
        sparse_products(lists.ptr, lists.ids, weight, row_of, heads["ptr"], column, heads["weights"], scores)
