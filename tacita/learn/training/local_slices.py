"""slice_local: the local models of neighbouring clients, in the memory of the whole cohort's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.types import AnyArray, Arrays, CohortView, Ints, LocalModels, Longs, Ragged
from tacita.learn.training.stepper import CONTEXT


def slice_local(local: LocalModels, first: int, last: int) -> LocalModels:
    """Clients first..last-1 of a cohort's local models: the same memory."""
    first_sample = local.ptr[first]
    first_turn = local.turn_ptr[first]
    first_row = local.row_start[first]
    ends = slice(first, last + 1)
    clients = slice(first, last)
    samples = slice(first_sample, local.ptr[last])
    turns = slice(first_turn, local.turn_ptr[last])
    rows = slice(first_row, local.row_start[last])
    user_ptr = local.view.user_ptr
    users = slice(user_ptr[first], user_ptr[last])
    user_ends = slice(user_ptr[first], user_ptr[last] + 1)
    return replace(
        local,
        view=_slice_view(local.view, first, last),
        ptr=local.ptr[ends] - first_sample,
        item=local.item[samples],
        label=local.label[samples],
        user_ptr=local.user_ptr[user_ends] - first_sample,
        turn_ptr=local.turn_ptr[ends] - first_turn,
        order=local.order[:, turns] - first_sample,
        partner=None if local.partner is None else local.partner[samples] - first_sample,
        weight=_slice_array(local.weight, samples),
        row_of=local.row_of[samples],
        row_start=local.row_start[ends] - first_row,
        row_item=local.row_item[rows],
        rows=local.rows[rows],
        private=local.private[users],
        heads={name: head[clients] for name, head in local.heads.items()},
        rows_needed=_slice_context(local, users.start, users.stop),
        batch_ptr=None if local.batch_ptr is None else local.batch_ptr[ends] - local.batch_ptr[first],
        batch_start=_slice_batch_starts(local, first, last),
        batches_per_group=_slice_array(local.batches_per_group, clients),
        personal={},
        moments=_slice_moments(local.moments, clients, rows),
    )


def _slice_array(array: AnyArray | None, span: slice) -> AnyArray | None:
    return None if array is None else array[span]


def _slice_moments(moments: Arrays, clients: slice, rows: slice) -> Arrays:
    sliced: Arrays = {}
    for name, moment in moments.items():
        span = rows if name.startswith("rows.") else clients
        sliced[name] = moment[span]
    return sliced


def _slice_context(local: LocalModels, first: int, last: int) -> dict[str, tuple[Ragged, Ints]]:
    """What the model reads of users first..last-1; parts ask with the whole cohort's lists."""
    if CONTEXT not in local.rows_needed:
        return {}
    lists, row = local.rows_needed[CONTEXT]
    users = np.arange(first, last)
    entries = slice(lists.ptr[first], lists.ptr[last])
    return {CONTEXT: (lists.take(users), row[entries])}


def _slice_batch_starts(local: LocalModels, first: int, last: int) -> Longs | None:
    """Where batches of whole people begin, counted from the first of these clients' turns."""
    if local.batch_ptr is None or local.batch_start is None:
        return None
    batches = slice(local.batch_ptr[first], local.batch_ptr[last] + 1)
    starts = local.batch_start[:, batches] - local.turn_ptr[first]
    return np.asarray(starts)


def _slice_view(view: CohortView, first: int, last: int) -> CohortView:
    first_user = view.user_ptr[first]
    users = slice(first_user, view.user_ptr[last])
    no_samples = Ragged.empty(int(users.stop - users.start))  # samples are drawn already
    return replace(
        view,
        user_ptr=view.user_ptr[first : last + 1] - first_user,
        user=view.user[users],
        user_keys=view.user_keys[users],
        client_keys=view.client_keys[first:last],
        train=no_samples,
        exclude=no_samples,
        private=view.private[users],
        parts={},
    )
