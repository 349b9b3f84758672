"""What a node does with one request of its server: the lab's own round on the people at hand, then one commit.

A request has a number (run, block, round, kind). Asked again, the node sends the reply it stored; asked something
else under the same number, it refuses, since two answers to nearly the same question give more away than one.
A refusal changes nothing of a run. A node with too few people for a sum learns for them beside the run (`alone`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.clients import grow, no_devices, put_parts
from tacita.config import RunConfig, validated
from tacita.data.splits import collected_block
from tacita.device_state import DeviceState
from tacita.devices import Federation, Here, Received, Sums, block_sums, nobody_here
from tacita.errors import TacitaError
from tacita.fields import Total
from tacita.files import flat, nested
from tacita.live.node import Node
from tacita.live.node_store import Model, Release
from tacita.live.settings import check_live
from tacita.live.wire import (
    MOST_REQUESTS,
    SCORES,
    Reply,
    ReplyHead,
    Request,
    RequestHead,
    decode_request,
    encode,
    read_catalogue,
    sha_of,
    total_arrays,
)
from tacita.rng import keys_of
from tacita.runs import build, check_cutoffs, check_settings, planned
from tacita.types import AnyArray, Arrays, Longs, ServerState, Stream

MOST_AHEAD = 100  # blocks that a server may be ahead of a node
NOW, ALONE = ("now", "best"), ("alone", "best alone")  # what devices are stored as

log = logging.getLogger(__name__)


MOST_NUMBER = 1e6  # of a model that a node computes with; beyond, training has diverged or somebody is asking with it


class Refusal(TacitaError):
    """Why a request is not followed, in words that tell the server nothing about people."""


@dataclass
class Standing:
    """Where a run stands on this node, in memory between requests."""

    fed: Federation
    here: Here
    users: Longs  # ids of the store, in the order of the arrays
    made_from: tuple[Any, ...]
    tags: tuple[str, str] = NOW
    block: int = -1  # begun last
    round: int = 0  # the round of `here.clients`
    ended: bool = True


def handle(node: Node, body: bytes) -> bytes:
    """Answer one request; raises a sentence for a request that is not one."""
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
    stored = store.stored_reply(head.run, head.block, head.round, head.kind)
    if stored is not None:
        if stored[0] == request.sha and stored[1]:
            return stored[1]
        raise Refusal("this round was already answered, for this or another model.")
    model = _whole_model(node, request)
    if model is None:
        return encode(Reply(_echo(request, verdict="missing", have=_have(node, head.run))))
    arrays = {name: array for name, (_, array) in model[1].items()}
    catalogue = _catalogue(node, arrays)
    withdrawals = store.withdrawals
    try:
        standing = _standing(node, request, config, catalogue)
        server, received = _server(arrays, head.block, head.round), nested(arrays, "parts-received/")
        _check_model(standing.fed, server, received)
        try:
            reply, release = _answer(node, request, standing, server, received)
        except (LookupError, ValueError):
            raise Refusal("the arrays of the request do not fit each other.") from None
        answered = reply.head.verdict == "ok"
        queue = store.waiting()[:MOST_REQUESTS] if answered else []
        carried = [{"id": n, "kind": kind, "payload": payload} for n, kind, payload in queue]
        have = [sha for sha, _ in model[1].values()]
        reply = replace(reply, head=reply.head.model_copy(update={"have": have, "requests": carried}))
        sent = encode(reply)
        model[0]["tag"] = standing.tags[0]
        store.set_catalogue(catalogue)
        done = store.commit(
            head.run,
            head.block,
            head.round,
            head.kind,
            request.sha,
            sent if answered else None,  # who refused may be asked again
            now=_devices(standing, standing.here.clients),
            best=_devices(standing, standing.here.best),
            model=model,
            ledger=None if release is None else replace(release, n_bytes=len(sent)),
            sent=[n for n, _, _ in queue],
            released=answered and head.kind not in SCORES,
            unless_withdrawn_since=withdrawals,
            tags=standing.tags,
        )
    except BaseException as error:
        node.held.pop(head.run, None)  # what was not committed did not happen
        if isinstance(error, Refusal):
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
    held = node.store.model(head.run)
    if held is not None and _json(json.loads(held[0]["config"])) != config.model_dump_json():
        raise Refusal("the settings of this run have changed; begin a new run.")
    most = plan.learner.rounds
    if head.round > most or head.best_round > most:
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    return config


def _echo(request: Request, **more: Any) -> ReplyHead:
    head = request.head
    return ReplyHead(kind=head.kind, run=head.run, block=head.block, round=head.round, **more)


def _refused(node: Node, request: Request, said: str) -> Reply:
    head = request.head
    log.info("block %d round %d %s: nothing left this node: %s", head.block, head.round, head.kind, said)
    return Reply(_echo(request, verdict="refused", said=said, have=_have(node, head.run)))


def _have(node: Node, run: str) -> list[str]:
    """Digests of what need not travel again."""
    held = node.store.model(run)
    return [] if held is None else [sha for sha, _ in held[1].values()]


# What the server sent


def _whole_model(node: Node, request: Request) -> Model | None:
    """All arrays of the model: those that travelled and those that were here; None: some are missing."""
    held = node.store.model(request.head.run)
    kept = {} if held is None else {sha: array for sha, array in held[1].values()}
    arrays = {}
    for name, sha in request.head.names.items():
        if name in request.arrays:
            if sha_of(request.arrays[name]) != sha:
                raise Refusal(f"the request is damaged: '{name[:100]}' does not match its digest.")
            arrays[name] = (sha, request.arrays[name])
        elif sha in kept:
            arrays[name] = (sha, kept[sha])
        else:
            return None
    if not {"items", "catalogue"} <= arrays.keys() or arrays["items"][1].ndim != 2:
        raise Refusal("the request holds no item table and catalogue.")
    if any(not name.startswith(("heads/", "parts-received/")) for name in arrays.keys() - {"items", "catalogue"}):
        raise Refusal("the request holds arrays that no model has.")
    head = request.head
    note = {"config": _json(head.config), "block": head.block, "round": head.round, "tag": "now"}
    return note, arrays


def _catalogue(node: Node, arrays: Arrays) -> list[tuple[str, str]]:
    """The items of the table, which must be the first of those this node knows, or the other way round."""
    try:
        items = read_catalogue(arrays["catalogue"])
    except TacitaError as error:
        raise Refusal(str(error)) from None
    if any(new != old for (new, _), (old, _) in zip(items, node.store.catalogue(), strict=False)):
        raise Refusal("the catalogue differs from the one this node has; an operator only adds items at its end.")
    return items


def _json(config: dict[str, Any]) -> str:
    return validated(RunConfig, config, "the settings").model_dump_json()


def _server(arrays: Arrays, block: int, round: int) -> ServerState:
    heads = {name.removeprefix("heads/"): v for name, v in arrays.items() if name.startswith("heads/")}
    return ServerState(arrays["items"], heads, block, round)


def _check_model(fed: Federation, server: ServerState, received: Received) -> None:
    """Refuse arrays that do not fit the settings: compiled loops trust the shapes they are given."""
    items = server.items
    fits = items.dtype == np.float32 and items.shape == (fed.stream.n_items, fed.backbone.item_width)
    fits = fits and fed.backbone.heads_fit(server.heads, len(items))
    fits = fits and received.keys() <= {part.name for part in fed.parts}
    numbers = [items, *server.heads.values(), *(v for one in received.values() for v in one.values())]
    fits = fits and all(v.dtype.kind != "f" or bool((np.abs(v) <= MOST_NUMBER).all()) for v in numbers)
    if not fits or not all(p.received_fits(received.get(p.name, {}), len(items)) for p in fed.parts):
        raise Refusal("the request does not fit its own settings: its arrays have other shapes.")
    try:
        check_cutoffs(fed.config, len(items))
        for part in fed.parts:
            part.check(len(items))
            received.setdefault(part.name, {})
    except TacitaError as error:
        raise Refusal(str(error)) from None


# The people here


def _standing(node: Node, request: Request, config: RunConfig, items: list[tuple[str, str]]) -> Standing:
    """The run as it stands on this node, with the block of the request opened."""
    store, head = node.store, request.head
    last = store.last_block(head.run)
    if head.block > max(last, 0) + MOST_AHEAD:
        raise Refusal(f"block {head.block} is too far ahead.")
    least = 1 if node.config.insecure_single_user_uploads else node.config.min_users
    store.reopen(head.run, head.block)
    store.assign(head.run, head.block, least, [item for item, _ in items], config.split.min_rating)
    made_from = (store.changes, head.block, len(items), config.model_dump_json())
    standing = node.held.get(head.run)
    if not isinstance(standing, Standing) or standing.made_from != made_from:
        standing = _opened(node, head.run, head.block, config, [item for item, _ in items], made_from)
        node.held[head.run] = standing
    return standing


def _opened(
    node: Node, run: str, block: int, config: RunConfig, catalogue: list[str], made_from: tuple[Any, ...]
) -> Standing:
    """From what the store holds: the stream of this node's people, and their private state."""
    store = node.store
    ids, raws = store.users()
    number = {item: n for n, item in enumerate(catalogue)}
    row_of = {int(one): n for n, one in enumerate(ids)}
    keys, item_keys = keys_of(raws), keys_of(catalogue)
    seen, blocks = np.zeros(len(ids), bool), []
    for index in range(block + 1):
        rows = store.rows(run, index)
        user = np.array([row_of[int(u)] for u in rows.user], np.int32)
        item = np.array([number.get(i, -1) for i in rows.item], np.int32)
        keep = item >= 0
        if config.split.min_rating is not None:
            keep &= rows.rating >= config.split.min_rating
        new = ~seen
        told = {"time": rows.time[keep], "rating": rows.rating[keep]}
        blocks.append(collected_block(index, user[keep], item[keep], told, new, keys, item_keys, config.split))
        seen[user[keep]] = True
    backbone, parts, draws = build(config, secret_of(store.secret, run))
    stream = Stream(run, tuple(blocks), tuple(raws), tuple(catalogue), keys, item_keys, {}, "")
    fed = Federation(backbone, parts, config, draws, stream=stream)
    here = nobody_here(backbone, config)
    alone = node.too_few(int((blocks[block].train.counts() > 0).sum()))
    standing = Standing(fed, here, ids, made_from, ALONE if alone else NOW)
    kept = [[store.devices(run, tag) for tag in tags] for tags in ((NOW, ALONE) if alone else (NOW,))]
    whole = [[one for one in both if one is not None] for both in kept if None not in both]
    if whole:  # alone: from where the run stood, if that was later
        found = max(whole, key=lambda both: (both[0][0]["block"], both[0][0]["round"]))
        note = found[0][0]
        standing.block, standing.round, standing.ended = int(note["block"]), int(note["round"]), bool(note["ended"])
        now, best = (_clients(one[1], standing, ids) for one in found)
        here.clients = now.with_kept(best)
    return standing


