"""What people ask for between rounds: share, unshare, forget, leave. One door for every method.

First the person's own device does its part and says what of the request leaves it, then the server's record of what was
shared changes, then every part that the request concerns handles it; it may ask devices questions of its own and play
rounds. What it did is told in a certificate. Where that changes the model, the best round so far still holds what was
withdrawn, so the block goes on from the state that is left. The same asked for by many people is carried out together,
at the price of one request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.types import Given, Keys, Ragged, Request, Requests, ServerState
from tacita.federation.devices import Here
from tacita.federation.measuring import selecting_metric
from tacita.federation.one_round import Progress, decoded, run_round
from tacita.fields import Total
from tacita.round.parts import overrides
from tacita.round.plan import Federation, Plan, to_serve


def handle(plan: Plan, progress: Progress, request: Request | Requests) -> dict[str, Any]:
    """Carry out what one person asks for, or many; returns what each part that it concerns says of it."""
    asked_for = Requests.of(request)
    _check(plan, asked_for)
    before = progress.server
    asked_for = progress.devices.request(plan, before, asked_for)
    server = replace(before, given=given_after(before.given, asked_for))
    asked_for = replace(asked_for, taken=_taken(before.given, asked_for))
    asked, play = 0, Rounds(plan, progress)

    def ask(now: ServerState, question: str, chosen: Keys | None) -> Total:
        nonlocal asked
        if plan.asker(question) is None:
            raise TacitaError(f"'{question[:100]}' is no question of a part's own; play a round instead.")
        asked += 1  # nodes answer each question once
        named = f"{question}/{asked_for.number}.{asked}"
        told = progress.devices.exchange(plan, now, to_serve(plan, now), named, chosen)
        return decoded(plan, now, told.total, named)

    said: dict[str, Any] = {}
    try:
        for part in plan.parts:
            handled = part.handle_many(server, asked_for, ask, play)
            if handled is not None:
                server, said[part.name] = handled
    finally:  # devices have played those rounds, whatever became of the request
        progress.server = replace(progress.server, round=progress.server.round + play.played)
        progress.played += play.played
    if not play.played and not _changed(before, server):
        progress.server, progress.best_server = server, replace(progress.best_server, given=server.given)
        return said
    progress.server = progress.best_server = replace(server, round=progress.server.round)
    progress.best_score, progress.best_round, progress.stale = -1.0, progress.server.round, 0
    progress.devices.keep_best(progress.server.round)
    return said


@dataclass
class Rounds:
    """The rounds that a request takes, played on the run's own devices."""

    plan: Plan
    progress: Progress
    played: int = 0

    def __call__(self, server: ServerState, chosen: Keys | None) -> ServerState:
        after, report = run_round(self.plan, server, self.progress.devices, chosen)
        self.played += 1
        self.progress.bytes_up += report.bytes_up
        self.progress.bytes_down += report.bytes_down
        return after

    def measure(self, server: ServerState) -> float | None:
        metric, k = selecting_metric(self.plan.config)
        found = self.progress.devices.validate(self.plan, server, to_serve(self.plan, server))
        total, users = found.get(f"{metric}@{k}", (0.0, 0))
        return total / users if users else None


def _changed(before: ServerState, after: ServerState) -> bool:
    """Whether a request changed more than the record of what people shared."""
    same = before.items is after.items and before.heads is after.heads
    return not same or any(after.parts[name] is not v for name, v in before.parts.items() if name in after.parts)


def _check(plan: Plan, request: Requests) -> None:
    """Refuse what nobody would carry out, before any device or record changes."""
    if plan.config.train.silos:
        raise TacitaError("requests are for clients that are one user each; train.silos must be 0.")
    if not any(overrides(part, "handle") or overrides(part, "handle_many") for part in plan.parts):
        raise TacitaError(
            f"nothing in this run can carry out '{request.kind}': its parts are "
            f"{', '.join(part.name for part in plan.parts) or 'none'}; train again with other data."
        )


def given_after(given: Given, request: Request | Requests) -> Given:
    """What the server holds of people's own after a request: who leaves takes everything."""
    asked = Requests.of(request)
    if asked.kind == "share":
        return given.with_lists(asked.senders, asked.items, asked.time)
    return given.without_lists(asked.senders, given.of(asked.senders) if asked.kind == "leave" else asked.items)


def _taken(given: Given, request: Requests) -> Ragged:
    """What of the record goes with a request, by sender."""
    mine = given.of(request.senders)
    if request.kind == "share":
        return Ragged.empty(len(request.senders))
    if request.kind == "leave" or not len(mine.ids):
        return mine
    return mine.where(request.items.holds(mine.rows(), mine.ids))


def enrol(fed: Federation, progress: Progress) -> None:
    """What the lab's people choose as a block begins, or some rounds later; people elsewhere choose by themselves."""
    if not isinstance(progress.devices, Here):
        return
    done = progress.server.round - progress.played
    for part in fed.parts:
        if overrides(part, "enrol") and part.enrols_after() == done:
            asked = progress.devices.enrol(fed, progress.server, part)
            if asked is not None and len(asked.senders):
                handle(fed, progress, asked)
