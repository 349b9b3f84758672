"""Snapshots: the server's last tables, from which contrastive unlearning sees what is to be forgotten (spec B.3).

They still hold what was withdrawn, so that unlearning ends with none of them. Newest last; a table from before an
item came has its first row.
"""

from __future__ import annotations

import math

import numpy as np

from tacita.core.types import Arrays, Floats

TABLES, TAKEN_AT = "snapshots", "snapshots_taken"


def compute_spacing(every: int, most: int, rounds: int) -> int:
    """Rounds between two snapshots; 0: as many as spread them over a block."""
    return every or math.ceil(rounds / max(1, most))


def load_tables(state: Arrays, items: Floats) -> Floats:
    """(tables, items, width), grown for items that came later."""
    tables = state.get(TABLES)
    if tables is None:
        return np.zeros((0, *items.shape), np.float32)
    new = items[tables.shape[1] :]
    return np.concatenate([tables, np.broadcast_to(new, (len(tables), *new.shape))], axis=1)


def append_table(state: Arrays, items: Floats, when: tuple[int, int], most: int) -> Arrays:
    """One snapshot more, of a block and round; the oldest goes where there are too many."""
    tables = np.concatenate([load_tables(state, items), items[None]])[-most:]
    taken = np.concatenate([state.get(TAKEN_AT, np.zeros((0, 2), np.int64)), np.array([when])])[-most:]
    return {**state, TABLES: tables, TAKEN_AT: taken}


def drop_tables(state: Arrays) -> Arrays:
    return {name: v for name, v in state.items() if name not in (TABLES, TAKEN_AT)}


def snapshot_bytes(state: Arrays) -> int:
    """What they take up wherever they are written."""
    return int(state[TABLES].nbytes) if TABLES in state else 0
