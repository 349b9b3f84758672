"""A run with people planted and people held out, in which withdrawals can be judged (sharing spec D.4).

No model learns from the held-out: they are what strangers look like. Each canary has two rare items that nobody else
has together. How high the first ranks for an owner of the second tells whether a model learned the pair.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_lists
from tacita.core.types import BlockStream, Ints, Keys, Longs, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.round.request import RequestBatch
from tacita.runs.forgetting.reopened_run import ReopenedRun, restrict_stream
from tacita.runs.forgetting.requests import ResolvedRequest, sample_requesters
from tacita.runs.forgetting.retraining import retrain_blocks

CANARIES = 50
HELD_OUT = 0.05


@dataclass(frozen=True)
class WithdrawalScenario:
    run: ReopenedRun
    held_out: Ragged  # (people) what those have who were not learned from
    canaries: Ints  # (canaries,) users
    known: Ints  # (canaries,) one item of each
    partner: Ints  # (canaries,) the other


def make_scenario_of_run(run: ReopenedRun) -> WithdrawalScenario:
    """The run's own model; nobody is planted."""
    none = np.zeros(0, np.int32)
    return WithdrawalScenario(run, Ragged.empty(0), none, none, none)


def retrain_with_canaries(run: ReopenedRun) -> WithdrawalScenario:
    """The run retrained with canaries, and without the held-out."""
    stream = run.federation.stream
    draws = run.federation.draws
    away = _draw_held_out(stream, draws)
    trained = stream.collect_train_items(len(stream.blocks) - 1)
    history = stream.collect_history(len(stream.blocks))
    remaining_stream = restrict_stream(stream, _drop_users(history, away))
    item_hashes = hash_owners(draws.public("canaries"), stream.item_keys)
    known, partner = find_rare_pairs(remaining_stream, item_hashes)
    canary_stream = add_canary_users(remaining_stream, known, partner)
    federation = replace(run.federation, stream=canary_stream)
    shared = _drop_users(run.shared, away)
    if len(shared.ids):
        canary_items = _list_canary_items(known, partner, stream.n_users)
        shared = shared.join_rows(canary_items)
    progress = retrain_blocks(federation, shared)
    progress.in_block = True
    return WithdrawalScenario(
        run=ReopenedRun(run.saved, federation, progress),
        held_out=trained.take(away),
        canaries=np.arange(stream.n_users, stream.n_users + len(known), dtype=np.int32),
        known=known,
        partner=partner,
    )


def _draw_held_out(stream: BlockStream, draws: Draws) -> Longs:
    """Some users, at least two, by a hash of their keys."""
    hashes = hash_owners(draws.public("held-out"), stream.user_keys)
    order = np.argsort(hashes)
    n_held_out = max(2, int(HELD_OUT * stream.n_users))
    return np.sort(order[:n_held_out])


def _drop_users(lists: Ragged, users: Longs) -> Ragged:
    is_dropped = np.isin(lists.rows(), users)
    return lists.filter_entries(~is_dropped)


def _list_canary_items(known: Ints, partner: Ints, n_users: int) -> Ragged:
    """(users and canaries) both items of every canary; canaries come after all users."""
    n_canaries = len(known)
    canaries = np.tile(np.arange(n_canaries), 2)
    rows = n_users + canaries
    ids = np.concatenate([known, partner])
    return Ragged.from_pairs(rows, ids, n_users + n_canaries)


