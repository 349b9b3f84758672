"""A run once more from its beginning: the way of requests that no part carries out, and what all others are judged by.

People share what they shared, or what is left of it; nobody chooses again. What lasts on devices and on the server
stays: who left, what must not be proposed. Where what was told is not what people have, it stays as it was told, and
is there from the first round on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Held, Ragged, Requests, ServerState
from tacita.federation.devices import Here
from tacita.federation.measuring import Learned
from tacita.federation.one_round import open_block
from tacita.federation.requests import can_handle, enrol, handle
from tacita.federation.rounds import Progress, RoundReport, end_block, run_block, start
from tacita.lab.assembling import build
from tacita.lab.forgetting.paths import Shares
from tacita.lab.forgetting.wishes import Asked
from tacita.round.device_state import PARTS, DeviceState
from tacita.round.parts import Part, overrides
from tacita.round.plan import TOLD_TWICE, Federation


def shared_by(fed: Federation, now: Learned) -> Ragged:
    """(users) what people share by their own devices' word, which may tell the server something else for it."""
    if not any(name.endswith("/shared") for name in now.clients.lists):
        return now.server.given.of(fed.stream.user_keys[: now.clients.n_users])
    return _kept(now, "/shared")


def shares_of(fed: Federation, now: Learned) -> Shares:
    """(users) the same, and what of it devices may have learned from before."""
    return Shares(shared_by(fed, now), _kept(now, "/learned"))


def _kept(now: Learned, ending: str) -> Ragged:
    """(users) the lists of that name, of all parts together."""
    users = np.arange(now.clients.n_users)
    found = Ragged.empty(len(users))
    for one in (now.clients.list_of(name, users) for name in now.clients.lists if name.endswith(ending)):
        found = found.joined(Ragged(one.ptr, one.ids))
    return found


@dataclass
class Price:
    """What the rounds took, as a certificate says it."""

    rounds: int = 0
    clients: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    seconds: float = 0.0

    def pay(self, report: RoundReport, now: Progress) -> None:
        self.rounds += 1
        self.clients += report.clients
        self.bytes_up += report.clients * report.bytes_up
        self.bytes_down += report.clients * report.bytes_down
        self.seconds += report.seconds


def begun_anew(
    fed: Federation, shared: Ragged, seed: int | None = None, now: Learned | None = None, price: Price | None = None
) -> Progress:
    """All blocks from nothing, where people share what is in `shared`; `now`: what of it lasts.

    Where chance decides who takes part and budgets count on that, everybody is drawn anew: whoever is in the same round
    twice is in both or in none, and two draws would be counted where there is one.
    """
    if now is not None and fed.learner.ledger() is not None:
        raise TacitaError(TOLD_TWICE)
    if seed is None and now is not None and any(one.law == "sampled" for kept in fed.ledgers for one in kept.events):
        seed = _another_seed(fed, now)
    if seed is not None:
        config = fed.config.model_copy(update={"seed": seed})
        backbone, parts, draws = build(config)
        fed = replace(fed, backbone=backbone, parts=parts, draws=draws, config=config)
    if now is not None:  # who was away in the last block has spent what their silo has
        Here(now.clients).level(fed, now.server)
    told = now is not None and any(overrides(part, "encode_request") and not part.takes_back for part in fed.parts)
    choices = Ragged.empty(len(shared)) if told else shared
    fed = replace(fed, parts=tuple(decided(part, choices) for part in fed.parts))
    progress, paid = start(fed), price or Price()
    if now is not None:
        progress.server = progress.best_server = _lasting(fed, progress.server, now.server, told)
    while len(progress.results) < len(fed.stream.blocks):
        known = progress.clients.n_users
        open_block(fed, progress, len(progress.results))
        if now is not None:
            _restore(fed, progress, now.clients, known, told)
        enrol(fed, progress)
        run_block(fed, progress, paid.pay)
        end_block(fed, progress)
    return progress


def _another_seed(fed: Federation, now: Learned) -> int:
    """One that no earlier training of this run had: what everybody has paid grows with each of them."""
    times = (v for name, v in now.clients.arrays.items() if name.startswith(PARTS) and name.endswith("/times"))
    return int(Draws(fed.config.seed).private("anew", sum(int(one.sum()) for one in times)) >> np.uint64(33))


def _lasting(fed: Federation, server: ServerState, now: ServerState, told: bool) -> ServerState:
    """A server that has learned nothing, with what it must not forget."""
    for part in fed.parts:
        held = {name: v for name, v in now.parts.get(part.name, {}).items() if name in part.lasting_here}
        if held:
            server = server.with_part(part.name, held)
    return replace(server, given=now.given) if told else server


def _restore(fed: Federation, progress: Progress, now: DeviceState, known: int, told: bool) -> None:
    """What lasts on the devices of those who came with a block; what they share they ask for, unless it was told."""
    clients = progress.clients
    new = np.arange(known, min(clients.n_users, now.n_users))
    for name in (f"{PARTS}{part.name}/{one}" for part in fed.parts for one in part.lasting):
        if name in clients.lists and (told or not name.endswith("/shared")):
            clients.lists[name].put(new, *now.lists[name].take(new))
        elif name in clients.arrays:
            clients.arrays[name][new] = now.arrays[name][new]
    if isinstance(progress.devices, Here):
        progress.devices.level(fed, progress.server)
    clients.keep()


def decided(part: Part, shared: Ragged) -> Part:
    """The same part where people do not choose what to share: it is known."""
    if not overrides(part, "enrol"):
        return part

    class Decided(type(part)):  # type: ignore[misc]
        def enrol(self, view: CohortView) -> tuple[Held, Requests | None]:
            kept, asked = super().enrol(view)
            lists = shared.joined(Ragged.empty(int(view.user.max(initial=-1)) + 1)).take(view.user)
            mine = Ragged(lists.ptr, lists.ids).where(view.train.holds(lists.rows(), lists.ids))
            asking = np.flatnonzero(mine.counts() > 0)
            time = asked.time if asked is not None else 0.0
            return kept, Requests("share", view.client_keys[asking], mine.take(asking), time)

    return Decided(part.config, part.world)


def noted(fed: Federation, progress: Progress, asked: Asked) -> list[str]:
    """The request as devices, the record and the parts that only note it hear it; what these dropped."""
    parts = tuple(part for part in fed.parts if not (part.takes_back and can_handle(part)))
    if fed.config.train.silos or not any(can_handle(part) for part in parts):
        if not fed.config.train.silos:
            progress.devices.request(replace(fed, parts=parts), progress.server, asked.requests)
        return []
    said = handle(replace(fed, parts=parts), progress, asked.requests)
    return [str(line) for one in said.values() for line in one.get("purged", ())]


def certified(price: Price, purged: list[str], exact: bool) -> dict[str, Any]:
    return {
        "method": "retrain",
        "mode": "all rounds from the first one on",
        "exact": exact,
        "rounds": price.rounds,
        "clients_asked": price.clients,
        "bytes_up": price.bytes_up,
        "bytes_down": price.bytes_down,
        "seconds_client": price.seconds,
        "purged": [*purged, "everything that was learnt"],
    }
