"""What a node does with one request of its server: the lab's own round on the people at hand, then one commit.

A request has a number (run, block, round, kind). Asked again, the node sends the reply it stored; asked something
else under the same number, it refuses, since two answers to nearly the same question give more away than one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.clients import Clients
from tacita.config import RunConfig, validated
from tacita.data.splits import collected_block
from tacita.devices import Federation, Here, Received, Told, block_sums, nobody
from tacita.errors import TacitaError
from tacita.files import flat, nested
from tacita.live.node import Node
from tacita.live.node_store import Model, Release
from tacita.live.wire import (
    SUMS,
    Reply,
    ReplyHead,
    Request,
    decode_request,
    encode,
    read_catalogue,
    sha_of,
    total_arrays,
)
from tacita.rng import keys_of
from tacita.runs import build
from tacita.types import Arrays, Longs, ServerState, Stream

MOST_EPOCHS, MOST_NEGATIVES = 100, 1000  # what a server may ask of a node in one round


@dataclass
class Standing:
    """Where a run stands on this node, in memory between requests."""

    fed: Federation
    here: Here
    users: Longs  # ids of the store, in the order of the arrays
    made_from: tuple[Any, ...]
    block: int = -1  # begun last
    round: int = 0  # the round of `here.clients`
    ended: bool = True


_HELD: OrderedDict[tuple[str, str], Standing] = OrderedDict()  # (file, run) -> the last few runs


def handle(node: Node, body: bytes) -> bytes:
    """Answer one request; raises a sentence for a request that is not one."""
    request = decode_request(body)
    head, store = request.head, node.store
    config = validated(RunConfig, head.config, "the settings the server sent")
    check_live(config)
    stored = store.stored_reply(head.run, head.block, head.round, head.kind)
    if stored is not None:
        if stored[0] == request.sha:
            return stored[1]
        return encode(_refused(request, "this round was already answered, for another model or other settings."))
    model = _whole_model(node, request)
    if model is None:
        held = store.model(head.run)
        have = [] if held is None else [sha for sha, _ in held[1].values()]
        return encode(Reply(_echo(request, verdict="missing", have=have)))
    arrays = {name: array for name, (_, array) in model[1].items()}
    store.set_catalogue(read_catalogue(arrays["catalogue"]))
    try:
        standing = _standing(node, request, config)
        server, received = _server(arrays, head.block, head.round), nested(arrays, "parts-received/")
        _check_model(standing.fed, server, received)
        reply, release = _answer(node, request, standing, server, received)
        now = _devices(standing, standing.here.clients)
        best = _devices(standing, standing.here.best)
        queue = [] if reply.head.verdict == "refused" else store.waiting()
        carried = [{"id": n, "kind": kind, "payload": payload} for n, kind, payload in queue]
        have = [sha for sha, _ in model[1].values()]
        reply = replace(reply, head=reply.head.model_copy(update={"have": have, "requests": carried}))
        sent = encode(reply)
        if release is not None:
            release = replace(release, n_bytes=len(sent))
        store.commit(
            head.run,
            head.block,
            head.round,
            head.kind,
            request.sha,
            sent,
            now=now,
            best=best,
            model=model,
            ledger=release,
            sent=[n for n, _, _ in queue],
        )
    except BaseException:
        _HELD.pop((str(store.path), head.run), None)  # what was not committed did not happen
        raise
    return sent


def check_live(config: RunConfig) -> None:
    """Refuse settings that only a lab can follow."""
    if config.train.silos:
        raise TacitaError("train.silos is for the lab: live, the nodes are what they are; leave it at 0.")
    if config.evaluate.item_table != "global":
        raise TacitaError("evaluate.item_table = 'personal' is for the lab; use 'global'.")
    plan = config.train
    if plan.local_epochs > MOST_EPOCHS or plan.negatives > MOST_NEGATIVES:
        raise TacitaError(
            f"a node trains at most {MOST_EPOCHS} local epochs with {MOST_NEGATIVES} negatives in a round; lower "
            "train.local_epochs and train.negatives."
        )


def _echo(request: Request, **more: Any) -> ReplyHead:
    head = request.head
    return ReplyHead(kind=head.kind, run=head.run, block=head.block, round=head.round, **more)


def _refused(request: Request, said: str) -> Reply:
    return Reply(_echo(request, verdict="refused", said=said))


# What the server sent


def _whole_model(node: Node, request: Request) -> Model | None:
    """All arrays of the model: those that travelled and those that were here; None: some are missing."""
    held = node.store.model(request.head.run)
    kept = {} if held is None else {sha: array for sha, array in held[1].values()}
    arrays = {}
    for name, sha in request.head.names.items():
        if name in request.arrays:
            if sha_of(request.arrays[name]) != sha:
                raise TacitaError(f"the server's request is damaged: '{name}' does not match its digest.")
            arrays[name] = (sha, request.arrays[name])
        elif sha in kept:
            arrays[name] = (sha, kept[sha])
        else:
            return None
    if not {"items", "catalogue"} <= arrays.keys() or arrays["items"][1].ndim != 2:
        raise TacitaError("the server's request holds no item table and catalogue.")
    head = request.head
    note = {"config": _json(head.config), "block": head.block, "round": head.round, "tag": "now"}
    return note, arrays


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
    if not fits or not all(p.received_fits(received.get(p.name, {}), len(items)) for p in fed.parts):
        raise TacitaError("the server's request does not fit its own settings: its arrays have other shapes.")
    for part in fed.parts:
        part.check(len(items))
        received.setdefault(part.name, {})


# The people here


def _standing(node: Node, request: Request, config: RunConfig) -> Standing:
    """The run as it stands on this node, with the block of the request opened."""
    store, head = node.store, request.head
    store.assign(head.run, head.block)
    key = (str(store.path), head.run)
    catalogue = store.catalogue()
    made_from = (store.changes, head.block, len(catalogue), config.model_dump_json())
    standing = _HELD.get(key)
    if standing is None or standing.made_from != made_from:
        standing = _HELD[key] = _opened(node, head.run, head.block, config, made_from)
    _HELD.move_to_end(key)
    while len(_HELD) > 4:
        _HELD.popitem(last=False)
    return standing


def _opened(node: Node, run: str, block: int, config: RunConfig, made_from: tuple[Any, ...]) -> Standing:
    """From what the store holds: the stream of this node's people, and their private state."""
    store = node.store
    ids, raws = store.users()
    catalogue = [item for item, _ in store.catalogue()]
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
        blocks.append(
            collected_block(index, user[keep], item[keep], rows.time[keep], new, keys, item_keys, config.split)
        )
        seen[user[keep]] = True
    backbone, parts, draws = build(config, store.secret)
    stream = Stream(run, tuple(blocks), tuple(raws), tuple(catalogue), keys, item_keys, {}, "")
    fed = Federation(stream, backbone, parts, config, draws)
    here = nobody(backbone, config)
    standing = Standing(fed, here, ids, made_from)
    found = store.devices(run, "now"), store.devices(run, "best")
    if found[0] is not None and found[1] is not None:
        note = found[0][0]
        standing.block, standing.round, standing.ended = int(note["block"]), int(note["round"]), bool(note["ended"])
        here.clients, here.best = (_clients(one[1], standing, ids) for one in found if one is not None)
    return standing


