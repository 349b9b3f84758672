"""Whether heads that a server sent are safe to compute with: devices read them without further checks."""

from __future__ import annotations

import numpy as np

from tacita.core.ragged import are_borders
from tacita.core.types import AnyArray, Arrays

MOST_WEIGHT = 1e6  # of an entry of B that a device computes with: what a solve gives lies far below
MOST_REPEAT = 10.0  # of what is added to the score of earlier items


def are_scalars(heads: Arrays, *names: str) -> bool:
    """Whether each is one number."""
    return all(heads[name].shape == (1,) for name in names)


def is_bounded(values: AnyArray, most: float) -> bool:
    """Whether no number is larger, or none at all."""
    return bool((np.abs(values) <= most).all())


def settings_fit(heads: Arrays) -> bool:
    """Whether recency and repeat can be computed with."""
    recency = heads["recency"][0]
    repeat = heads["repeat"][0]
    return bool(recency >= 0 and abs(repeat) <= MOST_REPEAT)


def inputs_fit(inputs: AnyArray, n_items: int) -> bool:
    """Whether inputs are items of the catalogue, ascending."""
    if inputs.ndim != 1 or len(inputs) > n_items:
        return False
    if len(inputs) == 0:
        return True
    ascends = inputs[1:] > inputs[:-1]  # a difference could run over and look right
    if not ascends.all():
        return False
    first = inputs[0]
    last = inputs[-1]
    return bool(first >= 0 and last < n_items)


def matrix_fits(heads: Arrays, n_items: int) -> bool:
    """Whether B, its inputs and its settings fit: its places must lie inside it."""
    if not are_scalars(heads, "known", "recency", "repeat"):
        return False
    inputs = heads["inputs"]
    if not inputs_fit(inputs, n_items):
        return False
    known = int(heads["known"][0])
    if not 0 <= known <= n_items:
        return False
    if not settings_fit(heads):
        return False
    weights = heads["weights"]
    if not is_bounded(weights, MOST_WEIGHT):
        return False
    n_rows = len(inputs) or known
    if weights.ndim == 2:
        return _dense_fits(heads, n_rows, known)
    return _sparse_fits(heads, n_rows, known)


def _dense_fits(heads: Arrays, n_rows: int, known: int) -> bool:
    shape = heads["weights"].shape
    if has_sparse_places(heads):
        return False
    is_empty = shape == (0, 0) and known == 0
    return is_empty or shape == (n_rows, known)


def has_sparse_places(heads: Arrays) -> bool:
    """Whether the heads name places of a sparse matrix."""
    return heads["column"].size > 0 or heads["ptr"].size > 0


def _sparse_fits(heads: Arrays, n_rows: int, known: int) -> bool:
    weights = heads["weights"]
    column = heads["column"]
    ptr = heads["ptr"]
    is_flat = weights.ndim == column.ndim == ptr.ndim == 1
    if not is_flat:
        return False
    n_entries = len(column)
    if len(weights) != n_entries or len(ptr) != n_rows + 1:
        return False
    if not are_borders(ptr, n_entries):
        return False
    if n_entries == 0:
        return True
    lowest = column.min()
    highest = column.max()
    return bool(lowest >= 0 and highest < known)


def private_heads_fit(heads: Arrays, n_items: int, most_inputs: int) -> bool:
    """Whether B between the inputs, and in what terms devices encode theirs, fit."""
    inputs = heads["inputs"]
    k = inputs.size
    if not _private_shapes_fit(heads, k):
        return False
    if k > most_inputs or not inputs_fit(inputs, n_items):
        return False
    if heads["liked"].size > n_items:
        return False
    if not settings_fit(heads):
        return False
    n_releases = heads["released"][1]
    if n_releases < 0:
        return False
    for name in ("weights", "scale", "centre", "liked"):
        if not is_bounded(heads[name], MOST_WEIGHT):
            return False
    if k == 0:
        return True
    length = float(np.linalg.norm(heads["centre"]))
    return abs(length - 1) < 1e-6


def _private_shapes_fit(heads: Arrays, k: int) -> bool:
    if not are_scalars(heads, "known", "recency", "repeat"):
        return False
    if heads["released"].shape != (2,) or heads["liked"].ndim != 1:
        return False
    if has_sparse_places(heads):
        return False
    for name in ("inputs", "scale", "centre"):
        if heads[name].shape != (k,):
            return False
    return square_fits(heads["weights"], k)


def square_fits(matrix: AnyArray, k: int) -> bool:
    """Whether a matrix is between the inputs, or empty."""
    return matrix.shape in ((0, 0), (k, k))
