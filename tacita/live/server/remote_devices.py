"""Devices behind a network: the questions of the federated loop as messages to nodes, their answers as one sum.

A round waits for a quorum. The server asks nodes that did not answer again under the same number, which is harmless:
they send the reply they stored. An answer counts once, and only from a node that was asked.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Broadcast, Keys, ServerState
from tacita.federation.device_protocol import RoundReply
from tacita.federation.evaluation import MetricSums, parse_selection_metric
from tacita.live.json_object import JsonObject
from tacita.live.per_client_arrays import NAMES, ROSTER, TAKES_PART, decode_client_fields
from tacita.live.server.attempts import Attempts, NoAnswer
from tacita.live.server.block_result import check_closing_reply, merge_results, sum_scores
from tacita.live.server.bounds import ExpectedSum, check_scores, check_total
from tacita.live.server.node_messages import NodeMessages, collect_common_arrays, digest_arrays
from tacita.live.server.node_query import AcceptedAnswer, NodeQuery, QuorumPolicy, Transport, UsersByNode
from tacita.live.server.open_requests import NodeRequest
from tacita.live.server.user_locations import UserLocations
from tacita.live.wire import (
    MOST_PLAYED,
    SCORE_QUESTIONS,
    Catalogue,
    Reply,
    ReplyHead,
    RequestHead,
    RequestOutcome,
    decode_reply,
    encode_question,
)
from tacita.messages import Spec, Total, merge_totals
from tacita.metrics import Evaluation
from tacita.round.plan import Plan
from tacita.round.question import Question
from tacita.round.request import RequestBatch

log = logging.getLogger(__name__)

NO_SCORES = "no scores: what answers cost is counted in this run, and nodes send nothing that is not"
MOST_PRIVATE_PEOPLE = 2**20  # in a node's sum, where the node does not say how many: larger ones are not exact
WAITING_INTERVAL = 10  # seconds between events that say for how many nodes a round waits

Replies = dict[int, Reply]  # by node
Specs = tuple[Spec, ...]
NodeOutcomes = dict[int, list[RequestOutcome]]  # of requests, by node
NodeReports = dict[int, JsonObject]  # what nodes say of themselves
CheckReply = Callable[[int, Reply], None]  # raises an error for a reply of a node that does not fit


@dataclass
class RemoteDevices:
    """The people are on nodes. Everything the server learns of them is in what `ask_nodes` returns."""

    transport: Transport
    run: str
    allowed_nodes: Callable[[], set[int]]  # nodes that are enrolled now
    catalogue: Callable[[], Catalogue]
    policy: QuorumPolicy = field(default_factory=QuorumPolicy)
    best_round: int = 0
    log_event: Callable[[JsonObject], None] = lambda event: None
    accepted_answers: list[AcceptedAnswer] = field(default_factory=list)  # since the last commit
    received_requests: list[NodeRequest] = field(default_factory=list)  # by node, since the last commit
    acknowledged_ends: list[tuple[int, int]] = field(default_factory=list)  # node, its request: since the last commit
    outcomes: Callable[[], NodeOutcomes] = dict  # that nodes do not know yet
    attempts: Attempts = field(default_factory=Attempts)
    record_nodes: Callable[[NodeReports], None] = lambda reports: None
    reached_nodes: set[int] = field(default_factory=set)  # nodes that a round's question was sent to
    silent_nodes: set[int] = field(default_factory=set)  # nodes that requests of this round have waited for in vain
    locations: UserLocations = field(default_factory=UserLocations)
    _last_refusal: str = ""  # what a node that refused said last
    _reported: set[tuple[int, int, int]] = field(default_factory=set)
    _held_digests: dict[int, set[str]] = field(default_factory=dict)

    @property
    def lab(self) -> None:
        return None

    @property
    def max_request_rounds(self) -> int | None:
        return MOST_PLAYED

    def begin_block(self, plan: Plan, server: ServerState, down: Broadcast) -> None:
        """Nodes open a block with its first question."""
        self.best_round = 0

    def has_training_data(self, plan: Plan, server: ServerState) -> bool:
        return True

    def keep_best_round(self, round: int) -> None:
        self.best_round = round

    def apply_requests(self, plan: Plan, server: ServerState, requests: RequestBatch) -> RequestBatch:
        """The person's own device did its part when the node sent the request."""
        return requests

    def end_block(self, plan: Plan, server: ServerState, down: Broadcast) -> None:
        """Nodes ended the block with `evaluate_best_round`."""

    # Who takes part

    def choose_clients(self, plan: Plan, server: ServerState) -> Keys:
        """The names of those who take part: each decides at home, by the run's own rule."""
        self.locations.participants.clear()
        query = NodeQuery(ROSTER, plan, server, plan.broadcast_serving(server))
        replies = self.ask_nodes(query, self._check_roster)
        participants = []
        for _, reply in sorted(replies.items()):
            takes_part = reply.arrays[TAKES_PART] > 0
            participants.append(reply.arrays[NAMES][takes_part])
        if not participants:
            raise NoAnswer(f"every node refused to say who takes part; one said: {self._last_refusal}")
        return np.concatenate(participants)

    def _check_roster(self, node: int, reply: Reply) -> None:
        """Refuse a roster that makes no sense, or that names users of another node."""
        names = reply.arrays.get(NAMES)
        takes_part = reply.arrays.get(TAKES_PART)
        if names is None or takes_part is None:
            raise TacitaError("the node's reply names nobody.")
        if names.dtype != np.uint64 or names.ndim != 1:
            raise TacitaError("the node's reply names nobody.")
        distinct = np.unique(names)
        has_duplicates = len(distinct) != len(names)
        has_other_arrays = len(reply.arrays) != 2
        if takes_part.shape != names.shape or has_other_arrays or has_duplicates:
            raise TacitaError("the node's reply names people in a way that makes no sense.")
        participants = self.locations.participants
        for name in names.tolist():
            if participants.get(name, node) != node:
                raise TacitaError("the node's reply names people of another node.")
        participants.update(dict.fromkeys(names.tolist(), node))

    def _split_by_node(self, plan: Plan, server: ServerState, chosen: Keys | None) -> UsersByNode | None:
        """Who of some users is on which node; None: all users are meant."""
        if chosen is None:
            return None
        locations = self.locations
        if not locations.participants and not locations.are_requesters(chosen):
            self.choose_clients(plan, server)
        return locations.split_by_node(chosen)

    def _list_users_by_node(self, plan: Plan, server: ServerState) -> UsersByNode:
        """All users that the server knows by name."""
        locations = self.locations
        if not locations.participants:
            self.choose_clients(plan, server)
        names = np.array(list(locations.participants), np.uint64)
        return self._split_by_node(plan, server, names) or {}

    # Sums

    def exchange(
        self, plan: Plan, server: ServerState, broadcast: Broadcast, question: Question, chosen: Keys | None = None
    ) -> RoundReply:
        specs = plan.fields(server, question)
        expected_sum = _make_expected_sum(plan, server, specs)
        users_by_node = self._split_by_node(plan, server, chosen)

        def check(node: int, reply: Reply) -> None:
            check_total(reply, expected_sum)
            if users_by_node is not None:
                users = users_by_node.get(node, np.zeros(0, np.uint64))
                _check_reply_users(reply, users, specs)

        query = NodeQuery(encode_question(question), plan, server, broadcast, users_by_node)
        replies = self.ask_nodes(query, check)
        if not replies:
            raise NoAnswer(f"every node refused to take part in the round; one said: {self._last_refusal}")
        self._check_requesters(chosen, users_by_node or {}, replies)
        total = _merge_replies(replies, specs)
        expected = sum(reply.head.expected for reply in replies.values())
        n_bytes = sum(_count_bytes(reply) for reply in replies.values())
        return RoundReply(total, total.n_clients, expected, float(n_bytes))

    def _check_requesters(self, chosen: Keys | None, users_by_node: UsersByNode, replies: Replies) -> None:
        """All who withdraw have to answer: a sum without some takes back nothing of theirs."""
        if chosen is None or not self.locations.are_requesters(chosen):
            return
        n_answered = sum(len(users_by_node[node]) for node in replies)
        if n_answered < len(chosen):
            raise NoAnswer(
                f"{len(chosen) - n_answered} of the {len(chosen)} people who withdraw live on nodes that refused or "
                f"are no longer enrolled, so nothing was taken back; one said: {self._last_refusal or 'nothing'}"
            )

    # Scores

    def sum_validation(self, plan: Plan, server: ServerState, down: Broadcast) -> MetricSums:
        metric, k = parse_selection_metric(plan.config)
        names = {f"{metric}@{k}"}

        def check(_: int, reply: Reply) -> None:
            check_scores(reply, names)

        replies = self._ask_scores("validate", plan, server, down, check)
        return {} if plan.ledgers else sum_scores(replies)

    def evaluate_best_round(
        self, plan: Plan, server: ServerState, down: Broadcast
    ) -> tuple[JsonObject, Evaluation | None]:
        """Close the block on the nodes: they test the best round and go on from it."""
        config = plan.config

        def check(_: int, reply: Reply) -> None:
            check_closing_reply(reply, config)

        replies = self._ask_scores("close", plan, server, down, check)
        result = merge_results(replies, config)
        if not plan.ledgers:
            return result, None
        uncounted: JsonObject = {"users": 0, "controls": {}, "unscored": NO_SCORES}
        if "spent" in result:
            uncounted["spent"] = result["spent"]
        return uncounted, None

    def _ask_scores(self, kind: str, plan: Plan, server: ServerState, down: Broadcast, check: CheckReply) -> Replies:
        """Ask also where no scores come: the model and outcomes of requests travel with the question."""
        users_by_node = self._list_users_by_node(plan, server) if plan.identifies_clients else None
        query = NodeQuery(kind, plan, server, down, users_by_node, expects_answers=False)
        return self.ask_nodes(query, check)

    # One exchange

    def ask_nodes(self, query: NodeQuery, check: CheckReply) -> Replies:
        """The answers of a quorum, without those of nodes that refused."""
        messages = self._make_messages(query)
        serves_request = self.attempts.is_open and query.users_by_node is not None
        if serves_request and self._select_allowed_nodes(query) & self.silent_nodes:
            raise NoAnswer("a node that was waited for in this round already is silent.")
        shas: dict[int, str] = {}
        replies = self._wait_for_quorum(query, messages, check, shas)
        for node, reply in sorted(replies.items()):
            self._record_reply(query, node, reply.head, shas[node])
        return {node: reply for node, reply in replies.items() if reply.head.verdict == "ok"}

    def _make_messages(self, query: NodeQuery) -> NodeMessages:
        server = query.server
        arrays = collect_common_arrays(query, self.catalogue())
        head = RequestHead(
            kind=query.kind,
            run=self.run,
            block=server.block,
            round=server.round,
            best_round=self.best_round,
            config=query.plan.config.model_dump(mode="json"),
            names=digest_arrays(arrays),
            attempt=self.attempts.take_attempt_number(),
            resolved=self.attempts.resolved,
            failed=self.attempts.failed,
        )
        outcomes = self.outcomes()
        return NodeMessages(query, head, arrays, outcomes, self.list_held_digests)

    def _wait_for_quorum(
        self, query: NodeQuery, messages: NodeMessages, check: CheckReply, shas: dict[int, str]
    ) -> Replies:
        """Ask until enough nodes have answered; `shas` gets digests of their answers."""
        replies: Replies = {}
        start = last_event = time.monotonic()
        policy = self.policy
        limit = self.attempts.compute_wait_limit(policy.give_up, policy.timeout)
        while True:
            new_replies = self._exchange_once(query, messages, check, shas, set(replies))
            replies |= new_replies
            allowed = self._select_allowed_nodes(query)  # somebody may have been revoked meanwhile
            replies = {node: reply for node, reply in replies.items() if node in allowed}
            n_needed = self._count_needed_nodes(query, allowed)
            if len(replies) >= max(1, n_needed):
                return replies
            now = time.monotonic()
            if now - start > limit:
                if self.attempts.is_open:
                    self.silent_nodes |= allowed - replies.keys()
                raise _quorum_error(query.server, len(replies), n_needed, limit)
            if now - last_event > WAITING_INTERVAL:
                last_event = now
                event = {"event": "waiting", "kind": query.kind, "answered": len(replies), "needed": n_needed}
                self.log_event(event)
            time.sleep(policy.pause)

    def _exchange_once(
        self, query: NodeQuery, messages: NodeMessages, check: CheckReply, shas: dict[int, str], answered: set[int]
    ) -> Replies:
        """Ask the nodes that are online and have not answered; return answers that fit."""
        online = set(self.transport.list_online_nodes())
        asked_nodes = (online & self._select_allowed_nodes(query)) - answered
        bodies = messages.encode_bodies(asked_nodes)
        if query.kind not in SCORE_QUESTIONS:
            self.reached_nodes |= bodies.keys()
        sent_at = time.time()
        replies = {}
        reports = {}
        answers = self.transport.exchange(bodies, self.policy.timeout)
        for node, body in answers.items():
            if node not in bodies:
                continue
            request = messages.make_head(node)
            reply = self._read_reply(node, body, request, check)
            if reply is not None:
                replies[node] = reply
                shas[node] = hashlib.sha256(body).hexdigest()
                reports[node] = _make_node_report(reply.head, sent_at)
        self.record_nodes(reports)
        return replies

    def _count_needed_nodes(self, query: NodeQuery, allowed: set[int]) -> int:
        """How many nodes a question needs: all where it names users."""
        quorum = self.policy.quorum
        if quorum == "all" or query.users_by_node is not None:
            return len(allowed)
        return quorum

    def _record_reply(self, query: NodeQuery, node: int, head: ReplyHead, sha: str) -> None:
        """Note what a node refuses, what its users ask for, and that its answer counted."""
        server = query.server
        if head.said:  # why it refused, or sends no scores
            self._last_refusal = head.said
            event = {"event": "refused", "kind": query.kind, "node": str(node), "said": head.said}
            self.log_event(event)
        self.received_requests += [(node, request) for request in head.requests]
        self.acknowledged_ends += [(node, request_id) for request_id in head.heard]
        if head.verdict == "ok":
            answer = AcceptedAnswer(server.block, server.round, query.kind, node, sha, head.clients)
            self.accepted_answers.append(answer)

    def list_held_digests(self, node: int) -> set[str]:
        """Digests of the arrays that a node is known to hold."""
        return self._held_digests.get(node, set())

    def _select_allowed_nodes(self, query: NodeQuery) -> set[int]:
        """Enrolled nodes, of those that the question is about."""
        allowed = self.allowed_nodes()
        if query.users_by_node is None:
            return allowed
        return allowed & query.users_by_node.keys()

    def _read_reply(self, node: int, body: bytes, request: RequestHead, check: CheckReply) -> Reply | None:
        """An answer that fits the question; None: there is none, ask again."""
        try:
            reply = decode_reply(body)
            _check_same_question(reply.head, request)
            self._held_digests[node] = set(reply.head.have)
            if reply.head.verdict == "missing":
                return None
            if reply.head.verdict == "ok":
                check(node, reply)
        except TacitaError as error:
            reason = str(error)[:500]
            self._report_bad_reply(node, request, reason)
            return None
        return reply

    def _report_bad_reply(self, node: int, request: RequestHead, reason: str) -> None:
        """Log a reply that does not fit; as an event only once a round, since the node is asked again and again."""
        log.warning("node %s: %s", node, reason)
        place = (node, request.block, request.round)
        if place not in self._reported:
            self._reported.add(place)
            event = {"event": "bad reply", "kind": request.kind, "node": str(node), "said": reason}
            self.log_event(event)


