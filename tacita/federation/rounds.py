"""run_round, run_block, run_stream: the only federated loop in the code, whether the devices are here or elsewhere.

A block ends after its last round or when patience runs out; its best round is restored, tested and carried on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import tacita.learn  # noqa: F401  (learners register themselves)
from tacita.core.types import Keys, ServerState
from tacita.federation.devices import Devices, Here, Told, nobody_here
from tacita.federation.measuring import selecting_metric
from tacita.fields import Total
from tacita.metrics import Evaluation
from tacita.round.device_state import DeviceState
from tacita.round.parts import SERVER
from tacita.round.plan import Federation, Plan, send_down, to_serve


@dataclass(frozen=True)
class RoundReport:
    block: int
    round: int
    clients: int
    bytes_up: float  # per participating client
    bytes_down: float
    valid: float | None = None  # the selecting metric on the block's validation items
    notes: dict[str, float] = field(default_factory=dict)  # what the parts say of the round


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
    found: list[Evaluation] = field(default_factory=list)  # per user, of the blocks ended since the run was opened

    @property
    def here(self) -> Here:
        """The devices, where they are in this process."""
        assert isinstance(self.devices, Here)
        return self.devices

    @property
    def clients(self) -> DeviceState:
        return self.here.clients

    @property
    def best_clients(self) -> DeviceState:
        return self.here.best


OnRound = Callable[[RoundReport, Progress], None]


def start(fed: Federation, devices: Devices | None = None) -> Progress:
    """Nobody has trained yet: an empty table and, where devices are here, none of them."""
    server = ServerState(np.zeros((0, fed.backbone.item_width), np.float32), fed.backbone.init_heads(fed.draws))
    return Progress(server, devices or nobody_here(fed), server)


def run_round(
    plan: Plan, server: ServerState, devices: Devices, chosen: Keys | None = None
) -> tuple[ServerState, RoundReport]:
    """One federated round, with some clients or with those that it chooses. Devices change in place."""
    before = server
    if chosen is None and plan.names_clients:
        chosen = devices.choose(plan, server)
    server, down = send_down(plan, server, chosen)
    told: list[Told] = []
    total = None
    for question in plan.learner.questions(server):
        told.append(devices.exchange(plan, server, down, question, chosen))
        total = decoded(plan, server, told[-1].total, question)
        heard = plan.heard_by(SERVER, total)
        learned = plan.learner.learn(plan.seen_by(SERVER, server), heard, question, told[-1].expected)
        server = plan.joined(server, learned)
    server = replace(server_steps(plan, before, server, total), round=before.round + 1)
    return server, _report(plan, server, told, down.n_bytes)


def decoded(plan: Plan, server: ServerState, total: Total, question: str) -> Total:
    """What came back, as the parts that encoded it read it."""
    for part in reversed(plan.transforming(question)):
        total = plan.changed(part.party, total, partial(part.decode, plan.seen_by(part.party, server)))
    return total


def server_steps(plan: Plan, before: ServerState, server: ServerState, total: Total | None) -> ServerState:
    """What the parts make of the aggregated state; without a total nobody was asked, and the learner goes on."""
    if total is None:
        return plan.joined(server, plan.learner.go_on(plan.seen_by(SERVER, server)))
    for part in plan.parts:
        was, now = (plan.seen_by(part.party, one) for one in (before, server))
        server = plan.joined(server, part.server_step(was, now, plan.heard_by(part.party, total)), part)
    return server


def _report(plan: Plan, server: ServerState, told: list[Told], bytes_down: float) -> RoundReport:
    if not told:
        return RoundReport(server.block, server.round, 0, 4.0, 4.0)  # a setting down, a score up
    notes = {name: value for one in told for name, value in one.notes.items()}
    notes |= {k: v for p in plan.parts for k, v in p.server_notes(plan.seen_by(p.party, server)).items()}
    up = sum(one.bytes_up for one in told) / max(1, told[-1].clients)
    if plan.learner.model_after:
        bytes_down = to_serve(plan, server).n_bytes
    return RoundReport(server.block, server.round, told[-1].clients, up, bytes_down, None, notes)


def begin_block(fed: Federation, progress: Progress, index: int) -> None:
    """Grow tables for new items and users; let the parts prepare both sides."""
    block, server = fed.stream.blocks[index], progress.server
    items = np.concatenate([server.items, fed.first_rows(len(server.items), block.n_items)])
    server = replace(server, items=items, block=index, round=0)
    for part in fed.parts:
        server = server.with_part(part.name, part.server_begin_block(fed.seen_by(part.party, server)))
    progress.server = progress.best_server = server
    progress.devices.begin_block(fed, server, to_serve(fed, server))
    progress.best_score, progress.best_round, progress.stale, progress.in_block = -1.0, 0, 0, True
    progress.bytes_up = progress.bytes_down = 0.0
    progress.played = 0


def run_block(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """Rounds with validation until patience runs out; leaves the best round in `progress`."""
    plan, every = fed.config.train, fed.config.evaluate.every
    metric, k = selecting_metric(fed.config)
    rounds = fed.learner.rounds
    somebody = progress.devices.anybody(fed, progress.server)
    while progress.server.round - progress.played < rounds and progress.stale < plan.patience and somebody:
        progress.server, report = run_round(fed, progress.server, progress.devices)
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        if report.round % every == 0 or report.round - progress.played == rounds:
            down = to_serve(fed, progress.server)
            total, users = progress.devices.validate(fed, progress.server, down).get(f"{metric}@{k}", (0.0, 0))
            if users:
                report = replace(report, valid=total / users, clients=report.clients or users)
            if _is_best(report, progress):
                progress.best_score, progress.best_round = -1.0 if report.valid is None else report.valid, report.round
                progress.best_server, progress.stale = progress.server, 0
                progress.devices.keep_best(report.round)
            elif users:
                progress.stale += every
        on_round(report, progress)


def _is_best(report: RoundReport, progress: Progress) -> bool:
    """Whether a round is the best so far; where nobody has validated any, the last one is."""
    if report.valid is None:
        return progress.best_score < 0
    return report.valid > progress.best_score


def end_block(fed: Federation, progress: Progress) -> None:
    """Test the best round, let the parts keep what they need of it, and carry it on."""
    server, rounds = progress.best_server, progress.server.round
    down = to_serve(fed, server)
    scores, found = progress.devices.result(fed, server, down)
    progress.devices.end_block(fed, server, down)
    for part in fed.parts:
        server = server.with_part(part.name, part.server_end_block(fed.seen_by(part.party, server)))
    if fed.config.train.resume_from == "last":
        server = replace(progress.server, parts=server.parts)
    progress.server = server
    valid = progress.best_score if progress.best_score >= 0 else None
    progress.results.append(
        {
            "block": server.block,
            "rounds": rounds,
            "best_round": progress.best_round,
            "valid": valid,
            "valid_served": valid,
            **scores,
            "bytes_up": progress.bytes_up / max(1, rounds),
            "bytes_down": progress.bytes_down / max(1, rounds),
        }
    )
    if found is not None:
        progress.found.append(found)
    progress.in_block = False


def run_stream(fed: Federation, progress: Progress, on_round: OnRound) -> None:
    """All blocks from where `progress` stands."""
    while len(progress.results) < len(fed.stream.blocks):
        if not progress.in_block:
            begin_block(fed, progress, len(progress.results))
        run_block(fed, progress, on_round)
        end_block(fed, progress)
