"""What is left out of a table before it is cut, each time with its reason, so that nothing shrinks in silence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, BlockStream, FilterEffect, Longs
from tacita.data.sources import Interactions

Size = tuple[int, int, int]
"""Rows, users, items."""


def filter_by_rating(table: Interactions, least: float | None) -> Longs:
    """The rows rated at least this; all of them where nothing is asked."""
    if least is None:
        return np.arange(len(table.user))
    if table.rating is None:
        raise TacitaError(f"{table.name} has no ratings; remove split.min_rating.")
    rows = np.flatnonzero(table.rating >= least)
    if len(rows) == 0:
        raise TacitaError(f"nothing of {table.name} is left after split.min_rating; lower it.")
    return rows


def filter_by_activity(table: Interactions, rows: Longs, least: int) -> Longs:
    """The rows of users who have at least so many of them; items are not asked."""
    rows = rows[np.bincount(table.user[rows], minlength=len(table.user_ids))[table.user[rows]] >= least]
    if len(rows) == 0:
        raise TacitaError(f"nobody in {table.name} has {least} interactions; lower split.min_user.")
    return rows


def filter_k_core(table: Interactions, rows: Longs, k: int) -> Longs:
    """Drop users and items with fewer than k rows until none is left to drop."""
    if k <= 1:
        return rows
    start = len(rows)
    while len(rows):
        per_user = np.bincount(table.user[rows], minlength=len(table.user_ids))
        per_item = np.bincount(table.item[rows], minlength=len(table.item_ids))
        keep = (per_user[table.user[rows]] >= k) & (per_item[table.item[rows]] >= k)
        if keep.all():
            return rows
        rows = rows[keep]
    raise TacitaError(
        f"nothing of {table.name} is left: no {k}-core in its {start:,} interactions; lower split.k_core."
    )


def measure_size(user: AnyArray, item: AnyArray) -> Size:
    return len(user), int(np.count_nonzero(np.bincount(user))), int(np.count_nonzero(np.bincount(item)))


def list_removals(sizes: Sequence[tuple[str, Size]]) -> tuple[FilterEffect, ...]:
    """The steps that took something, from the sizes before (first) and after each."""
    out = []
    for (_, before), (reason, after) in pairwise(sizes):
        if before != after:
            rows, users, items = zip(before, after)
            out.append(FilterEffect(reason, rows, users, items))
    return tuple(out)


CONTINUAL_PARTS = ("replay", "temporal-mean", "proximal", "proxies", "error-memory")
"""Parts of methods that lean on an earlier block."""


def list_data_notes(stream: BlockStream, parts: Sequence[str] = ()) -> list[str]:
    """What people should know of the data a run with these parts begins with, a line each."""
    return format_data_notes(stream.notes, stream.removed, len(stream.blocks), parts)


def format_data_notes(
    read: Sequence[str], removed: Sequence[FilterEffect], n_blocks: int, parts: Sequence[str]
) -> list[str]:
    """How it was read, what filtering took, and which parts have nothing to do on it."""
    notes = [*read, *([f"filtering: {format_removals(removed)}."] if removed else [])]
    idle = [name for name in parts if name in CONTINUAL_PARTS]
    if idle and n_blocks == 1:
        named = " and ".join(idle)
        notes.append(f"continual parts ({named}) act from the second block on; this data has one: they change nothing.")
    return notes


def format_removals(removed: Sequence[FilterEffect]) -> str:
    """What filtering took, and from what, in one line."""
    first, last = removed[0], removed[-1]
    before = f"{first.rows[0]:,} rows, {first.users[0]:,} users and {first.items[0]:,} items"
    after = f"{last.rows[1]:,} rows, {last.users[1]:,} users and {last.items[1]:,} items"
    steps = []
    for one in removed:
        lost = ((one.rows, "rows"), (one.users, "users"), (one.items, "items"))
        took = ", ".join(f"{was - now:,} {name}" for (was, now), name in lost if was > now)
        steps.append(f"{one.reason} took {took}")
    return f"{before} became {after}; {'; '.join(steps)}"
