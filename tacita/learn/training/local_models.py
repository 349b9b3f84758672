"""Draw a cohort's samples for a round and lay out the local models: everything before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.flat_indices import expand_spans
from tacita.core.types import AnyArray, CohortView, Floats, Ints, LocalModels, Longs, Ragged
from tacita.kernels.sampling import draw_samples, pack_rows, room_for_negatives, shuffle_order, touch_rows
from tacita.kernels.steps import gather_rows
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.part_samples import collect_part_likes, collect_part_negatives, collect_part_samples
from tacita.round.task import LocalTask, TaskField


class Workspace:
    """Buffers that are used again for every cohort: fresh memory costs as much as the training itself.

    Arrays from a workspace are valid until it is used for the next cohort.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, AnyArray] = {}

    def array(self, name: str, shape: tuple[int, ...], kind: Any) -> AnyArray:
        size = math.prod(int(n) for n in shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = np.empty(size + size // 4, kind)
        return self._buffers[name][:size].reshape(shape)


@dataclass(frozen=True)
class _RoundSamples:
    """Every user's samples, flat: its positives, then the negatives of each draw, then what parts gave it."""

    ptr: Longs  # (users + 1,)
    item: Ints
    label: Floats
    positives: Longs  # (users,)
    negatives: Longs  # (users,) in one draw
    part_samples: Longs  # (users,)
    draws: int  # one a round, or one an epoch
    weight: Floats | None = None  # of the positives, user by user; None: 1

    def epoch_indices(self, k: int) -> Longs:
        """The samples of draw k and those given, user by user."""
        return _interleave_spans(
            (self._positive_spans, self._negative_spans(k), (self.ptr[1:] - self.part_samples, self.part_samples))
        )

    def draw_indices(self, k: int) -> Longs:
        """The positives and the negatives of draw k, user by user."""
        return _interleave_spans((self._positive_spans, self._negative_spans(k)))

    def negative_indices(self, k: int) -> Longs:
        """The negatives of draw k, user by user."""
        return expand_spans(*self._negative_spans(k))

    @property
    def _positive_spans(self) -> tuple[Longs, Longs]:
        return self.ptr[:-1], self.positives

    def _negative_spans(self, k: int) -> tuple[Longs, Longs]:
        return self.ptr[:-1] + self.positives + k * self.negatives, self.negatives


def _interleave_spans(each: Sequence[tuple[Longs, Longs]]) -> Longs:
    """Spans of several kinds, user by user."""
    starts, counts = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*each, strict=True))
    return expand_spans(starts, counts)


def _draw_round_samples(
    view: CohortView, plan: TrainConfig, draws: Draws, space: Workspace, tasks: Mapping[str, LocalTask]
) -> _RoundSamples:
    more = collect_part_likes(view, tasks) if _is_filled(tasks, "likes") else None
    if more is not None:
        mine = Ragged(view.train.ptr, view.train.ids, {"weight": np.ones(len(view.train.ids), np.float32)})
        view = replace(view, train=mine.join_rows(more), exclude=view.exclude.join_rows(more))
    positives = view.train.counts()
    negatives = positives * plan.negatives
    full = np.flatnonzero(view.exclude.counts() >= view.n_items)  # these may have nothing left to be drawn
    if len(full):
        lists = view.exclude.take(full)
        negatives[full[room_for_negatives(lists.ptr, lists.ids, view.n_items) == 0]] = 0
    n_draws = plan.local_epochs if plan.redraw == "epoch" else 1
    chosen = None
    if _is_filled(tasks, "negatives"):
        chosen = collect_part_negatives(view, tasks, n_draws * negatives)
    ptr = _offsets(positives + n_draws * negatives)
    item = space.array("item", (ptr[-1],), np.int32)
    label = space.array("label", (ptr[-1],), np.float32)
    weight = None if more is None else view.train.values["weight"]
    made = _RoundSamples(ptr, item, label, positives, negatives, np.zeros_like(positives), n_draws, weight)
    if chosen is None:
        _draw_uniformly(view, made, draws)
    else:
        own, other = expand_spans(ptr[:-1], positives), expand_spans(ptr[:-1] + positives, n_draws * negatives)
        item[own], label[own] = view.train.ids, 1.0
        item[other], label[other] = chosen, 0.0
    if plan.objective == "squared" and "rating" in view.train.values:
        label[expand_spans(ptr[:-1], positives)] = view.train.values["rating"]
    for task in tasks.values():
        labels = None if task.labels is None else task.labels(view, Ragged(ptr, item, {"label": label}))
        if labels is not None:
            label[:] = labels
    if not _is_filled(tasks, "samples"):
        return made
    given = collect_part_samples(view, tasks, Ragged(ptr, item, {"label": label}))
    return made if given is None else _append_part_samples(made, given)


