"""run_round: who takes part, what is sent down, the questions, what is learned, the parts' server steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import tacita.learn  # noqa: F401  (learners register themselves)
from tacita.core.types import Keys, RoundReplay, ServerState
from tacita.federation.device_protocol import Devices, RoundReply
from tacita.federation.devices import LocalDevices, empty_local_devices
from tacita.metrics import Evaluation
from tacita.round.device_state import DeviceState
from tacita.round.plan import Federation
from tacita.round.question import Question


@dataclass(frozen=True)
class RoundReport:
    block: int
    round: int
    clients: int
    bytes_up: float  # per participating client
    bytes_down: float
    valid: float | None = None  # the selecting metric on the block's validation items
    notes: dict[str, float] = field(default_factory=dict)  # what the parts say of the round
    seconds: float = 0.0  # until the devices had answered


@dataclass
class Progress:
    """Where a run stands: enough to go on from here with the same numbers."""

    server: ServerState
    devices: Devices
    best_server: ServerState
    best_score: float = -1.0
    best_round: int = 0
    stale: int = 0  # validations since the best
    in_block: bool = False
    played: int = 0  # rounds of this block that requests took, beside its own
    bytes_up: float = 0.0  # summed over the rounds of this block
    bytes_down: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)  # per user, of blocks ended since the run was opened

    @property
    def local_devices(self) -> LocalDevices:
        """All devices in this process; of devices in several processes a copy, at the price of gathering them."""
        devices = self.devices.lab
        assert devices is not None, "the devices are on nodes"
        local_devices = devices.gather_devices()
        assert isinstance(local_devices, LocalDevices)
        return local_devices

    def with_local_devices(self) -> Progress:
        """The same with all devices in this process, so that what they hold can be read several times."""
        return replace(self, devices=self.local_devices)

    @property
    def clients(self) -> DeviceState:
        return self.local_devices.clients

    @property
    def best_clients(self) -> DeviceState:
        return self.local_devices.best_devices


def make_initial_progress(federation: Federation, devices: Devices | None = None) -> Progress:
    """Nobody has trained yet: an empty table and, where devices are local, none of them."""
    backbone = federation.backbone
    no_items = np.zeros((0, backbone.item_width), np.float32)
    server = ServerState(no_items, backbone.init_heads(federation.draws))
    return Progress(server, devices or empty_local_devices(federation), server)


def run_round(
    federation: Federation,
    server: ServerState,
    devices: Devices,
    chosen: Keys | None = None,
    replay: RoundReplay | None = None,
) -> tuple[ServerState, RoundReport]:
    """One federated round, with some clients or with those that it chooses. Devices change in place.

    `replay`: an earlier round once more. All draw as in that one, and answer under the number of this one.
    """
    number = server.round
    before = server if replay is None else replace(server, round=replay.round)
    if chosen is None and federation.identifies_clients:
        chosen = devices.choose_clients(federation, before)
    server, broadcast = federation.broadcast_round(before, chosen)
    replies: list[RoundReply] = []
    total = None
    seconds = 0.0
    for kind in federation.learner.questions(server):
        question = Question(kind, replay=replay)
        began = time.perf_counter()
        reply = devices.exchange(federation, replace(server, round=number), broadcast, question, chosen)
        seconds += time.perf_counter() - began
        replies.append(reply)
        total = federation.decode(server, reply.total, question)
        server = federation.learn_from_total(server, total, question, reply.expected)
    server = replace(federation.server_step(before, server, total), round=number + 1)
    part_metrics = federation.metrics(server) if replies else {}
    report = _build_round_report(federation, server, replies, broadcast.n_bytes, part_metrics)
    return server, replace(report, seconds=seconds)


def _build_round_report(
    federation: Federation,
    server: ServerState,
    replies: list[RoundReply],
    bytes_down: float,
    part_metrics: dict[str, float],
) -> RoundReport:
    if not replies:
        return RoundReport(server.block, server.round, 0, 4.0, 4.0)  # a setting down, a score up
    notes: dict[str, float] = {}
    for reply in replies:
        notes |= reply.notes
    notes |= part_metrics
    n_clients = replies[-1].clients
    bytes_up = sum(reply.bytes_up for reply in replies) / max(1, n_clients)
    if federation.learner.model_after:
        bytes_down = federation.broadcast_serving(server).n_bytes
    return RoundReport(server.block, server.round, n_clients, bytes_up, bytes_down, None, notes)


def open_block(federation: Federation, progress: Progress, index: int) -> None:
    """Grow tables for new items and users; let the parts prepare both sides."""
    block = federation.stream.blocks[index]
    server = progress.server
    new_rows = federation.init_item_rows(len(server.items), block.n_items)
    items = np.concatenate([server.items, new_rows])
    server = federation.start_block(replace(server, items=items, block=index, round=0))
    progress.server = server
    progress.best_server = server
    progress.devices.begin_block(federation, server, federation.broadcast_serving(server))
    progress.best_score = -1.0
    progress.best_round = 0
    progress.stale = 0
    progress.in_block = True
    progress.bytes_up = 0.0
    progress.bytes_down = 0.0
    progress.played = 0