# Checks of replies


def _check_same_question(reply: ReplyHead, request: RequestHead) -> None:
    """Refuse a reply to another question."""
    number = (request.kind, request.run, request.block, request.round)
    answered_number = (reply.kind, reply.run, reply.block, reply.round)
    if answered_number != number:
        raise TacitaError("the node's reply is to another question.")


def _check_reply_users(reply: Reply, users: Keys, specs: Specs) -> None:
    """Refuse a reply over more users than were asked, or over others."""
    head = reply.head
    n_users = len(users)
    if head.clients > n_users or head.expected > n_users:
        raise TacitaError("the node's reply is over more people than were asked.")
    for client_field in decode_client_fields(reply.arrays, specs).values():
        if not np.isin(client_field.sender, users).all():
            raise TacitaError("the node's reply speaks for people who were not asked.")


def _make_expected_sum(plan: Plan, server: ServerState, specs: Specs) -> ExpectedSum:
    """What a reply to a question may hold."""
    train = plan.config.train
    inputs = server.heads.get("inputs", np.zeros(0))
    n_items = len(server.items)
    is_exact = all(part.fields(n_items).after_encoding is None for part in plan.parts)  # noise fits no count of people
    changes_weights = bool(plan.weighing_parts)
    max_data_weight = float(len(server.items)) if train.weighs_data else 1.0
    return ExpectedSum(
        specs,
        most_weight=max_data_weight,
        equal_weights=not train.weighs_data and not changes_weights,
        may_drop=changes_weights or bool(plan.implementing("encode")),
        is_sampled=train.participation.kind != "all",
        most_people=MOST_PRIVATE_PEOPLE if plan.learner.ledger() is not None else None,
        has_item_counts=is_exact and any(spec.name == "touched" for spec in specs),
        inputs=inputs if len(inputs) else None,
    )


def _merge_replies(replies: Replies, specs: Specs) -> Total:
    """One total, added in the order of the nodes' numbers."""
    first, *others = sorted(replies)
    total = replies[first].read_total(specs)
    for node in others:
        node_total = replies[node].read_total(specs)
        total = merge_totals(total, node_total)
    return total


def _count_bytes(reply: Reply) -> int:
    return sum(array.nbytes for array in reply.arrays.values())


def _quorum_error(server: ServerState, n_answered: int, n_needed: int, seconds: float) -> NoAnswer:
    return NoAnswer(
        f"block {server.block} round {server.round + 1}: {n_answered} of the {n_needed} nodes that a round "
        f"needs answered within {seconds:.0f} s; start the others and continue with "
        "`tacita server resume`."
    )


def _make_node_report(head: ReplyHead, sent_at: float) -> JsonObject:
    """What a node says of itself. Its clock is right if it was between question and answer; else so far off."""
    now = time.time()
    if head.time > now:
        deviation = head.time - now
    else:
        deviation = min(0.0, head.time - sent_at)
    clock = round(deviation, 1) if head.time else None
    return {"version": head.version, "clock": clock, "time": now}
