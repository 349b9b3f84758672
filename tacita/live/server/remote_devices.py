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

from tacita.core.codec import digest_array
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts
from tacita.core.types import Arrays, Broadcast, Keys, ServerState
from tacita.federation.devices import RoundReply
from tacita.federation.evaluation import MetricSums, selection_metric
from tacita.live.per_client_arrays import CHOSEN, NAMES, ROSTER, TAKES_PART, decode_client_fields, encode_per_client
from tacita.live.server.attempts import Attempts, NoAnswer
from tacita.live.server.block_result import add_scores, check_closing_reply, merge_results
from tacita.live.server.bounds import ExpectedSum, check_scores, check_total
from tacita.live.wire import (
    MOST_PLAYED,
    SCORE_QUESTIONS,
    Reply,
    ReplyHead,
    RequestHead,
    RequestOutcome,
    ServerRequest,
    UserRequest,
    decode_reply,
    encode_catalogue,
    encode_message,
)
from tacita.messages import Spec, merge_totals
from tacita.metrics import Evaluation
from tacita.round.parts import overrides
from tacita.round.plan import Plan, prepare_serving
from tacita.round.request import RequestBatch

log = logging.getLogger(__name__)

NO_SCORES = "no scores: what answers cost is counted in this run, and nodes send nothing that is not"


class Transport(Protocol):
    """Carries bodies to nodes and answers back."""

    def nodes(self) -> list[int]:
        """The nodes that are online."""
        ...

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        """Answers that came in time."""
        ...


@dataclass(frozen=True)
class QuorumPolicy:
    """How many nodes a round needs and how long it waits for them."""

    quorum: int | Literal["all"] = "all"  # of the nodes that may take part
    timeout: float = 300.0  # seconds for one exchange
    give_up: float = 3600.0  # seconds without a quorum after which the run stops
    pause: float = 2.0  # between attempts


@dataclass(frozen=True)
class AcceptedAnswer:
    """An answer that counted."""

    block: int
    round: int
    kind: str
    node: int
    sha: str
    clients: int


@dataclass(frozen=True)
class NodeQuery:
    """What nodes are asked, and about whom."""

    kind: str
    plan: Plan
    server: ServerState
    down: Broadcast
    users_by_node: dict[int, Keys] | None = (
        None  # node -> whom of its people, where the server knows them; None: everybody
    )
    expects_answers: bool = True  # they are to answer; else they only get what is for each of them alone


