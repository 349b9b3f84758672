"""What a node does with one request of its server: the lab's own round on the people at hand, then one commit.

A request has a number (run, block, round, kind). Asked again, the node sends the reply it stored; asked something
else under the same number, it refuses, since two answers to nearly the same question give more away than one.
A refusal changes nothing of a run. A node with too few people for a sum learns for them beside the run (`alone`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np

from tacita import __version__
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Longs
from tacita.federation.devices import RoundReply
from tacita.learn.statistic import CONTRIBUTION_LOG
from tacita.live.node import min_contributors, noise_replay
from tacita.live.node.answers import AnswerRecord, QuestionNumber, ReleaseRecord
from tacita.live.node.attempts import resolve_attempt
from tacita.live.node.budgets import (
    apply_declared_budgets,
    carry_over_spending,
    compute_costs,
    copy_spent,
    count_budget_use,
    describe_highest_cost,
    read_accounts,
    suspend_charges,
)
from tacita.live.node.node import Node
from tacita.live.node.node_run import ALONE_TAGS, NodeRun, Refusal, open_node_run, pack_devices
from tacita.live.node.question_reader import (
    ReceivedQuestion,
    assemble_model,
    check_catalogue,
    normalise_config,
    read_question,
)
from tacita.live.node.request_queue import (
    WITHDRAWALS,
    QueuedRequest,
    has_conflict,
    list_batch_digests,
    make_answer_marks,
    select_due,
    select_whole_batches,
)
from tacita.live.node.scores import compute_scores, count_scored_users
from tacita.live.per_client_arrays import NAMES, ROSTER, TAKES_PART, encode_client_fields
from tacita.live.settings import check_live_settings
from tacita.live.wire import (
    MOST_PLAYED,
    SCORE_QUESTIONS,
    Reply,
    ReplyHead,
    RequestHead,
    ServerRequest,
    UserRequest,
    decode_request,
    encode_message,
    encode_total,
    stamp_reply,
)
from tacita.messages import Total
from tacita.round.device_state import PARTS
from tacita.round.parts import overrides
from tacita.round.plan import strip_replay
from tacita.round.request import Request as AskedFor
from tacita.round.request import RequestBatch
from tacita.runs.assembly import build_plan, check_settings

log = logging.getLogger(__name__)


def answer_message(node: Node, body: bytes) -> bytes:
    """Answer one request; raises a sentence for a request that is not one."""
    return stamp_reply(_build_reply(node, body), __version__, time.time())


def _build_reply(node: Node, body: bytes) -> bytes:
    request = decode_request(body)
    try:
        for _ in range(3):  # again if somebody withdrew while the sum was being made
            answer = _answer_once(node, request)
            if answer is not None:
                return answer
        raise Refusal("people are changing what they share; ask again later.")
    except Refusal as why:
        return encode_message(_refuse_request(node, request, str(why)[:500]))
    finally:
        if len(node.open_runs) > 4:
            node.open_runs.clear()


def _answer_once(node: Node, request: ServerRequest) -> bytes | None:
    """The stored answer, or a new one that was committed; None: what it was made from has changed."""
    head, store = request.head, node.store
    config = _check_settings(node, head)
    store.record_outcomes(head.run, head.told)
    number = QuestionNumber(head.run, head.block, head.round, head.kind)
    stored = store.stored_reply(number)
    if stored is not None:
        if stored[0] == request.sha and stored[1]:
            return stored[1]
        raise Refusal("this round was already answered, for this or another model.")
    resolve_attempt(node, head, config)
    model = assemble_model(node, request)
    if model is None:
        return encode_message(Reply(_make_head(request, verdict="missing", have=_held_digests(node, head.run))))
    arrays = {name: array for name, (_, array) in model[1].items()}
    catalogue = check_catalogue(node, arrays)
    withdrawals = store.withdrawals
    try:
        standing = open_node_run(node, head.run, head.block, config, [item for item, _ in catalogue])
        asked = read_question(standing, arrays, head.block, head.round)
        try:
            reply, release = _compute_reply(node, request, standing, asked)
        except (LookupError, ValueError):
            raise Refusal("the arrays of the request do not fit each other.") from None
        answered = reply.head.verdict == "ok"
        carried = _collect_requests(node, standing, asked, head) if answered or standing.tags == ALONE_TAGS else []
        have = [sha for sha, _ in model[1].values()]
        more = {"have": have, "requests": carried, "heard": _acknowledged_ids(request)}
        reply = replace(reply, head=reply.head.model_copy(update=more))
        sent = encode_message(reply)
        model[0]["tag"] = standing.tags[0]
        store.set_catalogue(catalogue)
        answer = AnswerRecord(
            request.sha,
            sent if answered else None,  # who refused may be asked again
            now=pack_devices(standing, standing.devices.clients),
            best=pack_devices(standing, standing.devices.best),
            model=model,
            release=None if release is None else replace(release, n_bytes=len(sent)),
            sent_requests=carried,
            releases_block=answered and head.kind not in (*SCORE_QUESTIONS, ROSTER),
            marks=_withdrawal_marks(node, standing, asked, head.kind) if answered else {},
            min_batch=node.config.min_users if _batches_withdrawals(node, standing) else 0,
            tags=standing.tags,
            attempt=head.attempt,
        )
        done = store.commit_answer(number, answer, unless_withdrawn_since=withdrawals)
    except BaseException as error:
        node.open_runs.pop(head.run, None)  # what was not committed did not happen
        if isinstance(error, Exception):
            store.reopen_block(head.run, head.block)
        raise
    if not done:
        node.open_runs.pop(head.run, None)
        return None
    if not answered:
        store.reopen_block(head.run, head.block)
    return sent


def _check_settings(node: Node, head: RequestHead) -> RunConfig:
    """The run's settings: such that a node can follow them, and the same as when the run began."""
    try:
        config = validate_model(RunConfig, head.config, "the settings the server sent")
        check_live_settings(config)
        plan = build_plan(config)
        check_settings(config, plan.backbone)
    except TacitaError as error:
        raise Refusal(str(error)) from None
    if any(one.delta > node.config.max_delta for one in plan.ledgers):
        raise Refusal(
            "this run counts epsilon at a larger delta than this node allows (max_delta), which makes a budget worth "
            "little; begin one with a smaller delta."
        )
    held = node.store.model(head.run)
    if held is not None and normalise_config(json.loads(held[0]["config"])) != config.model_dump_json():
        raise Refusal("the settings of this run have changed; begin a new run.")
    most = plan.learner.rounds + MOST_PLAYED
    if head.round > most or head.best_round > most:
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    return config


