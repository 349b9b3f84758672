"""Who may withdraw together: batches of withdrawals that leave in one sum, so that no sum is about a few people.

A batch is who left with one answer, whatever the server says of some of them later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable

from tacita.live.node.answers import QuestionNumber
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.wire import MOST_REQUESTS
from tacita.round.request import UNLEARNING_KINDS

ANSWERED_PREFIX = "answered/"  # a person, and what was asked of them when they withdrew

BatchKey = tuple[QuestionNumber | None, str]  # the answer that a batch left with, and the kind of its requests


# What leaves


def select_requests_to_send(
    queue: Collection[QueuedRequest], min_users: int, in_batches: bool, empty_withdrawals: Collection[int] = ()
) -> list[QueuedRequest]:
    """What the next answer carries: all that the server has not acknowledged.

    `in_batches`: the server asks what to take back, so withdrawals leave only with those of `min_users` people.
    `empty_withdrawals`: these take nothing back, so they hide nobody; `min_users` others must be with them, or none.
    """
    unacknowledged = [request for request in queue if request.outcome is None]
    due = unacknowledged[:MOST_REQUESTS]
    if not in_batches:
        return due
    new_requests = [request for request in due if request.sent is None]
    waiting = list[QueuedRequest]()
    for kind in UNLEARNING_KINDS:
        batch = [request for request in new_requests if request.kind == kind]
        if not may_leave_together(batch, min_users, empty_withdrawals):
            waiting += batch
    waiting_ids = {request.id for request in waiting}
    return [request for request in due if request.id not in waiting_ids]


def may_leave_together(batch: Collection[QueuedRequest], min_users: int, empty_withdrawals: Collection[int]) -> bool:
    """Whether enough people withdraw, and enough of them, or none, take something back."""
    withdrawing = list_batch_users(batch)
    retracting = {request.user for request in batch if request.id not in empty_withdrawals}
    if len(withdrawing) < min_users:
        return False
    return not retracting or len(retracting) >= min_users


def collect_withdrawn_items(queue: Collection[QueuedRequest]) -> dict[int, set[str] | None]:
    """The items that nobody learns from any more, by user; None: all of theirs."""
    withdrawn: dict[int, set[str] | None] = {}
    for request in queue:
        user = request.user
        if user is None or request.sent is None or not request.is_withdrawal:
            continue
        items = withdrawn.setdefault(user, set())
        if request.kind == "leave":
            withdrawn[user] = None
        elif items is not None:
            items |= set(request.items)
    return withdrawn


# Batches


def group_sent_withdrawals(queue: Iterable[QueuedRequest]) -> dict[BatchKey, list[QueuedRequest]]:
    """People's withdrawals by the answer that they left with, oldest first."""
    batches: dict[BatchKey, list[QueuedRequest]] = {}
    for request in sorted(queue, key=lambda request: request.id):
        has_left = request.sent is not None and request.user is not None
        if has_left and request.is_withdrawal:
            key = (request.carrier, request.kind)
            batches.setdefault(key, []).append(request)
    return batches


def list_batch_users(batch: Iterable[QueuedRequest]) -> set[int | None]:
    return {request.user for request in batch}


def select_whole_batches(
    queue: Collection[QueuedRequest], users: Collection[int], min_users: int
) -> list[QueuedRequest]:
    """The withdrawals of some users, if these are all users of their batches and nobody else; else none.

    A batch without those whom the server calls done would be another sum. The difference of both sums would be what
    these few had contributed.
    """
    respondents = set(users)
    withdrawals: list[QueuedRequest] = []
    for batch in group_sent_withdrawals(queue).values():
        members = list_batch_users(batch)
        final_requests = [request for request in batch if request.is_final]
        is_settled = len(final_requests) == len(batch)
        if is_settled or not respondents & members:
            continue
        if len(members) < min_users or final_requests:
            return []
        withdrawals += batch
    is_whole = respondents == list_batch_users(withdrawals)
    if not is_whole or len(respondents) < min_users:
        return []
    return withdrawals


# Names of batches


def digest_batch(key: BatchKey, batch: Iterable[QueuedRequest]) -> str:
    """The name of a batch: from the answer that it left with, and who is in it."""
    users = sorted({request.user or 0 for request in batch})
    text = json.dumps([_flatten_key(key), users])
    return hashlib.sha256(text.encode()).hexdigest()


def digest_single_withdrawal(key: BatchKey, request: QueuedRequest) -> str:
    """The name of one person's withdrawal, where the server knows who is who."""
    return f"{request.user} {digest_batch(key, [request])}"


def _flatten_key(key: BatchKey) -> list[str | int]:
    carrier, kind = key
    if carrier is None:
        return []
    return [*vars(carrier).values(), kind]


def list_batch_digests(queue: Iterable[QueuedRequest], users: Collection[int], min_users: int) -> set[str]:
    """The names of the batches that answer a retraction; `min_users` 0: the server names people, so each alone."""
    if min_users:
        withdrawals = select_whole_batches(list(queue), users, min_users)
        batches = group_sent_withdrawals(withdrawals)
        return {digest_batch(key, batch) for key, batch in batches.items()}
    own_requests = [request for request in queue if request.user in users]
    open_requests = [request for request in own_requests if not request.is_final]
    digests = set[str]()
    for key, batch in group_sent_withdrawals(open_requests).items():
        digests |= {digest_single_withdrawal(key, request) for request in batch}
    for user in set(users) - list_batch_users(open_requests):
        digests.add(f"{user} nothing")
    return digests


def make_answer_marks(withdrawals: Iterable[QueuedRequest], question: str, each_batch: bool) -> dict[str, str]:
    """What a node notes of a question that people answered when they withdrew: by user, who was in their batch.

    A question of a part (`fru/stored-0-3`) is about what devices keep. Two sums with different people would tell one
    person's share, so each user answers it in one batch only, and there again if the answer got lost. A batch that
    somebody was erased from is another batch. `each_batch`: the question is about what this withdrawal takes back, so
    the next one raises it again.
    """
    stem = question.split("/")[: 1 if each_batch else 2]
    marks: dict[str, str] = {}
    for key, batch in group_sent_withdrawals(withdrawals).items():
        digest = digest_batch(key, batch)
        scope = _flatten_key(key) if each_batch else []
        for request in batch:
            name = json.dumps([request.run, *stem, *scope])
            marks.setdefault(f"{ANSWERED_PREFIX}{request.user}/{name}", digest)
    return marks
