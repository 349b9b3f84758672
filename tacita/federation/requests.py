"""What users ask for between rounds: share, unshare, forget, leave. One service for every method.

First the user's own device does its part and says what of the request leaves it. Then the server's record of what was
shared changes, and every part that the request concerns carries it out; it may ask devices questions of its own and
play rounds. What it did stands in a certificate. Where that changes the model, the best round so far still holds what
was withdrawn, so the block goes on from the new state. Requests of many users are carried out together, at the price
of one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Keys, Ragged, RoundReplay, ServerState, SharedRecord
from tacita.federation.evaluation import parse_selection_metric
from tacita.federation.one_round import Progress, make_initial_progress, open_block, run_round
from tacita.messages import Total
from tacita.round.capabilities import Unlearning
from tacita.round.fulfilment import can_retract
from tacita.round.part import Part
from tacita.round.plan import Federation, Plan
from tacita.round.question import Question
from tacita.round.request import Request, RequestBatch
from tacita.round.state import Role
from tacita.round.unlearning_report import PartReports, UnlearningReport


def handle_requests(federation: Federation, progress: Progress, request: Request | RequestBatch) -> PartReports:
    """Carry out what one user asks for, or many; returns what each part that it concerns reports, and what it took."""
    requests = RequestBatch.from_request(request)
    refuse_unsupported_requests(federation, requests)
    before = progress.server
    requests = progress.devices.apply_requests(federation, before, requests)
    server = replace(before, shared=compute_shared_record_after(before.shared, requests))
    requests = replace(requests, withdrawn_items=_list_withdrawn_items(before.shared, requests))
    server, purged = _purge_parts(federation, server, requests)
    rounds = RequestRounds(federation, progress, server, requests)
    reports = {name: UnlearningReport(purged=tuple(lines)) for name, lines in purged.items()}
    try:
        for name, unlearning in federation.unlearners.items():
            report = rounds.run_unlearning(name, unlearning)
            if report is not None:
                reports[name] = report.with_defaults(reports[name]) if name in reports else report
    finally:  # devices have played those rounds, whatever became of the request
        progress.server = replace(progress.server, round=progress.server.round + rounds.rounds_played)
        progress.played += rounds.rounds_played
    server = rounds.full_state
    if not rounds.rounds_played and not _has_model_changed(before, server, federation.learner.name):
        _keep_best_round(federation, progress, server)
    else:
        _continue_block_from(progress, server, rounds.restarted)
    return reports


def _keep_best_round(federation: Federation, progress: Progress, server: ServerState) -> None:
    """The model is as it was: only records changed, and who waits to take something back."""
    parts = dict(progress.best_server.parts)
    if federation.learner.name in server.parts:
        parts[federation.learner.name] = server.parts[federation.learner.name]
    progress.server = server
    progress.best_server = replace(progress.best_server, shared=server.shared, parts=parts)


def _continue_block_from(progress: Progress, server: ServerState, restarted: bool) -> None:
    """The block goes on from the new state: the best round so far still holds what was withdrawn."""
    if restarted:
        progress.server = server
        progress.played = 0
    server = replace(server, round=progress.server.round)
    progress.server = server
    progress.best_server = server
    progress.best_score = -1.0
    progress.best_round = server.round
    progress.stale = 0
    progress.devices.keep_best_round(server.round)


@dataclass
class RequestCost:
    """What a part's handling of a request took from the devices."""

    rounds: int = 0
    clients: int = 0  # answers; who answers twice counts twice
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0

    def to_report(self, seconds: float) -> UnlearningReport:
        """As a certificate says it, after so many seconds in all."""
        return UnlearningReport(
            rounds=self.rounds,
            clients_asked=self.clients,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            seconds_client=self.seconds,
            seconds_server=max(0.0, seconds - self.seconds),
        )


