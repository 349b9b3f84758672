"""A run once more from its beginning: the way of requests that no part carries out, and what all others are judged by.

People share what they shared, or what is left of it; nobody chooses again. What lasts on devices and on the server
stays: who left, what must not be proposed. Where what was told is not what people have, it stays as it was told, and
is there from the first round on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Ragged, ServerState, StateUpdate
from tacita.federation.clients import copy_state
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState
from tacita.federation.one_round import open_block
from tacita.federation.requests import enrol_users, handle_requests
from tacita.federation.rounds import Progress, RoundReport, end_block, run_block, start_run
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.part import Part
from tacita.round.plan import RETRAINING_OVER_BUDGET, Federation
from tacita.round.request import RequestBatch
from tacita.round.state import Role
from tacita.round.unlearning_report import UnlearningReport, list_purged
from tacita.runs.assembly import build_components
from tacita.runs.forgetting.requests import ResolvedRequest
from tacita.runs.forgetting.routes import SharedItems, sends_substitutes


def find_shared(fed: Federation, now: TrainedState) -> Ragged:
    """(users) what people share by their own devices' word, which may tell the server something else for it."""
    names = fed.names_of(Role.SHARED)
    if not names:
        return now.server.shared.lists_of(fed.stream.user_keys[: now.clients.n_users])
    return _join_lists(now, names)


def collect_shares(fed: Federation, now: TrainedState) -> SharedItems:
    """(users) the same, and what of it devices may have learned from before."""
    return SharedItems(find_shared(fed, now), _join_lists(now, fed.names_of(Role.LEARNED)))


def _join_lists(now: TrainedState, names: Sequence[str]) -> Ragged:
    """(users) some lists of devices together; runs of earlier versions may not have all of them."""
    users = np.arange(now.clients.n_users)
    joined = Ragged.empty(len(users))
    for name in names:
        if name in now.clients.lists:
            lists = now.clients.read_list(name, users)
            joined = joined.join_rows(Ragged(lists.ptr, lists.ids))
    return joined


@dataclass
class RetrainingCost:
    """What the rounds took, as a certificate says it."""

    rounds: int = 0
    clients: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0

    def add_round(self, report: RoundReport, now: Progress) -> None:
        self.rounds += 1
        self.clients += report.clients
        self.bytes_up += report.clients * report.bytes_up
        self.bytes_down += report.clients * report.bytes_down
        self.seconds += report.seconds


def retrain_blocks(
    fed: Federation,
    shared: Ragged,
    seed: int | None = None,
    now: TrainedState | None = None,
    price: RetrainingCost | None = None,
) -> Progress:
    """All blocks from nothing, where people share what is in `shared`; `now`: what of it lasts.

    Where chance decides who takes part and budgets count on that, everybody is drawn anew: whoever is in the same round
    twice is in both or in none, and two draws would be counted where there is one.
    """
    if now is not None and fed.learner.ledger() is not None:
        raise TacitaError(RETRAINING_OVER_BUDGET)
    if seed is None and now is not None and _counts_on_sampling(fed):
        seed = _draw_new_seed(fed, now)
    if seed is not None:
        fed = _with_seed(fed, seed)
    if now is not None:  # who was away in the last block has spent what their silo has
        LocalDevices(now.clients).equalise_silos(fed, now.server)
    told = now is not None and sends_substitutes(fed)
    choices = Ragged.empty(len(shared)) if told else shared
    fed = replace(fed, parts=tuple(fix_shares(part, choices) for part in fed.parts))
    progress, paid = start_run(fed), price or RetrainingCost()
    if now is not None:
        progress.server = progress.best_server = _restore_server(fed, progress.server, now.server, told)
    while len(progress.results) < len(fed.stream.blocks):
        known = progress.clients.n_users
        open_block(fed, progress, len(progress.results))
        if now is not None:
            _restore_devices(fed, progress, now.clients, known, told)
        enrol_users(fed, progress)
        run_block(fed, progress, paid.add_round)
        end_block(fed, progress)
    return progress