def secret_of(secret: str, run: str) -> str:
    """Each run has draws of its own, so that those of two runs do not cancel; an empty secret draws as the lab does."""
    return hashlib.sha256(f"{secret} {run}".encode()).hexdigest() if secret else ""


def _clients(held: Arrays, standing: Standing, ids: Longs) -> DeviceState:
    """Private state in the order of `ids`; people who came since start as the model has newcomers start."""
    fed = standing.fed
    clients = no_devices(fed.backbone)
    grow(clients, fed.backbone, fed.parts, fed.draws, fed.stream.user_keys)
    place = {int(one): n for n, one in enumerate(held["users"])}
    at = np.array([place.get(int(one), -1) for one in ids], np.int64)
    rows, source = np.flatnonzero(at >= 0).astype(np.int32), at[at >= 0]
    clients.private[rows] = held["private"][source]
    clients.took_part[rows] = held["took_part"][source].astype(bool)
    parts = {part: {k: v[source] for k, v in one.items()} for part, one in nested(held, "parts/").items()}
    put_parts(clients, rows, parts)
    return clients


def _devices(standing: Standing, clients: DeviceState) -> tuple[dict[str, Any], Arrays]:
    note = {"block": standing.block, "round": standing.round, "ended": standing.ended}
    arrays: Arrays = {"users": standing.users[: clients.n_users], "private": clients.private}
    arrays["took_part"] = clients.took_part.astype(np.uint8)
    return note, arrays | flat(clients.parts, "parts/")


