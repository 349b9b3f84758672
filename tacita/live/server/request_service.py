"""The request service: it carries out the requests that came with answers, in order, and withdrawals in groups.

What cannot be carried out gets an outcome that says so, and stops no run.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Keys, Ragged, ServerState
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress
from tacita.live.json_object import JsonObject
from tacita.live.server.attempts import NoAnswer
from tacita.live.server.certificates import build_certificate, certify_each_user, certify_user
from tacita.live.server.open_requests import ApplyResult, NumberedOutcome, OpenRequest
from tacita.live.server.remote_devices import RemoteDevices
from tacita.live.wire import RequestOutcome
from tacita.round.plan import Federation
from tacita.round.request import WITHDRAWAL_KINDS, Request, RequestBatch
from tacita.round.unlearning_report import PartReports, UnlearningReport

log = logging.getLogger(__name__)

MOST_TRIES = 5
"""Tries after which an operator learns that somebody's request is stuck; it stays open all the same."""
MAX_DELAY_EXPONENT = 6  # a request that was tried in vain waits for at most 2 to this many rounds

RequestGroup = list[OpenRequest]
Outcomes = list[NumberedOutcome]

_NO_KEYS = np.zeros(0, np.uint64)


# What is due


def select_due_requests(requests: RequestGroup, server: ServerState) -> RequestGroup:
    """What is to be carried out now.

    The service repeats what was tried in vain after ever more rounds. What its people ask for next waits for it.
    """
    due = []
    waiting_users = set[tuple[int, int]]()
    for request in requests:
        if request.user in waiting_users or not _is_retry_due(request, server):
            waiting_users.add(request.user)
        else:
            due.append(request)
    return due


def _is_retry_due(request: OpenRequest, server: ServerState) -> bool:
    last = request.outcome
    if last is None or last.state != "pending":
        return True
    if last.block != server.block:
        return True
    exponent = min(max(last.tries - 1, 0), MAX_DELAY_EXPONENT)
    return server.round >= last.round + (1 << exponent)


def group_requests(requests: RequestGroup) -> list[RequestGroup]:
    """Requests in order; withdrawals of one kind by several people of a node are carried out together.

    A node that is silent or refuses then fails its own people alone.
    """
    groups: list[RequestGroup] = []
    for request in requests:
        group = _find_group(groups, request)
        if group is None:
            groups.append([request])
        else:
            group.append(request)
    return groups


def _find_group(groups: list[RequestGroup], request: OpenRequest) -> RequestGroup | None:
    """The latest group that a request can join; None: it stands alone, or behind one of the same person."""
    kind = request.kind
    sender = request.sender
    if kind not in ("forget", "leave"):
        return None
    for group in reversed(groups):
        first = group[0]
        if any(other.sender == sender for other in group):
            return None
        if (first.kind, first.node) == (kind, request.node):
            return group
    return None


# Carrying out


def apply_requests(federation: Federation, progress: Progress, group: RequestGroup) -> ApplyResult:
    """Carry out requests of one kind that came with answers; those whose nodes do not answer stay open."""
    kind = group[0].kind
    is_withdrawal = kind in WITHDRAWAL_KINDS
    fitting, refused = _separate_misfits(progress, group)
    if not fitting:
        reason = refused[0].outcome.said
        return ApplyResult({"kind": kind, "said": reason}, refused, is_withdrawal, _NO_KEYS)
    model_before = progress.server
    try:
        reports_by_part = _carry_out(federation, progress, fitting)
    except NoAnswer as error:
        reason = str(error)[:500]
        return _postpone_requests(progress, fitting, refused, reason)
    except TacitaError as error:
        reason = str(error)[:500]
    except Exception as error:  # of a part: whatever it was, the next round must not meet it again
        log.exception("requests %s", [request.number for request in fitting])
        reason = f"it failed: {type(error).__name__}"
    else:
        return _certify_requests(progress, model_before, fitting, refused, reports_by_part)
    outcomes = list(refused)
    for request in fitting:
        outcomes.append(_make_outcome(progress, request, "refused", said=reason))
    return ApplyResult({"kind": kind, "said": reason}, outcomes, is_withdrawal, _NO_KEYS)


def _separate_misfits(progress: Progress, group: RequestGroup) -> tuple[RequestGroup, Outcomes]:
    """Requests that can be meant, and outcomes of those that cannot."""
    fitting = []
    refused = []
    for request in group:
        reason = _find_misfit_reason(progress, request)
        if reason:
            refused.append(_make_outcome(progress, request, "refused", said=reason))
        else:
            fitting.append(request)
    return fitting, refused


def _find_misfit_reason(progress: Progress, request: OpenRequest) -> str:
    """Why a request cannot be meant; empty: it can."""
    last_item = max(request.items, default=0)
    if last_item >= len(progress.server.items):
        return "the request is about items that are not in the catalogue."
    known_node = _require_remote_devices(progress).locations.find_node(request.sender)
    if known_node not in (None, request.node):
        return "the request is for somebody of another node."
    return ""


