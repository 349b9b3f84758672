"""What people ask for between rounds: share, unshare, forget, leave. One door for every method.

First the person's own device does its part and says what of the request leaves it, then the server's record of what was
shared changes, then every part that the request concerns handles it; it may ask devices questions of its own and play
rounds. What it did is told in a certificate. Where that changes the model, the best round so far still holds what was
withdrawn, so the block goes on from the state that is left. The same asked for by many people is carried out together,
at the price of one request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Keys, Ragged, RoundReplay, ServerState, SharedRecord
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import selection_metric
from tacita.federation.one_round import Progress, decode_total, open_block, run_round, start_run
from tacita.messages import Total
from tacita.round.device_state import DeviceState
from tacita.round.learner import Learner
from tacita.round.parts import SERVER, Part, overrides
from tacita.round.plan import Federation, Plan, prepare_serving
from tacita.round.request import Request, RequestBatch


def handle_requests(plan: Plan, progress: Progress, request: Request | RequestBatch) -> dict[str, Any]:
    """Carry out what one person asks for, or many; returns what each part that it concerns says, and what it took."""
    asked_for = RequestBatch.from_request(request)
    _check_requests(plan, asked_for)
    before = progress.server
    asked_for = progress.devices.apply_requests(plan, before, asked_for)
    server = replace(before, shared=update_shared_record(before.shared, asked_for))
    asked_for = replace(asked_for, withdrawn_items=_withdrawn_items(before.shared, asked_for))
    server, dropped = _purge_parts(plan, server, asked_for)
    asked, play = 0, RequestRounds(plan, progress, server)

    def ask(now: ServerState, question: str, chosen: Keys | None) -> Total:
        nonlocal asked
        if plan.find_asker(question) is None:
            raise TacitaError(f"'{question[:100]}' is no question of a part's own; play a round instead.")
        asked += 1  # nodes answer each question once
        named = f"{question}/{asked_for.number}.{asked}"
        now = plan.merge_state(play.full_state, now)
        down, began = prepare_serving(plan, now), time.perf_counter()
        told = progress.devices.exchange(plan, now, down, named, chosen)
        play.add_cost(told.clients, told.bytes_up, down.n_bytes * told.clients, time.perf_counter() - began)
        return plan.visible_total(SERVER, decode_total(plan, now, told.total, named))

    said: dict[str, Any] = {name: {"purged": lines} for name, lines in dropped.items()}
    try:
        handlers: tuple[Part | Learner, ...] = (*plan.parts, plan.learner)
        for one in handlers:
            play.cost, began = RequestCost(), time.perf_counter()
            part = one if isinstance(one, Part) else None
            handled = one.handle_many(plan.visible_state(part.party if part else SERVER, server), asked_for, ask, play)
            if handled is not None:
                made, told = handled
                server = play.full_state = plan.merge_state(play.full_state, made, part)
                took = play.cost.to_certificate(time.perf_counter() - began) if "method" in told else {}
                # who names a method certifies what it did, at what price
                said[one.name] = {**said.get(one.name, {}), **took, **told}
    finally:  # devices have played those rounds, whatever became of the request
        progress.server = replace(progress.server, round=progress.server.round + play.rounds_played)
        progress.played += play.rounds_played
    if not play.rounds_played and not _model_changed(before, server, plan.learner.name):
        waiting = {name: v for name, v in server.parts.items() if name == plan.learner.name}
        parts = {**progress.best_server.parts, **waiting}
        progress.server = server
        progress.best_server = replace(progress.best_server, shared=server.shared, parts=parts)
        return said
    if play.restarted:
        progress.server, progress.played = server, 0
    progress.server = progress.best_server = replace(server, round=progress.server.round)
    progress.best_score, progress.best_round, progress.stale = -1.0, progress.server.round, 0
    progress.devices.keep_best(progress.server.round)
    return said


@dataclass
class RequestCost:
    """What a part's handling of a request took from the devices."""

    rounds: int = 0
    clients: int = 0  # answers; who answers twice counts twice
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0

    def to_certificate(self, seconds: float) -> dict[str, Any]:
        """As a certificate says it, after so many seconds in all."""
        return {
            "rounds": self.rounds,
            "clients_asked": self.clients,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds_client": self.seconds,
            "seconds_server": max(0.0, seconds - self.seconds),
        }


