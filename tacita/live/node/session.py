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
from tacita.core.config import RunConfig, validated
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Longs, Requests
from tacita.core.types import Request as AskedFor
from tacita.federation.devices import Told
from tacita.fields import Total
from tacita.lab.assembling import check_settings, planned
from tacita.learn.statistic import TOLD
from tacita.live.letters import NAMES, PART, ROSTER, each_arrays
from tacita.live.node import rare, retold
from tacita.live.node.answers import Answer, Release, RequestNumber
from tacita.live.node.budgets import (
    accounts,
    carry,
    cost_of_all,
    costs_of,
    declare,
    nothing_charged,
    spent_arrays,
    spread_of,
)
from tacita.live.node.node import Node
from tacita.live.node.received import Asked, as_json, asked_of, catalogue_of, whole_model
from tacita.live.node.scores import asked_about, scores
from tacita.live.node.settling import settle
from tacita.live.node.standing import ALONE, Refusal, Standing, standing_of, stored_devices
from tacita.live.node.wants import WITHDRAW, Want, due, marks, noted, whole_batches, withdrawing
from tacita.live.settings import check_live
from tacita.live.wire import (
    MOST_PLAYED,
    SCORES,
    Reply,
    ReplyHead,
    Request,
    RequestHead,
    Wanted,
    decode_request,
    encode,
    stamped,
    total_arrays,
)
from tacita.round.device_state import PARTS
from tacita.round.parts import overrides
from tacita.round.plan import plain

log = logging.getLogger(__name__)


def handle(node: Node, body: bytes) -> bytes:
    """Answer one request; raises a sentence for a request that is not one."""
    return stamped(_reply(node, body), __version__, time.time())


def _reply(node: Node, body: bytes) -> bytes:
    request = decode_request(body)
    try:
        for _ in range(3):  # again if somebody withdrew while the sum was being made
            answer = _handle(node, request)
            if answer is not None:
                return answer
        raise Refusal("people are changing what they share; ask again later.")
    except Refusal as why:
        return encode(_refused(node, request, str(why)[:500]))
    finally:
        if len(node.held) > 4:
            node.held.clear()


def _handle(node: Node, request: Request) -> bytes | None:
    """The stored answer, or a new one that was committed; None: what it was made from has changed."""
    head, store = request.head, node.store
    config = _settings(node, head)
    store.hear(head.run, head.told)
    number = RequestNumber(head.run, head.block, head.round, head.kind)
    stored = store.stored_reply(number)
    if stored is not None:
        if stored[0] == request.sha and stored[1]:
            return stored[1]
        raise Refusal("this round was already answered, for this or another model.")
    settle(node, head, config)
    model = whole_model(node, request)
    if model is None:
        return encode(Reply(_echo(request, verdict="missing", have=_have(node, head.run))))
    arrays = {name: array for name, (_, array) in model[1].items()}
    catalogue = catalogue_of(node, arrays)
    withdrawals = store.withdrawals
    try:
        standing = standing_of(node, head.run, head.block, config, [item for item, _ in catalogue])
        asked = asked_of(standing, arrays, head.block, head.round)
        try:
            reply, release = _answer(node, request, standing, asked)
        except (LookupError, ValueError):
            raise Refusal("the arrays of the request do not fit each other.") from None
        answered = reply.head.verdict == "ok"
        carried = _carried(node, standing, asked, head) if answered or standing.tags == ALONE else []
        have = [sha for sha, _ in model[1].values()]
        more = {"have": have, "requests": carried, "heard": _heard(request)}
        reply = replace(reply, head=reply.head.model_copy(update=more))
        sent = encode(reply)
        model[0]["tag"] = standing.tags[0]
        store.set_catalogue(catalogue)
        answer = Answer(
            request.sha,
            sent if answered else None,  # who refused may be asked again
            now=stored_devices(standing, standing.here.clients),
            best=stored_devices(standing, standing.here.best),
            model=model,
            ledger=None if release is None else replace(release, n_bytes=len(sent)),
            sent=carried,
            released=answered and head.kind not in (*SCORES, ROSTER),
            marks=_of_leavers(node, standing, asked, head.kind) if answered else {},
            least=node.config.min_users if _together(node, standing) else 0,
            tags=standing.tags,
            attempt=head.attempt,
        )
        done = store.commit(number, answer, unless_withdrawn_since=withdrawals)
    except BaseException as error:
        node.held.pop(head.run, None)  # what was not committed did not happen
        if isinstance(error, Exception):
            store.reopen(head.run, head.block)
        raise
    if not done:
        node.held.pop(head.run, None)
        return None
    if not answered:
        store.reopen(head.run, head.block)
    return sent


