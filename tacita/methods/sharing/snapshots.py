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
    n_tables = max(1, most)
    return math.ceil(rounds / n_tables)


def read_snapshot_tables(state: Arrays, items: Floats) -> Floats:
    """(tables, items, width), grown for items that came later."""
    tables = state.get(TABLES)
    if tables is None:
        shape = (0, *items.shape)
        return np.zeros(shape, np.float32)
    n_known = tables.shape[1]
    new_rows = items[n_known:]
    n_tables = len(tables)
    new_shape = (n_tables, *new_rows.shape)
    repeated = np.broadcast_to(new_rows, new_shape)
    return np.concatenate([tables, repeated], axis=1)


def with_snapshot_added(state: Arrays, items: Floats, when: tuple[int, int], most: int) -> Arrays:
    """One snapshot more, of a block and round; the oldest goes where there are too many."""
    earlier = read_snapshot_tables(state, items)
    shape = (0, 2)
    no_moments = np.zeros(shape, np.int64)
    moments = state.get(TAKEN_AT, no_moments)
    new_moment = np.array([when])
    table = items[None]
    tables = np.concatenate([earlier, table])
    moments = np.concatenate([moments, new_moment])
    last_tables = tables[-most:]
    last_moments = moments[-most:]
    return {**state, TABLES: last_tables, TAKEN_AT: last_moments}


def without_snapshots(state: Arrays) -> Arrays:
    remaining: Arrays = {}
    for name, array in state.items():
        if name not in (TABLES, TAKEN_AT):
            remaining[name] = array
    return remaining


def count_snapshot_bytes(state: Arrays) -> int:
    """What they take up wherever they are written."""
    if TABLES not in state:
        return 0
    return int(state[TABLES].nbytes)
