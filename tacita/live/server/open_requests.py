"""Requests that wait at the server, in its file, until they are carried out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from tacita.core.types import Keys
from tacita.live.database import mark_for_scrub
from tacita.live.json_object import JsonObject
from tacita.live.wire import RequestOutcome, UserRequest

MOST_OPEN = 10_000  # requests of one node that wait here; the others wait there


NodeRequest = tuple[int, UserRequest]  # a node, and a request of one of its people


@dataclass(frozen=True)
class OpenRequest:
    """A request that waits at the server."""

    number: int  # at the server
    node: int
    request: UserRequest
    outcome: RequestOutcome | None = None  # so far, as its node gets it

    @property
    def kind(self) -> str:
        return self.request.kind

    @property
    def sender(self) -> int:
        return self.request.sender

    @property
    def items(self) -> list[int]:
        return self.request.items

    @property
    def user(self) -> tuple[int, int]:
        """Whose it is: a node, and the name that it gives the user."""
        return self.node, self.request.sender

    @property
    def tries(self) -> int:
        """In vain, so far."""
        return 0 if self.outcome is None else self.outcome.tries


@dataclass(frozen=True)
class ReceivedRequests:
    """What nodes sent along with answers: new requests of their people, and outcomes that they have read."""

    requests: Sequence[NodeRequest] = ()
    acknowledged_ends: Sequence[tuple[int, int]] = ()  # node, its number of a request


@dataclass(frozen=True)
class NumberedOutcome:
    """What became of a request."""

    number: int
    outcome: RequestOutcome


@dataclass(frozen=True)
class ApplyResult:
    """What became of some requests that were carried out together."""

    event: JsonObject
    outcomes: list[NumberedOutcome]
    needs_scrub: bool  # no old bytes of something may stay anywhere
    freed: Keys  # who waited, and need not any more
    freed_outcome: RequestOutcome | None = None  # for those of them who are not in `outcomes`


# Receiving


def store_received_requests(db: Connection, run: str, received: ReceivedRequests, at: float) -> None:
    """Store new requests until they are carried out; an outcome that a node has read is not sent again.

    A node with too many open requests keeps the others, and sends them again and again.
    """
    accepted, n_refused = _select_acceptable(db, run, received.requests)
    for node, count in n_refused.items():
        reason = (
            f"{count} requests were not taken and stay at the node: {MOST_OPEN:,} of its people's are open already."
        )
        event = json.dumps({"event": "refused", "kind": "requests", "node": str(node), "said": reason})
        db.execute("INSERT INTO events (run, time, event) VALUES (?, ?, ?)", (run, at, event))
    for node, request in accepted:
        outcome = RequestOutcome(id=request.id, state="heard")
        texts = (request.model_dump_json(), outcome.model_dump_json())
        db.execute(
            "INSERT OR IGNORE INTO requests (run, node, time, number, sender, request, outcome) "
            "VALUES (?, ?, ?, ?, '', ?, ?)",
            (run, str(node), at, request.id, *texts),
        )
    for node, request_id in received.acknowledged_ends:
        sql = "UPDATE requests SET heard = ? WHERE run = ? AND node = ? AND number = ? AND done IS NOT NULL"
        db.execute(sql, (at, run, str(node), request_id))


def _select_acceptable(
    db: Connection, run: str, requests: Sequence[NodeRequest]
) -> tuple[list[NodeRequest], dict[int, int]]:
    """New requests, and by node how many are beyond what the server keeps open for it."""
    count_open = "SELECT node, count(*) FROM requests WHERE run = ? AND done IS NULL GROUP BY node"
    find_known = "SELECT 1 FROM requests WHERE run = ? AND node = ? AND number = ?"
    n_open = {}
    for node_text, count in db.execute(count_open, (run,)):
        n_open[int(node_text)] = int(count)
    accepted = list[NodeRequest]()
    n_refused: dict[int, int] = {}
    for node, request in requests:
        number = (run, str(node), request.id)
        if db.execute(find_known, number).fetchone() is not None:
            continue
        if n_open.get(node, 0) >= MOST_OPEN:
            n_refused[node] = n_refused.get(node, 0) + 1
        else:
            n_open[node] = n_open.get(node, 0) + 1
            accepted.append((node, request))
    return accepted, n_refused


# Outcomes


def store_apply_result(db: Connection, run: str, result: ApplyResult, at: float) -> None:
    """Store outcomes, and drop what the requests asked for: the file must not show what somebody took back."""
    rows = db.execute("SELECT id, request FROM requests WHERE run = ? AND request != ''", (run,)).fetchall()
    request_texts = dict(rows)
    for numbered in result.outcomes:
        if numbered.outcome.state == "pending":  # the service needs the request to try it again
            update = "UPDATE requests SET outcome = ? WHERE id = ?"
            text = numbered.outcome.model_dump_json()
            db.execute(update, (text, numbered.number))
        else:
            _put_outcome(db, numbered, request_texts, at)
    if result.freed_outcome is not None:
        _store_freed_outcomes(db, run, result, result.freed_outcome, at)
    if result.needs_scrub:
        mark_for_scrub(db)


def _put_outcome(db: Connection, numbered: NumberedOutcome, request_texts: dict[int, str], at: float) -> None:
    """Store an outcome; who waits for others stays known by name, to be told when these have asked."""
    outcome = numbered.outcome
    sender = ""
    if not outcome.is_final:
        request = json.loads(request_texts[numbered.number])
        sender = str(request["sender"])
    done = at if outcome.is_final else None
    db.execute(
        "UPDATE requests SET request = '', sender = ?, outcome = ?, done = ? WHERE id = ?",
        (sender, outcome.model_dump_json(), done, numbered.number),
    )


def _store_freed_outcomes(db: Connection, run: str, result: ApplyResult, outcome: RequestOutcome, at: float) -> None:
    """Store the outcome of those who waited for others, and need not any more."""
    freed = {str(name) for name in result.freed.tolist()}
    select = "SELECT id, sender, number FROM requests WHERE run = ? AND sender != ''"
    update = "UPDATE requests SET sender = '', outcome = ?, done = ? WHERE id = ?"
    rows = db.execute(select, (run,)).fetchall()
    for row_id, sender, request_id in rows:
        if sender in freed:
            own_outcome = outcome.model_copy(update={"id": request_id})
            db.execute(update, (own_outcome.model_dump_json(), at, row_id))