def find_rare_pairs(stream: BlockStream, drawn: Keys) -> tuple[Ints, Ints]:
    """Pairs of items that few people have and nobody has together; each item is in one pair."""
    trained = stream.collect_train_items(len(stream.blocks) - 1)
    count = np.bincount(trained.ids, minlength=stream.n_items)
    order = np.lexsort((drawn, count))
    n_rare = max(2, len(order) // 3)
    rare = order[:n_rare]
    draw_order = np.argsort(drawn[rare], kind="stable")
    shuffled = rare[draw_order].astype(np.int32)
    half = len(shuffled) // 2
    known = shuffled[:half]
    partner = shuffled[half : 2 * half]
    has_item = matrix_of_lists(trained, stream.n_items).tocsc()
    has_known = has_item[:, known]
    has_partner = has_item[:, partner]
    has_both = has_known.multiply(has_partner)
    n_owners = np.asarray(has_both.sum(axis=0)).ravel()
    is_apart = n_owners == 0
    known = known[is_apart]
    partner = partner[is_apart]
    return known[:CANARIES], partner[:CANARIES]


def add_canary_users(stream: BlockStream, known: Ints, partner: Ints) -> BlockStream:
    """The stream with one more user for every pair, who comes in the last block."""
    last = stream.blocks[-1]
    n_canaries = len(known)
    plain_lists = Ragged(last.train.ptr, last.train.ids)
    canary_items = _list_canary_items(known, partner, last.n_users)
    train = plain_lists.join_rows(canary_items)
    block = replace(
        last,
        n_users=last.n_users + n_canaries,
        train=_extend_columns(train, last.train),
        valid=_append_empty_lists(last.valid, n_canaries),
        test=_append_empty_lists(last.test, n_canaries),
        new_users=np.append(last.new_users, np.ones(n_canaries, bool)),
        n_rows=last.n_rows + 2 * n_canaries,
    )
    names = tuple(f"canary {number}" for number in range(n_canaries))
    return replace(
        stream,
        blocks=(*stream.blocks[:-1], block),
        user_ids=(*stream.user_ids, *names),
        user_keys=np.append(stream.user_keys, derive_keys(names)),
    )


def _extend_columns(train: Ragged, before: Ragged) -> Ragged:
    """The columns that lists had, with the largest time and rating for new entries.

    New users have the last rows, so earlier entries stay in place.
    """
    n_new = len(train.ids) - len(before.ids)
    columns = {}
    for name, column in before.values.items():
        largest = column.max() if len(column) else 0
        new_entries = np.full(n_new, largest, column.dtype)
        columns[name] = np.append(column, new_entries)
    return replace(train, values=columns)


def _append_empty_lists(lists: Ragged, n: int) -> Ragged:
    end = lists.ptr[-1]
    more_ends = np.full(n, end)
    ptr = np.append(lists.ptr, more_ends)
    return replace(lists, ptr=ptr)


def draw_requests(scenario: WithdrawalScenario, share: float) -> ResolvedRequest:
    """Some of those who share withdraw all of it; where nobody shares, some people withdraw half of what they have."""
    federation = scenario.run.federation
    keys = federation.stream.user_keys
    is_shared = len(scenario.run.shared.ids) > 0
    lists = _list_withdrawable(scenario, is_shared)
    has_items = np.flatnonzero(lists.counts() > 0)
    able = np.setdiff1d(has_items, scenario.canaries)
    if len(able) == 0:
        raise TacitaError("nobody in this run has anything to withdraw, so there is nothing to audit.")
    users = sample_requesters(able, keys, federation.draws, share)
    items = lists.take(users)
    if len(scenario.canaries):
        canary_items = _list_canary_requests(scenario, is_shared)
        canary_rows = len(users) + canary_items.rows()
        rows = np.concatenate([items.rows(), canary_rows])
        ids = np.concatenate([items.ids, canary_items.ids])
        users = np.concatenate([users, scenario.canaries])
        items = Ragged.from_pairs(rows, ids, len(users))
    kind: Literal["unshare", "forget"] = "unshare" if is_shared else "forget"
    batch = RequestBatch(kind, keys[users], items, is_immediate=True)
    return ResolvedRequest(batch, users.astype(np.int32), items, False)


def _list_withdrawable(scenario: WithdrawalScenario, is_shared: bool) -> Ragged:
    """(users) all that they share, or half of what they have."""
    federation = scenario.run.federation
    stream = federation.stream
    lists = scenario.run.shared
    if not is_shared:
        trained = stream.collect_train_items(len(stream.blocks) - 1)
        drawn = hash_owners(federation.draws.public("withdrawn"), stream.item_keys)
        lists = draw_half_of_items(trained, drawn)
    return Ragged(lists.ptr, lists.ids)


def _list_canary_requests(scenario: WithdrawalScenario, is_shared: bool) -> Ragged:
    """(canaries) both items where people share, else the partner."""
    if is_shared:
        return _list_canary_items(scenario.known, scenario.partner, 0)
    n_canaries = len(scenario.canaries)
    return Ragged.from_pairs(np.arange(n_canaries), scenario.partner, n_canaries)


def draw_half_of_items(lists: Ragged, drawn: Keys) -> Ragged:
    """Half of everybody's items, by a draw; an only item stays."""
    rows = lists.rows()
    n_entries = len(rows)
    draws = drawn[lists.ids]
    order = np.lexsort((draws, rows))
    starts = lists.ptr[rows[order]]
    place = np.empty(n_entries, np.int64)
    place[order] = np.arange(n_entries) - starts
    half = lists.counts()[rows] // 2
    plain_lists = Ragged(lists.ptr, lists.ids)
    return plain_lists.filter_entries(place < half)