@dataclass
class RequestRounds:
    """The questions and rounds that a request takes, on the run's own devices."""

    federation: Federation
    progress: Progress
    full_state: ServerState  # where hooks see only their share of it
    requests: RequestBatch
    cost: RequestCost = field(default_factory=RequestCost)
    questions_asked: int = 0
    rounds_played: int = 0
    restarted: bool = False

    def run_unlearning(self, name: str, unlearning: Unlearning) -> UnlearningReport | None:
        """Let one part carry the requests out; what it reports, with the price where it certifies a method."""
        part = self._find_part(name)
        self.cost = RequestCost()
        began = time.perf_counter()
        visible = self.federation.restrict_state_to_part(part, self.full_state)

        def ask(server: ServerState, kind: str, chosen: Keys | None) -> Total:
            return self.ask_devices(server, Question(kind, owner=name), chosen)

        outcome = unlearning.on_server(visible, self.requests, ask, self)
        if outcome is None:
            return None
        changed, report = outcome
        self.full_state = self.federation.merge_state(part, self.full_state, changed)
        if not report.is_certified:
            return report
        seconds = time.perf_counter() - began
        return report.with_defaults(self.cost.to_report(seconds))

    def _find_part(self, name: str) -> Part | None:
        return next((part for part in self.federation.parts if part.name == name), None)

    def ask_devices(self, server: ServerState, question: Question, chosen: Keys | None) -> Total:
        """One exchange between rounds."""
        self.questions_asked += 1  # nodes answer each question once
        question = question.with_number(self.requests.number, self.questions_asked)
        server = self.federation.merge_state(None, self.full_state, server)
        broadcast = self.federation.broadcast_serving(server)
        began = time.perf_counter()
        reply = self.progress.devices.exchange(self.federation, server, broadcast, question, chosen)
        seconds = time.perf_counter() - began
        self.add_cost(reply.clients, reply.bytes_up, broadcast.n_bytes * reply.clients, seconds)
        return self.federation.restrict_total_to_part(None, self.federation.decode(server, reply.total, question))

    def __call__(self, server: ServerState, chosen: Keys | None, replay: RoundReplay | None = None) -> ServerState:
        self.require_rounds_left(1)
        server = self.federation.merge_state(None, self.full_state, server)
        self.full_state, report = run_round(self.federation, server, self.progress.devices, chosen, replay)
        self.rounds_played += 1
        self.cost.rounds += 1
        self.progress.bytes_up += report.bytes_up
        self.progress.bytes_down += report.bytes_down
        n_clients = report.clients
        self.add_cost(n_clients, n_clients * report.bytes_up, n_clients * report.bytes_down, report.seconds)
        return self.federation.restrict_state_to_part(None, self.full_state)

    def require_rounds_left(self, rounds: int) -> None:
        most = self.progress.devices.max_request_rounds
        so_far = self.progress.played + self.rounds_played
        if most is not None and so_far + rounds > most:
            raise TacitaError(
                f"requests have taken {so_far} rounds of this block, may take {most} and this one needs {rounds}; ask "
                "again in the next block."
            )

    def restart_block(self, server: ServerState, block: int) -> ServerState:
        devices = self.progress.devices.lab
        if devices is None:
            raise TacitaError("nodes do not go back to an earlier block; begin a new run without what was withdrawn.")
        if not self.restarted:
            devices.remember_devices()
        server = self.federation.merge_state(None, self.full_state, server)
        if block == 0:
            devices.restart_devices(self.federation)
            server = replace(make_initial_progress(self.federation).server, shared=server.shared)
        else:
            devices.keep_best_round(server.round)
            devices.end_block(self.federation, server, self.federation.broadcast_serving(server))
            server = self.federation.end_block(server)
        reopened = Progress(server, devices, server)
        open_block(self.federation, reopened, block)
        devices.restore_persistent_state(self.federation)
        self.restarted = True
        self.full_state = reopened.server
        return self.federation.restrict_state_to_part(None, self.full_state)

    def measure_validation(self, server: ServerState) -> float | None:
        metric, k = parse_selection_metric(self.federation.config)
        server = self.federation.merge_state(None, self.full_state, server)
        sums = self.progress.devices.sum_validation(self.federation, server, self.federation.broadcast_serving(server))
        total, users = sums.get(f"{metric}@{k}", (0.0, 0))
        return total / users if users else None

    def add_cost(self, clients: int, bytes_up: float, bytes_down: float, seconds: float) -> None:
        self.cost.clients += clients
        self.cost.bytes_up += bytes_up
        self.cost.bytes_down += bytes_down
        self.cost.seconds += seconds


