"""Snapshots: the server's last tables, from which contrastive unlearning sees what is to be forgotten (spec B.3).

They still hold what was withdrawn, so that unlearning ends with none of them. The newest is the last; in a table from
before an item came, the item has its first row.
"""

from __future__ import annotations

import math

import numpy as np

from tacita.core.types import Arrays, Floats

TABLES = "snapshots"
TAKEN_AT = "snapshots_taken"


def compute_spacing(every: int, most: int, rounds: int) -> int:
    """Rounds between two snapshots; 0: as many as spread them over a block."""
    if every:
        return every
    return math.ceil(rounds / max(1, most))


def load_tables(state: Arrays, items: Floats) -> Floats:
    """(tables, items, width), grown for items that came later."""
    tables = state.get(TABLES)
    if tables is None:
        return np.zeros((0, *items.shape), np.float32)
    n_known = tables.shape[1]
    new_rows = items[n_known:]
    new_shape = (len(tables), *new_rows.shape)
    repeated = np.broadcast_to(new_rows, new_shape)
    return np.concatenate([tables, repeated], axis=1)


def append_table(state: Arrays, items: Floats, when: tuple[int, int], most: int) -> Arrays:
    """One snapshot more, of a block and round; the oldest goes where there are too many."""
    earlier = load_tables(state, items)
    no_moments = np.zeros((0, 2), np.int64)
    moments = state.get(TAKEN_AT, no_moments)
    new_moment = np.array([when])
    tables = np.concatenate([earlier, items[None]])
    moments = np.concatenate([moments, new_moment])
    return {**state, TABLES: tables[-most:], TAKEN_AT: moments[-most:]}


def drop_tables(state: Arrays) -> Arrays:
    return {name: array for name, array in state.items() if name not in (TABLES, TAKEN_AT)}


def snapshot_bytes(state: Arrays) -> int:
    """What they take up wherever they are written."""
    if TABLES not in state:
        return 0
    return int(state[TABLES].nbytes)
