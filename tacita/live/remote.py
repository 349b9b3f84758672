"""Devices behind a network: the questions of the federated loop as messages to nodes, their answers as one sum.

A round waits for a quorum. Nodes that did not answer are asked again under the same number, which is harmless: they
send the reply they stored. An answer counts once, and only from a node that was asked.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from tacita.devices import Plan, Received, Sums, Told, selecting_metric
from tacita.errors import TacitaError
from tacita.evaluate import Evaluation
from tacita.fields import merge
from tacita.files import flat
from tacita.live.bounds import Asked, check_sums, check_total
from tacita.live.wire import (
    Reply,
    Request,
    RequestHead,
    catalogue_array,
    decode_reply,
    encode,
    sha_of,
)
from tacita.methods.base import overrides
from tacita.types import Arrays, ServerState

log = logging.getLogger(__name__)


class Transport(Protocol):
    """Carries bodies to nodes and answers back."""

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        ...

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        """Answers that came in time."""
        ...


@dataclass(frozen=True)
class Patience:
    """How many nodes a round needs and how long it waits for them."""

    quorum: int | Literal["all"] = "all"  # of the nodes that may take part
    timeout: float = 300.0  # seconds for one exchange
    give_up: float = 3600.0  # seconds without a quorum after which the run stops
    pause: float = 2.0  # between attempts


@dataclass(frozen=True)
class Accepted:
    """An answer that counted."""

    block: int
    round: int
    kind: str
    node: int
    sha: str
    clients: int


@dataclass
class Remote:
    """The people are on nodes. Everything the server learns of them is in what `ask` returns."""

    transport: Transport
    run: str
    allowed: Callable[[], set[int]]  # nodes that are enrolled now
    catalogue: Callable[[], list[tuple[str, str]]]
    patience: Patience = Patience()
    best_round: int = 0
    tell: Callable[[dict[str, Any]], None] = lambda event: None
    accepted: list[Accepted] = field(default_factory=list)  # since the last commit
    asked_for: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (node, request) since the last commit
    _refusal: str = ""  # what a node that refused said last
    _validated: int = 0
    _told: set[tuple[int, int, int]] = field(default_factory=set)
    _have: dict[int, set[str]] = field(default_factory=dict)

    def begin_block(self, fed: Plan, server: ServerState, received: Received) -> None:
        """Nodes open a block when they first hear of it."""
        self.best_round = self._validated = 0

    def anybody(self, fed: Plan, server: ServerState) -> bool:
        return True

    def exchange(self, fed: Plan, server: ServerState, received: Received, question: str) -> Told:
        fields = fed.fields(server, question)
        if any(one.seen == "each" for one in fields):
            raise TacitaError("nodes send sums only: this run's learner wants to see people one by one.")
        inputs = server.heads.get("inputs", np.zeros(0))
        counted = "touched" if any(one.name == "touched" for one in fields) else ""
        most = float(len(server.items)) if fed.config.train.aggregation == "weighted" else 1.0
        may_drop = any(overrides(part, "encode") or overrides(part, "weight") for part in fed.parts)
        among = inputs if len(inputs) else None
        alike = fed.config.train.aggregation != "weighted" and not any(overrides(p, "weight") for p in fed.parts)
        asked = Asked(fields, most * fed.most_weight, alike, may_drop, counted, among)
        replies = self.ask(question, fed, server, received, lambda reply: check_total(reply, asked))
        if not replies:
            raise TacitaError(f"every node refused to take part in the round; one said: {self._refusal}")
        total = None
        for node in sorted(replies):
            one = replies[node].total(fields)
            total = one if total is None else merge(total, one)
        assert total is not None
        expected = sum(one.head.expected for one in replies.values())
        size = sum(sum(v.nbytes for v in one.arrays.values()) for one in replies.values())
        return Told(total, total.n_clients, expected, float(size))

    def validate(self, fed: Plan, server: ServerState, received: Received) -> Sums:
        self._validated = server.round
        metric, k = selecting_metric(fed.config)
        names = {f"{metric}@{k}"}
        return _added(self.ask("validate", fed, server, received, lambda reply: check_sums(reply, names)))

    def keep_best(self) -> None:
        self.best_round = self._validated

    def result(self, fed: Plan, server: ServerState, received: Received) -> tuple[dict[str, Any], Evaluation | None]:
        """Close the block on the nodes: they test the best round and go on from it."""
        cfg = fed.config.evaluate
        names = {"auc" if metric == "auc" else f"{metric}@{k}" for metric in cfg.metrics for k in cfg.k}
        sums = _added(self.ask("close", fed, server, received, lambda reply: check_sums(reply, names)))
        people = max((n for _, n in sums.values()), default=0)
        means = {name: total / n if n else 0.0 for name, (total, n) in sums.items()}
        return {**means, "users": people}, None

    def end_block(self, fed: Plan, server: ServerState, received: Received) -> None:
        """Nodes ended the block with `result`."""

    # One exchange

    def ask(
        self,
        kind: str,
        fed: Plan,
        server: ServerState,
        received: Received,
        check: Callable[[Reply], None] = lambda reply: None,
    ) -> dict[int, Reply]:
        """The answers of a quorum, without those of nodes that refused."""
        arrays = self._arrays(server, received)
        names = {name: sha_of(array) for name, array in arrays.items()}
        head = RequestHead(
            kind=kind,
            run=self.run,
            block=server.block,
            round=server.round,
            best_round=self.best_round,
            config=fed.config.model_dump(mode="json"),
            names=names,
        )
        replies: dict[int, Reply] = {}
        shas: dict[int, str] = {}
        began = told = time.monotonic()
        while True:
            allowed = self.allowed()
            asked = self._bodies(head, arrays, (set(self.transport.nodes()) & allowed) - replies.keys())
            for node, body in self.transport.exchange(asked, self.patience.timeout).items():
                reply = self._read(node, body, head, check) if node in asked else None
                if reply is not None:
                    replies[node], shas[node] = reply, hashlib.sha256(body).hexdigest()
            allowed = self.allowed()  # somebody may have been revoked meanwhile
            replies = {node: one for node, one in replies.items() if node in allowed}
            need = len(allowed) if self.patience.quorum == "all" else self.patience.quorum
            if len(replies) >= max(1, need):
                break
            now = time.monotonic()
            if now - began > self.patience.give_up:
                raise TacitaError(
                    f"block {server.block} round {server.round + 1}: {len(replies)} of the {need} nodes that a round "
                    f"needs answered within {self.patience.give_up:.0f} s; start the others and continue with "
                    "`tacita server resume`."
                )
            if now - told > 10:
                told = now
                self.tell({"event": "waiting", "kind": kind, "answered": len(replies), "needed": need})
            time.sleep(self.patience.pause)
        for node in sorted(replies):
            said = replies[node].head
            if said.said:  # why it refused, or keeps its scores to itself
                self._refusal = said.said
                self.tell({"event": "refused", "kind": kind, "node": str(node), "said": said.said})
            if said.verdict == "refused":
                continue
            self.accepted.append(Accepted(head.block, head.round, kind, node, shas[node], said.clients))
            self.asked_for += [(node, one) for one in said.requests]
        return {node: one for node, one in replies.items() if one.head.verdict == "ok"}

    def _arrays(self, server: ServerState, received: Received) -> Arrays:
        """The model as it travels."""
        arrays: Arrays = {"items": server.items, "catalogue": catalogue_array(self.catalogue()[: len(server.items)])}
        arrays |= {f"heads/{k}": v for k, v in server.heads.items()}
        return arrays | flat(received, "parts-received/")

    def _bodies(self, head: RequestHead, arrays: Arrays, nodes: set[int]) -> dict[int, bytes]:
        """What each node gets: all it does not have. Nodes that need the same share the bytes."""
        made: dict[frozenset[str], bytes] = {}
        bodies = {}
        for node in sorted(nodes):
            have = self._have.get(node, set())
            lacks = frozenset(name for name, sha in head.names.items() if sha not in have)
            if lacks not in made:
                made[lacks] = encode(Request(head, {name: arrays[name] for name in lacks}))
            bodies[node] = made[lacks]
        return bodies

    def _read(self, node: int, body: bytes, head: RequestHead, check: Callable[[Reply], None]) -> Reply | None:
        """An answer that fits the question; None: there is none, ask again."""
        try:
            reply = decode_reply(body)
            said = reply.head
            if (said.kind, said.run, said.block, said.round) != (head.kind, head.run, head.block, head.round):
                raise TacitaError("the node's reply is to another question.")
            self._have[node] = set(said.have)
            if said.verdict == "missing":
                return None
            if said.verdict == "refused":
                return reply
            check(reply)
        except TacitaError as error:
            log.warning("node %s: %s", node, str(error)[:500])
            if (node, head.block, head.round) not in self._told:  # once: it is asked again and again
                self._told.add((node, head.block, head.round))
                self.tell({"event": "bad reply", "kind": head.kind, "node": str(node), "said": str(error)[:500]})
            return None
        return reply


def _added(replies: Mapping[int, Reply]) -> Sums:
    sums: Sums = {}
    for node in sorted(replies):
        for name, (total, n) in replies[node].head.sums.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + n)
    return sums