def _counts_on_sampling(fed: Federation) -> bool:
    """Whether some ledger of the run counts a release as sampled."""
    return any(event.law == "sampled" for ledger in fed.ledgers for event in ledger.events)


def _with_seed(fed: Federation, seed: int) -> Federation:
    """The same run with other draws."""
    config = fed.config.model_copy(update={"seed": seed})
    backbone, parts, draws = build_components(config, lab_secret=fed.draws.lab_secret)
    return replace(fed, backbone=backbone, parts=parts, draws=draws, config=config)


def _draw_new_seed(fed: Federation, now: TrainedState) -> int:
    """One that no earlier training of this run had: what everybody has paid grows with each of them."""
    times = (v for name, v in now.clients.arrays.items() if name.startswith(PARTS) and name.endswith("/times"))
    return int(Draws(fed.config.seed).private("anew", sum(int(one.sum()) for one in times)) >> np.uint64(33))


def _restore_server(fed: Federation, server: ServerState, now: ServerState, told: bool) -> ServerState:
    """A server that has learned nothing, with what it must not forget."""
    for part in fed.parts:
        persistent = {spec.name for spec in part.state(0) if spec.persistent and not spec.on_device}
        held = {name: v for name, v in now.parts.get(part.name, {}).items() if name in persistent}
        if held:
            server = server.with_part(part.name, held)
    return replace(server, shared=now.shared) if told else server


def _restore_devices(fed: Federation, progress: Progress, now: DeviceState, known: int, told: bool) -> None:
    """What lasts on the devices of those who came with a block; what they share they ask for, unless it was told."""
    clients = progress.clients
    new = np.arange(known, min(clients.n_users, now.n_users))
    shared = () if told else fed.names_of(Role.SHARED)
    names = [name for name in fed.persistent_part_names if name not in shared]
    copy_state(clients, now, names, new)
    progress.local_devices.equalise_silos(fed, progress.server)
    clients.take_snapshot()


def fix_shares(part: Part, shared: Ragged) -> Part:
    """The same part where people do not choose what to share: it is known."""
    if part.lab_enrolment is None:
        return part

    class Decided(type(part)):  # type: ignore[misc]
        def enrol(self, view: CohortView) -> tuple[StateUpdate, RequestBatch | None]:
            kept, asked = super().enrol(view)
            lists = shared.join_rows(Ragged.empty(int(view.user.max(initial=-1)) + 1)).take(view.user)
            mine = Ragged(lists.ptr, lists.ids).filter_entries(view.train.holds(lists.rows(), lists.ids))
            asking = np.flatnonzero(mine.counts() > 0)
            time = asked.time if asked is not None else 0.0
            return kept, RequestBatch("share", view.client_keys[asking], mine.take(asking), time)

    return Decided(part.config, part.context)


def note_request(fed: Federation, progress: Progress, request: ResolvedRequest) -> list[str]:
    """The request as devices, the record and the parts that only note it hear it; what these dropped."""
    parts = tuple(part for part in fed.parts if part not in fed.forgetting_parts)
    recording = replace(fed, parts=parts)
    if fed.config.train.silos:
        return []
    if not recording.implementing("on_server"):
        progress.devices.apply_requests(recording, progress.server, request.requests)
        return []
    said = handle_requests(recording, progress, request.requests)
    return list_purged(said.values())


def describe_retraining(price: RetrainingCost, purged: list[str], exact: bool) -> UnlearningReport:
    return UnlearningReport(
        method="retrain",
        mode="all rounds from the first one on",
        exact=exact,
        rounds=price.rounds,
        clients_asked=price.clients,
        bytes_up=price.bytes_up,
        bytes_down=price.bytes_down,
        seconds_client=price.seconds,
        purged=(*purged, "everything that was learnt"),
    )
