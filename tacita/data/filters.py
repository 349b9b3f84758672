"""Filters that shrink a table before it is split; each removal is reported with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tacita.core.config import SplitConfig
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, BlockStream, FilterEffect, Longs
from tacita.data.sources import Interactions

Size = tuple[int, int, int]
"""Rows, users, items."""

SizesByReason = list[tuple[str, Size]]
"""The size before filtering, then the reason of each filter and the size after it."""


def filter_rows(table: Interactions, config: SplitConfig) -> tuple[Longs, SizesByReason]:
    """The remaining rows, and the sizes before and after each filter."""
    full_size = measure_table_size(table.user, table.item)
    sizes = [("", full_size)]

    def note_size(reason: str) -> None:
        user = table.user[rows]
        item = table.item[rows]
        size = measure_table_size(user, item)
        sizes.append((reason, size))

    least = config.min_rating
    rows = filter_by_rating(table, least)
    if least is not None:
        note_size(f"the least rating of {least:g} (split.min_rating)")
    if config.min_user > 1:
        rows = filter_by_activity(table, rows, config.min_user)
        note_size(f"users with fewer than {config.min_user} (split.min_user)")
    core = config.k_core or 0
    rows = filter_k_core(table, rows, core)
    note_size(f"the {core}-core (split.k_core)")
    return rows, sizes


def filter_by_rating(table: Interactions, least: float | None) -> Longs:
    """The rows rated at least this; all of them without a least rating."""
    if least is None:
        return np.arange(len(table.user))
    if table.rating is None:
        raise TacitaError(f"{table.name} has no ratings; remove split.min_rating.")
    is_liked = table.rating >= least
    rows = np.flatnonzero(is_liked)
    if len(rows) == 0:
        raise TacitaError(f"nothing of {table.name} is left after split.min_rating; lower it.")
    return rows


def filter_by_activity(table: Interactions, rows: Longs, least: int) -> Longs:
    """The rows of users who have at least so many of them; items do not count."""
    user = table.user[rows]
    per_user = np.bincount(user)
    is_active = per_user[user] >= least
    rows = rows[is_active]
    if len(rows) == 0:
        raise TacitaError(f"nobody in {table.name} has {least} interactions; lower split.min_user.")
    return rows


def filter_k_core(table: Interactions, rows: Longs, k: int) -> Longs:
    """Drop users and items with fewer than k rows until every remaining one has k."""
    if k <= 1:
        return rows
    start = len(rows)
    while len(rows):
        user = table.user[rows]
        item = table.item[rows]
        per_user = np.bincount(user)
        per_item = np.bincount(item)
        keep = per_user[user] >= k
        keep &= per_item[item] >= k
        if keep.all():
            return rows
        rows = rows[keep]
    raise TacitaError(
        f"nothing of {table.name} is left: no {k}-core in its {start:,} interactions; lower split.k_core."
    )


def measure_table_size(user: AnyArray, item: AnyArray) -> Size:
    per_user = np.bincount(user)
    per_item = np.bincount(item)
    n_users = int(np.count_nonzero(per_user))
    n_items = int(np.count_nonzero(per_item))
    return len(user), n_users, n_items


def list_filter_effects(sizes: Sequence[tuple[str, Size]]) -> tuple[FilterEffect, ...]:
    """The steps that removed something, from the sizes before (first) and after each."""
    removals = []
    for (_, before), (reason, after) in pairwise(sizes):
        if before != after:
            rows, users, items = zip(before, after)
            effect = FilterEffect(reason, rows, users, items)
            removals.append(effect)
    return tuple(removals)


CONTINUAL_PARTS = ("replay", "temporal-mean", "proximal", "proxies", "error-memory")
"""Parts of methods that lean on an earlier block."""


def list_data_notes(stream: BlockStream, parts: Sequence[str] = ()) -> list[str]:
    """What people should know of the data a run with these parts begins with, a line each."""
    n_blocks = len(stream.blocks)
    return format_data_notes(stream.notes, stream.removed, n_blocks, parts)


def format_data_notes(
    read: Sequence[str], removed: Sequence[FilterEffect], n_blocks: int, parts: Sequence[str]
) -> list[str]:
    """How the data was read, what filtering removed, and which parts have nothing to do on it."""
    notes = list(read)
    if removed:
        notes.append(f"filtering: {format_removals(removed)}.")
    idle_parts = [name for name in parts if name in CONTINUAL_PARTS]
    if idle_parts and n_blocks == 1:
        names = " and ".join(idle_parts)
        notes.append(f"continual parts ({names}) act from the second block on; this data has one: they change nothing.")
    return notes


def format_removals(removed: Sequence[FilterEffect]) -> str:
    """What filtering removed, and from what, in one line."""
    before = _format_size(removed[0], 0)
    after = _format_size(removed[-1], 1)
    steps = []
    for effect in removed:
        losses = []
        changes = {"rows": effect.rows, "users": effect.users, "items": effect.items}
        for name, (old, new) in changes.items():
            n_lost = old - new
            if n_lost > 0:
                losses.append(f"{n_lost:,} {name}")
        listed = ", ".join(losses)
        steps.append(f"{effect.reason} took {listed}")
    reasons = "; ".join(steps)
    return f"{before} became {after}; {reasons}"


def _format_size(effect: FilterEffect, side: int) -> str:
    """The size before (0) or after (1) a filter."""
    rows = effect.rows[side]
    users = effect.users[side]
    items = effect.items[side]
    return f"{rows:,} rows, {users:,} users and {items:,} items"
