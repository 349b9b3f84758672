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

from tacita.core.codec import digest_of
from tacita.core.errors import TacitaError
from tacita.core.files import flat
from tacita.core.types import Arrays, Down, Keys, Requests, ServerState
from tacita.federation.devices import Told
from tacita.federation.measuring import Sums, selecting_metric
from tacita.fields import Spec, merge
from tacita.live.letters import CHOSEN, NAMES, PART, ROSTER, read_each, written
from tacita.live.server.attempts import Attempts, Unanswered
from tacita.live.server.bounds import Asked, check_sums, check_total
from tacita.live.server.closing import added, check_closing, result_of
from tacita.live.wire import (
    MOST_PLAYED,
    SCORES,
    Outcome,
    Reply,
    ReplyHead,
    Request,
    RequestHead,
    Wanted,
    catalogue_array,
    decode_reply,
    encode,
)
from tacita.metrics import Evaluation
from tacita.round.parts import overrides
from tacita.round.plan import Plan, to_serve

log = logging.getLogger(__name__)

UNSCORED = "no scores: what answers cost is counted in this run, and nodes send nothing that is not"


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


@dataclass(frozen=True)
class Question:
    """What nodes are asked, and about whom."""

    kind: str
    plan: Plan
    server: ServerState
    down: Down
    people: dict[int, Keys] | None = None  # node -> whom of its people, where the server knows them; None: everybody
    chosen: bool = True  # they are to answer; else they only get what is for each of them alone


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
    asked_for: list[tuple[int, Wanted]] = field(default_factory=list)  # (node, request) since the last commit
    ends: list[tuple[int, int]] = field(default_factory=list)  # (node, its request) whose end it heard since then
    outcomes: Callable[[], dict[int, list[Outcome]]] = dict  # what is to be told to nodes
    attempts: Attempts = field(default_factory=Attempts)
    met: Callable[[dict[int, dict[str, Any]]], None] = lambda nodes: None  # what nodes say of themselves
    reached: set[int] = field(default_factory=set)  # nodes that a round's question was sent to
    silent: set[int] = field(default_factory=set)  # nodes that requests of this round have waited for in vain
    _refusal: str = ""  # what a node that refused said last
    _told: set[tuple[int, int, int]] = field(default_factory=set)
    _have: dict[int, set[str]] = field(default_factory=dict)
    _homes: dict[int, int] = field(default_factory=dict)  # name of a person -> node, where the server has to know
    _askers: dict[int, int] = field(default_factory=dict)  # the same of who asked for something

    @property
    def most_played(self) -> int | None:
        return MOST_PLAYED

    def begin_block(self, plan: Plan, server: ServerState, down: Down) -> None:
        """Nodes open a block when they first hear of it."""
        self.best_round = 0

    def anybody(self, plan: Plan, server: ServerState) -> bool:
        return True

    def choose(self, plan: Plan, server: ServerState) -> Keys:
        """The names of those who take part: each decides at home, by the run's own rule."""
        self._homes.clear()

        def check(node: int, reply: Reply) -> None:
            names, part = reply.arrays.get(NAMES), reply.arrays.get(PART)
            if names is None or part is None or names.dtype != np.uint64 or names.ndim != 1:
                raise TacitaError("the node's reply names nobody.")
            if part.shape != names.shape or len(reply.arrays) != 2 or len(np.unique(names)) != len(names):
                raise TacitaError("the node's reply names people in a way that makes no sense.")
            if any(self._homes.get(int(name), node) != node for name in names):
                raise TacitaError("the node's reply names people of another node.")
            self._homes.update(dict.fromkeys((int(name) for name in names), node))

        replies = self.ask(Question(ROSTER, plan, server, to_serve(plan, server)), check)
        part = [one.arrays[NAMES][one.arrays[PART] > 0] for _, one in sorted(replies.items())]
        if not part:
            raise Unanswered(f"every node refused to say who takes part; one said: {self._refusal}")
        return np.concatenate(part)

    def exchange(self, plan: Plan, server: ServerState, down: Down, question: str, chosen: Keys | None = None) -> Told:
        fields = plan.fields(server, question)
        asked = self._asked(plan, server, fields)
        homes = self._by_home(plan, server, chosen)

        def check(node: int, reply: Reply) -> None:
            check_total(reply, asked)
            people = np.inf if homes is None else len(homes.get(node, ()))
            if reply.head.clients > people or reply.head.expected > people:
                raise TacitaError("the node's reply is over more people than were asked.")
            for one in read_each(reply.arrays, fields).values():
                if homes is not None and not np.isin(one.sender, homes.get(node, np.zeros(0, np.uint64))).all():
                    raise TacitaError("the node's reply speaks for people who were not asked.")

        replies = self.ask(Question(question, plan, server, down, homes), check)
        if not replies:
            raise Unanswered(f"every node refused to take part in the round; one said: {self._refusal}")
        self._check_askers(chosen, homes or {}, replies)
        total = None
        for node in sorted(replies):
            one = replies[node].total(fields)
            total = one if total is None else merge(total, one)
        assert total is not None
        expected = sum(one.head.expected for one in replies.values())
        size = sum(sum(v.nbytes for v in one.arrays.values()) for one in replies.values())
        return Told(total, total.n_clients, expected, float(size))

    def _asked(self, plan: Plan, server: ServerState, fields: tuple[Spec, ...]) -> Asked:
        """What a reply to a question may hold."""
        inputs = server.heads.get("inputs", np.zeros(0))
        exact = not any(overrides(part, "field_sent") for part in plan.parts)  # noise fits no count of people
        counted = exact and any(one.name == "touched" for one in fields)
        train = plan.config.train
        most = float(len(server.items)) if train.weighs_data else 1.0
        alike = not train.weighs_data and not any(overrides(p, "weight") for p in plan.parts)
        return Asked(
            fields,
            most * plan.most_weight,
            alike,
            may_drop=any(overrides(part, "encode") or overrides(part, "weight") for part in plan.parts),
            sampled=train.participation.kind != "all",
            counted=counted,
            inputs=inputs if len(inputs) else None,
        )

    def _by_home(self, plan: Plan, server: ServerState, chosen: Keys | None) -> dict[int, Keys] | None:
        """Who of some people is on which node; None: everybody is meant."""
        if chosen is None:
            return None
        if not self._homes and any(int(name) not in self._askers for name in chosen):
            self.choose(plan, server)
        homes, found = {**self._askers, **self._homes}, dict[int, list[int]]()
        for name in chosen:
            if int(name) in homes:
                found.setdefault(homes[int(name)], []).append(int(name))
        return {node: np.array(names, np.uint64) for node, names in found.items()}

    def _check_askers(self, chosen: Keys | None, homes: Mapping[int, Keys], replies: Mapping[int, Reply]) -> None:
        """All who withdraw have to answer when they are asked: a sum without some takes back nothing of theirs."""
        if chosen is None or any(int(name) not in self._askers for name in chosen):
            return
        told = sum(len(homes[node]) for node in replies)
        if told < len(chosen):
            raise Unanswered(
                f"{len(chosen) - told} of the {len(chosen)} people who withdraw live on nodes that refused or are no "
                f"longer enrolled, so nothing was taken back; one said: {self._refusal or 'nothing'}"
            )

    def request(self, plan: Plan, server: ServerState, requests: Requests) -> Requests:
        """The person's own device did its part when the request was made."""
        return requests

    def validate(self, plan: Plan, server: ServerState, down: Down) -> Sums:
        metric, k = selecting_metric(plan.config)
        replies = self._scores("validate", plan, server, down, lambda reply: check_sums(reply, {f"{metric}@{k}"}))
        return {} if plan.ledgers else added(replies)

    def _scores(
        self, kind: str, plan: Plan, server: ServerState, down: Down, check: Callable[[Reply], None]
    ) -> dict[int, Reply]:
        everybody = self._everybody(plan, server) if plan.names_clients else None
        asked = Question(kind, plan, server, down, everybody, chosen=False)
        return self.ask(asked, lambda _, reply: check(reply))  # also where no scores come: model and wishes travel

    def _everybody(self, plan: Plan, server: ServerState) -> dict[int, Keys]:
        if not self._homes:
            self.choose(plan, server)
        return self._by_home(plan, server, np.array(list(self._homes), np.uint64)) or {}

    def keep_best(self, round: int) -> None:
        self.best_round = round

    def result(self, plan: Plan, server: ServerState, down: Down) -> tuple[dict[str, Any], Evaluation | None]:
        """Close the block on the nodes: they test the best round and go on from it."""
        config = plan.config
        replies = self._scores("close", plan, server, down, lambda reply: check_closing(reply, config))
        if not plan.ledgers:
            return result_of(replies, config), None
        told = {name: value for name, value in result_of(replies, config).items() if name == "spent"}
        return {"users": 0, "controls": {}, "unscored": UNSCORED, **told}, None

    def end_block(self, plan: Plan, server: ServerState, down: Down) -> None:
        """Nodes ended the block with `result`."""

    # One exchange

    def ask(self, question: Question, check: Callable[[int, Reply], None]) -> dict[int, Reply]:
        """The answers of a quorum, without those of nodes that refused."""
        kind, server, people = question.kind, question.server, question.people
        asking = _Asking(self, question)
        replies: dict[int, Reply] = {}
        shas: dict[int, str] = {}
        began = told = time.monotonic()
        give_up = self.attempts.patience(self.patience.give_up, self.patience.timeout)
        if self.attempts.open and people is not None and self._allowed(people) & self.silent:
            raise Unanswered("a node that was waited for in this round already is silent.")
        while True:
            allowed = self._allowed(people)
            asked = asking.bodies((set(self.transport.nodes()) & allowed) - replies.keys())
            self.reached |= asked.keys() if kind not in SCORES else set()
            since, seen = time.time(), dict[int, dict[str, Any]]()
            for node, body in self.transport.exchange(asked, self.patience.timeout).items():
                reply = self._read(node, body, asking.head(node), check) if node in asked else None
                if reply is not None:
                    replies[node], shas[node] = reply, hashlib.sha256(body).hexdigest()
                    seen[node] = _of_itself(reply.head, since)
            self.met(seen)
            allowed = self._allowed(people)  # somebody may have been revoked meanwhile
            replies = {node: one for node, one in replies.items() if node in allowed}
            quorum = self.patience.quorum
            need = len(allowed) if quorum == "all" or people is not None else quorum
            if len(replies) >= max(1, need):
                break
            now = time.monotonic()
            if now - began > give_up:
                self.silent |= allowed - replies.keys() if self.attempts.open else set()
                raise Unanswered(
                    f"block {server.block} round {server.round + 1}: {len(replies)} of the {need} nodes that a round "
                    f"needs answered within {give_up:.0f} s; start the others and continue with "
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
            self.asked_for += [(node, one) for one in said.requests]
            self.ends += [(node, one) for one in said.heard]
            if said.verdict == "ok":
                self.accepted.append(Accepted(server.block, server.round, kind, node, shas[node], said.clients))
        return {node: one for node, one in replies.items() if one.head.verdict == "ok"}

    def home(self, name: int) -> int | None:
        """The node that a person is known to live on."""
        return self._homes.get(name, self._askers.get(name))

    def meet(self, askers: dict[int, int]) -> None:
        """Who asked for something, and came with an answer of which node."""
        self._askers |= askers

    def part(self, waiting: Keys) -> None:
        """Requests are carried out; only who waits for others has to be known by name."""
        stays = set(waiting.tolist())
        self._askers = {name: node for name, node in self._askers.items() if name in stays}

    def homes(self) -> Arrays:
        """Who lives where, as arrays: a server that goes on has to know."""
        found: Arrays = {}
        for ending, known in (("", self._homes), ("/asked", self._askers)):
            if known:
                found |= {f"names{ending}": np.array(list(known), np.uint64)}
                found |= {f"nodes{ending}": np.array(list(known.values()), np.uint64)}
        return found

    def settle(self, arrays: Arrays) -> None:
        def known(ending: str) -> dict[int, int]:
            names, nodes = (arrays.get(f"{what}{ending}", np.zeros(0, np.uint64)) for what in ("names", "nodes"))
            return dict(zip(names.tolist(), nodes.tolist(), strict=True))

        self._homes, self._askers = known(""), known("/asked")

    def have(self, node: int) -> set[str]:
        """Digests of the arrays that a node is known to hold."""
        return self._have.get(node, set())

    def _allowed(self, people: dict[int, Keys] | None) -> set[int]:
        return self.allowed() if people is None else self.allowed() & people.keys()

    def _read(self, node: int, body: bytes, head: RequestHead, check: Callable[[int, Reply], None]) -> Reply | None:
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
            check(node, reply)
        except TacitaError as error:
            log.warning("node %s: %s", node, str(error)[:500])
            if (node, head.block, head.round) not in self._told:  # once: it is asked again and again
                self._told.add((node, head.block, head.round))
                self.tell({"event": "bad reply", "kind": head.kind, "node": str(node), "said": str(error)[:500]})
            return None
        return reply


class _Asking:
    """A question as it is put to each node: what everybody gets, and what is for some people alone."""

    def __init__(self, remote: Remote, question: Question) -> None:
        server, self.remote, self.question = question.server, remote, question
        self.arrays: Arrays = {
            "items": server.items,
            "catalogue": catalogue_array(remote.catalogue()[: len(server.items)]),
            **{f"heads/{k}": v for k, v in server.heads.items()},
            **flat(question.down.common, "parts-received/"),
        }
        self.common = RequestHead(
            kind=question.kind,
            run=remote.run,
            block=server.block,
            round=server.round,
            best_round=remote.best_round,
            config=question.plan.config.model_dump(mode="json"),
            names={name: digest_of(array) for name, array in self.arrays.items()},
            attempt=remote.attempts.ask(),
            resolved=remote.attempts.resolved,
            failed=remote.attempts.failed,
        )
        self._letters: dict[int, Arrays] = {}
        self._told = remote.outcomes()

    def letters(self, node: int) -> Arrays:
        """What only this node gets."""
        if self.question.people is None:
            return {}
        if node not in self._letters:
            names = self.question.people.get(node, np.zeros(0, np.uint64))
            asked = {CHOSEN: names} if self.question.chosen else {}
            self._letters[node] = written(self.question.down, names) | asked
        return self._letters[node]

    def head(self, node: int) -> RequestHead:
        more = {name: digest_of(array) for name, array in self.letters(node).items()}
        update: dict[str, Any] = {"names": {**self.common.names, **more}} if more else {}
        if node in self._told:
            update["told"] = self._told[node]
        return self.common.model_copy(update=update) if update else self.common

    def bodies(self, nodes: set[int]) -> dict[int, bytes]:
        """What each node gets: all it does not have. Nodes that need the same share the bytes."""
        made: dict[frozenset[str], bytes] = {}
        bodies = {}
        for node in sorted(nodes):
            have, head, letters = self.remote.have(node), self.head(node), self.letters(node)
            lacks = frozenset(name for name, sha in head.names.items() if sha not in have)
            if letters or head.told:
                bodies[node] = encode(Request(head, {name: (self.arrays | letters)[name] for name in lacks}))
                continue
            if lacks not in made:
                made[lacks] = encode(Request(head, {name: self.arrays[name] for name in lacks}))
            bodies[node] = made[lacks]
        return bodies


def _of_itself(said: ReplyHead, since: float) -> dict[str, Any]:
    """What a node says of itself. Its clock is right if it stood between asking and now; else so far off, at least."""
    now = time.time()
    off = said.time - now if said.time > now else min(0.0, said.time - since)
    return {"version": said.version, "clock": round(off, 1) if said.time else None, "time": now}
