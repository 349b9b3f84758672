"""How well withdrawn pairs of user and item can still be separated from others, by the item table alone.

The rule that stops unlearning watches it (sharing spec B.7). A user's vector is the mean row of the other items that
the user shared or withdrew; a withdrawn item is compared with an unshared one of about the same popularity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.types import Bools, Floats, Longs, Ragged, SharedRecord
from tacita.kernels.cosine import normalise_rows
from tacita.kernels.hashing import draw_uniforms
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
    def from_record(withdrawn: SharedRecord, record: SharedRecord, n_items: int) -> WithdrawnPairs:
        stays = np.isin(record.sender, withdrawn.sender)
        remaining_sender = record.sender[stays]
        remaining_item = record.item[stays]
        remaining_time = record.time[stays]
        everything = SharedRecord(
            np.concatenate([withdrawn.sender, remaining_sender]),
            np.concatenate([withdrawn.item, remaining_item]),
            np.concatenate([withdrawn.time, remaining_time]),
        )
        graph = SharedGraph.from_record(everything, n_items)
        row = np.searchsorted(graph.users, withdrawn.sender)
        item = withdrawn.item.astype(np.int64)
        popularity = np.bincount(record.item, minlength=n_items)
        order = np.argsort(popularity, kind="stable")
        return WithdrawnPairs(graph.lists, row, item, order)

    def draw_matched_items(self, key: np.uint64) -> Longs:
        """For each pair an unshared item of the same tenth in popularity; -1: none was drawn."""
        n_pairs = len(self.item)
        items = self._draw_similar_items(key)
        owner = np.repeat(self.row, _TRIES)
        drawn_items = items.reshape(-1)
        is_owned = self.lists.holds(owner, drawn_items)
        is_owned = is_owned.reshape(items.shape)
        pairs = np.arange(n_pairs)
        first = np.argmin(is_owned, axis=1)
        first_item = items[pairs, first]
        has_none = is_owned[pairs, first]
        return np.where(has_none, -1, first_item)

    def _draw_similar_items(self, key: np.uint64) -> Longs:
        """(pairs, tries) items of the same tenth in popularity."""
        n_items = len(self.order)
        n_pairs = len(self.item)
        place = np.empty(n_items, np.int64)
        ranks = np.arange(n_items)
        place[self.order] = ranks
        rank = place[self.item]
        tenth = rank * 10 // n_items
        next_tenth = tenth + 1
        negative = -tenth * n_items
        low = -(negative // 10)
        next_negative = -next_tenth * n_items
        high = -(next_negative // 10)
        size = high - low
        numbers = np.arange(n_pairs, dtype=np.uint64)
        drawn = draw_uniforms(key, numbers, _TRIES)
        scaled = drawn * size[:, None]
        offset = scaled.astype(np.int64)
        position = low[:, None] + offset
        position = np.minimum(position, n_items - 1)
        return np.asarray(self.order[position])

    def compute_auc(self, table: Floats, key: np.uint64) -> float | None:
        """How often a withdrawn item is nearer to its user than another; None: nothing can be compared."""
        other = self.draw_matched_items(key)
        list_lengths = self.lists.counts()
        has_vector = list_lengths[self.row] > 1
        has_other = other >= 0
        usable = has_other & has_vector
        if not usable.any():
            return None
        users = self._sum_other_item_rows(table, usable)
        unit = np.empty(table.shape, np.float32)
        n_items = len(table)
        length = np.empty(n_items, np.float32)
        normalise_rows(table, unit, length)
        withdrawn_rows = unit[self.item[usable]]
        other_rows = unit[other[usable]]
        withdrawn_score = (users * withdrawn_rows).sum(1)
        other_score = (users * other_rows).sum(1)
        is_nearer = withdrawn_score > other_score
        is_tied = withdrawn_score == other_score
        wins = is_nearer + 0.5 * is_tied
        return float(np.mean(wins))

    def _sum_other_item_rows(self, table: Floats, usable: Bools) -> Floats:
        """For some pairs, the sum of the rows of the user's other items."""
        lists = self.lists
        starts = lists.ptr[:-1]
        rows = table[lists.ids]
        total = np.add.reduceat(rows, starts, axis=0)
        own_row = table[self.item]
        own_total = total[self.row]
        without_item: Floats = own_total - own_row
        return without_item[usable]
