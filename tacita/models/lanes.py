"""Lanes: rows in groups of one size, which towers score on all cores; no shape follows the cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tacita.core.types import AnyArray, Floats
from tacita.kernels.threads import threads_in_use
from tacita.models.scorer import Scorer, Tensors

TILE = 512  # items scored at once by models that are not affine in the item row
LANES = 32  # samples of one product in a tower: so small a product stays on one core and costs no waiting


def select_users(arrays: Tensors, users: AnyArray | int) -> Tensors:
    selected = {}
    for name, value in arrays.items():
        selected[name] = value[users]
    return selected


def as_one_group(arrays: Tensors) -> Tensors:
    group = {}
    for name, value in arrays.items():
        group[name] = value[None]
    return group


def score_tiles(backbone: Scorer, group: Tensors, heads: Tensors, tiles: Floats) -> Floats:
    """Logits of one group for the rows of all tiles, flat."""
    scored = []
    for tile in tiles:
        logits = backbone.compute_group_logits(group, heads, tile)
        scored.append(logits.reshape(-1))
    return join_arrays(scored)


def pad_rows(rows: Floats, multiple: int) -> Floats:
    """Rows filled up with zeros to a multiple of a number."""
    idle = -len(rows) % multiple
    return np.pad(rows, ((0, idle), (0, 0)))


def group_lanes(rows: Floats) -> Floats:
    """Rows in groups of `LANES`, the last filled up."""
    width = rows.shape[1]
    padded = pad_rows(rows, LANES)
    return padded.reshape(-1, LANES, width)


def lay_tiles(rows: Floats) -> Floats:
    """Whole tiles of rows as (tiles, groups, lanes, width)."""
    width = rows.shape[1]
    n_groups = TILE // LANES
    return rows.reshape(-1, n_groups, LANES, width)


def join_arrays(arrays: list[Floats]) -> Floats:
    if not arrays:
        return np.zeros(0, np.float32)
    return np.concatenate(arrays)


def map_threads(function: Callable[[int], Floats], numbers: Iterable[int]) -> list[Floats]:
    """The function of every number, on all cores."""
    with ThreadPoolExecutor(threads_in_use()) as pool:
        return list(pool.map(function, numbers))
