"""Transcripts of live runs: every reply that a node sends, its head included, to an honest server or to a hostile one.

One node and its server live in this process, in a folder that is removed afterwards. A new node has a new secret, so
every play has noise of its own.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, BlockStream, ServerState
from tacita.live.node.budgets import set_budget
from tacita.live.node.node import Node, NodeConfig
from tacita.live.node.node_run import NodeRun
from tacita.live.node.question_handler import answer_message
from tacita.live.server.coordinator import continue_run
from tacita.live.server.store import STORE_FILE, ServerStore
from tacita.live.wire import Reply, ServerRequest, decode_reply, decode_request, encode_message, select_prefixed
from tacita.messages import Total
from tacita.models.tally.model import STATISTIC, SURVEY
from tacita.research.audit.canaries.lab_plays import SMALL_EVALUATION, Release
from tacita.research.audit.canaries.neighbours import LeavingWorld, Row
from tacita.research.audit.canaries.transcripts import Transcript
from tacita.round.question import Question

NODE = 1  # the number of the only node
MIN_USERS = 20
PATIENCE = {"pause": 0.0, "give_up": 60.0}
NOT_ABOUT_PEOPLE = {"kind", "run", "block", "round", "have", "heard", "version", "time"}
"""Fields of a reply's head that repeat the question, or say what the node has received and what it is."""


@dataclass(frozen=True)
class LiveSetting:
    """A run under a budget, and the node that it runs on."""

    values: dict[str, Any]
    catalogue: Sequence[str]
    min_users: int = MIN_USERS

    def build_config(self) -> RunConfig:
        values = {"split": {"kind": "blocks", "n_blocks": 1}, "evaluate": SMALL_EVALUATION, **self.values}
        return validate_model(RunConfig, values, "the audit")

    def build_node_config(self) -> NodeConfig:
        values = {"name": "node", "server": "localhost:1", "min_users": self.min_users}
        return validate_model(NodeConfig, values, "the audit")


@dataclass
class LoopbackTransport:
    """Carries messages to a node in this process, and keeps its replies; `stop_at`: where another server takes over."""

    node: Node
    replies: list[bytes] = field(default_factory=list)
    releases: dict[str, list[Release]] = field(default_factory=dict)  # of each run, the sums as a server reads them
    stop_at: str = ""
    last_request: ServerRequest | None = None

    def list_online_nodes(self) -> list[int]:
        return [NODE]

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        body = requests[NODE]
        request = decode_request(body)
        if self.stop_at and request.head.kind.startswith(self.stop_at):
            self.last_request = request
            raise ServerStops
        reply = answer_message(self.node, body)
        self.replies.append(reply)
        self._note_release(decode_reply(reply))
        return {NODE: reply}

    def _note_release(self, reply: Reply) -> None:
        head = reply.head
        is_sum = head.verdict == "ok" and head.kind in (SURVEY, STATISTIC)
        model = self.node.store.load_model(head.run)
        if not is_sum or model is None:
            return
        _, stored = model
        arrays = {name: array for name, (_, array) in stored.items()}
        server = ServerState(arrays["items"], select_prefixed(arrays, "heads/"), head.block, head.round)
        total = Total(dict(reply.arrays), head.weight, head.clients)
        self.releases.setdefault(head.run, []).append(Release(server, Question(head.kind), total))


class ServerStops(BaseException):
    """An honest server ends here, so that a hostile one can go on."""


@dataclass
class LiveSite:
    """A server's folder and its node."""

    folder: Path
    setting: LiveSetting
    transport: LoopbackTransport

    @property
    def node(self) -> Node:
        return self.transport.node

    def add_rows(self, rows: Sequence[Row]) -> None:
        interactions = [(user, item, float(time), None) for user, item, time in rows]
        self.node.store.add_interactions(interactions)

    def withhold_data(self, users: Collection[str]) -> None:
        """These people are enrolled, and nothing of theirs may leave."""
        for user in users:
            self.node.set_consent(user, None, "keep")

    def raise_budgets(self, users: Sequence[str], epsilon: float) -> None:
        """These people are willing to spend more than the run plans."""
        for user in users:
            set_budget(self.node, user, epsilon)

    def begin_run(self, run: str) -> None:
        with self._open_store() as store:
            store.create_run(run, self.setting.build_config(), PATIENCE)

    def run_block(self, run: str) -> None:
        """One more block; where nobody answers, it ends without a model."""
        with self._open_store() as store:
            store.open_block(run)
        self.continue_run(run)

    def continue_run(self, run: str) -> None:
        try:
            continue_run(self.folder, run, self.transport)
        except TacitaError:
            return  # every node refused: the replies say so

    def _open_store(self) -> ServerStore:
        return ServerStore(self.folder / STORE_FILE)


@contextmanager
def open_site(setting: LiveSetting) -> Iterator[LiveSite]:
    with tempfile.TemporaryDirectory(prefix="tacita-audit-") as name:
        folder = Path(name)
        ServerStore.create(folder / STORE_FILE).close()
        Node.create(folder / "node", setting.build_node_config())
        with ServerStore(folder / STORE_FILE) as store:
            store.add_node("node", "its key")
            store.set_node_number("node", NODE)
            store.add_items([(item, item) for item in setting.catalogue])
        node = Node.open(folder / "node")
        try:
            yield LiveSite(folder, setting, LoopbackTransport(node))
        finally:
            node.close()


# Transcripts