@dataclass
class RemoteDevices:
    """The people are on nodes. Everything the server learns of them is in what `ask` returns."""

    transport: Transport
    run: str
    allowed_nodes: Callable[[], set[int]]  # nodes that are enrolled now
    catalogue: Callable[[], list[tuple[str, str]]]
    policy: QuorumPolicy = QuorumPolicy()
    best_round: int = 0
    log_event: Callable[[dict[str, Any]], None] = lambda event: None
    accepted_answers: list[AcceptedAnswer] = field(default_factory=list)  # since the last commit
    received_requests: list[tuple[int, UserRequest]] = field(
        default_factory=list
    )  # (node, request) since the last commit
    acknowledged_ends: list[tuple[int, int]] = field(
        default_factory=list
    )  # (node, its request) whose end it heard since then
    outcomes: Callable[[], dict[int, list[RequestOutcome]]] = dict  # what is to be told to nodes
    attempts: Attempts = field(default_factory=Attempts)
    record_nodes: Callable[[dict[int, dict[str, Any]]], None] = lambda nodes: None  # what nodes say of themselves
    reached_nodes: set[int] = field(default_factory=set)  # nodes that a round's question was sent to
    silent_nodes: set[int] = field(default_factory=set)  # nodes that requests of this round have waited for in vain
    _last_refusal: str = ""  # what a node that refused said last
    _reported: set[tuple[int, int, int]] = field(default_factory=set)
    _held_digests: dict[int, set[str]] = field(default_factory=dict)
    _locations: dict[int, int] = field(default_factory=dict)  # name of a person -> node, where the server has to know
    _requesters: dict[int, int] = field(default_factory=dict)  # the same of who asked for something

    @property
    def max_request_rounds(self) -> int | None:
        return MOST_PLAYED

    def begin_block(self, plan: Plan, server: ServerState, down: Broadcast) -> None:
        """Nodes open a block when they first hear of it."""
        self.best_round = 0

    def has_data(self, plan: Plan, server: ServerState) -> bool:
        return True

    def choose_clients(self, plan: Plan, server: ServerState) -> Keys:
        """The names of those who take part: each decides at home, by the run's own rule."""
        self._locations.clear()

        def check(node: int, reply: Reply) -> None:
            names, part = reply.arrays.get(NAMES), reply.arrays.get(TAKES_PART)
            if names is None or part is None or names.dtype != np.uint64 or names.ndim != 1:
                raise TacitaError("the node's reply names nobody.")
            if part.shape != names.shape or len(reply.arrays) != 2 or len(np.unique(names)) != len(names):
                raise TacitaError("the node's reply names people in a way that makes no sense.")
            if any(self._locations.get(int(name), node) != node for name in names):
                raise TacitaError("the node's reply names people of another node.")
            self._locations.update(dict.fromkeys((int(name) for name in names), node))

        replies = self.ask_nodes(NodeQuery(ROSTER, plan, server, prepare_serving(plan, server)), check)
        part = [one.arrays[NAMES][one.arrays[TAKES_PART] > 0] for _, one in sorted(replies.items())]
        if not part:
            raise NoAnswer(f"every node refused to say who takes part; one said: {self._last_refusal}")
        return np.concatenate(part)

    def exchange(
        self, plan: Plan, server: ServerState, down: Broadcast, question: str, chosen: Keys | None = None
    ) -> RoundReply:
        fields = plan.fields(server, question)
        asked = self._expected_sum(plan, server, fields)
        homes = self._split_by_node(plan, server, chosen)

        def check(node: int, reply: Reply) -> None:
            check_total(reply, asked)
            people = np.inf if homes is None else len(homes.get(node, ()))
            if reply.head.clients > people or reply.head.expected > people:
                raise TacitaError("the node's reply is over more people than were asked.")
            for one in decode_client_fields(reply.arrays, fields).values():
                if homes is not None and not np.isin(one.sender, homes.get(node, np.zeros(0, np.uint64))).all():
                    raise TacitaError("the node's reply speaks for people who were not asked.")

        replies = self.ask_nodes(NodeQuery(question, plan, server, down, homes), check)
        if not replies:
            raise NoAnswer(f"every node refused to take part in the round; one said: {self._last_refusal}")
        self._check_requesters(chosen, homes or {}, replies)
        total = None
        for node in sorted(replies):
            one = replies[node].read_total(fields)
            total = one if total is None else merge_totals(total, one)
        assert total is not None
        expected = sum(one.head.expected for one in replies.values())
        size = sum(sum(v.nbytes for v in one.arrays.values()) for one in replies.values())
        return RoundReply(total, total.n_clients, expected, float(size))

    def _expected_sum(self, plan: Plan, server: ServerState, fields: tuple[Spec, ...]) -> ExpectedSum:
        """What a reply to a question may hold."""
        inputs = server.heads.get("inputs", np.zeros(0))
        exact = not any(overrides(part, "field_sent") for part in plan.parts)  # noise fits no count of people
        counted = exact and any(one.name == "touched" for one in fields)
        train = plan.config.train
        most = float(len(server.items)) if train.weighs_data else 1.0
        alike = not train.weighs_data and not any(overrides(p, "weight") for p in plan.parts)
        return ExpectedSum(
            fields,
            most * plan.max_weight,
            alike,
            may_drop=any(overrides(part, "encode") or overrides(part, "weight") for part in plan.parts),
            is_sampled=train.participation.kind != "all",
            has_item_counts=counted,
            inputs=inputs if len(inputs) else None,
        )

    def _split_by_node(self, plan: Plan, server: ServerState, chosen: Keys | None) -> dict[int, Keys] | None:
        """Who of some people is on which node; None: everybody is meant."""
        if chosen is None:
            return None
        if not self._locations and any(int(name) not in self._requesters for name in chosen):
            self.choose_clients(plan, server)
        homes, found = {**self._requesters, **self._locations}, dict[int, list[int]]()
        for name in chosen:
            if int(name) in homes:
                found.setdefault(homes[int(name)], []).append(int(name))
        return {node: np.array(names, np.uint64) for node, names in found.items()}

    def _check_requesters(self, chosen: Keys | None, homes: Mapping[int, Keys], replies: Mapping[int, Reply]) -> None:
        """All who withdraw have to answer when they are asked: a sum without some takes back nothing of theirs."""
        if chosen is None or any(int(name) not in self._requesters for name in chosen):
            return
        told = sum(len(homes[node]) for node in replies)
        if told < len(chosen):
            raise NoAnswer(
                f"{len(chosen) - told} of the {len(chosen)} people who withdraw live on nodes that refused or are no "
                f"longer enrolled, so nothing was taken back; one said: {self._last_refusal or 'nothing'}"
            )

    def apply_requests(self, plan: Plan, server: ServerState, requests: RequestBatch) -> RequestBatch:
        """The person's own device did its part when the request was made."""
        return requests

    def validate(self, plan: Plan, server: ServerState, down: Broadcast) -> MetricSums:
        metric, k = selection_metric(plan.config)
        replies = self._ask_scores("validate", plan, server, down, lambda reply: check_scores(reply, {f"{metric}@{k}"}))
        return {} if plan.ledgers else add_scores(replies)

    def _ask_scores(
        self, kind: str, plan: Plan, server: ServerState, down: Broadcast, check: Callable[[Reply], None]
    ) -> dict[int, Reply]:
        everybody = self._users_by_node(plan, server) if plan.identifies_clients else None
        asked = NodeQuery(kind, plan, server, down, everybody, expects_answers=False)
        return self.ask_nodes(
            asked, lambda _, reply: check(reply)
        )  # also where no scores come: model and wishes travel

    def _users_by_node(self, plan: Plan, server: ServerState) -> dict[int, Keys]:
        if not self._locations:
            self.choose_clients(plan, server)
        return self._split_by_node(plan, server, np.array(list(self._locations), np.uint64)) or {}

    def keep_best(self, round: int) -> None:
        self.best_round = round

    def evaluate_best(
        self, plan: Plan, server: ServerState, down: Broadcast
    ) -> tuple[dict[str, Any], Evaluation | None]:
        """Close the block on the nodes: they test the best round and go on from it."""
        config = plan.config
        replies = self._ask_scores("close", plan, server, down, lambda reply: check_closing_reply(reply, config))
        if not plan.ledgers:
            return merge_results(replies, config), None
        told = {name: value for name, value in merge_results(replies, config).items() if name == "spent"}
        return {"users": 0, "controls": {}, "unscored": NO_SCORES, **told}, None

    def end_block(self, plan: Plan, server: ServerState, down: Broadcast) -> None:
        """Nodes ended the block with `result`."""

    # One exchange

    def ask_nodes(self, question: NodeQuery, check: Callable[[int, Reply], None]) -> dict[int, Reply]:
        """The answers of a quorum, without those of nodes that refused."""
        kind, server, people = question.kind, question.server, question.users_by_node
        asking = _NodeMessages(self, question)
        replies: dict[int, Reply] = {}
        shas: dict[int, str] = {}
        began = told = time.monotonic()
        give_up = self.attempts.wait_limit(self.policy.give_up, self.policy.timeout)
        if self.attempts.is_open and people is not None and self._select_allowed(people) & self.silent_nodes:
            raise NoAnswer("a node that was waited for in this round already is silent.")
        while True:
            allowed = self._select_allowed(people)
            asked = asking.encode_bodies((set(self.transport.nodes()) & allowed) - replies.keys())
            self.reached_nodes |= asked.keys() if kind not in SCORE_QUESTIONS else set()
            since, seen = time.time(), dict[int, dict[str, Any]]()
            for node, body in self.transport.exchange(asked, self.policy.timeout).items():
                reply = self._read_reply(node, body, asking.make_head(node), check) if node in asked else None
                if reply is not None:
                    replies[node], shas[node] = reply, hashlib.sha256(body).hexdigest()
                    seen[node] = _node_report(reply.head, since)
            self.record_nodes(seen)
            allowed = self._select_allowed(people)  # somebody may have been revoked meanwhile
            replies = {node: one for node, one in replies.items() if node in allowed}
            quorum = self.policy.quorum
            need = len(allowed) if quorum == "all" or people is not None else quorum
            if len(replies) >= max(1, need):
                break
            now = time.monotonic()
            if now - began > give_up:
                self.silent_nodes |= allowed - replies.keys() if self.attempts.is_open else set()
                raise NoAnswer(
                    f"block {server.block} round {server.round + 1}: {len(replies)} of the {need} nodes that a round "
                    f"needs answered within {give_up:.0f} s; start the others and continue with "
                    "`tacita server resume`."
                )
            if now - told > 10:
                told = now
                self.log_event({"event": "waiting", "kind": kind, "answered": len(replies), "needed": need})
            time.sleep(self.policy.pause)
        for node in sorted(replies):
            said = replies[node].head
            if said.said:  # why it refused, or keeps its scores to itself
                self._last_refusal = said.said
                self.log_event({"event": "refused", "kind": kind, "node": str(node), "said": said.said})
            self.received_requests += [(node, one) for one in said.requests]
            self.acknowledged_ends += [(node, one) for one in said.heard]
            if said.verdict == "ok":
                self.accepted_answers.append(
                    AcceptedAnswer(server.block, server.round, kind, node, shas[node], said.clients)
                )
        return {node: one for node, one in replies.items() if one.head.verdict == "ok"}

    def find_node(self, name: int) -> int | None:
        """The node that a person is known to live on."""
        return self._locations.get(name, self._requesters.get(name))

    def add_requesters(self, askers: dict[int, int]) -> None:
        """Who asked for something, and came with an answer of which node."""
        self._requesters |= askers

    def drop_requesters(self, waiting: Keys) -> None:
        """Requests are carried out; only who waits for others has to be known by name."""
        stays = set(waiting.tolist())
        self._requesters = {name: node for name, node in self._requesters.items() if name in stays}

    def location_arrays(self) -> Arrays:
        """Who lives where, as arrays: a server that goes on has to know."""
        found: Arrays = {}
        for ending, known in (("", self._locations), ("/asked", self._requesters)):
            if known:
                found |= {f"names{ending}": np.array(list(known), np.uint64)}
                found |= {f"nodes{ending}": np.array(list(known.values()), np.uint64)}
        return found

    def restore_locations(self, arrays: Arrays) -> None:
        def known(ending: str) -> dict[int, int]:
            names, nodes = (arrays.get(f"{what}{ending}", np.zeros(0, np.uint64)) for what in ("names", "nodes"))
            return dict(zip(names.tolist(), nodes.tolist(), strict=True))

        self._locations, self._requesters = known(""), known("/asked")

    def held_digests(self, node: int) -> set[str]:
        """Digests of the arrays that a node is known to hold."""
        return self._held_digests.get(node, set())

    def _select_allowed(self, people: dict[int, Keys] | None) -> set[int]:
        return self.allowed_nodes() if people is None else self.allowed_nodes() & people.keys()

    def _read_reply(
        self, node: int, body: bytes, head: RequestHead, check: Callable[[int, Reply], None]
    ) -> Reply | None:
        """An answer that fits the question; None: there is none, ask again."""
        try:
            reply = decode_reply(body)
            said = reply.head
            if (said.kind, said.run, said.block, said.round) != (head.kind, head.run, head.block, head.round):
                raise TacitaError("the node's reply is to another question.")
            self._held_digests[node] = set(said.have)
            if said.verdict == "missing":
                return None
            if said.verdict == "refused":
                return reply
            check(node, reply)
        except TacitaError as error:
            log.warning("node %s: %s", node, str(error)[:500])
            if (node, head.block, head.round) not in self._reported:  # once: it is asked again and again
                self._reported.add((node, head.block, head.round))
                self.log_event({"event": "bad reply", "kind": head.kind, "node": str(node), "said": str(error)[:500]})
            return None
        return reply