@dataclass
class RequestRounds:
    """The rounds that a request takes, played on the run's own devices."""

    plan: Plan
    progress: Progress
    full_state: ServerState  # what all parties hold, where parts see their share of it
    cost: RequestCost = field(default_factory=RequestCost)
    rounds_played: int = 0
    restarted: bool = False
    devices_before: DeviceState | None = None  # as they were before the first block began anew

    def __call__(self, server: ServerState, chosen: Keys | None, replay: RoundReplay | None = None) -> ServerState:
        self.require_rounds(1)
        server = self.plan.merge_state(self.full_state, server)
        self.full_state, report = run_round(self.plan, server, self.progress.devices, chosen, replay)
        self.rounds_played += 1
        self.cost.rounds += 1
        self.progress.bytes_up += report.bytes_up
        self.progress.bytes_down += report.bytes_down
        n = report.clients
        self.add_cost(n, n * report.bytes_up, n * report.bytes_down, report.seconds)
        return self.plan.visible_state(SERVER, self.full_state)

    def require_rounds(self, rounds: int) -> None:
        most, so_far = self.progress.devices.max_request_rounds, self.progress.played + self.rounds_played
        if most is not None and so_far + rounds > most:
            raise TacitaError(
                f"requests have taken {so_far} rounds of this block, may take {most} and this one needs {rounds}; ask "
                "again in the next block."
            )

    def restart_block(self, server: ServerState, block: int) -> ServerState:
        devices = self.progress.devices
        if not isinstance(devices, LocalDevices) or not isinstance(self.plan, Federation):
            raise TacitaError("nodes do not go back to an earlier block; begin a new run without what was withdrawn.")
        self.devices_before, server = (
            self.devices_before or devices.clients,
            self.plan.merge_state(self.full_state, server),
        )
        if block == 0:
            devices.restart(self.plan)
            server = replace(start_run(self.plan).server, shared=server.shared)
        else:
            devices.keep_best(server.round)
            devices.end_block(self.plan, server, prepare_serving(self.plan, server))
            for part in self.plan.parts:
                server = server.with_part(part.name, part.server_end_block(self.plan.visible_state(part.party, server)))
        anew, known = Progress(server, devices, server), devices.clients.n_users
        open_block(self.plan, anew, block)
        devices.restore_persistent(self.plan, self.devices_before, known)
        self.restarted, self.full_state = True, anew.server
        return self.plan.visible_state(SERVER, self.full_state)

    def validate(self, server: ServerState) -> float | None:
        metric, k = selection_metric(self.plan.config)
        server = self.plan.merge_state(self.full_state, server)
        found = self.progress.devices.validate(self.plan, server, prepare_serving(self.plan, server))
        total, users = found.get(f"{metric}@{k}", (0.0, 0))
        return total / users if users else None

    def add_cost(self, clients: int, up: float, down: float, seconds: float) -> None:
        spent = self.cost
        spent.clients += clients
        spent.bytes_up += up
        spent.bytes_down += down
        spent.seconds += seconds


def _model_changed(before: ServerState, after: ServerState, learner: str) -> bool:
    """Whether a request changed more than the record of what people shared, and of who waits to take some back."""
    same = before.items is after.items and before.heads is after.heads
    held = {name: v for name, v in before.parts.items() if name in after.parts and name != learner}
    return not same or any(after.parts[name] is not v for name, v in held.items())


def _purge_parts(plan: Plan, server: ServerState, request: RequestBatch) -> tuple[ServerState, dict[str, list[str]]]:
    """Without what parts keep of earlier models, where somebody is about to unlearn; by part, what that was."""
    able = [part for part in plan.parts if part.takes_back and can_handle(part)]
    withdrawn = (
        len(request.withdrawn_items.ids)
        if request.kind == "unshare" and request.withdrawn_items is not None
        else len(request.senders)
    )
    dropped: dict[str, list[str]] = {}
    if request.kind == "share" or not able or not withdrawn:
        return server, dropped
    for part in plan.parts:
        left, lines = part.purged(plan.visible_state(part.party, server))
        if lines:
            server, dropped[part.name] = server.with_part(part.name, left), lines
    return server, dropped


def can_handle(part: Part) -> bool:
    """Whether a part does anything on the server about what people ask for."""
    return overrides(part, "handle") or overrides(part, "handle_many")


def _check_requests(plan: Plan, request: RequestBatch) -> None:
    """Refuse what nobody would carry out, before any device or record changes."""
    if plan.config.train.silos:
        raise TacitaError("requests are for clients that are one user each; train.silos must be 0.")
    able = any(can_handle(part) for part in plan.parts)
    if not able and not (plan.learner.takes_back and request.kind in ("forget", "leave")):
        raise TacitaError(
            f"nothing in this run can carry out '{request.kind}': its parts are "
            f"{', '.join(part.name for part in plan.parts) or 'none'}; train again with other data."
        )


def update_shared_record(record: SharedRecord, request: Request | RequestBatch) -> SharedRecord:
    """What the server holds of people's own after a request: who leaves takes everything.

    What is shared later has no earlier time, whatever a device says: what goes over rounds again takes the older for
    having been there.
    """
    asked = RequestBatch.from_request(request)
    if asked.kind == "share":
        last = float(record.time.max(initial=-np.inf))
        at = asked.time if asked.time >= last else float(np.nextafter(last, np.inf))
        return record.with_lists(asked.senders, asked.items, at)
    return record.without_lists(asked.senders, record.lists_of(asked.senders) if asked.kind == "leave" else asked.items)


def _withdrawn_items(given: SharedRecord, request: RequestBatch) -> Ragged:
    """What of the record goes with a request, by sender."""
    mine = given.lists_of(request.senders)
    if request.kind == "share":
        return Ragged.empty(len(request.senders))
    if request.kind == "leave" or not len(mine.ids):
        return mine
    return mine.filter_entries(request.items.holds(mine.rows(), mine.ids))


def enrol_users(fed: Federation, progress: Progress) -> None:
    """What the lab's people choose as a block begins, or some rounds later; people elsewhere choose by themselves."""
    if not isinstance(progress.devices, LocalDevices):
        return
    done = progress.server.round - progress.played
    for part in fed.parts:
        if overrides(part, "enrol") and part.enrols_after() == done:
            asked = progress.devices.enrol(fed, progress.server, part)
            if asked is not None and len(asked.senders):
                handle_requests(fed, progress, asked)
