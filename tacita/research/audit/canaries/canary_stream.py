"""Streams in which every user is a canary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tacita.core.draws import derive_keys
from tacita.core.types import Block, BlockStream, Ragged


def make_training_block(lists: Ragged, n_items: int, index: int = 0) -> Block:
    """One block of training items; every canary comes in the first."""
    n_users = len(lists)
    nothing = Ragged.empty(n_users)
    return Block(
        index=index,
        n_users=n_users,
        n_items=n_items,
        train=lists,
        valid=nothing,
        test=nothing,
        new_users=np.full(n_users, index == 0),
        n_rows=len(lists.ids),
    )


def make_stream(blocks: Iterable[Block], items: tuple[str, ...] | None = None) -> BlockStream:
    """A stream of blocks; items have numbers for names unless names are passed."""
    all_blocks = tuple(blocks)
    last = all_blocks[-1]
    users = name_canaries(last.n_users)
    if items is None:
        items = tuple(str(number) for number in range(last.n_items))
    return BlockStream(
        name="canaries",
        blocks=all_blocks,
        user_ids=users,
        item_ids=items,
        user_keys=derive_keys(users),
        item_keys=derive_keys(items),
        titles={},
        fingerprint="canaries",
    )


def name_canaries(n: int) -> tuple[str, ...]:
    return tuple(f"canary {number}" for number in range(n))
