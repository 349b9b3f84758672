"""order_by_people: batches that hold all samples of whole people."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.draws import Draws
from tacita.core.flat_indices import compute_offsets, expand_spans
from tacita.core.types import CohortView, Longs
from tacita.kernels.sampling import shuffle_client_samples
from tacita.learn.training.round_samples import RoundSamples, SampleOrder, choose_epoch_turns


@dataclass(frozen=True)
class _PeopleGroups:
    """How the people of each client are cut into groups, and a group's turns into batches."""

    users: Longs  # (people,) who have samples
    first_person: Longs  # (clients + 1,) where each client's people begin
    client: Longs  # (groups,)
    cut: Longs  # (groups + 1,) the first person of each group
    batches: Longs  # (clients,) of each of its groups
    batch_ptr: Longs  # (clients + 1,)

    @staticmethod
    def form(view: CohortView, train: TrainConfig, per_user: Longs) -> _PeopleGroups:
        """As many people in each group, and so many groups that their batches hold the wanted size on average."""
        users = np.flatnonzero(per_user > 0)
        first_person = np.searchsorted(users, view.user_ptr)
        n_people = np.diff(first_person)
        turns = np.diff(compute_offsets(per_user)[view.user_ptr])
        wanted = np.rint(turns / train.batch_size / train.held_steps).astype(np.int64)
        n_groups = np.minimum(n_people, np.maximum(1, wanted))
        fewest = _find_min_per_client(per_user[users], first_person)
        batches = _count_batches_per_group(train, turns, n_groups, n_people, fewest)
        client = np.repeat(np.arange(len(n_groups)), n_groups)
        number = np.arange(len(client)) - compute_offsets(n_groups)[client]
        groups_of_client = np.maximum(n_groups, 1)[client]
        start = first_person[client] + number * n_people[client] // groups_of_client
        cut = np.append(start, first_person[-1])
        batch_ptr = compute_offsets(n_groups * batches)
        return _PeopleGroups(users, first_person, client, cut, batches, batch_ptr)


def order_in_people_batches(
    view: CohortView,
    samples: RoundSamples,
    train: TrainConfig,
    draws: Draws,
    per_user: Longs,
    order: Longs,
    share: float,
) -> SampleOrder:
    """Batches of whole people: as many people in each, and so many batches that they hold the asked size on average.

    With `held_steps` these are groups, and a group's batches each have a part of all its people's samples.
    """
    first = compute_offsets(per_user)
    ptr = first[view.user_ptr]
    groups = _PeopleGroups.form(view, train, per_user)
    starts = np.empty((len(order), groups.batch_ptr[-1] + 1), np.int64)
    shuffled = np.empty(len(groups.users), np.int64)
    pairs = train.objective == "bpr"
    for epoch in range(len(order)):
        key = draws.private("people", view.block, view.round, epoch)
        shuffle_client_samples(key, view.client_keys, groups.first_person, 1, shuffled)
        users = groups.users[shuffled]
        group_ends = compute_offsets(per_user[users])[groups.cut]
        dealt, starts[epoch] = _deal_turns(group_ends, groups.batches[groups.client])
        turns = expand_spans(first[users], per_user[users])[dealt]
        order[epoch] = choose_epoch_turns(samples, turns, epoch, pairs)
    whole = SampleOrder(ptr, order, groups.batch_ptr, starts, groups.batches)
    return whole if share >= 1 else _take_share_of_batches(whole, groups.batch_ptr, starts, share)


def _take_share_of_batches(whole: SampleOrder, batch_ptr: Longs, starts: Longs, share: float) -> SampleOrder:
    """A share of every client's batches, at least one."""
    first_turn = whole.ptr[:-1]
    first_batch = batch_ptr[:-1]
    n_batches = np.ceil(share * np.diff(batch_ptr) - 1e-9).astype(np.int64)
    ends = starts[0, first_batch + n_batches]
    n_turns = ends - first_turn
    ptr = compute_offsets(n_turns)
    shift = np.repeat(first_turn - ptr[:-1], n_batches)
    batches = expand_spans(first_batch, n_batches)
    cut_starts = np.append(starts[:, batches] - shift, [[n_turns.sum()]], axis=1)
    turns = expand_spans(first_turn, n_turns)
    order = np.ascontiguousarray(whole.order[:, turns])
    return SampleOrder(ptr, order, compute_offsets(n_batches), cut_starts, whole.batches_per_group)


def _find_min_per_client(counts: Longs, ptr: Longs) -> Longs:
    """The smallest number of each client's; 0 for who has none."""
    smallest = np.zeros(len(ptr) - 1, np.int64)
    clients = np.flatnonzero(np.diff(ptr))
    if len(clients):
        smallest[clients] = np.minimum.reduceat(counts, ptr[clients])
    return smallest


def _count_batches_per_group(
    train: TrainConfig, turns: Longs, n_groups: Longs, n_people: Longs, fewest: Longs
) -> Longs:
    """How many batches a group of each client is dealt into: none is empty, and none much smaller than asked."""
    groups = np.maximum(n_groups, 1)
    by_size = np.rint(turns / groups / train.batch_size).astype(np.int64)
    wanted = np.minimum(train.held_steps, by_size)
    possible = fewest * (n_people // groups)
    batches = np.maximum(1, np.minimum(wanted, possible))
    return np.asarray(batches, np.int64)


def _deal_turns(ends: Longs, batches: Longs) -> tuple[Longs, Longs]:
    """Deals the turns of each group to its batches, one after another: their new order, and where each begins."""
    size = np.diff(ends)
    group = np.repeat(np.arange(len(batches)), batches)
    n_batches = batches[group]
    number = np.arange(len(group)) - compute_offsets(batches)[group]
    batch_size = -(-(size[group] - number) // n_batches)
    borders = compute_offsets(batch_size)
    within = np.arange(borders[-1]) - np.repeat(borders[:-1], batch_size)
    first = np.repeat(ends[group] + number, batch_size)
    stride = np.repeat(n_batches, batch_size)
    return first + within * stride, borders
