"""What people ask for between rounds: share, unshare, forget, leave. One door for every method.

First the person's own device does its part, then the server's record of what was shared changes, then every part that
the request concerns handles it; it may ask devices questions of its own and play rounds. What it did is told in a
certificate. Where that changes the model, the best round so far still holds what was withdrawn, so the block goes on
from the state that is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Given, Keys, Request, ServerState
from tacita.federation.rounds import Progress, decoded, run_round
from tacita.fields import Total
from tacita.round.parts import SERVER, overrides
from tacita.round.plan import Plan, to_serve


def handle(plan: Plan, progress: Progress, request: Request) -> dict[str, Any]:
    """Carry out one request; returns what each part that it concerns says of it."""
    _check(plan, request)
    server = replace(progress.server, given=given_after(progress.server.given, request))
    progress.devices.request(plan, server, request)
    asked, played, before, whole = 0, 0, progress.server, server

    def ask(now: ServerState, question: str, chosen: Keys | None) -> Total:
        nonlocal asked
        if plan.asker(question) is None:
            raise TacitaError(f"'{question[:100]}' is no question of a part's own; play a round instead.")
        asked += 1  # nodes answer each question once
        named = f"{question}/{request.number}.{asked}"
        now = plan.joined(whole, now)
        told = progress.devices.exchange(plan, now, to_serve(plan, now), named, chosen)
        return plan.heard_by(SERVER, decoded(plan, now, told.total, named))

    def play(now: ServerState, chosen: Keys | None) -> ServerState:
        nonlocal played, whole
        whole, report = run_round(plan, plan.joined(whole, now), progress.devices, chosen)
        played += 1
        progress.bytes_up += report.bytes_up
        progress.bytes_down += report.bytes_down
        return plan.seen_by(SERVER, whole)

    said: dict[str, Any] = {}
    try:
        for part in plan.parts:
            handled = part.handle(plan.seen_by(part.party, server), request, ask, play)
            if handled is not None:
                said[part.name] = handled[1]
                server = whole = plan.joined(whole, handled[0], part)
    finally:  # devices have played those rounds, whatever became of the request
        progress.server = replace(progress.server, round=progress.server.round + played)
        progress.played += played
    if not played and not _changed(before, server):
        progress.server, progress.best_server = server, replace(progress.best_server, given=server.given)
        return said
    progress.server = progress.best_server = replace(server, round=progress.server.round)
    progress.best_score, progress.best_round, progress.stale = -1.0, progress.server.round, 0
    progress.devices.keep_best(progress.server.round)
    return said


def _changed(before: ServerState, after: ServerState) -> bool:
    """Whether a request changed more than the record of what people shared."""
    same = before.items is after.items and before.heads is after.heads
    return not same or any(after.parts[name] is not v for name, v in before.parts.items() if name in after.parts)


def _check(plan: Plan, request: Request) -> None:
    """Refuse what nobody would carry out, before any device or record changes."""
    if plan.config.train.silos:
        raise TacitaError("requests are for clients that are one user each; train.silos must be 0.")
    if not any(overrides(part, "handle") for part in plan.parts):
        raise TacitaError(
            f"nothing in this run can carry out '{request.kind}': its parts are "
            f"{', '.join(part.name for part in plan.parts) or 'none'}; train again with other data."
        )


def given_after(given: Given, request: Request) -> Given:
    """What the server holds of people's own after a request: who leaves takes everything."""
    if request.kind == "share":
        return given.with_shared(request.sender, request.items, request.time)
    mine = given.of(np.array([request.sender], np.uint64)).ids
    return given.without(request.sender, mine if request.kind == "leave" else request.items)
