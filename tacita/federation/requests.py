"""What people ask for between rounds: share, unshare, forget, leave. One door for every method.

First the person's own device does its part, then the server's record of what was shared changes, then every part that
the request concerns handles it; it may ask devices questions of its own and play rounds. What it did is told in a
certificate. Where that changes the model, the best round so far still holds what was withdrawn, so the block goes on
from the state that is left. The same asked for by many people is carried out together, at the price of one request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.types import Given, Keys, Request, Requests, ServerState
from tacita.federation.devices import Here
from tacita.federation.one_round import Progress, decoded, run_round
from tacita.fields import Total
from tacita.round.learner import Learner
from tacita.round.parts import Part, overrides
from tacita.round.plan import Federation, Plan, to_serve


def handle(plan: Plan, progress: Progress, request: Request | Requests) -> dict[str, Any]:
    """Carry out what one person asks for, or many; returns what each part that it concerns says of it."""
    asked_for = Requests.of(request)
    _check(plan, asked_for)
    server = replace(progress.server, given=given_after(progress.server.given, asked_for))
    progress.devices.request(plan, server, asked_for)
    asked, played, before = 0, 0, progress.server

    def ask(now: ServerState, question: str, chosen: Keys | None) -> Total:
        nonlocal asked
        if plan.asker(question) is None:
            raise TacitaError(f"'{question[:100]}' is no question of a part's own; play a round instead.")
        asked += 1  # nodes answer each question once
        named = f"{question}/{asked_for.number}.{asked}"
        told = progress.devices.exchange(plan, now, to_serve(plan, now), named, chosen)
        return decoded(plan, now, told.total, named)

    def play(now: ServerState, chosen: Keys | None) -> ServerState:
        nonlocal played
        after, report = run_round(plan, now, progress.devices, chosen)
        played += 1
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        return after

    said: dict[str, Any] = {}
    try:
        handlers: tuple[Part | Learner, ...] = (*plan.parts, plan.learner)
        for one in handlers:
            handled = one.handle_many(server, asked_for, ask, play)
            if handled is not None:
                server, said[one.name] = handled
    finally:  # devices have played those rounds, whatever became of the request
        progress.server = replace(progress.server, round=progress.server.round + played)
        progress.played += played
    if not played and not _changed(before, server, plan.learner.name):
        waiting = {name: v for name, v in server.parts.items() if name == plan.learner.name}
        parts = {**progress.best_server.parts, **waiting}
        progress.server = server
        progress.best_server = replace(progress.best_server, given=server.given, parts=parts)
        return said
    progress.server = progress.best_server = replace(server, round=progress.server.round)
    progress.best_score, progress.best_round, progress.stale = -1.0, progress.server.round, 0
    progress.devices.keep_best(progress.server.round)
    return said


def _changed(before: ServerState, after: ServerState, learner: str) -> bool:
    """Whether a request changed more than the record of what people shared, and of who waits to take some back."""
    same = before.items is after.items and before.heads is after.heads
    held = {name: v for name, v in before.parts.items() if name in after.parts and name != learner}
    return not same or any(after.parts[name] is not v for name, v in held.items())


def _check(plan: Plan, request: Requests) -> None:
    """Refuse what nobody would carry out, before any device or record changes."""
    if plan.config.train.silos:
        raise TacitaError("requests are for clients that are one user each; train.silos must be 0.")
    able = any(overrides(part, "handle") or overrides(part, "handle_many") for part in plan.parts)
    if not able and not (plan.learner.takes_back and request.kind in ("forget", "leave")):
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


def enrol(fed: Federation, progress: Progress) -> None:
    """What the lab's people choose as a block begins; people elsewhere choose by themselves, when they like."""
    if not isinstance(progress.devices, Here):
        return
    for part in fed.parts:
        if overrides(part, "enrol"):
            asked = progress.devices.enrol(fed, progress.server, part)
            if asked is not None and len(asked.senders):
                handle(fed, progress, asked)