def _clients(held: Arrays, standing: Standing, ids: Longs) -> Clients:
    """Private state in the order of `ids`; people who came since start as the model has newcomers start."""
    fed = standing.fed
    clients = Clients.nobody(fed.backbone)
    clients.grow(fed.backbone, fed.parts, fed.draws, fed.stream.user_keys)
    place = {int(one): n for n, one in enumerate(held["users"])}
    at = np.array([place.get(int(one), -1) for one in ids], np.int64)
    rows, source = np.flatnonzero(at >= 0).astype(np.int32), at[at >= 0]
    clients.private[rows] = held["private"][source]
    clients.took_part[rows] = held["took_part"][source].astype(bool)
    parts = {part: {k: v[source] for k, v in one.items()} for part, one in nested(held, "parts/").items()}
    clients.put_parts(rows, parts)
    return clients


def _devices(standing: Standing, clients: Clients) -> tuple[dict[str, Any], Arrays]:
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
    if head.block < standing.block or (head.block == standing.block and standing.ended):
        return _refused(request, f"block {head.block} of this run is over on this node."), None
    if head.block > standing.block:
        if not standing.ended:  # its end was missed: go on from its best round
            here.clients = here.best
        here.begin_block(fed, replace(server, round=0), received)
        standing.block, standing.round, standing.ended = head.block, 0, False
    if head.kind == "train" and head.round < standing.round:
        return _refused(request, f"round {head.round + 1} of block {head.block} is over on this node."), None
    if head.best_round >= standing.round:
        here.keep_best()
    if head.kind in SUMS:
        return _sum(node, request, standing, server, received)
    if head.kind == "validate":
        sums = here.validate(fed, server, received)
    else:
        sums = block_sums(fed, server, here.best, received)
        here.end_block(fed, server, received)
        standing.ended = True
    people = max((n for _, n in sums.values()), default=0)
    refusal = node.refusal(people, head.kind) if people else None
    if refusal is not None:
        return _refused(request, refusal), None
    release = Release(people, 0, "sums of scores and how many people they are over") if people else None
    return Reply(_echo(request, verdict="ok", sums=sums)), release


def _sum(
    node: Node, request: Request, standing: Standing, server: ServerState, received: Received
) -> tuple[Reply, Release | None]:
    """One sum over the people who take part. A node that may not send it still learns for its own people."""
    fed, here, head = standing.fed, standing.here, request.head
    people = len(here.chosen(fed, server))
    refusal = node.refusal(people, head.kind)
    if head.kind == "train":
        told = here.train(fed, server, received)
        standing.round = head.round + 1
    elif refusal is not None:
        return _refused(request, refusal), None
    elif head.kind == "statistic":
        told = here.statistic(fed, server)
        standing.round = head.round + 1
    else:
        counts = here.survey(fed, server).astype(np.int64)
        release = Release(people, 0, "how many people have each item")
        return Reply(_echo(request, verdict="ok", clients=people), {"counts": counts}), release
    if refusal is not None:
        return _refused(request, refusal), None
    arrays, shape = total_arrays(told.total, single=head.kind == "train")
    sees = _sees(told, head.kind)
    weight, expected = told.total.weight, told.expected
    made = _echo(request, verdict="ok", clients=told.total.n_clients, expected=expected, weight=weight, shape=shape)
    return Reply(made, arrays), Release(told.total.n_clients, 0, sees)


def _sees(told: Told, kind: str) -> str:
    if kind == "train":
        return f"one sum of how item rows moved, over {told.total.n_clients} people"
    return f"one sum of which items go together, over {told.total.n_clients} people"