def _settings(node: Node, head: RequestHead) -> RunConfig:
    """The run's settings: such that a node can follow them, and the same as when the run began."""
    try:
        config = validated(RunConfig, head.config, "the settings the server sent")
        check_live(config)
        plan = planned(config)
        check_settings(config, plan.backbone)
    except TacitaError as error:
        raise Refusal(str(error)) from None
    if any(one.delta > node.config.max_delta for one in plan.ledgers):
        raise Refusal(
            "this run counts epsilon at a larger delta than this node allows (max_delta), which makes a budget worth "
            "little; begin one with a smaller delta."
        )
    held = node.store.model(head.run)
    if held is not None and as_json(json.loads(held[0]["config"])) != config.model_dump_json():
        raise Refusal("the settings of this run have changed; begin a new run.")
    most = plan.learner.rounds + MOST_PLAYED
    if head.round > most or head.best_round > most:
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    return config


def _echo(request: Request, **more: Any) -> ReplyHead:
    head = request.head
    return ReplyHead(kind=head.kind, run=head.run, block=head.block, round=head.round, **more)


def _refused(node: Node, request: Request, said: str) -> Reply:
    head = request.head
    log.info("block %d round %d %s: nothing left this node: %s", head.block, head.round, head.kind, said)
    return Reply(_echo(request, verdict="refused", said=said, have=_have(node, head.run), heard=_heard(request)))


def _heard(request: Request) -> list[int]:
    """Requests whose end the server need not tell again."""
    return [one.id for one in request.head.told if one.final]


def _have(node: Node, run: str) -> list[str]:
    """Digests of what need not travel again."""
    held = node.store.model(run)
    return [] if held is None else [sha for sha, _ in held[1].values()]


# What people here ask of the server


def _carried(node: Node, standing: Standing, asked: Asked, head: RequestHead) -> list[Wanted]:
    """What people here ask for, as the server gets it.

    Answers to questions that a request raised, and the last one of a block, carry nothing: what they bring would lie
    at the server for long, and what devices do in an attempt may not hold.
    """
    if head.kind == "close" or "/" in head.kind or head.attempt:
        return []
    wants = node.store.wants(standing.fed.stream.name)
    number = {item: n for n, item in enumerate(standing.fed.stream.item_ids)}
    found = due(wants, node.config.min_users, _together(node, standing), _idle(standing, wants, number))
    called = {one.user: one.wanted.sender for one in reversed(wants) if one.wanted is not None and one.wanted.sender}
    return [one.wanted or _sent_first(node, standing, asked, one, (number, called)) for one in found]


def _together(node: Node, standing: Standing) -> bool:
    """Whether who withdraws is going to be asked what to take back, which nobody here tells alone."""
    fed = standing.fed
    asks = fed.learner.takes_back or any(overrides(part, "answer") for part in fed.parts)
    return asks and standing.tags != ALONE and not node.config.insecure_single_user_uploads


def _idle(standing: Standing, wants: list[Want], number: dict[str, int]) -> set[int]:
    """Withdrawals by which nothing is taken back of what was told in sums: in theirs they hide nobody."""
    fed, clients = standing.fed, standing.here.clients
    if not fed.learner.takes_back:
        return set()
    place, found = {int(one): n for n, one in enumerate(standing.users[: clients.n_users])}, set[int]()
    for one in wants:
        if one.sent is not None or one.kind not in WITHDRAW:
            continue
        row = np.array([place[one.user]] if one.user in place else [], np.int64)
        told = clients.list_of(f"{PARTS}{fed.learner.name}/{TOLD}", row).ids
        if not len(told) or (one.kind == "forget" and not np.isin(told, [number.get(i, -1) for i in one.items]).any()):
            found.add(one.id)
    return found


def _sent_first(
    node: Node, standing: Standing, asked: Asked, want: Want, known: tuple[dict[str, int], dict[int | None, int]]
) -> Wanted:
    """A request as the server gets it; the person's own device does its part now.

    Items travel only where they are, or were, shared with the server. A node that does not name its people calls who
    asks for something by a name that nothing else of the run knows. Who has asked before keeps the name of then: under
    another one the server would not find what it has of them. `known`: numbers of items, names of people who asked.
    """
    number, called = known
    row = np.flatnonzero(standing.users == want.user)
    items = np.array(sorted({number[item] for item in want.items if item in number}), np.int32)
    told = items if want.kind in ("share", "unshare") else np.intersect1d(items, _shared(standing, row))
    wanted = validated(
        Wanted, {"id": want.id, "kind": want.kind, "items": told.tolist(), "time": want.created}, "a request"
    )
    if not len(row):
        return wanted
    request = AskedFor(wanted.kind, int(standing.keys[row[0]]), items, wanted.time, wanted.id)
    leaves = standing.here.request(standing.fed, asked.server, Requests.of(request)).items.ids
    names = standing.names if node.config.insecure_single_user_uploads else standing.askers
    sender = called.get(want.user, int(names[row[0]]))
    return wanted.model_copy(update={"sender": sender, "items": leaves.tolist()})