def _require_remote_devices(progress: Progress) -> RemoteDevices:
    assert isinstance(progress.devices, RemoteDevices)
    return progress.devices


def _carry_out(federation: Federation, progress: Progress, group: RequestGroup) -> PartReports:
    """Carry requests out in one attempt, which has failed unless all of it went through."""
    remote = _require_remote_devices(progress)
    is_effective = False
    remote.attempts.begin_attempt()
    try:
        _refuse_absent_nodes(remote, group)
        node_by_sender = {request.sender: request.node for request in group}
        remote.locations.add_requesters(node_by_sender)
        requests = _merge_requests(group, remote)
        reports_by_part = handle_requests(federation, progress, requests)
        is_effective = True
        return reports_by_part
    finally:
        remote.attempts.end_attempt(is_effective)


def _refuse_absent_nodes(remote: RemoteDevices, group: RequestGroup) -> None:
    """Do not wait a second time for a node that is away.

    A server that was killed may have asked with this attempt's number: so the number is used up.
    """
    nodes = {request.node for request in group}
    was_tried = any(request.tries for request in group)
    online = set(remote.transport.list_online_nodes())
    if was_tried and not nodes <= online:
        remote.attempts.take_attempt_number()
        raise NoAnswer("the node is away.")


def _merge_requests(group: RequestGroup, remote: RemoteDevices) -> Request | RequestBatch:
    first = group[0].request
    number = group[0].number
    last_time = max(request.request.time for request in group)
    at = remote.attempts.order_request_time(last_time, time.time())
    if len(group) == 1:
        item_numbers = np.array(first.items, np.int32)
        return Request(first.kind, first.sender, item_numbers, at, number)
    senders = np.array([request.sender for request in group], np.uint64)
    items = Ragged.from_lists([request.items for request in group])
    return RequestBatch(first.kind, senders, items, at, number)


# Outcomes


def _certify_requests(
    progress: Progress,
    model_before: ServerState,
    group: RequestGroup,
    refused: Outcomes,
    reports_by_part: PartReports,
) -> ApplyResult:
    """Requests that were carried out, or that wait for others, with a certificate for each user."""
    kind = group[0].kind
    models = (model_before, progress.server)
    reports = list(reports_by_part.values())
    waits = any(report.is_waiting for report in reports)
    certificate = build_certificate(reports, models, kind)
    verdict = certificate.verdict
    state = "waits" if waits else "done"
    outcomes = list(refused)
    for request, user_certificate in certify_each_user(certificate, models, group):
        facts = user_certificate.to_facts()
        outcomes.append(_make_outcome(progress, request, state, said=verdict, certificate=facts))
    freed_facts = certify_user(certificate, kind, 0).to_facts()
    freed = _make_outcome(progress, group[0], state, said=verdict, certificate=freed_facts)
    content = {name: _to_json(report.to_json()) for name, report in reports_by_part.items()}
    event = {"kind": kind, "people": len(group), "done": content}
    freed_users = _collect_freed(reports)
    return ApplyResult(event, outcomes, kind in WITHDRAWAL_KINDS, freed_users, freed.outcome)


def _collect_freed(reports: list[UnlearningReport]) -> Keys:
    """Users who waited for others, and need not any more."""
    freed = [_NO_KEYS]
    for report in reports:
        if not report.is_waiting:
            users = np.array(report.subjects, np.uint64)
            freed.append(users)
    return np.concatenate(freed)


def _postpone_requests(progress: Progress, group: RequestGroup, refused: Outcomes, reason: str) -> ApplyResult:
    """Requests whose nodes did not answer stay open, to be tried again."""
    first = group[0]
    kind = first.kind
    outcomes = list(refused)
    for request in group:
        n_tries = request.tries + 1
        outcomes.append(_make_outcome(progress, request, "pending", said=reason, tries=n_tries))
    event: JsonObject = {
        "kind": kind,
        "said": reason,
        "state": "pending",
        "node": str(first.node),
        "tries": first.tries + 1,
    }
    needs_scrub = bool(refused) and kind in WITHDRAWAL_KINDS
    return ApplyResult(event, outcomes, needs_scrub, _NO_KEYS)


def _make_outcome(progress: Progress, request: OpenRequest, state: Any, **fields: Any) -> NumberedOutcome:
    server = progress.server
    request_id = request.request.id
    outcome = RequestOutcome(id=request_id, state=state, block=server.block, round=server.round, **fields)
    return NumberedOutcome(request.number, outcome)


def _to_json(value: Any) -> Any:
    """What a part reports, as JSON."""
    if isinstance(value, dict):
        return {str(name): _to_json(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