def _is_filled(tasks: Mapping[str, LocalTask], name: TaskField) -> bool:
    """Whether some part decides a field of the task."""
    return any(getattr(task, name) is not None for task in tasks.values())


def _append_part_samples(made: _RoundSamples, given: Ragged) -> _RoundSamples:
    """The same samples, and after each user's own those that parts gave it."""
    counts, own = given.counts(), np.diff(made.ptr)
    ptr = _offsets(own + counts)
    item, label = np.empty(ptr[-1], np.int32), np.empty(ptr[-1], np.float32)
    mine, theirs = expand_spans(ptr[:-1], own), expand_spans(ptr[1:] - counts, counts)
    item[mine], label[mine] = made.item, made.label
    item[theirs], label[theirs] = given.ids, given.values["label"]
    return replace(made, ptr=ptr, item=item, label=label, part_samples=counts)


def _draw_uniformly(view: CohortView, made: _RoundSamples, draws: Draws) -> None:
    """Write the positives, and the negatives of every draw, uniform over the items each user may get."""
    train, exclude = view.train, view.exclude
    once = _offsets(made.positives + made.negatives)
    in_place = once[-1] == made.ptr[-1]
    for k in range(made.draws):
        key = draws.private("negatives", view.block, view.round, *([k] if k else []))
        some = (made.item, made.label) if in_place else (np.empty(once[-1], np.int32), np.empty(once[-1], np.float32))
        lists = (train.ptr, train.ids, exclude.ptr, exclude.ids)
        draw_samples(threads_in_use(), key, view.user_keys, *lists, once, view.n_items, *some)
        if not in_place:
            place = made.draw_indices(k)
            made.item[place], made.label[place] = some


def _offsets(counts: Longs) -> Longs:
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    return ptr


@dataclass(frozen=True)
class _SampleOrder:
    """Where each client's turns of an epoch begin, the sample of every turn, and how whole people are batched."""

    ptr: Longs
    order: Longs
    batch_ptr: Longs | None = None
    batch_start: Longs | None = None
    held: Longs | None = None


def _order_samples(
    view: CohortView, drawn: _RoundSamples, plan: TrainConfig, draws: Draws, space: Workspace
) -> _SampleOrder:
    """What every turn of a round learns from, shuffled inside each client."""
    pairs, share = plan.objective == "bpr", 1.0
    if view.replay is not None:
        share = view.replay.share * plan.local_epochs
        plan = plan.model_copy(update={"local_epochs": max(1, math.ceil(share - 1e-9))})
    per_user = drawn.negatives if pairs else drawn.positives + drawn.negatives + drawn.part_samples
    ptr = _offsets(per_user)[view.user_ptr]
    order = space.array("order", (plan.local_epochs, ptr[-1]), np.int64)
    if plan.batches == "people":
        return _order_by_people(view, drawn, plan, draws, per_user, order, share)
    for epoch in range(plan.local_epochs):
        key = draws.private("order", view.block, view.round, epoch)
        shuffle_order(key, view.client_keys, ptr, plan.batch_size, order[epoch])
        if pairs or drawn.draws > 1:
            which = epoch if drawn.draws > 1 else 0
            order[epoch] = (drawn.negative_indices(which) if pairs else drawn.epoch_indices(which))[order[epoch]]
    return _SampleOrder(ptr, order) if share >= 1 else _cut_order(ptr, order, plan.batch_size, share)