def transcribe_replies(replies: Sequence[bytes]) -> Transcript:
    """Every field of every head, and every array."""
    transcript = Transcript()
    counts: Counter[str] = Counter()
    for body in replies:
        reply = decode_reply(body)
        head = reply.head
        question = f"{head.run}, block {head.block}, {head.kind}"
        counts[question] += 1
        prefix = f"{question} ({counts[question]}): "
        add_reply(transcript, prefix, reply)
    transcript.add("replies", len(replies))
    return transcript


def add_reply(transcript: Transcript, prefix: str, reply: Reply) -> None:
    fields = reply.head.model_dump(exclude=NOT_ABOUT_PEOPLE)
    fields["requests"] = len(reply.head.requests)
    for name, value in fields.items():
        is_list = isinstance(value, list | tuple)
        transcript.add(f"{prefix}{name}", np.array(value) if is_list else value)
    transcript.add_all(prefix, reply.arrays)


@dataclass(frozen=True)
class LivePlay:
    """A run that was played, what left, and the rows that a node learned from."""

    transcript: Transcript
    releases: list[Release]
    stream: BlockStream | None  # None: the node refused before it read any rows


def play_block(setting: LiveSetting, rows: Sequence[Row], silent: Collection[str] = ()) -> LivePlay:
    """An honest server asks for a block; `silent`: people who are enrolled and share nothing."""
    run = "run"
    with open_site(setting) as site:
        site.begin_run(run)
        site.add_rows(rows)
        site.withhold_data(silent)
        site.run_block(run)
        return _end_play(site, run, 0)


def _end_play(site: LiveSite, run: str, n_earlier: int) -> LivePlay:
    """A play without the replies before it."""
    node_run = site.node.open_runs.get(run)
    stream = node_run.federation.stream if isinstance(node_run, NodeRun) else None
    transcript = transcribe_replies(site.transport.replies[n_earlier:])
    return LivePlay(transcript, site.transport.releases.get(run, []), stream)


def play_second_run(setting: LiveSetting, earlier: Sequence[Row], fresh: Sequence[Row]) -> LivePlay:
    """After a run of some people, others come; the transcript is that of a second run with all of them."""
    with open_site(setting) as site:
        site.add_rows(earlier)
        site.begin_run("first")
        site.run_block("first")
        site.raise_budgets(sorted({user for user, _, _ in earlier}), 20.0)
        site.add_rows(fresh)
        n_replies = len(site.transport.replies)
        site.begin_run("second")
        site.run_block("second")
        return _end_play(site, "second", n_replies)


# A hostile server


@dataclass
class HostileServer:
    """Asks for a retraction once more and once more, under models of its own, and says that every attempt failed."""

    node: Node
    first: ServerRequest
    n_attempts: int = 0

    def ask_node(self, changes: Arrays) -> Reply:
        base = self.first.head
        attempt = base.attempt + self.n_attempts
        failed = [attempt - 1] if self.n_attempts else []
        self.n_attempts += 1
        arrays = self._collect_arrays(changes)
        names = {name: digest_array(array) for name, array in arrays.items()}
        update = {
            "names": names,
            "round": base.round + self.n_attempts,
            "attempt": attempt,
            "resolved": max(0, attempt - 1),
            "failed": failed,
        }
        request = ServerRequest(base.model_copy(update=update), arrays)
        return decode_reply(answer_message(self.node, encode_message(request)))

    def _collect_arrays(self, changes: Arrays) -> Arrays:
        model = self.node.store.load_model(self.first.head.run)
        arrays: Arrays = {}
        if model is not None:
            _, stored = model
            arrays = {name: array for name, (_, array) in stored.items()}
        arrays |= self.first.arrays
        arrays |= changes
        return {name: array for name, array in arrays.items() if name in self.first.head.names}

    def read_scale(self) -> Arrays:
        """What the node is told that inputs are multiplied by."""
        arrays = self._collect_arrays({})
        return {"heads/scale": arrays["heads/scale"]}


def play_retractions(setting: LiveSetting, world: LeavingWorld, probes: int) -> Transcript:
    """People leave after a block; a hostile server asks what they take back under models that differ in one entry.

    Of every probe the transcript says whether the answer is the same, bit for bit, as that to the honest question.
    """
    run = "run"
    with open_site(setting) as site:
        site.begin_run(run)
        site.add_rows(world.first)
        site.run_block(run)
        for user in world.leavers:
            number = site.node.store.find_user(user)
            site.node.store.enqueue_request("leave", run, user=number)
        site.add_rows(world.second)
        site.transport.stop_at = "statistic/retraction"
        with suppress(ServerStops):
            site.run_block(run)
        assert site.transport.last_request is not None
        server = HostileServer(site.node, site.transport.last_request)
        return _probe_scales(server, probes)


def _probe_scales(server: HostileServer, probes: int) -> Transcript:
    transcript = Transcript()
    honest = server.ask_node({})
    add_reply(transcript, "the honest question: ", honest)
    scale = server.read_scale()["heads/scale"]
    for probe in range(probes):
        changed = scale.copy()
        changed[probe] *= 1.001
        reply = server.ask_node({"heads/scale": changed})
        transcript.add(f"probe {probe}: verdict", reply.head.verdict)
        transcript.add(f"probe {probe}: the same answer", str(_is_same_reply(reply, honest)))
        add_reply(transcript, f"probe {probe}: ", reply)
    return transcript


def _is_same_reply(reply: Reply, other: Reply) -> bool:
    if reply.arrays.keys() != other.arrays.keys():
        return False
    return all(np.array_equal(array, other.arrays[name]) for name, array in reply.arrays.items())