def _make_head(request: ServerRequest, **more: Any) -> ReplyHead:
    head = request.head
    return ReplyHead(kind=head.kind, run=head.run, block=head.block, round=head.round, **more)


def _refuse_request(node: Node, request: ServerRequest, said: str) -> Reply:
    head = request.head
    log.info("block %d round %d %s: nothing left this node: %s", head.block, head.round, head.kind, said)
    return Reply(
        _make_head(
            request, verdict="refused", said=said, have=_held_digests(node, head.run), heard=_acknowledged_ids(request)
        )
    )


def _acknowledged_ids(request: ServerRequest) -> list[int]:
    """Requests whose end the server need not tell again."""
    return [one.id for one in request.head.told if one.is_final]


def _held_digests(node: Node, run: str) -> list[str]:
    """Digests of what need not travel again."""
    held = node.store.model(run)
    return [] if held is None else [sha for sha, _ in held[1].values()]


# What people here ask of the server


def _collect_requests(node: Node, standing: NodeRun, asked: ReceivedQuestion, head: RequestHead) -> list[UserRequest]:
    """What people here ask for, as the server gets it.

    Answers to questions that a request raised, and the last one of a block, carry nothing: what they bring would lie
    at the server for long, and what devices do in an attempt may not hold.
    """
    if head.kind == "close" or "/" in head.kind or head.attempt:
        return []
    wants = node.store.list_requests(standing.federation.stream.name)
    number = {item: n for n, item in enumerate(standing.federation.stream.item_ids)}
    found = select_due(
        wants,
        node.config.min_users,
        _batches_withdrawals(node, standing),
        _find_empty_withdrawals(standing, wants, number),
    )
    called = {
        one.user: one.sent_request.sender
        for one in reversed(wants)
        if one.sent_request is not None and one.sent_request.sender
    }
    return [one.sent_request or _prepare_request(node, standing, asked, one, (number, called)) for one in found]