def _cut_order(ptr: Longs, order: Longs, batch: int, share: float) -> _SampleOrder:
    """A share of an epoch's steps, at least one; turns are shuffled already."""
    turns = np.diff(ptr)
    steps = np.ceil(share * -(-turns // batch) - 1e-9).astype(np.int64)
    kept = np.minimum(turns, steps * batch)
    return _SampleOrder(_offsets(kept), np.ascontiguousarray(order[:, expand_spans(ptr[:-1], kept)]))


def _order_by_people(
    view: CohortView, drawn: _RoundSamples, plan: TrainConfig, draws: Draws, per_user: Longs, order: Longs, share: float
) -> _SampleOrder:
    """Batches of whole people: as many people in each, and so many batches that they hold the asked size on average.

    With `held_steps` these are groups, and a group's batches each have a part of all its people's samples.
    """
    first = _offsets(per_user)
    ptr, who = first[view.user_ptr], np.flatnonzero(per_user > 0)
    people = np.searchsorted(who, view.user_ptr)  # where each client's people begin
    count, turns = np.diff(people), np.diff(ptr)
    groups = np.minimum(count, np.maximum(1, np.rint(turns / plan.batch_size / plan.held_steps).astype(np.int64)))
    held = _batches_per_group(plan, turns, groups, count, _min_per_client(per_user[who], people))
    client = np.repeat(np.arange(len(groups)), groups)
    number = np.arange(len(client)) - _offsets(groups)[client]
    cut = np.append(people[client] + number * count[client] // np.maximum(groups, 1)[client], people[-1])
    batch_ptr, n = _offsets(groups * held), groups * held
    starts = np.empty((len(order), batch_ptr[-1] + 1), np.int64)
    shuffled = np.empty(len(who), np.int64)
    for epoch in range(len(order)):
        shuffle_order(draws.private("people", view.block, view.round, epoch), view.client_keys, people, 1, shuffled)
        mine = who[shuffled]
        dealt, starts[epoch] = _deal_turns(_offsets(per_user[mine])[cut], held[client])
        order[epoch] = expand_spans(first[mine], per_user[mine])[dealt]
        if plan.objective == "bpr" or drawn.draws > 1:
            which = epoch if drawn.draws > 1 else 0
            order[epoch] = (drawn.negative_indices(which) if plan.objective == "bpr" else drawn.epoch_indices(which))[
                order[epoch]
            ]
    if share >= 1:
        return _SampleOrder(ptr, order, batch_ptr, starts, held)
    kept = np.ceil(share * n - 1e-9).astype(np.int64)
    ends = starts[0, batch_ptr[:-1] + kept]
    left = ends - ptr[:-1]
    some = expand_spans(batch_ptr[:-1], kept)
    moved = np.repeat(ptr[:-1] - _offsets(left)[:-1], kept)
    starts = np.append(starts[:, some] - moved, [[left.sum()]], axis=1)
    some_turns = np.ascontiguousarray(order[:, expand_spans(ptr[:-1], left)])
    return _SampleOrder(_offsets(left), some_turns, _offsets(kept), starts, held)


def _min_per_client(counts: Longs, ptr: Longs) -> Longs:
    """The smallest number of each client's; 0 for who has none."""
    out = np.zeros(len(ptr) - 1, np.int64)
    some = np.flatnonzero(np.diff(ptr))
    if len(some):
        out[some] = np.minimum.reduceat(counts, ptr[some])
    return out


def _batches_per_group(plan: TrainConfig, turns: Longs, groups: Longs, count: Longs, least: Longs) -> Longs:
    """How many batches a group of each client is dealt into: none is empty, and none much smaller than asked."""
    each = np.maximum(groups, 1)
    wanted = np.minimum(plan.held_steps, np.rint(turns / each / plan.batch_size).astype(np.int64))
    return np.asarray(np.maximum(1, np.minimum(wanted, least * (count // each))), np.int64)


def _deal_turns(ends: Longs, parts: Longs) -> tuple[Longs, Longs]:
    """Deals the turns of each group to its parts, one after another: their new order, and where each part begins."""
    size, group = np.diff(ends), np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(group)) - _offsets(parts)[group]
    some = -(-(size[group] - part) // parts[group])
    borders = _offsets(some)
    within = np.arange(borders[-1]) - np.repeat(borders[:-1], some)
    return np.repeat(ends[group] + part, some) + within * np.repeat(parts[group], some), borders


def _match_positives(drawn: _RoundSamples) -> Longs:
    """The positive of every negative: each has the same number of them, in turn; a positive is its own."""
    first = np.repeat(drawn.ptr[:-1], np.diff(drawn.ptr))
    of_user = np.arange(drawn.ptr[-1]) - first
    positives = np.repeat(np.maximum(drawn.positives, 1), np.diff(drawn.ptr))
    return np.asarray(first + of_user % positives, np.int64)


def _weigh_samples(drawn: _RoundSamples) -> Floats | None:
    """Of every sample: a negative weighs what its positive does, what parts gave with a label of its own weighs 1."""
    if drawn.weight is None:
        return None
    out = np.ones(len(drawn.item), np.float32)
    out[expand_spans(drawn.ptr[:-1], drawn.positives)] = drawn.weight
    out = out[_match_positives(drawn)]
    out[expand_spans(drawn.ptr[1:] - drawn.part_samples, drawn.part_samples)] = 1
    return out


def build_local_models(
    view: CohortView,
    lists: dict[str, Ragged],
    plan: TrainConfig,
    draws: Draws,
    space: Workspace | None = None,
    tasks: Mapping[str, LocalTask] | None = None,
    gather: bool = True,
) -> LocalModels:
    """Samples, order and each client's own copy of the rows it will touch; or without `gather`, room for them."""
    space = space or Workspace()
    drawn = _draw_round_samples(view, plan, draws, space, tasks or {})
    item, ptr = drawn.item, drawn.ptr[view.user_ptr]
    merged = Ragged.empty(len(view.user))
    for one in lists.values():
        merged = merged.join_rows(Ragged(one.ptr, one.ids))
    more_ptr = merged.ptr[view.user_ptr]
    row_of = space.array("row_of", (len(item),), np.int32)
    row_of_more = np.empty(len(merged.ids), np.int32)
    padded = space.array("padded", (len(item) + len(merged.ids),), np.int32)
    counts = touch_rows(threads_in_use(), view.n_items, ptr, item, more_ptr, merged.ids, row_of, row_of_more, padded)
    row_start = np.zeros(view.n_clients + 1, np.int64)
    np.cumsum(counts, out=row_start[1:])
    row_item = space.array("row_item", (row_start[-1],), np.int32)
    rows = space.array("rows", (row_start[-1], view.items.shape[1]), np.float32)
    pack_rows(ptr + more_ptr, row_start, padded, row_item)
    if gather:
        gather_rows(row_item, view.items, rows)
    turns = _order_samples(view, drawn, plan, draws, space)
    return LocalModels(
        view=view,
        ptr=ptr,
        item=item,
        label=drawn.label,
        user_ptr=drawn.ptr,
        turn_ptr=turns.ptr,
        order=turns.order,
        partner=_match_positives(drawn) if plan.objective == "bpr" else None,
        batch=plan.batch_size,
        row_of=row_of,
        row_start=row_start,
        row_item=row_item,
        rows=rows,
        private=view.private.copy(),
        heads={name: np.repeat(v[None], view.n_clients, axis=0) for name, v in view.heads.items()},
        rows_needed=_split_rows_needed(lists, merged, row_of_more),
        n_part_samples=drawn.part_samples,
        weight=_weigh_samples(drawn),
        batch_ptr=turns.batch_ptr,
        batch_start=turns.batch_start,
        batches_per_group=turns.held,
    )


def _split_rows_needed(lists: dict[str, Ragged], merged: Ragged, row_of_more: Ints) -> dict[str, tuple[Ragged, Ints]]:
    """Each part's own view of the merged lists: in every user's row its entries follow the earlier parts'."""
    out: dict[str, tuple[Ragged, Ints]] = {}
    skip = np.zeros(len(merged), np.int64)
    for name, one in lists.items():
        counts = one.counts()
        where = np.repeat(merged.ptr[:-1] + skip - one.ptr[:-1], counts) + np.arange(len(one.ids))
        out[name] = (one, row_of_more[where])
        skip = skip + counts
    return out