def _shared(standing: Standing, row: Longs) -> AnyArray:
    """What a person shares with the server of the run."""
    clients = standing.here.clients
    known = row[row < clients.n_users]
    lists = [clients.list_of(name, known).ids for name in clients.lists if name.endswith("/shared")]
    return np.concatenate([np.zeros(0, np.int32), *lists])


# The answer


def _answer(node: Node, request: Request, standing: Standing, asked: Asked) -> tuple[Reply, Release | None]:
    """The same questions that a lab's loop asks its devices."""
    fed, here, head = standing.fed, standing.here, request.head
    together = bool(_of_leavers(node, standing, asked, head.kind))
    if not together and (asked.letters or asked.chosen is not None or fed.config.train.participation.kind != "all"):
        _named(node)
    if standing.tags == ALONE and head.kind != "close" and not together:
        return _learn_alone(node, request, standing, asked), None
    if head.kind == ROSTER:
        return _roster(node, request, standing, asked)
    _advance(standing, head, asked)
    if head.kind not in SCORES:
        return _sum(node, request, standing, asked, together)
    counted = bool(fed.ledgers)  # then nothing leaves that is not counted: scores have no noise
    refusal = None if counted else node.refusal(asked_about(standing, head), head.kind)  # before anything is computed
    if head.kind != "close" and refusal is not None:
        raise Refusal(refusal)
    sums = {} if counted or refusal else scores(standing, head, asked)
    if head.kind == "close":  # the block ends here in any case; only its scores may have to stay
        here.end_block(fed, asked.server, asked.down)
        standing.ended = True
    people = max((n for _, n in sums.values()), default=0)
    spent = spread_of(node, standing) if head.kind == "close" else []
    told = ["sums of scores and how many people they are over"] if people else []
    told += ["how many people spent how much of their budgets, rounded"] if any(spent) else []
    release = Release(people or sum(spent), 0, ", and ".join(told)) if told else None
    return Reply(_echo(request, verdict="ok", sums=sums, spent=spent, clients=people, said=refusal or "")), release


def _of_leavers(node: Node, standing: Standing, asked: Asked, question: str) -> dict[str, str]:
    """Notes of a question about those, all of them and enough, who withdrew together: in a sum they may answer it.

    None, where it is about others, or where one of them has answered it in other company.
    """
    if "/" not in question or asked.chosen is None or asked.letters:
        return {}
    fed = standing.fed
    users = standing.users[np.isin(standing.keys, asked.chosen)].tolist()
    meant = whole_batches(node.store.wants(fed.stream.name), users, node.config.min_users)
    found = marks(meant, question, each_batch=question.startswith(f"{fed.learner.name}/"))
    return {} if node.store.ask(lambda db: noted(db, found)) else found


def _named(node: Node) -> None:
    """Refuse what shows single people unless the owner of the node allowed it.

    Sums over people who take part by chance are among that: two of them may differ by one person.
    """
    if not node.config.insecure_single_user_uploads:
        raise Refusal(
            "this node sends sums over all of its people only, and the run would show them one by one; its owner can "
            "allow that (insecure_single_user_uploads)."
        )


def _roster(node: Node, request: Request, standing: Standing, asked: Asked) -> tuple[Reply, Release | None]:
    """What the people here are called in this run, and who of them takes part."""
    _named(node)
    _advance(standing, request.head, asked)
    everybody = np.arange(len(standing.names))
    part = np.isin(everybody, standing.here.taking_part(standing.fed, asked.server)).astype(np.uint8)
    reply = Reply(_echo(request, verdict="ok", clients=len(everybody)), {NAMES: standing.names, PART: part})
    return reply, Release(len(everybody), 0, "made-up names of the people here, and who takes part")


def _advance(standing: Standing, head: RequestHead, asked: Asked) -> None:
    """Open the block of a request and keep the round that was best; refuses what is over before it changes anything."""
    fed, here = standing.fed, standing.here
    if head.block < standing.block or (head.block == standing.block and standing.ended):
        raise Refusal(f"block {head.block} of this run is over on this node.")
    if head.block > standing.block:
        if not standing.ended:  # its end was missed: go on from its best round
            here.clients = here.best.copy()
        here.begin_block(fed, replace(asked.server, round=0), asked.down)
        standing.block, standing.round, standing.ended = head.block, 0, False
    if head.kind != "close" and head.round < standing.round:
        raise Refusal(f"round {head.round + 1} of block {head.block} is over on this node.")
    if head.best_round >= standing.round:
        here.keep_best(head.best_round)


