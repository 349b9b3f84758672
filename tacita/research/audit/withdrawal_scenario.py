"""A run with people planted and people held out, in which withdrawals can be judged (sharing spec D.4).

The held-out are never learned from: they are what strangers look like. Each canary has two rare items that nobody
else has together; how high the one stands for who has the other tells whether the pair was learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.sparse import matrix_of_lists
from tacita.core.types import Block, BlockStream, Ints, Keys, Longs, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.round.request import RequestBatch
from tacita.runs.forgetting.request_service import ReopenedRun, restrict_stream
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


def wrap_run(run: ReopenedRun) -> WithdrawalScenario:
    """The run's own model; nobody is planted."""
    none = np.zeros(0, np.int32)
    return WithdrawalScenario(run, Ragged.empty(0), none, none, none)


def plant_canaries(run: ReopenedRun) -> WithdrawalScenario:
    """The run trained anew with canaries, and without the held-out."""
    stream, draws = run.federation.stream, run.federation.draws
    order = np.argsort(hash_owners(draws.public("held-out"), stream.user_keys))
    away = np.sort(order[: max(2, int(HELD_OUT * stream.n_users))])
    history = stream.history(len(stream.blocks))
    trained = stream.train_items(len(stream.blocks) - 1)
    left = restrict_stream(stream, history.filter_entries(~np.isin(history.rows(), away)))
    known, partner = find_rare_pairs(left, hash_owners(draws.public("canaries"), stream.item_keys))
    users = np.arange(stream.n_users, stream.n_users + len(known), dtype=np.int32)
    fed = replace(run.federation, stream=add_canary_users(left, known, partner))
    shared = run.shared
    shared = shared.filter_entries(~np.isin(shared.rows(), away))
    if len(shared.ids):
        rows, ids = _list_pair_entries(known, partner)
        shared = shared.join_rows(Ragged.from_pairs(stream.n_users + rows, ids, stream.n_users + len(users)))
    progress = retrain_blocks(fed, shared)
    progress.in_block = True
    return WithdrawalScenario(ReopenedRun(run.saved, fed, progress), trained.take(away), users, known, partner)


def _list_pair_entries(known: Ints, partner: Ints) -> tuple[Longs, Ints]:
    return np.tile(np.arange(len(known)), 2), np.concatenate([known, partner])


def find_rare_pairs(stream: BlockStream, drawn: Keys) -> tuple[Ints, Ints]:
    """Pairs of items that few people have and nobody has together; each item is in one pair."""
    trained = stream.train_items(len(stream.blocks) - 1)
    count = np.bincount(trained.ids, minlength=stream.n_items)
    order = np.lexsort((drawn, count))
    rare = order[: max(2, len(order) // 3)]
    rare = rare[np.argsort(drawn[rare], kind="stable")]
    half = len(rare) // 2
    one, other = rare[:half].astype(np.int32), rare[half : 2 * half].astype(np.int32)
    has = matrix_of_lists(trained, stream.n_items).tocsc()
    apart = np.asarray(has[:, one].multiply(has[:, other]).sum(axis=0)).ravel() == 0
    return one[apart][:CANARIES], other[apart][:CANARIES]


def add_canary_users(stream: BlockStream, known: Ints, partner: Ints) -> BlockStream:
    """The stream with one more user for every pair, who comes in the last block."""
    last, n = stream.blocks[-1], len(known)
    rows, ids = _list_pair_entries(known, partner)
    train = Ragged(last.train.ptr, last.train.ids).join_rows(
        Ragged.from_pairs(last.n_users + rows, ids, last.n_users + n)
    )
    names = tuple(f"canary {k}" for k in range(n))
    block = Block(
        last.index, last.n_users + n, last.n_items, _extend_columns(train, last.train),
        _append_empty_lists(last.valid, n),
        _append_empty_lists(last.test, n), np.append(last.new_users, np.ones(n, bool)), last.n_rows + 2 * n,
    )  # fmt: skip
    return replace(
        stream,
        blocks=(*stream.blocks[:-1], block),
        user_ids=(*stream.user_ids, *names),
        user_keys=np.append(stream.user_keys, derive_keys(names)),
    )


def _extend_columns(train: Ragged, before: Ragged) -> Ragged:
    """The columns that lists had, with the largest time and rating for those who came."""
    more = len(train.ids) - len(before.ids)
    columns = {k: np.append(v, np.full(more, v.max() if len(v) else 0, v.dtype)) for k, v in before.values.items()}
    return replace(train, values=columns)  # who came has the last rows, so what was there keeps its place


def _append_empty_lists(lists: Ragged, n: int) -> Ragged:
    return replace(lists, ptr=np.append(lists.ptr, np.full(n, lists.ptr[-1])))


def draw_requests(scene: WithdrawalScenario, share: float) -> ResolvedRequest:
    """Some of those who share withdraw all of it; where nobody shares, some people withdraw half of what they have."""
    fed, shared = scene.run.federation, scene.run.shared
    keys, stream = fed.stream.user_keys, fed.stream
    trained, sharing = stream.train_items(len(stream.blocks) - 1), len(shared.ids) > 0
    lists = shared if sharing else draw_half(trained, hash_owners(fed.draws.public("withdrawn"), stream.item_keys))
    lists = Ragged(lists.ptr, lists.ids)
    able = np.setdiff1d(np.flatnonzero(lists.counts() > 0), scene.canaries)
    if len(able) == 0:
        raise TacitaError("nobody in this run has anything to withdraw, so there is nothing to audit.")
    users = sample_requesters(able, keys, fed.draws, share)
    asked = lists.take(users)
    if len(scene.canaries):
        own = Ragged.from_pairs(*_list_pair_entries(scene.known, scene.partner), len(scene.canaries))
        partner = Ragged.from_pairs(np.arange(len(scene.canaries)), scene.partner, len(scene.canaries))
        more = own if sharing else partner
        rows = np.concatenate([asked.rows(), len(users) + more.rows()])
        users = np.concatenate([users, scene.canaries])
        asked = Ragged.from_pairs(rows, np.concatenate([asked.ids, more.ids]), len(users))
    kind = RequestBatch("unshare" if sharing else "forget", keys[users], asked, is_immediate=True)
    return ResolvedRequest(kind, users.astype(np.int32), asked, False)


def draw_half(lists: Ragged, drawn: Keys) -> Ragged:
    """Half of everybody's items, by a draw; who has one keeps it."""
    rows = lists.rows()
    order = np.lexsort((drawn[lists.ids], rows))
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - lists.ptr[rows[order]]
    return Ragged(lists.ptr, lists.ids).filter_entries(place < lists.counts()[rows] // 2)