def _batches_withdrawals(node: Node, standing: NodeRun) -> bool:
    """Whether who withdraws is going to be asked what to take back, which nobody here tells alone."""
    fed = standing.federation
    asks = fed.learner.takes_back or any(overrides(part, "answer") for part in fed.parts)
    return asks and standing.tags != ALONE_TAGS and not node.config.insecure_single_user_uploads


def _find_empty_withdrawals(standing: NodeRun, wants: list[QueuedRequest], number: dict[str, int]) -> set[int]:
    """Withdrawals by which nothing is taken back of what was told in sums: in theirs they hide nobody."""
    fed, clients = standing.federation, standing.devices.clients
    if not fed.learner.takes_back:
        return set()
    place, found = {int(one): n for n, one in enumerate(standing.users[: clients.n_users])}, set[int]()
    for one in wants:
        if one.sent is not None or one.kind not in WITHDRAWALS:
            continue
        row = np.array([place[one.user]] if one.user in place else [], np.int64)
        told = clients.read_list(f"{PARTS}{fed.learner.name}/{CONTRIBUTION_LOG}", row).ids
        if not len(told) or (one.kind == "forget" and not np.isin(told, [number.get(i, -1) for i in one.items]).any()):
            found.add(one.id)
    return found


def _prepare_request(
    node: Node,
    standing: NodeRun,
    asked: ReceivedQuestion,
    want: QueuedRequest,
    known: tuple[dict[str, int], dict[int | None, int]],
) -> UserRequest:
    """A request as the server gets it; the person's own device does its part now.

    Items travel only where they are, or were, shared with the server. A node that does not name its people calls who
    asks for something by a name that nothing else of the run knows. Who has asked before keeps the name of then: under
    another one the server would not find what it has of them. `known`: numbers of items, names of people who asked.
    """
    number, called = known
    row = np.flatnonzero(standing.users == want.user)
    items = np.array(sorted({number[item] for item in want.items if item in number}), np.int32)
    told = items if want.kind in ("share", "unshare") else np.intersect1d(items, _shared_items(standing, row))
    wanted = validate_model(
        UserRequest, {"id": want.id, "kind": want.kind, "items": told.tolist(), "time": want.created}, "a request"
    )
    if not len(row):
        return wanted
    request = AskedFor(wanted.kind, int(standing.keys[row[0]]), items, wanted.time, wanted.id)
    leaves = standing.devices.apply_requests(
        standing.federation, asked.server, RequestBatch.from_request(request)
    ).items.ids
    names = standing.names if node.config.insecure_single_user_uploads else standing.requester_names
    sender = called.get(want.user, int(names[row[0]]))
    return wanted.model_copy(update={"sender": sender, "items": leaves.tolist()})


def _shared_items(standing: NodeRun, row: Longs) -> AnyArray:
    """What a person shares with the server of the run."""
    clients = standing.devices.clients
    known = row[row < clients.n_users]
    lists = [clients.read_list(name, known).ids for name in clients.lists if name.endswith("/shared")]
    return np.concatenate([np.zeros(0, np.int32), *lists])


# The answer


def _compute_reply(
    node: Node, request: ServerRequest, standing: NodeRun, asked: ReceivedQuestion
) -> tuple[Reply, ReleaseRecord | None]:
    """The same questions that a lab's loop asks its devices."""
    fed, here, head = standing.federation, standing.devices, request.head
    together = bool(_withdrawal_marks(node, standing, asked, head.kind))
    if not together and (
        asked.is_per_client or asked.respondents is not None or fed.config.train.participation.kind != "all"
    ):
        _check_single_uploads(node)
    if standing.tags == ALONE_TAGS and head.kind != "close" and not together:
        return _learn_alone(node, request, standing, asked), None
    if head.kind == ROSTER:
        return _answer_roster(node, request, standing, asked)
    _advance_run(standing, head, asked)
    if head.kind not in SCORE_QUESTIONS:
        return _answer_sum(node, request, standing, asked, together)
    counted = bool(fed.ledgers)  # then nothing leaves that is not counted: scores have no noise
    refusal = (
        None if counted else node.find_refusal(count_scored_users(standing, head), head.kind)
    )  # before anything is computed
    if head.kind != "close" and refusal is not None:
        raise Refusal(refusal)
    sums = {} if counted or refusal else compute_scores(standing, head, asked)
    if head.kind == "close":  # the block ends here in any case; only its scores may have to stay
        here.end_block(fed, asked.server, asked.down)
        standing.has_ended = True
    people = max((n for _, n in sums.values()), default=0)
    spent = count_budget_use(node, standing) if head.kind == "close" else []
    told = ["sums of scores and how many people they are over"] if people else []
    told += ["how many people spent how much of their budgets, rounded"] if any(spent) else []
    release = ReleaseRecord(people or sum(spent), 0, ", and ".join(told)) if told else None
    return Reply(_make_head(request, verdict="ok", sums=sums, spent=spent, clients=people, said=refusal or "")), release