def find_waiting_users(plan: Plan, server: ServerState) -> Keys:
    """Who asked to take something back, and waits until enough others have asked."""
    keys = [np.zeros(0, np.uint64)]
    for owner, specs in plan.list_state_specs().items():
        state = server.parts.get(owner, {})
        keys += [state[spec.name] for spec in specs if spec.role is Role.WAITING and spec.name in state]
    return np.concatenate(keys)


def _has_model_changed(before: ServerState, after: ServerState, learner: str) -> bool:
    """Whether a request changed more than the record of what users shared, and of who waits to take some back."""
    if before.items is not after.items or before.heads is not after.heads:
        return True
    common = [name for name in before.parts if name in after.parts and name != learner]
    return any(after.parts[name] is not before.parts[name] for name in common)


def _purge_parts(
    federation: Federation, server: ServerState, requests: RequestBatch
) -> tuple[ServerState, dict[str, list[str]]]:
    """Without what parts keep of earlier models, where somebody is about to unlearn; by part, what that was."""
    purged: dict[str, list[str]] = {}
    if not federation.forgetting_parts or not _has_withdrawal(requests):
        return server, purged
    for part in federation.parts:
        if part.unlearning is None:
            continue
        remaining, lines = part.unlearning.purge(federation.restrict_state_to_part(part, server))
        if lines:
            server = server.with_part(part.name, remaining)
            purged[part.name] = lines
    return server, purged


def _has_withdrawal(requests: RequestBatch) -> bool:
    """Whether somebody takes something back."""
    if requests.kind == "share":
        return False
    if requests.kind == "unshare" and requests.withdrawn_items is not None:
        return len(requests.withdrawn_items.ids) > 0
    return len(requests.senders) > 0


def refuse_unsupported_requests(federation: Federation, requests: RequestBatch) -> None:
    """Refuse what nobody would carry out, before any device or record changes."""
    if federation.config.train.silos:
        raise TacitaError("requests are for clients that are one user each; train.silos must be 0.")
    if not federation.implementing("on_server") and not can_retract(federation, requests.kind):
        names = ", ".join(part.name for part in federation.parts) or "none"
        raise TacitaError(
            f"nothing in this run can carry out '{requests.kind}': its parts are {names}; train again with other data."
        )


def compute_shared_record_after(record: SharedRecord, request: Request | RequestBatch) -> SharedRecord:
    """What the server holds of people's own after a request: who leaves takes everything.

    What is shared later has no earlier time, whatever a device says: what goes over rounds again takes the older for
    having been there.
    """
    requests = RequestBatch.from_request(request)
    if requests.kind == "share":
        last = float(record.time.max(initial=-np.inf))
        time = requests.time if requests.time >= last else float(np.nextafter(last, np.inf))
        return record.with_lists(requests.senders, requests.items, time)
    withdrawn = record.take_sender_lists(requests.senders) if requests.kind == "leave" else requests.items
    return record.without_lists(requests.senders, withdrawn)


def _list_withdrawn_items(record: SharedRecord, requests: RequestBatch) -> Ragged:
    """What of the record goes with a request, by sender."""
    shared = record.take_sender_lists(requests.senders)
    if requests.kind == "share":
        return Ragged.empty(len(requests.senders))
    if requests.kind == "leave" or not len(shared.ids):
        return shared
    return shared.filter_entries(requests.items.holds(shared.rows(), shared.ids))


def enrol_users(federation: Federation, progress: Progress) -> None:
    """What the lab's users choose as a block begins, or some rounds later; live users choose by themselves."""
    devices = progress.devices.lab
    if devices is None:
        return
    rounds_done = progress.server.round - progress.played
    for part in federation.parts:
        if part.lab_enrolment is None or part.lab_enrolment.enrolment_round != rounds_done:
            continue
        requests = devices.enrol(federation, progress.server, part)
        if requests is not None and len(requests.senders):
            handle_requests(federation, progress, requests)
