"""Items that only one person has: whether a model still knows whose they are tells what it did not forget.

Everybody who shares all they have gets one item more, and shares it too. A model that learned from it has its row near
the rows of its owner's other items. One that never had it cannot tell owners apart, so its AUC is one half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import derive_keys
from tacita.core.types import BlockStream, Doubles, Floats, Longs, Ragged
from tacita.runs.forgetting.traces import compute_auc


@dataclass(frozen=True)
class PlantedItems:
    """An item for each of some users, and what these have beside it."""

    stream: BlockStream  # with the items
    owners: Longs  # (owners,) users, ascending
    items: Longs  # (owners,) the item of each
    others: Ragged  # (owners) what they share beside it

    @staticmethod
    def plant(stream: BlockStream, shared: Ragged) -> PlantedItems:
        """One item for everybody who shares all they learn from."""
        block = stream.blocks[-1]
        n_shared = shared.counts()
        shares_all = (n_shared > 0) & (n_shared == _count_distinct(block.train))
        owners = np.flatnonzero(shares_all)
        items = stream.n_items + np.arange(len(owners))
        return PlantedItems(_add_items(stream, owners, items), owners, items, shared.take(owners))

    def measure_auc(self, table: Floats, users: Longs) -> float | None:
        """How well a table tells which of some users has which planted item; None: fewer than two of them own one."""
        chosen = np.flatnonzero(np.isin(self.owners, users))
        if len(chosen) < 2:
            return None
        likeness = self._compute_likeness(table, chosen)
        is_own = np.eye(len(chosen), dtype=bool)
        return compute_auc(likeness[is_own], likeness[~is_own])

    def _compute_likeness(self, table: Floats, chosen: Longs) -> Doubles:
        """(items, owners) cosines with the owners' mean rows, without what a user's mean has of every item."""
        rows = _normalise(table[self.items[chosen]])
        lists = self.others.take(chosen)
        unit = _normalise(table)
        means = np.zeros(rows.shape)
        np.add.at(means, lists.rows(), unit[lists.ids])
        likeness = rows @ _normalise(means).T
        return np.asarray(likeness - likeness.mean(axis=0))


def _normalise(rows: Floats | Doubles) -> Doubles:
    numbers = rows.astype(np.float64)
    lengths = np.linalg.norm(numbers, axis=1, keepdims=True)
    return np.asarray(numbers / np.maximum(lengths, 1e-12))


def _count_distinct(lists: Ragged) -> Longs:
    pairs = np.unique(np.stack([lists.rows(), lists.ids.astype(np.int64)]), axis=1)
    return np.bincount(pairs[0], minlength=len(lists))


def _add_items(stream: BlockStream, owners: Longs, items: Longs) -> BlockStream:
    """The stream with one more item for each owner, to learn from."""
    block = stream.blocks[-1]
    names = tuple(f"planted item {number}" for number in range(len(items)))
    n_items = stream.n_items + len(items)
    train = _append_entries(block.train, owners, items)
    changed = replace(block, n_items=n_items, train=train, n_rows=block.n_rows + len(items))
    return replace(
        stream,
        blocks=(*stream.blocks[:-1], changed),
        item_ids=(*stream.item_ids, *names),
        item_keys=np.append(stream.item_keys, derive_keys(names)),
    )


def _append_entries(lists: Ragged, rows: Longs, ids: Longs) -> Ragged:
    """Lists with one more entry in some rows; of a column it has the largest value."""
    columns = {}
    for name, column in lists.values.items():
        added = np.full(len(ids), column.max(initial=0), column.dtype)
        columns[name] = np.concatenate([column, added])
    all_rows = np.concatenate([lists.rows(), rows])
    all_ids = np.concatenate([lists.ids, ids.astype(np.int32)])
    return Ragged.from_pairs(all_rows, all_ids, len(lists), columns)