def _withdrawal_marks(node: Node, standing: NodeRun, asked: ReceivedQuestion, question: str) -> dict[str, str]:
    """Notes of a question about those, all of them and enough, who withdrew together: in a sum they may answer it.

    None, where it is about others, or where one of them has answered it in other company.
    """
    if "/" not in question or asked.respondents is None or asked.is_per_client:
        return {}
    fed = standing.federation
    users = standing.users[np.isin(standing.keys, asked.respondents)].tolist()
    meant = select_whole_batches(node.store.list_requests(fed.stream.name), users, node.config.min_users)
    found = make_answer_marks(meant, question, each_batch=question.startswith(f"{fed.learner.name}/"))
    return {} if node.store.run_query(lambda db: has_conflict(db, found)) else found


def _check_single_uploads(node: Node) -> None:
    """Refuse what shows single people unless the owner of the node allowed it.

    Sums over people who take part by chance are among that: two of them may differ by one person.
    """
    if not node.config.insecure_single_user_uploads:
        raise Refusal(
            "this node sends sums over all of its people only, and the run would show them one by one; its owner can "
            "allow that (insecure_single_user_uploads)."
        )


def _answer_roster(
    node: Node, request: ServerRequest, standing: NodeRun, asked: ReceivedQuestion
) -> tuple[Reply, ReleaseRecord | None]:
    """What the people here are called in this run, and who of them takes part."""
    _check_single_uploads(node)
    _advance_run(standing, request.head, asked)
    everybody = np.arange(len(standing.names))
    part = np.isin(everybody, standing.devices.round_participants(standing.federation, asked.server)).astype(np.uint8)
    reply = Reply(_make_head(request, verdict="ok", clients=len(everybody)), {NAMES: standing.names, TAKES_PART: part})
    return reply, ReleaseRecord(len(everybody), 0, "made-up names of the people here, and who takes part")


def _advance_run(standing: NodeRun, head: RequestHead, asked: ReceivedQuestion) -> None:
    """Open the block of a request and keep the round that was best; refuses what is over before it changes anything."""
    fed, here = standing.federation, standing.devices
    if head.block < standing.block or (head.block == standing.block and standing.has_ended):
        raise Refusal(f"block {head.block} of this run is over on this node.")
    if head.block > standing.block:
        if not standing.has_ended:  # its end was missed: go on from its best round
            here.clients = here.best.copy()
        here.begin_block(fed, replace(asked.server, round=0), asked.down)
        standing.block, standing.round, standing.has_ended = head.block, 0, False
    if head.kind != "close" and head.round < standing.round:
        raise Refusal(f"round {head.round + 1} of block {head.block} is over on this node.")
    if head.best_round >= standing.round:
        here.keep_best(head.best_round)


def _learn_alone(node: Node, request: ServerRequest, standing: NodeRun, asked: ReceivedQuestion) -> Reply:
    """Too few people for any sum: nothing is told, and they learn for themselves, once a round."""
    kind, fed = request.head.kind, standing.federation
    with contextlib.suppress(Refusal):  # asked again: it was learned already
        _advance_run(standing, request.head, asked)
        if kind in fed.learner.questions(asked.server) and not fed.learner.model_after:
            with suspend_charges(standing):
                standing.devices.exchange(fed, asked.server, asked.down, kind)
            standing.round = request.head.round + 1
    return _refuse_request(node, request, node.find_refusal(0) or "")


