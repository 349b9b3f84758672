"""Draw a cohort's samples for a round and lay out the local models: everything before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.flat_indices import compute_offsets, expand_spans
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ints, LocalModels, Longs, Ragged
from tacita.kernels.sampling import (
    count_possible_negatives,
    draw_samples,
    number_client_rows,
    pack_rows,
    shuffle_client_samples,
)
from tacita.kernels.steps import gather_rows
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.part_samples import collect_part_likes, collect_part_negatives, collect_part_samples
from tacita.learn.training.people_batches import order_in_people_batches
from tacita.learn.training.round_samples import RoundSamples, SampleOrder, choose_epoch_turns
from tacita.round.task import LocalTask, TaskField

Tasks = Mapping[str, LocalTask]


class Workspace:
    """Buffers that are used again for every cohort: fresh memory costs as much as the training itself.

    Arrays from a workspace are valid until it is used for the next cohort.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, AnyArray] = {}

    def reserve_array(self, name: str, shape: tuple[int, ...], kind: Any) -> AnyArray:
        size = math.prod(int(n) for n in shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size + size // 4, kind)
            self._buffers[name] = buffer
        return buffer[:size].reshape(shape)


# Samples


def _draw_round_samples(
    view: CohortView, train: TrainConfig, draws: Draws, space: Workspace, tasks: Tasks
) -> RoundSamples:
    likes = collect_part_likes(view, tasks) if _is_decided_by_part(tasks, "likes") else None
    weight = None
    if likes is not None:
        view = _with_part_likes(view, likes)
        weight = view.train.values["weight"]
    positives = view.train.counts()
    negatives = _count_negatives(view, train)
    n_draws = train.local_epochs if train.redraw == "epoch" else 1
    ptr = compute_offsets(positives + n_draws * negatives)
    item = space.reserve_array("item", (ptr[-1],), np.int32)
    label = space.reserve_array("label", (ptr[-1],), np.float32)
    samples = RoundSamples(ptr, item, label, positives, negatives, np.zeros_like(positives), n_draws, weight)
    chosen = None
    if _is_decided_by_part(tasks, "negatives"):
        chosen = collect_part_negatives(view, tasks, n_draws * negatives)
    if chosen is None:
        _write_uniform_samples(view, samples, draws)
    else:
        _write_chosen_samples(view, samples, chosen)
    if train.objective == "squared" and "rating" in view.train.values:
        label[expand_spans(ptr[:-1], positives)] = view.train.values["rating"]
    for task in tasks.values():
        labels = None if task.labels is None else task.labels(view, Ragged(ptr, item, {"label": label}))
        if labels is not None:
            label[:] = labels
    if not _is_decided_by_part(tasks, "samples"):
        return samples
    part_samples = collect_part_samples(view, tasks, Ragged(ptr, item, {"label": label}))
    if part_samples is None:
        return samples
    return _with_part_samples(samples, part_samples)


def _is_decided_by_part(tasks: Tasks, name: TaskField) -> bool:
    """Whether some part decides a field of the task."""
    return any(getattr(task, name) is not None for task in tasks.values())


def _with_part_likes(view: CohortView, likes: Ragged) -> CohortView:
    """The view with the parts' items to learn as liked, each positive with its weight."""
    weight = np.ones(len(view.train.ids), np.float32)
    own = Ragged(view.train.ptr, view.train.ids, {"weight": weight})
    return replace(view, train=own.join_rows(likes), exclude=view.exclude.join_rows(likes))


def _count_negatives(view: CohortView, train: TrainConfig) -> Longs:
    """How many negatives each user draws: none where no item remains to be drawn."""
    negatives = view.train.counts() * train.negatives
    crowded = np.flatnonzero(view.exclude.counts() >= view.n_items)  # these may have nothing to draw from
    if len(crowded):
        lists = view.exclude.take(crowded)
        room = count_possible_negatives(lists.ptr, lists.ids, view.n_items)
        negatives[crowded[room == 0]] = 0
    return negatives


def _write_chosen_samples(view: CohortView, samples: RoundSamples, chosen: Ints) -> None:
    """Write the positives, and the negatives that a part chose."""
    first = samples.ptr[:-1]
    positive = expand_spans(first, samples.positives)
    negative = expand_spans(first + samples.positives, samples.draws * samples.negatives)
    samples.item[positive] = view.train.ids
    samples.label[positive] = 1.0
    samples.item[negative] = chosen
    samples.label[negative] = 0.0


def _with_part_samples(samples: RoundSamples, part_samples: Ragged) -> RoundSamples:
    """The same samples, and after each user's own those of parts."""
    part_counts = part_samples.counts()
    own_counts = np.diff(samples.ptr)
    ptr = compute_offsets(own_counts + part_counts)
    own = expand_spans(ptr[:-1], own_counts)
    added = expand_spans(ptr[1:] - part_counts, part_counts)
    item = np.empty(ptr[-1], np.int32)
    item[own] = samples.item
    item[added] = part_samples.ids
    label = np.empty(ptr[-1], np.float32)
    label[own] = samples.label
    label[added] = part_samples.values["label"]
    return replace(samples, ptr=ptr, item=item, label=label, part_samples=part_counts)


def _write_uniform_samples(view: CohortView, samples: RoundSamples, draws: Draws) -> None:
    """Write the positives, and the negatives of every draw, uniform over the items each user may get."""
    lists = (view.train.ptr, view.train.ids, view.exclude.ptr, view.exclude.ids)
    ptr = compute_offsets(samples.positives + samples.negatives)  # of one draw
    is_single_draw = ptr[-1] == samples.ptr[-1]
    item = samples.item
    label = samples.label
    for draw in range(samples.draws):
        number = [draw] if draw else []
        key = draws.private("negatives", view.block, view.round, *number)
        if not is_single_draw:
            item = np.empty(ptr[-1], np.int32)
            label = np.empty(ptr[-1], np.float32)
        draw_samples(threads_in_use(), key, view.user_keys, *lists, ptr, view.n_items, item, label)
        if not is_single_draw:
            place = samples.list_draw_indices(draw)
            samples.item[place] = item
            samples.label[place] = label


def _weigh_samples(samples: RoundSamples) -> Floats | None:
    """Of every sample: a negative weighs what its positive does, a part's sample with a label of its own weighs 1."""
    if samples.weight is None:
        return None
    weight = np.ones(len(samples.item), np.float32)
    weight[expand_spans(samples.ptr[:-1], samples.positives)] = samples.weight
    weight = weight[samples.match_positives()]
    first_of_parts = samples.ptr[1:] - samples.part_samples
    weight[expand_spans(first_of_parts, samples.part_samples)] = 1
    return weight


# The order of turns


def _order_samples(
    view: CohortView, samples: RoundSamples, train: TrainConfig, draws: Draws, space: Workspace
) -> SampleOrder:
    """What every turn of a round learns from, shuffled inside each client."""
    share = 1.0
    if view.replay is not None:
        share = view.replay.share * train.local_epochs
        n_epochs = max(1, math.ceil(share - 1e-9))
        train = train.model_copy(update={"local_epochs": n_epochs})
    pairs = train.objective == "bpr"
    per_user = samples.negatives
    if not pairs:
        per_user = samples.positives + samples.negatives + samples.part_samples
    ptr = compute_offsets(per_user)[view.user_ptr]
    order = space.reserve_array("order", (train.local_epochs, ptr[-1]), np.int64)
    if train.batches == "people":
        return order_in_people_batches(view, samples, train, draws, per_user, order, share)
    draws_all_turns = not pairs and samples.draws == 1
    for epoch in range(train.local_epochs):
        key = draws.private("order", view.block, view.round, epoch)
        shuffle_client_samples(key, view.client_keys, ptr, train.batch_size, order[epoch])
        if not draws_all_turns:
            order[epoch] = choose_epoch_turns(samples, order[epoch], epoch, pairs)
    if share >= 1:
        return SampleOrder(ptr, order)
    return _take_share_of_order(ptr, order, train.batch_size, share)


def _take_share_of_order(ptr: Longs, order: Longs, batch: int, share: float) -> SampleOrder:
    """A share of an epoch's steps, at least one; turns are shuffled already."""
    turns = np.diff(ptr)
    n_batches = -(-turns // batch)
    n_steps = np.ceil(share * n_batches - 1e-9).astype(np.int64)
    n_turns = np.minimum(turns, n_steps * batch)
    remaining = expand_spans(ptr[:-1], n_turns)
    return SampleOrder(compute_offsets(n_turns), np.ascontiguousarray(order[:, remaining]))


# Local models


def build_local_models(
    view: CohortView,
    lists: dict[str, Ragged],
    train: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
    tasks: Tasks | None = None,
    gather: bool = True,
) -> LocalModels:
    """Samples, order and each client's own copy of the rows it will touch; or without `gather`, room for them."""
    space = space or Workspace()
    samples = _draw_round_samples(view, train, draws, space, tasks or {})
    item = samples.item
    ptr = samples.ptr[view.user_ptr]
    merged = Ragged.empty(len(view.user))
    for part_lists in lists.values():
        merged = merged.join_rows(Ragged(part_lists.ptr, part_lists.ids))
    more_ptr = merged.ptr[view.user_ptr]
    row_of = space.reserve_array("row_of", (len(item),), np.int32)
    row_of_more = np.empty(len(merged.ids), np.int32)
    padded = space.reserve_array("padded", (len(item) + len(merged.ids),), np.int32)
    counts = number_client_rows(
        threads_in_use(), view.n_items, ptr, item, more_ptr, merged.ids, row_of, row_of_more, padded
    )
    row_start = compute_offsets(counts)
    row_item = space.reserve_array("row_item", (row_start[-1],), np.int32)
    rows = space.reserve_array("rows", (row_start[-1], view.items.shape[1]), np.float32)
    pack_rows(ptr + more_ptr, row_start, padded, row_item)
    if gather:
        gather_rows(row_item, view.items, rows)
    turns = _order_samples(view, samples, train, draws, space)
    heads: Arrays = {name: np.repeat(head[None], view.n_clients, axis=0) for name, head in view.heads.items()}
    return LocalModels(
        view=view,
        ptr=ptr,
        item=item,
        label=samples.label,
        user_ptr=samples.ptr,
        turn_ptr=turns.ptr,
        order=turns.order,
        partner=samples.match_positives() if train.objective == "bpr" else None,
        batch=train.batch_size,
        row_of=row_of,
        row_start=row_start,
        row_item=row_item,
        rows=rows,
        private=view.private.copy(),
        heads=heads,
        rows_needed=_split_rows_needed(lists, merged, row_of_more),
        n_part_samples=samples.part_samples,
        weight=_weigh_samples(samples),
        batch_ptr=turns.batch_ptr,
        batch_start=turns.batch_start,
        batches_per_group=turns.batches_per_group,
    )


def _split_rows_needed(lists: dict[str, Ragged], merged: Ragged, row_of_more: Ints) -> dict[str, tuple[Ragged, Ints]]:
    """Each part's own view of the merged lists: in every user's row its entries follow the earlier parts'."""
    rows_needed: dict[str, tuple[Ragged, Ints]] = {}
    skip = np.zeros(len(merged), np.int64)
    for name, part_lists in lists.items():
        counts = part_lists.counts()
        shift = np.repeat(merged.ptr[:-1] + skip - part_lists.ptr[:-1], counts)
        entry = shift + np.arange(len(part_lists.ids))
        rows_needed[name] = (part_lists, row_of_more[entry])
        skip = skip + counts
    return rows_needed
