"""Retraining: a run from its beginning, for requests that no part carries out, and as the measure of all others.

People share what they shared, or what is left of it; nobody chooses again. What lasts on devices and on the server
stays: who left, what must not be proposed. Where people told the server substitutes for their items, these stay as
they were told, and are there from the first round on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Ragged, ServerState, StateUpdate
from tacita.federation.clients import copy_user_state
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState
from tacita.federation.one_round import open_block
from tacita.federation.requests import enrol_users, handle_requests
from tacita.federation.rounds import Progress, RoundReport, end_block, make_initial_progress, run_block
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.part import Part
from tacita.round.plan import RETRAINING_OVER_BUDGET, Federation
from tacita.round.request import RequestBatch
from tacita.round.state import Role
from tacita.round.unlearning_report import UnlearningReport, list_purged
from tacita.runs.assembly import build_components
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.routes import SharedItems, sends_substitutes

# What people share


def find_shared_items(federation: Federation, current: TrainedState) -> Ragged:
    """(users) what people share by their own devices' word, which may tell the server something else for it."""
    names = federation.list_state_names(Role.SHARED)
    if names:
        return _join_lists(current, names)
    keys = federation.stream.user_keys[: current.clients.n_users]
    return current.server.shared.take_sender_lists(keys)


def find_shared_and_learned_items(federation: Federation, current: TrainedState) -> SharedItems:
    """What people share, and what of it their devices may have learned from before."""
    learned = _join_lists(current, federation.list_state_names(Role.LEARNED))
    return SharedItems(find_shared_items(federation, current), learned)


def _join_lists(current: TrainedState, names: Sequence[str]) -> Ragged:
    """(users) some lists of devices together; runs of earlier versions may not have all of them."""
    users = np.arange(current.clients.n_users)
    joined = Ragged.empty(len(users))
    for name in names:
        if name in current.clients.lists:
            lists = current.clients.read_list(name, users)
            joined = joined.join_rows(Ragged(lists.ptr, lists.ids))
    return joined


# Retraining


@dataclass
class RetrainingCost:
    """What the rounds took, as a certificate says it."""

    rounds: int = 0
    clients: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0

    def add_round(self, report: RoundReport, progress: Progress) -> None:
        self.rounds += 1
        self.clients += report.clients
        self.bytes_up += report.clients * report.bytes_up
        self.bytes_down += report.clients * report.bytes_down
        self.seconds += report.seconds


def retrain_blocks(
    federation: Federation,
    shared: Ragged,
    seed: int | None = None,
    current: TrainedState | None = None,
    cost: RetrainingCost | None = None,
) -> Progress:
    """All blocks from nothing, where people share what is in `shared`; `current`: what of it lasts.

    Where chance decides who takes part and budgets count on that, everybody is drawn anew: whoever is in the same round
    twice is in both or in none, and two draws would be counted where there is one.
    """
    if current is not None:
        seed = _admit_retraining(federation, current, seed)
    if seed is not None:
        federation = _with_seed(federation, seed)
    if current is not None:  # who was away in the last block has spent what their silo has
        LocalDevices(current.clients).equalise_silos(federation, current.server)
    keeps_record = current is not None and sends_substitutes(federation)
    choices = Ragged.empty(len(shared)) if keeps_record else shared
    parts = tuple(fix_shares(part, choices) for part in federation.parts)
    federation = replace(federation, parts=parts)
    progress = make_initial_progress(federation)
    cost = cost or RetrainingCost()
    if current is not None:
        server = _restore_server(federation, progress.server, current.server, keeps_record)
        progress.server = server
        progress.best_server = server
    while len(progress.results) < len(federation.stream.blocks):
        n_known = progress.clients.n_users
        open_block(federation, progress, len(progress.results))
        if current is not None:
            _restore_devices(federation, progress, current.clients, n_known, keeps_record)
        enrol_users(federation, progress)
        run_block(federation, progress, cost.add_round)
        end_block(federation, progress)
    return progress


def _admit_retraining(federation: Federation, current: TrainedState, seed: int | None) -> int | None:
    """Refuse what a budget forbids; the seed to retrain with, another one where budgets count on sampling."""
    if federation.learner.ledger() is not None:
        raise TacitaError(RETRAINING_OVER_BUDGET)
    if seed is None and _counts_on_sampling(federation):
        return _draw_new_seed(federation, current)
    return seed


