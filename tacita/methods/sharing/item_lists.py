"""Lists of items, one per user: which items two of them share, their union and difference, the mean of their rows."""

from __future__ import annotations

import numpy as np

from tacita.core.types import Bools, Floats, Ragged
from tacita.kernels.membership import mark_listed


def mark_listed_entries(lists: Ragged, others: Ragged, n_items: int) -> Bools:
    """Which entries of the lists are also in the other list of the same user."""
    return mark_listed(n_items, lists.ptr, lists.ids, others.ptr, others.ids)


def subtract_lists(lists: Ragged, removed: Ragged, n_items: int) -> Ragged:
    is_removed = mark_listed_entries(lists, removed, n_items)
    return lists.filter_entries(~is_removed)


def merge_lists(lists: Ragged, more: Ragged, n_items: int) -> Ragged:
    new = subtract_lists(more, lists, n_items)
    return lists.join_rows(new)


def deduplicate_items(lists: Ragged, n_items: int) -> Ragged:
    """Every item of a list once, where it comes first, and no other column; only items of the catalogue."""
    ids = lists.ids
    row = lists.rows().astype(np.int64)
    pairs = row * n_items
    pairs += ids
    _, first = np.unique(pairs, return_index=True)
    stays = np.zeros(len(pairs), bool)
    stays[first] = True
    stays &= ids >= 0
    stays &= ids < n_items
    items = Ragged(lists.ptr, ids)
    return items.filter_entries(stays)


def average_item_rows(lists: Ragged, table: Floats) -> Floats:
    """The mean of the rows in each list; none of the lists is empty."""
    starts = lists.ptr[:-1]
    rows = table[lists.ids]
    totals = np.add.reduceat(rows, starts, axis=0)
    counts = lists.counts()
    means = totals / counts[:, None]
    return np.asarray(means, np.float32)
