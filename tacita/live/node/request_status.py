"""How far the requests of a node's people have come, in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tacita.live.formatting import format_age, format_time
from tacita.live.node.node import Node
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.user_run import load_plan
from tacita.live.wire import RequestOutcome


class RequestStatus(BaseModel):
    """How far a request has come, for people and machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: int
    user: str | None  # raw id
    kind: str
    items: int
    run: str
    state: str  # in words
    age: float | None  # seconds; None: nothing more will happen
    done: bool
    effect: str
    certificate: dict[str, Any]


def list_request_statuses(node: Node, user: str | None = None) -> list[RequestStatus]:
    """Of every request, or of those of one person."""
    store = node.store
    user_ids, raw_ids = store.list_users()
    raw_id_of = dict(zip(user_ids.tolist(), raw_ids, strict=True))
    queue = store.list_requests()
    requests = queue
    if user is not None:
        number = store.find_user(user)
        requests = [request for request in queue if request.user == number]
    batching_runs = _list_batching_runs(node, queue)
    statuses = []
    for request in requests:
        outcome = request.outcome
        age = time.time() - request.created
        status = RequestStatus(
            request=request.id,
            user=None if request.user is None else raw_id_of.get(request.user),
            kind=request.kind,
            items=len(request.items),
            run=request.run,
            state=_describe_request_state(node, request, queue, batching_runs),
            age=None if request.is_final else max(0.0, age),
            done=request.is_final,
            effect=_describe_effect(request),
            certificate={} if outcome is None else dict(outcome.certificate),
        )
        statuses.append(status)
    return statuses


def _list_batching_runs(node: Node, queue: Sequence[QueuedRequest]) -> set[str]:
    """Runs with withdrawals that wait here for those of others."""
    unsent = [request for request in queue if request.phase == "queued"]
    runs = {request.run for request in unsent if request.is_withdrawal}
    return {run for run in runs if _batches_withdrawals(node, run)}


def _batches_withdrawals(node: Node, run: str) -> bool:
    """Whether who withdraws from a run has to wait for others here."""
    if node.config.insecure_single_user_uploads:
        return False
    plan = load_plan(node, run)
    if plan is None:
        return False
    if plan.learner.unlearning is not None:
        return True
    return bool(plan.implementing("answer_question"))


def _describe_request_state(
    node: Node, request: QueuedRequest, queue: Sequence[QueuedRequest], batching_runs: set[str]
) -> str:
    carrier = request.carrier
    if carrier is None:
        if request.is_withdrawal and request.run in batching_runs:
            return "queued" + _describe_wait_for_min_users(node, request, queue)
        return "queued"
    if request.outcome is None:
        return f"carried with block {carrier.block} round {carrier.round + 1}"
    return _describe_outcome(request.outcome, time.time() - request.created)


def _describe_outcome(outcome: RequestOutcome, age: float) -> str:
    reason = outcome.said
    if outcome.state == "heard":
        return "acknowledged: carried out before the next round"
    if outcome.state == "pending":
        tries = "once" if outcome.tries == 1 else f"{outcome.tries} times"
        history = f"open for {format_age(age)}, tried in vain {tries}"
        return f"{history}, to be tried again in later rounds: {reason.rstrip('.')}"
    if outcome.state == "waits":
        return f"waits at the server: {reason}"
    if outcome.state == "refused":
        return f"refused: {reason}"
    return f"done in block {outcome.block} after round {outcome.round}: {reason}"


def _describe_effect(request: QueuedRequest) -> str:
    """What the server says has happened, when, and how anybody knows; a sentence for people."""
    certificate = request.certificate
    if request.phase != "applied" or certificate.effective_at is None:
        return ""
    since = f"effective since {format_time(certificate.effective_at)}"
    place = f"in block {certificate.effective_block} after round {certificate.effective_round}"
    route = f"; taken: {certificate.removal}" if certificate.removal else ""
    return f"{since}, {place}{route}; verified {certificate.verified}"


def _describe_wait_for_min_users(node: Node, request: QueuedRequest, queue: Sequence[QueuedRequest]) -> str:
    """How many people have asked so far, of those whose withdrawals leave together."""
    min_users = node.config.min_users
    group = (request.run, request.kind)
    users = set()
    for other in queue:
        if other.sent is None and (other.run, other.kind) == group:
            users.add(other.user)
    if len(users) >= min_users:
        return ""
    return f": {len(users)} of the {min_users} people have asked whose withdrawals leave in one sum (min_users)"