# The answer


def _answer(
    node: Node, request: Request, standing: Standing, server: ServerState, received: Received
) -> tuple[Reply, Release | None]:
    """The same questions that a lab's loop asks its devices."""
    fed, here, head = standing.fed, standing.here, request.head
    if standing.tags == ALONE and head.kind != "close":
        return _learn_alone(node, request, standing, server, received), None
    _advance(standing, head, server, received)
    if head.kind not in SCORES:
        return _sum(node, request, standing, server, received)
    people = _asked_about(standing, head)
    refusal = node.refusal(people, head.kind)  # before anything is computed: what is said must not depend on that
    if head.kind == "close":  # the block ends here in any case; only its scores may have to stay
        sums = {} if refusal else _scores(standing, head, server, received)
        here.end_block(fed, server, received)
        standing.ended = True
    elif refusal is not None:
        raise Refusal(refusal)
    else:
        sums = _scores(standing, head, server, received)
    counted = max((n for _, n in sums.values()), default=0)
    release = Release(counted, 0, "sums of scores and how many people they are over") if counted else None
    return Reply(_echo(request, verdict="ok", sums=sums, clients=counted, said=refusal or "")), release


def _asked_about(standing: Standing, head: RequestHead) -> int:
    """How many people have something to be scored in the block, whatever the model."""
    block = standing.fed.stream.blocks[head.block]
    return int(((block.valid if head.kind == "validate" else block.test).counts() > 0).sum())


