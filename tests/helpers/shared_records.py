"""Records of shared items, and item tables."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, Floats, SharedRecord, make_single_list

N_ITEMS, DIM = 4, 5


def record_of_edges(edges: list[tuple[int, int]]) -> SharedRecord:
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    return SharedRecord(pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.int32), np.arange(len(edges), dtype=float))


def share_items(record: SharedRecord, sender: int, items: AnyArray, time: float) -> SharedRecord:
    """The record with more items of one sender."""
    senders, lists = make_single_list(sender, np.unique(items))
    return record.with_lists(senders, lists, time)


def random_record(n_users: int, n_items: int, seed: int = 0) -> SharedRecord:
    rng = np.random.default_rng(seed)
    lists = [rng.choice(n_items, rng.integers(1, n_items // 2), replace=False) for _ in range(n_users)]
    return record_of_edges([(3 * u + 1, int(i)) for u, entry in enumerate(lists) for i in entry])


def random_table(n_items: int = N_ITEMS, dim: int = DIM, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).normal(size=(n_items, dim)).astype(np.float32)
