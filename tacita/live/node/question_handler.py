"""What a node does with one question of its server: a round as in the lab, on its own people, then one commit.

A question has a number (run, block, round, kind). If it comes again, the node sends the reply it stored. If another
question comes under the same number, the node refuses: two answers to nearly the same question give more away than
one. A refusal changes nothing of a run. A node with too few people for a sum trains for them alone (`ALONE_TAGS`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace

import numpy as np

from tacita import __version__
from tacita.core.config import RunConfig
from tacita.core.types import Arrays
from tacita.live.node.admission import (
    admit_settings,
    make_withdrawal_marks,
    refuse_single_uploads,
    shows_single_users,
)
from tacita.live.node.answers import AnswerRecord, NodeAnswer, ReleaseRecord, StoredModel, make_question_number
from tacita.live.node.attempts import resolve_attempt
from tacita.live.node.block_progress import advance_run
from tacita.live.node.carried_requests import batches_withdrawals, collect_requests
from tacita.live.node.charging import suspend_charges
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun, Refusal, open_node_run, pack_devices
from tacita.live.node.question_reader import ReceivedQuestion, assemble_model, read_and_check_catalogue, read_question
from tacita.live.node.scores import answer_evaluation_or_close
from tacita.live.node.sum_release import answer_sum
from tacita.live.per_client_arrays import NAMES, ROSTER, TAKES_PART
from tacita.live.wire import (
    SCORE_QUESTIONS,
    Catalogue,
    Reply,
    RequestHead,
    ServerRequest,
    UserRequest,
    decode_request,
    encode_message,
    make_reply_head,
    stamp_reply,
)

log = logging.getLogger(__name__)

MAX_TRIES = 3  # to compute an answer while people withdraw
MAX_OPEN_RUNS = 4


@dataclass(frozen=True)
class CommittedAnswer:
    """A reply that the store has committed."""

    body: bytes
    is_answered: bool  # False: it refuses


def answer_message(node: Node, body: bytes) -> bytes:
    """Answer one request of the server; raise an error for bytes that are no request."""
    reply = _answer_or_refuse(node, body)
    return stamp_reply(reply, __version__, time.time())


def _answer_or_refuse(node: Node, body: bytes) -> bytes:
    request = decode_request(body)
    try:
        for _ in range(MAX_TRIES):
            answer = _repeat_or_compute_answer(node, request)
            if answer is not None:
                return answer
        raise Refusal("people are changing what they share; ask again later.")
    except Refusal as refusal:
        reason = str(refusal)[:500]
        return encode_message(_make_refusal(node, request.head, reason))
    finally:
        if len(node.open_runs) > MAX_OPEN_RUNS:
            node.open_runs.clear()


def _repeat_or_compute_answer(node: Node, request: ServerRequest) -> bytes | None:
    """The stored answer, or a new one after its commit; None: somebody withdrew while it was computed."""
    head = request.head
    config = admit_settings(node, head)
    node.store.record_outcomes(head.run, head.told)
    stored_reply = _find_stored_reply(node, request)
    if stored_reply is not None:
        return stored_reply
    resolve_attempt(node, head, config)
    model = assemble_model(node, request)
    if model is None:
        digests = _list_held_digests(node, head.run)
        return encode_message(Reply(make_reply_head(head, verdict="missing", have=digests)))
    catalogue = read_and_check_catalogue(node, _select_arrays(model))
    try:
        committed = _compute_and_commit(node, request, config, model, catalogue)
    except BaseException as error:
        node.open_runs.pop(head.run, None)  # what was not committed did not happen
        if isinstance(error, Exception):
            node.store.reopen_block(head.run, head.block)
        raise
    if committed is None:
        node.open_runs.pop(head.run, None)
        return None
    if not committed.is_answered:
        node.store.reopen_block(head.run, head.block)
    return committed.body


def _select_arrays(model: StoredModel) -> Arrays:
    _, arrays = model
    return {name: array for name, (_, array) in arrays.items()}


def _find_stored_reply(node: Node, request: ServerRequest) -> bytes | None:
    """The answer to the same request, if there was one; refuses another request under the same number."""
    stored = node.store.find_stored_reply(make_question_number(request.head))
    if stored is None:
        return None
    digest, reply = stored
    if digest != request.sha or not reply:
        raise Refusal("this round was already answered, for this or another model.")
    return reply


def _compute_and_commit(
    node: Node, request: ServerRequest, config: RunConfig, model: StoredModel, catalogue: Catalogue
) -> CommittedAnswer | None:
    """Compute an answer and commit all that it changed at once; None: somebody withdrew meanwhile."""
    store = node.store
    head = request.head
    withdrawals_before = store.withdrawals
    items = [item for item, _ in catalogue]
    node_run = open_node_run(node, head.run, head.block, config, items)
    question = read_question(node_run, _select_arrays(model), request)
    answer = _compute_or_refuse(node, node_run, question)
    carried: list[UserRequest] = []
    if answer.is_answered or node_run.has_too_few_users:
        carried = collect_requests(node, node_run, question)
    body = _encode_reply_with_notes(answer.reply, head, model, carried)
    note, _ = model
    note["tag"] = node_run.tags[0]
    store.extend_catalogue(catalogue)
    record = _make_answer_record(node, node_run, question, answer, model, carried, body)
    if not store.commit_answer(question.number, record, unless_withdrawn_since=withdrawals_before):
        return None
    return CommittedAnswer(body, answer.is_answered)


def _compute_or_refuse(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> NodeAnswer:
    try:
        return _compute_answer(node, node_run, question)
    except (LookupError, ValueError):
        raise Refusal("the arrays of the request do not fit each other.") from None


def _encode_reply_with_notes(reply: Reply, head: RequestHead, model: StoredModel, carried: list[UserRequest]) -> bytes:
    """A reply with what the node holds of the model, the requests it carries, and the outcomes it has read."""
    _, model_arrays = model
    digests = [sha for sha, _ in model_arrays.values()]
    notes = {"have": digests, "requests": carried, "heard": _list_final_ids(head)}
    noted_head = reply.head.model_copy(update=notes)
    return encode_message(replace(reply, head=noted_head))


def _make_answer_record(
    node: Node,
    node_run: NodeRun,
    question: ReceivedQuestion,
    answer: NodeAnswer,
    model: StoredModel,
    carried: list[UserRequest],
    body: bytes,
) -> AnswerRecord:
    """What the store keeps of an answer; a refusal keeps no reply, so the server may ask again."""
    head = question.head
    devices = node_run.devices
    is_sum = head.kind not in (*SCORE_QUESTIONS, ROSTER)
    release = answer.release
    if release is not None:
        release = replace(release, n_bytes=len(body))
    return AnswerRecord(
        request_sha=question.request.sha,
        reply=body if answer.is_answered else None,
        now=pack_devices(node_run, devices.clients),
        best=pack_devices(node_run, devices.best_devices),
        model=model,
        release=release,
        sent_requests=carried,
        releases_block=answer.is_answered and is_sum,
        has_noise=node_run.counts_epsilon,
        marks=make_withdrawal_marks(node, node_run, question) if answer.is_answered else {},
        min_batch=node.config.min_users if batches_withdrawals(node, node_run) else 0,
        tags=node_run.tags,
        attempt=head.attempt,
    )


# Refusals


def _make_refusal(node: Node, head: RequestHead, reason: str) -> Reply:
    """Say why nothing is sent."""
    log.info("block %d round %d %s: nothing left this node: %s", head.block, head.round, head.kind, reason)
    digests = _list_held_digests(node, head.run)
    final_ids = _list_final_ids(head)
    return Reply(make_reply_head(head, verdict="refused", said=reason, have=digests, heard=final_ids))


def _list_final_ids(head: RequestHead) -> list[int]:
    """Requests whose outcome the server need not send again."""
    return [outcome.id for outcome in head.told if outcome.is_final]


def _list_held_digests(node: Node, run: str) -> list[str]:
    """Digests of the arrays that need not travel again."""
    model = node.store.load_model(run)
    if model is None:
        return []
    _, arrays = model
    return [sha for sha, _ in arrays.values()]


# Answers


def _compute_answer(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> NodeAnswer:
    """Answer the questions that a lab's loop asks its devices."""
    kind = question.head.kind
    withdraws_together = bool(make_withdrawal_marks(node, node_run, question))
    if shows_single_users(node_run, question) and not withdraws_together:
        refuse_single_uploads(node)
    if node_run.has_too_few_users and kind != "close" and not withdraws_together:
        return _refuse_and_train_alone(node, node_run, question)
    if kind == ROSTER:
        return _answer_roster(node, node_run, question)
    advance_run(node_run, question)
    if kind in SCORE_QUESTIONS:
        return answer_evaluation_or_close(node, node_run, question)
    return answer_sum(node, node_run, question, withdraws_together)