def _scores(standing: Standing, head: RequestHead, server: ServerState, received: Received) -> Sums:
    try:
        if head.kind == "validate":
            return standing.here.validate(standing.fed, server, received)
        return block_sums(standing.fed, server, standing.here.best, received)
    except TacitaError:  # its scores are not finite
        raise Refusal("this model cannot be scored.") from None


def _advance(standing: Standing, head: RequestHead, server: ServerState, received: Received) -> None:
    """Open the block of a request and keep the round that was best; refuses what is over before it changes anything."""
    fed, here = standing.fed, standing.here
    if head.block < standing.block or (head.block == standing.block and standing.ended):
        raise Refusal(f"block {head.block} of this run is over on this node.")
    if head.block > standing.block:
        if not standing.ended:  # its end was missed: go on from its best round
            here.clients = here.best.copy()
        here.begin_block(fed, replace(server, round=0), received)
        standing.block, standing.round, standing.ended = head.block, 0, False
    if head.kind != "close" and head.round < standing.round:
        raise Refusal(f"round {head.round + 1} of block {head.block} is over on this node.")
    if head.best_round >= standing.round:
        here.keep_best()


def _learn_alone(node: Node, request: Request, standing: Standing, server: ServerState, received: Received) -> Reply:
    """Too few people for any sum: nothing is told, and they learn for themselves, once a round."""
    with contextlib.suppress(Refusal):  # asked again: it was learned already
        _advance(standing, request.head, server, received)
        if request.head.kind in standing.fed.learner.questions(server) and not standing.fed.backbone.reads_history:
            standing.here.exchange(standing.fed, server, received, request.head.kind)
            standing.round = request.head.round + 1
    return _refused(node, request, node.refusal(0) or "")


def _sum(
    node: Node, request: Request, standing: Standing, server: ServerState, received: Received
) -> tuple[Reply, Release | None]:
    """One sum over the people who take part."""
    fed, here, head = standing.fed, standing.here, request.head
    people = len(here.chosen(fed, server))
    questions = fed.learner.questions(server)
    if head.kind not in questions:
        raise Refusal(f"this run has no {head.kind} in round {head.round}.")
    refusal = node.refusal(people, head.kind)
    if refusal is not None:
        raise Refusal(refusal)
    fields = fed.fields(server, head.kind)
    if any(one.seen == "each" for one in fields) and not node.config.insecure_single_user_uploads:
        raise Refusal("this node sends sums over its people only, and the run wants to see them one by one.")
    told = here.exchange(fed, server, received, head.kind)
    if fed.backbone.reads_history:
        told = replace(told, total=without_rare(told.total, node.fewest, server.heads.get("inputs")))
    if head.kind == questions[-1]:
        standing.round = head.round + 1
    total = told.total
    made = _echo(request, verdict="ok", clients=total.n_clients, expected=told.expected, weight=total.weight)
    about = next((one.about for one in fields if one.about), "a sum")
    return Reply(made, total_arrays(total, fields)), Release(
        total.n_clients, 0, f"one sum of {about}, over {total.n_clients} people"
    )


def without_rare(total: Total, least: int, inputs: AnyArray | None) -> Total:
    """A statistic without items that fewer people have: the row of an item with one consumer is that one's history."""
    name = "touched" if "touched" in total.sums else "counts"
    rare = total[name] < least
    changed = {name: np.where(rare, 0.0, total[name])}
    first = rare if inputs is None or len(inputs) == 0 else rare[inputs]
    for square, value in total.sums.items():
        if value.ndim == 2:
            changed[square] = value.copy()
            changed[square][first] = 0.0
            changed[square][:, rare] = 0.0
    return total.with_sums(changed)
