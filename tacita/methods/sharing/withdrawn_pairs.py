"""How well withdrawn pairs of user and item can still be separated from others, by the item table alone.

The rule that stops unlearning watches it (sharing spec B.7). A user's vector is the mean row of the other items that
the user shared or withdrew; a withdrawn item is compared with an unshared one of about the same popularity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Floats, Longs, Ragged, SharedRecord
from tacita.kernels.cosine import normalise_rows
from tacita.kernels.hashing import uniforms
from tacita.methods.sharing.graph import SharedGraph

_TRIES = 8


@dataclass(frozen=True)
class WithdrawnPairs:
    """Withdrawn pairs, and all that their users ever shared."""

    lists: Ragged  # (users) everything, withdrawn or not
    row: Longs  # (pairs,) user
    item: Longs  # (pairs,) withdrawn
    order: Longs  # (items,) by how often they are still shared, popular last

    @staticmethod
    def of(withdrawn: SharedRecord, record: SharedRecord, n_items: int) -> WithdrawnPairs:
        stays = np.isin(record.sender, withdrawn.sender)
        everything = SharedRecord(
            np.concatenate([withdrawn.sender, record.sender[stays]]),
            np.concatenate([withdrawn.item, record.item[stays]]),
            np.concatenate([withdrawn.time, record.time[stays]]),
        )
        graph = SharedGraph.of(everything, n_items)
        row = np.searchsorted(graph.users, withdrawn.sender)
        item = withdrawn.item.astype(np.int64)
        popularity = np.bincount(record.item, minlength=n_items)
        order = np.argsort(popularity, kind="stable")
        return WithdrawnPairs(graph.lists, row, item, order)

    def draw_matched_items(self, key: np.uint64) -> Longs:
        """For each pair an unshared item of the same tenth in popularity; -1: none was drawn."""
        n_items = len(self.order)
        n_pairs = len(self.item)
        place = np.empty(n_items, np.int64)
        place[self.order] = np.arange(n_items)
        tenth = place[self.item] * 10 // n_items
        low = -(-tenth * n_items // 10)
        high = -(-(tenth + 1) * n_items // 10)
        numbers = np.arange(n_pairs, dtype=np.uint64)
        drawn = uniforms(key, numbers, _TRIES)
        offset = (drawn * (high - low)[:, None]).astype(np.int64)
        position = np.minimum(low[:, None] + offset, n_items - 1)
        items = self.order[position]
        owner = np.repeat(self.row, _TRIES)
        is_owned = self.lists.holds(owner, items.reshape(-1)).reshape(items.shape)
        first = np.argmin(is_owned, axis=1)
        pairs = np.arange(n_pairs)
        return np.where(is_owned[pairs, first], -1, items[pairs, first])

    def auc(self, table: Floats, key: np.uint64) -> float | None:
        """How often a withdrawn item is nearer to its user than another; None: nothing can be compared."""
        other = self.draw_matched_items(key)
        has_other = other >= 0
        has_vector = self.lists.counts()[self.row] > 1
        usable = has_other & has_vector
        if not usable.any():
            return None
        unit = np.empty(table.shape, np.float32)
        length = np.empty(len(table), np.float32)
        normalise_rows(table, unit, length)
        starts = self.lists.ptr[:-1]
        total = np.add.reduceat(table[self.lists.ids], starts, axis=0)
        without_item = total[self.row] - table[self.item]
        users = without_item[usable]
        withdrawn_score = (users * unit[self.item[usable]]).sum(1)
        other_score = (users * unit[other[usable]]).sum(1)
        is_nearer = withdrawn_score > other_score
        is_tied = withdrawn_score == other_score
        return float(np.mean(is_nearer + 0.5 * is_tied))
