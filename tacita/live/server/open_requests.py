"""Requests that wait at the server, and how its file keeps them until they are carried out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tacita.core.types import Keys
from tacita.live.database import mark_for_scrub
from tacita.live.wire import RequestOutcome, UserRequest

MOST_OPEN = 10_000  # requests of one node that wait here; the others wait there


@dataclass(frozen=True)
class OpenRequest:
    """A request that waits at the server."""

    number: int  # at the server
    node: int
    request: UserRequest
    outcome: RequestOutcome | None = None  # what its node is told of it so far

    @property
    def tries(self) -> int:
        """In vain, so far."""
        return 0 if self.outcome is None else self.outcome.tries


@dataclass(frozen=True)
class ReceivedRequests:
    """What nodes sent along with answers: what their people ask for, and of what they know the end."""

    requests: Sequence[tuple[int, UserRequest]] = ()
    acknowledged_ends: Sequence[tuple[int, int]] = ()  # node, its number of a request


@dataclass(frozen=True)
class NumberedOutcome:
    """What became of a request."""

    number: int
    outcome: RequestOutcome


@dataclass(frozen=True)
class ApplyResult:
    """What became of some requests that were carried out together."""

    event: dict[str, Any]
    outcomes: list[NumberedOutcome]
    needs_scrub: bool  # something is to be found nowhere any more
    freed: Keys  # who waited, and need not any more
    freed_outcome: RequestOutcome | None = None  # what these are told, who are not among `settled`


def put_received(db: sqlite3.Connection, run: str, received: ReceivedRequests, at: float) -> None:
    """New requests wait to be carried out; of those whose end a node knows it is told no more.

    What a node has too many of is not taken: it keeps the others, and sends them again and again.
    """
    asked = "SELECT node, count(*) FROM requests WHERE run = ? AND done IS NULL GROUP BY node"
    waiting = {int(node): int(n) for node, n in db.execute(asked, (run,))}
    known = "SELECT 1 FROM requests WHERE run = ? AND node = ? AND number = ?"
    taken, left = list[tuple[int, UserRequest]](), dict[int, int]()
    for node, one in received.requests:
        if db.execute(known, (run, str(node), one.id)).fetchone() is not None:
            continue
        if waiting.get(node, 0) >= MOST_OPEN:
            left[node] = left.get(node, 0) + 1
            continue
        waiting[node] = waiting.get(node, 0) + 1
        taken.append((node, one))
    for node, n in left.items():
        said = f"{n} requests were not taken and stay at the node: {MOST_OPEN:,} of its people's are open already."
        event = json.dumps({"event": "refused", "kind": "requests", "node": str(node), "said": said})
        db.execute("INSERT INTO events (run, time, event) VALUES (?, ?, ?)", (run, at, event))
    db.executemany(
        "INSERT OR IGNORE INTO requests (run, node, time, number, sender, request, outcome) "
        "VALUES (?, ?, ?, ?, '', ?, ?)",
        (
            (
                run,
                str(node),
                at,
                one.id,
                one.model_dump_json(),
                RequestOutcome(id=one.id, state="heard").model_dump_json(),
            )
            for node, one in taken
        ),
    )
    over = ((at, run, str(node), number) for node, number in received.acknowledged_ends)
    ends = "UPDATE requests SET heard = ? WHERE run = ? AND node = ? AND number = ? AND done IS NOT NULL"
    db.executemany(ends, over)


def put_apply_result(db: sqlite3.Connection, run: str, carried: ApplyResult, at: float) -> None:
    """What became of requests. What was asked for is not kept: who took something back would find it here."""
    named = dict(db.execute("SELECT id, request FROM requests WHERE run = ? AND request != ''", (run,)).fetchall())
    for one in carried.outcomes:
        final = one.outcome.is_final
        if one.outcome.state == "pending":  # what is tried again has to be known
            again = "UPDATE requests SET outcome = ? WHERE id = ?"
            db.execute(again, (one.outcome.model_dump_json(), one.number))
            continue
        sender = "" if final else str(json.loads(named[one.number])["sender"])  # to be told when others have asked
        db.execute(
            "UPDATE requests SET request = '', sender = ?, outcome = ?, done = ? WHERE id = ?",
            (sender, one.outcome.model_dump_json(), at if final else None, one.number),
        )
    waited = db.execute("SELECT id, sender, number FROM requests WHERE run = ? AND sender != ''", (run,)).fetchall()
    freed = {str(one) for one in carried.freed.tolist()}
    for number, sender, asked in waited:
        if sender in freed and carried.freed_outcome is not None:
            last = carried.freed_outcome.model_copy(update={"id": asked})
            done = "UPDATE requests SET sender = '', outcome = ?, done = ? WHERE id = ?"
            db.execute(done, (last.model_dump_json(), at, number))
    if carried.needs_scrub:
        mark_for_scrub(db)
