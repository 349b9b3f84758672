"""Streams of users with few and with many items."""

from __future__ import annotations

import numpy as np

from helpers.oracle import (
    make_block,
    make_stream,
)
from tacita.core.types import BlockStream

N_ITEMS = 12
UNEVEN = [[0, 3], [1, 2, 4, 7, 9], [5], [], [0, 1, 2, 3, 4, 5, 6], [11, 2, 6], [8]]


def uneven_stream() -> BlockStream:
    return make_stream(make_block(0, N_ITEMS, UNEVEN))


def random_stream(n_users: int, n_items: int, most: int) -> BlockStream:
    rng = np.random.default_rng(0)
    lists = [rng.choice(n_items, rng.integers(1, most), replace=False).tolist() for _ in range(n_users)]
    return make_stream(make_block(0, n_items, lists))