def _counts_on_sampling(federation: Federation) -> bool:
    """Whether some ledger of the run counts a release as sampled."""
    laws = set[str]()
    for ledger in federation.ledgers:
        laws.update(event.law for event in ledger.events)
    return "sampled" in laws


def _with_seed(federation: Federation, seed: int) -> Federation:
    """The same run with other draws."""
    config = federation.config.model_copy(update={"seed": seed})
    backbone, parts, draws = build_components(config, lab_secret=federation.draws.lab_secret)
    return replace(federation, backbone=backbone, parts=parts, draws=draws, config=config)


def _draw_new_seed(federation: Federation, current: TrainedState) -> int:
    """One that no earlier training of this run had: what everybody has paid grows with each of them."""
    n_paid = 0
    for name, array in current.clients.arrays.items():
        if name.startswith(PARTS) and name.endswith("/times"):
            n_paid += int(array.sum())
    draw = Draws(federation.config.seed).private("anew", n_paid)
    return int(draw >> np.uint64(33))


# What lasts


def _restore_server(
    federation: Federation, server: ServerState, current: ServerState, keeps_record: bool
) -> ServerState:
    """A server that has learned nothing, with what it must not forget."""
    for part in federation.parts:
        persistent = {spec.name for spec in part.state(0) if spec.persistent and not spec.on_device}
        arrays = current.parts.get(part.name, {})
        restored = {name: array for name, array in arrays.items() if name in persistent}
        if restored:
            server = server.with_part(part.name, restored)
    return replace(server, shared=current.shared) if keeps_record else server


def _restore_devices(
    federation: Federation, progress: Progress, current: DeviceState, n_known: int, keeps_record: bool
) -> None:
    """What lasts on the devices of those who came with a block; what they share they ask for, unless it was told."""
    clients = progress.clients
    new_users = np.arange(n_known, min(clients.n_users, current.n_users))
    shared = () if keeps_record else federation.list_state_names(Role.SHARED)
    names = [name for name in federation.persistent_part_names if name not in shared]
    copy_user_state(clients, current, names, new_users)
    progress.local_devices.equalise_silos(federation, progress.server)
    clients.take_snapshot()


# Shares that are fixed


def fix_shares(part: Part, shared: Ragged) -> Part:
    """The same part where people do not choose what to share: it is known."""
    if part.lab_enrolment is None:
        return part

    class Decided(type(part)):  # type: ignore[misc]
        def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
            update, request = super().enrol(view)
            own_items = _select_own(shared, view)
            sharers = np.flatnonzero(own_items.counts() > 0)
            time = request.time if request is not None else 0.0
            keys = view.client_keys[sharers]
            return update, RequestBatch("share", keys, own_items.take(sharers), time)

    return Decided(part.config, part.context)


def _select_own(shared: Ragged, view: CohortView) -> Ragged:
    """(users of a view) what they share of what they train on."""
    n_users = int(view.user.max(initial=-1)) + 1
    lists = shared.join_rows(Ragged.empty(n_users)).take(view.user)
    is_trained = view.train.holds(lists.rows(), lists.ids)
    return Ragged(lists.ptr, lists.ids).filter_entries(is_trained)


# Requests


def tell_parts_of_request(federation: Federation, progress: Progress, request: ResolvedRequest) -> list[str]:
    """Let devices, the record and the parts that only note it hear of a request; what these dropped."""
    parts = tuple(part for part in federation.parts if part not in federation.forgetting_parts)
    recording = replace(federation, parts=parts)
    if federation.config.train.silos:
        return []
    if not recording.implementing("on_server"):
        progress.devices.apply_requests(recording, progress.server, request.requests)
        return []
    reports = handle_requests(recording, progress, request.requests)
    return list_purged(reports.values())


def report_retraining(cost: RetrainingCost, purged: list[str], exact: bool) -> UnlearningReport:
    return UnlearningReport(
        method="retrain",
        mode="all rounds from the first one on",
        exact=exact,
        rounds=cost.rounds,
        clients_asked=cost.clients,
        bytes_up=cost.bytes_up,
        bytes_down=cost.bytes_down,
        seconds_client=cost.seconds,
        purged=(*purged, "everything that was learnt"),
    )
