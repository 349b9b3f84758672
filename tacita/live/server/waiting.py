"""Requests that wait at the server, and how its file keeps them until they are carried out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tacita.core.types import Keys
from tacita.live.database import ask_scrub
from tacita.live.wire import Outcome, Wanted


@dataclass(frozen=True)
class Open:
    """A request that waits at the server."""

    number: int  # at the server
    node: int
    wanted: Wanted
    outcome: Outcome | None = None  # what its node is told of it so far

    @property
    def tries(self) -> int:
        """In vain, so far."""
        return 0 if self.outcome is None else self.outcome.tries


@dataclass(frozen=True)
class Heard:
    """What nodes sent along with answers: what their people ask for, and of what they know the end."""

    asked_for: Sequence[tuple[int, Wanted]] = ()
    ends: Sequence[tuple[int, int]] = ()  # node, its number of a request


@dataclass(frozen=True)
class Settled:
    """What became of a request."""

    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Carried:
    """What became of some requests that were carried out together."""

    event: dict[str, Any]
    settled: list[Settled]
    withdrew: bool  # something is to be found nowhere any more
    freed: Keys  # who waited, and need not any more
    others: Outcome | None = None  # what these are told, who are not among `settled`


def put_heard(db: sqlite3.Connection, run: str, heard: Heard, at: float) -> None:
    """New requests wait to be carried out; of those whose end a node knows it is told no more."""
    db.executemany(
        "INSERT OR IGNORE INTO requests (run, node, time, number, sender, request, outcome) "
        "VALUES (?, ?, ?, ?, '', ?, ?)",
        (
            (run, str(node), at, one.id, one.model_dump_json(), Outcome(id=one.id, state="heard").model_dump_json())
            for node, one in heard.asked_for
        ),
    )
    known = ((at, run, str(node), number) for node, number in heard.ends)
    ends = "UPDATE requests SET heard = ? WHERE run = ? AND node = ? AND number = ? AND done IS NOT NULL"
    db.executemany(ends, known)


def put_carried(db: sqlite3.Connection, run: str, carried: Carried, at: float) -> None:
    """What became of requests. What was asked for is not kept: who took something back would find it here."""
    named = dict(db.execute("SELECT id, request FROM requests WHERE run = ? AND request != ''", (run,)).fetchall())
    for one in carried.settled:
        final = one.outcome.final
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
        if sender in freed and carried.others is not None:
            last = carried.others.model_copy(update={"id": asked})
            done = "UPDATE requests SET sender = '', outcome = ?, done = ? WHERE id = ?"
            db.execute(done, (last.model_dump_json(), at, number))
    if carried.withdrew:
        ask_scrub(db)