def _answer_roster(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> NodeAnswer:
    """The pseudonyms of the people here in this run, and who of them takes part."""
    refuse_single_uploads(node)
    advance_run(node_run, question)
    n_users = len(node_run.pseudonyms)
    participants = node_run.devices.draw_round_participants(node_run.federation, question.server)
    all_rows = np.arange(n_users)
    takes_part = np.isin(all_rows, participants).astype(np.uint8)
    head = make_reply_head(question.head, verdict="ok", clients=n_users)
    reply = Reply(head, {NAMES: node_run.pseudonyms, TAKES_PART: takes_part})
    release = ReleaseRecord(n_users, 0, "made-up names of the people here, and who takes part")
    return NodeAnswer(reply, release)


def _refuse_and_train_alone(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> NodeAnswer:
    """Send nothing where there are too few people for any sum; they train for themselves, once a round."""
    with contextlib.suppress(Refusal):  # a repeated question: they have trained already
        advance_run(node_run, question)
        _train_round_alone(node_run, question)
    reason = node.find_sum_refusal(0) or ""
    return NodeAnswer(_make_refusal(node, question.head, reason))


def _train_round_alone(node_run: NodeRun, question: ReceivedQuestion) -> None:
    """One round that charges nobody, since nothing of it leaves."""
    federation = node_run.federation
    learner = federation.learner
    kind = question.head.kind
    if learner.model_after or kind not in learner.questions(question.server):
        return
    with suspend_charges(node_run):
        node_run.devices.exchange(federation, question.server, question.broadcast, question.question)
    node_run.round = question.head.round + 1
