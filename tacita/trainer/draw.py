"""Draw a cohort's samples for a round and lay out the local models: everything before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacita.config import TrainConfig
from tacita.kernels.sampling import draw_samples, room_for_negatives, shuffle_order, touch_rows
from tacita.kernels.steps import gather_rows
from tacita.rng import Draws
from tacita.types import AnyArray, CohortView, Floats, Ints, Local, Longs, Ragged


class Workspace:
    """Buffers that are used again for every cohort: fresh memory costs as much as the training itself.

    Arrays from a workspace are valid until it is used for the next cohort.
    """

    def __init__(self) -> None:
        self._held: dict[str, AnyArray] = {}

    def array(self, name: str, shape: tuple[int, ...], kind: Any) -> AnyArray:
        size = int(np.prod(shape))
        if name not in self._held or len(self._held[name]) < size:
            self._held[name] = np.empty(size + size // 4, kind)
        return self._held[name][:size].reshape(shape)


def _samples(view: CohortView, plan: TrainConfig, draws: Draws, space: Workspace) -> tuple[Longs, Ints, Floats]:
    """Positives and negatives of every user, flat; negatives are drawn once per user and round."""
    positives = view.train.counts()
    per_user = positives * (1 + plan.negatives)
    full = np.flatnonzero(view.exclude.counts() >= view.n_items)  # these may have nothing left to be drawn
    if len(full):
        lists = view.exclude.take(full)
        empty = full[room_for_negatives(lists.ptr, lists.ids, view.n_items) == 0]
        per_user[empty] = positives[empty]
    ptr = np.zeros(len(per_user) + 1, np.int64)
    np.cumsum(per_user, out=ptr[1:])
    item = space.array("item", (ptr[-1],), np.int32)
    label = space.array("label", (ptr[-1],), np.float32)
    key = draws.private("negatives", view.block, view.round)
    train, exclude = view.train, view.exclude
    draw_samples(key, view.user_keys, train.ptr, train.ids, exclude.ptr, exclude.ids, ptr, view.n_items, item, label)
    return ptr, item, label


def _order(view: CohortView, ptr: Longs, plan: TrainConfig, draws: Draws, space: Workspace) -> Longs:
    order = space.array("order", (plan.local_epochs, ptr[-1]), np.int64)
    for epoch in range(plan.local_epochs):
        key = draws.private("order", view.block, view.round, epoch)
        shuffle_order(key, view.client_keys, ptr, plan.batch_size, order[epoch])
    return order


def lay_out(
    view: CohortView,
    lists: dict[str, Ragged],
    plan: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
) -> Local:
    """Samples, order and each client's own copy of the rows it will touch."""
    space = space or Workspace()
    user_ptr, item, label = _samples(view, plan, draws, space)
    ptr = user_ptr[view.user_ptr]
    merged = Ragged.empty(len(view.user))
    for one in lists.values():
        merged = merged.joined(one)
    more_ptr = merged.ptr[view.user_ptr]
    row_of = space.array("row_of", (len(item),), np.int32)
    row_of_more = np.empty(len(merged.ids), np.int32)
    padded = space.array("padded", (len(item) + len(merged.ids),), np.int32)
    counts = touch_rows(ptr, item, more_ptr, merged.ids, row_of, row_of_more, padded)
    row_start = np.zeros(view.n_clients + 1, np.int64)
    np.cumsum(counts, out=row_start[1:])
    row_item = space.array("row_item", (row_start[-1],), np.int32)
    rows = space.array("rows", (row_start[-1], view.items.shape[1]), np.float32)
    gather_rows((ptr + more_ptr)[:-1], row_start, padded, view.items, row_item, rows)
    return Local(
        view=view,
        ptr=ptr,
        item=item,
        label=label,
        user_ptr=user_ptr,
        order=_order(view, ptr, plan, draws, space),
        batch=plan.batch_size,
        row_of=row_of,
        row_start=row_start,
        row_item=row_item,
        rows=rows,
        private=view.private.copy(),
        heads={name: np.repeat(v[None], view.n_clients, axis=0) for name, v in view.heads.items()},
        at_hand=_rows_at_hand(lists, merged, row_of_more),
    )


def _rows_at_hand(lists: dict[str, Ragged], merged: Ragged, row_of_more: Ints) -> dict[str, tuple[Ragged, Ints]]:
    """Each part's own view of the merged lists: in every user's row its entries follow the earlier parts'."""
    out: dict[str, tuple[Ragged, Ints]] = {}
    skip = np.zeros(len(merged), np.int64)
    for name, one in lists.items():
        counts = one.counts()
        where = np.repeat(merged.ptr[:-1] + skip - one.ptr[:-1], counts) + np.arange(len(one.ids))
        out[name] = (one, row_of_more[where])
        skip = skip + counts
    return out
