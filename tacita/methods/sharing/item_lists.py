"""Lists of items, one per user: which items two of them share, their union and difference, the mean of their rows."""

from __future__ import annotations

import numpy as np

from tacita.core.types import Bools, Floats, Ragged
from tacita.kernels.membership import mark_listed


def find_listed(lists: Ragged, others: Ragged, n_items: int) -> Bools:
    """Which entries of the lists are also in the other list of the same user."""
    return mark_listed(n_items, lists.ptr, lists.ids, others.ptr, others.ids)


def subtract_lists(lists: Ragged, removed: Ragged, n_items: int) -> Ragged:
    is_removed = find_listed(lists, removed, n_items)
    return lists.filter_entries(~is_removed)


def merge_lists(lists: Ragged, more: Ragged, n_items: int) -> Ragged:
    new = subtract_lists(more, lists, n_items)
    return lists.join_rows(new)


def deduplicate_items(lists: Ragged, n_items: int) -> Ragged:
    """Every item of a list once, where it comes first, and no other column; only items of the catalogue."""
    row_starts = lists.rows().astype(np.int64) * n_items
    pairs = row_starts + lists.ids
    _, first = np.unique(pairs, return_index=True)
    is_first = np.zeros(len(pairs), bool)
    is_first[first] = True
    in_catalogue = (lists.ids >= 0) & (lists.ids < n_items)
    items = Ragged(lists.ptr, lists.ids)
    return items.filter_entries(is_first & in_catalogue)


def mean_rows(lists: Ragged, table: Floats) -> Floats:
    """The mean of the rows in each list; none of the lists is empty."""
    starts = lists.ptr[:-1]
    totals = np.add.reduceat(table[lists.ids], starts, axis=0)
    counts = lists.counts()[:, None]
    return np.asarray(totals / counts, np.float32)