class _NodeMessages:
    """A question as it is put to each node: what everybody gets, and what is for some people alone."""

    def __init__(self, remote: RemoteDevices, question: NodeQuery) -> None:
        server, self.remote, self.question = question.server, remote, question
        self.arrays: Arrays = {
            "items": server.items,
            "catalogue": encode_catalogue(remote.catalogue()[: len(server.items)]),
            **{f"heads/{k}": v for k, v in server.heads.items()},
            **flatten_parts(question.down.common, "parts-received/"),
        }
        self.common = RequestHead(
            kind=question.kind,
            run=remote.run,
            block=server.block,
            round=server.round,
            best_round=remote.best_round,
            config=question.plan.config.model_dump(mode="json"),
            names={name: digest_array(array) for name, array in self.arrays.items()},
            attempt=remote.attempts.take_number(),
            resolved=remote.attempts.resolved,
            failed=remote.attempts.failed,
        )
        self._per_node: dict[int, Arrays] = {}
        self._outcomes = remote.outcomes()

    def per_node_arrays(self, node: int) -> Arrays:
        """What only this node gets."""
        if self.question.users_by_node is None:
            return {}
        if node not in self._per_node:
            names = self.question.users_by_node.get(node, np.zeros(0, np.uint64))
            asked = {CHOSEN: names} if self.question.expects_answers else {}
            self._per_node[node] = encode_per_client(self.question.down, names) | asked
        return self._per_node[node]

    def make_head(self, node: int) -> RequestHead:
        more = {name: digest_array(array) for name, array in self.per_node_arrays(node).items()}
        update: dict[str, Any] = {"names": {**self.common.names, **more}} if more else {}
        if node in self._outcomes:
            update["told"] = self._outcomes[node]
        return self.common.model_copy(update=update) if update else self.common

    def encode_bodies(self, nodes: set[int]) -> dict[int, bytes]:
        """What each node gets: all it does not have. Nodes that need the same share the bytes."""
        made: dict[frozenset[str], bytes] = {}
        encode_bodies = {}
        for node in sorted(nodes):
            have, head, letters = self.remote.held_digests(node), self.make_head(node), self.per_node_arrays(node)
            lacks = frozenset(name for name, sha in head.names.items() if sha not in have)
            if letters or head.told:
                encode_bodies[node] = encode_message(
                    ServerRequest(head, {name: (self.arrays | letters)[name] for name in lacks})
                )
                continue
            if lacks not in made:
                made[lacks] = encode_message(ServerRequest(head, {name: self.arrays[name] for name in lacks}))
            encode_bodies[node] = made[lacks]
        return encode_bodies


def _node_report(said: ReplyHead, since: float) -> dict[str, Any]:
    """What a node says of itself. Its clock is right if it stood between asking and now; else so far off, at least."""
    now = time.time()
    off = said.time - now if said.time > now else min(0.0, said.time - since)
    return {"version": said.version, "clock": round(off, 1) if said.time else None, "time": now}
