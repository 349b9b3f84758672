"""How well withdrawn pairs of person and item can still be told from others, by the item table alone.

The rule that stops unlearning watches it (sharing spec B.7). A person's vector is the mean row of the other items that
they shared or withdrew; a withdrawn item is compared with one that they did not share, about as popular.
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
    """Withdrawn pairs, and all that their people ever shared."""

    lists: Ragged  # (people) everything, withdrawn or not
    row: Longs  # (pairs,) person
    item: Longs  # (pairs,) withdrawn
    order: Longs  # (items,) by how often they are still shared, popular last

    @staticmethod
    def of(gone: SharedRecord, record: SharedRecord, n_items: int) -> WithdrawnPairs:
        mine = np.isin(record.sender, gone.sender)
        everything = SharedRecord(
            np.concatenate([gone.sender, record.sender[mine]]),
            np.concatenate([gone.item, record.item[mine]]),
            np.concatenate([gone.time, record.time[mine]]),
        )
        graph = SharedGraph.of(everything, n_items)
        row = np.searchsorted(graph.users, gone.sender)
        popular = np.bincount(record.item, minlength=n_items)
        return WithdrawnPairs(graph.lists, row, gone.item.astype(np.int64), np.argsort(popular, kind="stable"))

    def draw_matched_items(self, key: np.uint64) -> Longs:
        """For each pair an item of the same tenth in popularity that the person did not share; -1: none was found."""
        n = len(self.order)
        place = np.empty(n, np.int64)
        place[self.order] = np.arange(n)
        tenth = place[self.item] * 10 // n
        low, high = -(-tenth * n // 10), -(-(tenth + 1) * n // 10)
        drawn = uniforms(key, np.arange(len(self.item), dtype=np.uint64), _TRIES)
        found = self.order[np.minimum(low[:, None] + (drawn * (high - low)[:, None]).astype(np.int64), n - 1)]
        owned = self.lists.holds(np.repeat(self.row, _TRIES), found.reshape(-1)).reshape(found.shape)
        first = np.argmin(owned, axis=1)
        at = np.arange(len(found))
        return np.where(owned[at, first], -1, found[at, first])

    def auc(self, table: Floats, key: np.uint64) -> float | None:
        """How often a withdrawn item is nearer to its person than another; None: nothing can be compared."""
        other = self.draw_matched_items(key)
        usable = (other >= 0) & (self.lists.counts()[self.row] > 1)
        if not usable.any():
            return None
        unit, length = np.empty(table.shape, np.float32), np.empty(len(table), np.float32)
        normalise_rows(table, unit, length)
        total = np.add.reduceat(table[self.lists.ids], self.lists.ptr[:-1], axis=0)
        person = (total[self.row] - table[self.item])[usable]
        inside = (person * unit[self.item[usable]]).sum(1)
        outside = (person * unit[other[usable]]).sum(1)
        return float(np.mean((inside > outside) + 0.5 * (inside == outside)))