def _answer_sum(
    node: Node, request: ServerRequest, standing: NodeRun, asked: ReceivedQuestion, together: bool
) -> tuple[Reply, ReleaseRecord | None]:
    """One sum over the people who take part, or what each of them sends."""
    fed, here, head, server = standing.federation, standing.devices, request.head, asked.server
    questions = fed.learner.questions(server)
    try:
        asker = fed.find_asker(head.kind)
    except TacitaError:
        asker = None
    kind = strip_replay(head.kind)
    if kind not in questions and (asker is None or not overrides(asker, "answer")):
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    fields = fed.fields(server, head.kind)
    if any(one.sparse for one in fields):
        raise Refusal("sums of so large a catalogue are made in the lab only; no node sends them.")
    if (asker is not None and not together) or kind != head.kind or any(one.seen == "each" for one in fields):
        _check_single_uploads(node)  # a part may ask as often as it likes, so who came or left in between would show
    drawn = any(event.law == "sampled" for ledger in fed.ledgers for event in ledger.events)
    if drawn and (
        kind != head.kind or asked.respondents is not None
    ):  # what is counted is that chance decides, every time
        raise Refusal("this run counts on people being drawn anew by chance in every round; ask those who are drawn.")
    refusal = node.find_refusal(len(here.select_respondents(fed, server, head.kind, asked.respondents)[1]), head.kind)
    if refusal is not None:
        raise Refusal(refusal)
    carry_over_spending(node, standing)
    apply_declared_budgets(node, standing, server)
    number = QuestionNumber(head.run, head.block, head.round, head.kind)
    retracts = asker is fed.learner and fed.learner.ledger() is not None
    before, spent, exact = read_accounts(standing), copy_spent(standing), list[Total]()
    here.draw_nonce = lambda total: exact.append(total) or noise_replay.draw_noise_seed(node.store, number)  # type: ignore[func-returns-value]
    told = here.exchange(fed, server, asked.down, head.kind, asked.respondents)
    none = told.contributors == 0 and asker is fed.learner  # nothing was told, and a sum of nothing says so
    if together and not none and node.is_too_few(told.contributors):  # who has nothing to say hides nobody
        raise Refusal("fewer people than this node's minimum (min_users) have something to take back.")
    if told.contributors > 0 and node.is_too_few(
        told.contributors
    ):  # who cannot pay, or learns from nothing, hides nobody, either
        words = "budget left for this" if fed.ledgers else "something to say"
        raise Refusal(f"fewer people than this node's minimum (min_users) have {words}.")
    told, again = _replay_noise(node, standing, asked, (told, exact[0], spent), together) if retracts else (told, {})
    if fed.learner.model_after and kind in questions:
        told = replace(
            told, total=min_contributors.drop_rare_entries(standing, told.total, node.min_contributors, asked.server)
        )
    if questions and kind == questions[-1]:
        standing.round = head.round + 1
    total = told.total
    made = _make_head(request, verdict="ok", clients=total.n_clients, expected=told.expected, weight=total.weight)
    about = next((one.about for one in fields if one.about), "a sum")
    called = dict(zip(standing.keys.tolist(), standing.names.tolist(), strict=True))
    what = f"one sum of {about}, over {total.n_clients} people"
    if total.each:
        what = f"{about}, of {total.n_clients} people one by one"
    arrays = encode_total(total, fields) | encode_client_fields(total, called)
    after = read_accounts(standing)
    costs = compute_costs(standing.users, before, after)
    return Reply(made, arrays), ReleaseRecord(total.n_clients, 0, what, describe_highest_cost(after), costs, again)


def _replay_noise(
    node: Node, standing: NodeRun, asked: ReceivedQuestion, made: tuple[RoundReply, Total, Arrays], together: bool
) -> tuple[RoundReply, dict[str, bytes]]:
    """A retraction under a budget: told before, it is told as it was and costs nothing; else what is kept of it."""
    told, exact, before = made
    fed, store = standing.federation, node.store
    users = standing.users[
        np.isin(standing.keys, standing.keys if asked.respondents is None else asked.respondents)
    ].tolist()
    wants = store.list_requests(fed.stream.name)
    batches = list_batch_digests(wants, users, node.config.min_users if together else 0)
    fields = fed.fields(asked.server, f"{fed.learner.name}/retraction")
    sha = noise_replay.digest_sum(store, exact, fields)
    kept = noise_replay.find_replay(store, batches, sha)
    if kept is None:
        return told, noise_replay.make_replay_notes(batches, sha, told)
    for name, value in before.items():
        standing.devices.clients.arrays[name][:] = value
    return noise_replay.replay_reply(told, kept, str(store.path)), {}