def _learn_alone(node: Node, request: Request, standing: Standing, asked: Asked) -> Reply:
    """Too few people for any sum: nothing is told, and they learn for themselves, once a round."""
    kind, fed = request.head.kind, standing.fed
    with contextlib.suppress(Refusal):  # asked again: it was learned already
        _advance(standing, request.head, asked)
        if kind in fed.learner.questions(asked.server) and not fed.learner.model_after:
            with nothing_charged(standing):
                standing.here.exchange(fed, asked.server, asked.down, kind)
            standing.round = request.head.round + 1
    return _refused(node, request, node.refusal(0) or "")


def _sum(
    node: Node, request: Request, standing: Standing, asked: Asked, together: bool
) -> tuple[Reply, Release | None]:
    """One sum over the people who take part, or what each of them sends."""
    fed, here, head, server = standing.fed, standing.here, request.head, asked.server
    questions = fed.learner.questions(server)
    try:
        asker = fed.asker(head.kind)
    except TacitaError:
        asker = None
    kind = plain(head.kind)
    if kind not in questions and (asker is None or not overrides(asker, "answer")):
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    fields = fed.fields(server, head.kind)
    if any(one.sparse for one in fields):
        raise Refusal("sums of so large a catalogue are made in the lab only; no node sends them.")
    if (asker is not None and not together) or kind != head.kind or any(one.seen == "each" for one in fields):
        _named(node)  # a part may ask as often as it likes, so who came or left in between would show
    drawn = any(event.law == "sampled" for ledger in fed.ledgers for event in ledger.events)
    if drawn and (kind != head.kind or asked.chosen is not None):  # what is counted is that chance decides, every time
        raise Refusal("this run counts on people being drawn anew by chance in every round; ask those who are drawn.")
    refusal = node.refusal(len(here.asked(fed, server, head.kind, asked.chosen)[1]), head.kind)
    if refusal is not None:
        raise Refusal(refusal)
    carry(node, standing)
    declare(node, standing, server)
    number = RequestNumber(head.run, head.block, head.round, head.kind)
    retracts = asker is fed.learner and fed.learner.ledger() is not None
    before, spent, exact = accounts(standing), spent_arrays(standing), list[Total]()
    here.seal = lambda total: exact.append(total) or retold.fresh(node.store, number)  # type: ignore[func-returns-value]
    told = here.exchange(fed, server, asked.down, head.kind, asked.chosen)
    none = told.counted == 0 and asker is fed.learner  # nothing was told, and a sum of nothing says so
    if together and not none and node.too_few(told.counted):  # who has nothing to say hides nobody
        raise Refusal("fewer people than this node's minimum (min_users) have something to take back.")
    if told.counted > 0 and node.too_few(told.counted):  # who cannot pay, or learns from nothing, hides nobody, either
        words = "budget left for this" if fed.ledgers else "something to say"
        raise Refusal(f"fewer people than this node's minimum (min_users) have {words}.")
    told, again = _noised_once(node, standing, asked, (told, exact[0], spent), together) if retracts else (told, {})
    if fed.learner.model_after and kind in questions:
        told = replace(told, total=rare.left_out(standing, told.total, node.fewest, asked.server))
    if questions and kind == questions[-1]:
        standing.round = head.round + 1
    total = told.total
    made = _echo(request, verdict="ok", clients=total.n_clients, expected=told.expected, weight=total.weight)
    about = next((one.about for one in fields if one.about), "a sum")
    called = dict(zip(standing.keys.tolist(), standing.names.tolist(), strict=True))
    what = f"one sum of {about}, over {total.n_clients} people"
    if total.each:
        what = f"{about}, of {total.n_clients} people one by one"
    arrays = total_arrays(total, fields) | each_arrays(total, called)
    after = accounts(standing)
    costs = costs_of(standing.users, before, after)
    return Reply(made, arrays), Release(total.n_clients, 0, what, cost_of_all(after), costs, again)


def _noised_once(
    node: Node, standing: Standing, asked: Asked, made: tuple[Told, Total, Arrays], together: bool
) -> tuple[Told, dict[str, bytes]]:
    """A retraction under a budget: told before, it is told as it was and costs nothing; else what is kept of it."""
    told, exact, before = made
    fed, store = standing.fed, node.store
    users = standing.users[np.isin(standing.keys, standing.keys if asked.chosen is None else asked.chosen)].tolist()
    wants = store.wants(fed.stream.name)
    batches = withdrawing(wants, users, node.config.min_users if together else 0)
    fields = fed.fields(asked.server, f"{fed.learner.name}/retraction")
    sha = retold.digest(store, exact, fields)
    kept = retold.earlier(store, batches, sha)
    if kept is None:
        return told, retold.to_keep(batches, sha, told)
    for name, value in before.items():
        standing.here.clients.arrays[name][:] = value
    return retold.again(told, kept, str(store.path)), {}
