"""What people ask for between rounds: share, unshare, forget, leave. One door for every method.

First the person's own device does its part, then the server's record of what was shared changes, then every part that
the request concerns handles it; it may ask devices questions of its own and play rounds. What it did is told in a
certificate. The best round so far still holds what was withdrawn, so the block goes on from the state that is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Given, Keys, Request, ServerState
from tacita.federation.rounds import Progress, decoded, run_round
from tacita.fields import Total
from tacita.round.plan import Plan, to_serve


def handle(plan: Plan, progress: Progress, request: Request) -> dict[str, Any]:
    """Carry out one request; returns what each part that it concerns says of it."""
    server = replace(progress.server, given=given_after(progress.server.given, request))
    progress.devices.request(plan, server, request)

    def ask(now: ServerState, question: str, chosen: Keys | None) -> Total:
        if plan.asker(question) is None:
            raise TacitaError(f"'{question[:100]}' is no question of a part's own; play a round instead.")
        told = progress.devices.exchange(plan, now, to_serve(plan, now), f"{question}/{request.number}", chosen)
        return decoded(plan, now, told.total)

    def play(now: ServerState, chosen: Keys | None) -> ServerState:
        return run_round(plan, now, progress.devices, chosen)[0]

    said: dict[str, Any] = {}
    for part in plan.parts:
        handled = part.handle(server, request, ask, play)
        if handled is not None:
            server, said[part.name] = handled
    if not said and request.kind in ("forget", "leave"):
        raise TacitaError(
            f"nothing in this run can carry out '{request.kind}': its parts are "
            f"{', '.join(part.name for part in plan.parts) or 'none'}; train again without the data."
        )
    progress.server = progress.best_server = server
    progress.best_score, progress.best_round, progress.stale = -1.0, server.round, 0
    progress.devices.keep_best()
    return said


def given_after(given: Given, request: Request) -> Given:
    """What the server holds of people's own after a request: who leaves takes everything."""
    if request.kind == "share":
        return given.with_shared(request.sender, request.items, request.time)
    mine = given.of(np.array([request.sender], np.uint64)).ids
    return given.without(request.sender, mine if request.kind == "leave" else request.items)
