"""run_round: who takes part, what is sent down, the questions, what is learned, the parts' server steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import tacita.learn  # noqa: F401  (learners register themselves)
from tacita.core.types import Keys, RoundReplay, ServerState
from tacita.federation.devices import Devices, LocalDevices, RoundReply, empty_local_devices
from tacita.messages import Total
from tacita.metrics import Evaluation
from tacita.round.device_state import DeviceState
from tacita.round.parts import SERVER
from tacita.round.plan import Federation, Plan, mark_replay, prepare_broadcast, prepare_serving


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
    evaluations: list[Evaluation] = field(
        default_factory=list
    )  # per user, of the blocks ended since the run was opened

    @property
    def local_devices(self) -> LocalDevices:
        """The devices, where they are in this process."""
        assert isinstance(self.devices, LocalDevices)
        return self.devices

    @property
    def clients(self) -> DeviceState:
        return self.local_devices.clients

    @property
    def best_clients(self) -> DeviceState:
        return self.local_devices.best


def start_run(fed: Federation, devices: Devices | None = None) -> Progress:
    """Nobody has trained yet: an empty table and, where devices are here, none of them."""
    server = ServerState(np.zeros((0, fed.backbone.item_width), np.float32), fed.backbone.init_heads(fed.draws))
    return Progress(server, devices or empty_local_devices(fed), server)


def run_round(
    plan: Plan, server: ServerState, devices: Devices, chosen: Keys | None = None, replay: RoundReplay | None = None
) -> tuple[ServerState, RoundReport]:
    """One federated round, with some clients or with those that it chooses. Devices change in place.

    `again`: an earlier round once more. Everybody draws as in that one, and answers under the number of this one.
    """
    number = server.round
    before = server if replay is None else replace(server, round=replay.round)
    if chosen is None and plan.identifies_clients:
        chosen = devices.choose_clients(plan, before)
    server, down = prepare_broadcast(plan, before, chosen)
    told: list[RoundReply] = []
    total, seconds = None, 0.0
    for question in plan.learner.questions(server):
        began = time.perf_counter()
        told.append(devices.exchange(plan, replace(server, round=number), down, mark_replay(question, replay), chosen))
        seconds += time.perf_counter() - began
        total = decode_total(plan, server, told[-1].total, question)
        heard = plan.visible_total(SERVER, total)
        learned = plan.learner.learn(plan.visible_state(SERVER, server), heard, question, told[-1].expected)
        server = plan.merge_state(server, learned)
    server = replace(apply_server_steps(plan, before, server, total), round=number + 1)
    return server, replace(_build_report(plan, server, told, down.n_bytes), seconds=seconds)


def decode_total(plan: Plan, server: ServerState, total: Total, question: str) -> Total:
    """What came back, as the parts that encoded it read it."""
    for part in reversed(plan.encoders(question)):
        total = plan.update_party_total(part.party, total, partial(part.decode, plan.visible_state(part.party, server)))
    return total


def apply_server_steps(plan: Plan, before: ServerState, server: ServerState, total: Total | None) -> ServerState:
    """What the parts make of the aggregated state; without a total nobody was asked, and the learner goes on."""
    if total is None:
        return plan.merge_state(server, plan.learner.go_on(plan.visible_state(SERVER, server)))
    for part in plan.parts:
        was, now = (plan.visible_state(part.party, one) for one in (before, server))
        server = plan.merge_state(server, part.server_step(was, now, plan.visible_total(part.party, total)), part)
    return server


def _build_report(plan: Plan, server: ServerState, told: list[RoundReply], bytes_down: float) -> RoundReport:
    if not told:
        return RoundReport(server.block, server.round, 0, 4.0, 4.0)  # a setting down, a score up
    notes = {name: value for one in told for name, value in one.notes.items()}
    notes |= {k: v for p in plan.parts for k, v in p.server_notes(plan.visible_state(p.party, server)).items()}
    up = sum(one.bytes_up for one in told) / max(1, told[-1].clients)
    if plan.learner.model_after:
        bytes_down = prepare_serving(plan, server).n_bytes
    return RoundReport(server.block, server.round, told[-1].clients, up, bytes_down, None, notes)


def open_block(fed: Federation, progress: Progress, index: int) -> None:
    """Grow tables for new items and users; let the parts prepare both sides."""
    block, server = fed.stream.blocks[index], progress.server
    items = np.concatenate([server.items, fed.initial_rows(len(server.items), block.n_items)])
    server = replace(server, items=items, block=index, round=0)
    for part in fed.parts:
        server = server.with_part(part.name, part.server_begin_block(fed.visible_state(part.party, server)))
    progress.server = progress.best_server = server
    progress.devices.begin_block(fed, server, prepare_serving(fed, server))
    progress.best_score, progress.best_round, progress.stale, progress.in_block = -1.0, 0, 0, True
    progress.bytes_up = progress.bytes_down = 0.0
    progress.played = 0
