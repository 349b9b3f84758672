"""The queue of requests in a node's file: each until it is done, and what became of it.

A request is for one run. Every answer to that run carries it until the server acknowledges it, and the server takes
each once, so a lost answer loses none. The person's own device does its part with the first of these answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection

from tacita.core.config import validate_model
from tacita.live.node import attempt_snapshot
from tacita.live.node.answers import QuestionNumber, count_request_bytes
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.withdrawal_batches import (
    ANSWERED_PREFIX,
    digest_batch,
    digest_single_withdrawal,
    group_sent_withdrawals,
    list_batch_users,
)
from tacita.live.wire import RequestOutcome, UserRequest

BUDGET = "budget"  # what somebody is willing to spend: kept like a request, and never sent

_COLUMNS = "id, run, kind, payload, user, created, sent, block, round, question, wanted, outcome"


def insert_request(db: Connection, request: QueuedRequest) -> int:
    payload = json.dumps({"items": request.items})
    cursor = db.execute(
        "INSERT INTO requests (run, kind, payload, user, created) VALUES (?, ?, ?, ?, ?)",
        (request.run, request.kind, payload, request.user, request.created),
    )
    return int(cursor.lastrowid or 0)


def list_requests(db: Connection, run: str | None = None) -> list[QueuedRequest]:
    """Requests for a run (None: for all), oldest first."""
    sql = f"SELECT {_COLUMNS} FROM requests WHERE (?1 IS NULL OR run = ?1) AND kind != ?2 ORDER BY id"
    rows = db.execute(sql, (run, BUDGET)).fetchall()
    return [_build_queued_request(*row) for row in rows]


def _build_queued_request(
    id: int, run: str, kind: str, payload: str, user: int | None, created: float, *more: str | float | int | None
) -> QueuedRequest:
    sent, block, round, question, wanted, outcome = more
    content = json.loads(payload)
    carrier = None
    if sent is not None:
        carrier = QuestionNumber(run, int(block or 0), int(round or 0), str(question))
    sent_request = None
    if wanted is not None:
        sent_request = validate_model(UserRequest, json.loads(str(wanted)), "a request")
    last_outcome = None
    if outcome is not None:
        last_outcome = validate_model(RequestOutcome, json.loads(str(outcome)), "an outcome")
    return QueuedRequest(
        id=id,
        run=run,
        kind=kind,
        items=content.get("items", []),
        user=user,
        created=created,
        sent=None if sent is None else float(sent),
        carrier=carrier,
        sent_request=sent_request,
        outcome=last_outcome,
        n_items_sent=int(content.get("told", 0)),
        n_bytes=int(content.get("bytes", 0)),
    )


# Declared budgets


def put_budget(db: Connection, user: int, run: str, millionths: int, at: float) -> None:
    """What somebody is willing to spend in a run ("": in every one), in millionths; no message says it."""
    payload = json.dumps({"millionths": millionths})
    db.execute(
        "INSERT INTO requests (run, kind, payload, user, created, sent) VALUES (?, ?, ?, ?, ?, ?)",
        (run, BUDGET, payload, user, at, at),
    )


def read_budgets(db: Connection, run: str) -> dict[int, int]:
    """What people here declared last that they are willing to spend in a run, in millionths."""
    sql = "SELECT user, payload FROM requests WHERE kind = ? AND run IN ('', ?) AND user IS NOT NULL ORDER BY id"
    budgets = {}
    for user, payload in db.execute(sql, (BUDGET, run)):
        content = json.loads(payload)
        budgets[int(user)] = int(content["millionths"])
    return budgets


# Sending


def mark_sent(db: Connection, number: QuestionNumber, requests: Sequence[UserRequest], at: float) -> bool:
    """An answer carries these; return whether it carries some of them for the first time."""
    sql = (
        "UPDATE requests SET sent = ?, block = ?, round = ?, question = ?, wanted = ?, "
        "payload = json_set(payload, '$.told', ?, '$.bytes', ?) WHERE id = ? AND sent IS NULL"
    )
    carrier = (number.block, number.round, number.kind)
    rows = []
    for request in requests:
        content = (request.model_dump_json(), len(request.items), count_request_bytes(request))
        rows.append((at, *carrier, *content, request.id))
    return db.executemany(sql, rows).rowcount > 0


def move_small_batches_to_next(db: Connection, number: QuestionNumber, min_users: int) -> None:
    """Batches that fell below `min_users` because people erased themselves go with the batch that leaves now.

    Only where nobody of them answered anything yet: who did stays in the earlier batch.
    """
    sql = "UPDATE requests SET block = ?, round = ?, question = ? WHERE id = ?"
    batches = group_sent_withdrawals(list_requests(db, number.run))
    for (carrier, kind), batch in batches.items():
        is_current = carrier == number
        has_successor = (number, kind) in batches
        is_small = len(list_batch_users(batch)) < min_users
        is_open = not any(request.is_final for request in batch)
        if is_current or not has_successor or not (is_small and is_open):
            continue
        if _has_answered(db, batch):
            continue
        place = (number.block, number.round, number.kind)
        for request in batch:
            db.execute(sql, (*place, request.id))


def _has_answered(db: Connection, batch: Iterable[QueuedRequest]) -> bool:
    """Whether somebody of these answered a question about what they withdraw."""
    sql = "SELECT 1 FROM meta WHERE key GLOB ?"
    for request in batch:
        pattern = f"{ANSWERED_PREFIX}{request.user}/*"
        mark = db.execute(sql, (pattern,)).fetchone()
        if mark is not None:
            return True
    return False


# Outcomes


def record_outcomes(db: Connection, run: str, outcomes: Iterable[RequestOutcome], where: str) -> None:
    """What the server says of requests that it got; what is done stays done, and no copy has it any more."""
    newly_done = set[int]()
    for outcome in outcomes:
        is_new = _put_outcome(db, run, outcome)
        if is_new and outcome.state == "done":
            newly_done.add(outcome.id)
    if not newly_done:
        return
    requests = [request for request in list_requests(db, run) if request.kind != "share"]
    settled_users = _find_settled_users(requests, newly_done)
    attempt_snapshot.drop_users_from_snapshot(db, run, settled_users, where)
    for key, batch in group_sent_withdrawals(requests).items():
        if all(request.is_final for request in batch):
            alone = [digest_single_withdrawal(key, request) for request in batch]
            _drop_replays(db, [digest_batch(key, batch), *alone])


def _put_outcome(db: Connection, run: str, outcome: RequestOutcome) -> bool:
    """Store an outcome; return whether it says something new.

    A request that is final keeps nothing of what was sent, but of a shared item under which name it lies at the server.
    """
    cursor = db.execute(
        "UPDATE requests SET outcome = ?1, wanted = CASE WHEN NOT ?2 THEN wanted WHEN kind = 'share' "
        "THEN json_set(wanted, '$.items', json('[]')) END "
        "WHERE id = ?3 AND run = ?4 AND sent IS NOT NULL AND outcome IS NOT ?1 "
        "AND (outcome IS NULL OR json_extract(outcome, '$.state') NOT IN ('done', 'refused'))",
        (outcome.model_dump_json(), outcome.is_final, outcome.id, run),
    )
    return cursor.rowcount != 0


def _find_settled_users(requests: Iterable[QueuedRequest], newly_done: set[int]) -> set[int]:
    """Users with a request that is done, and none that is open, for which their devices might have to go back."""
    done_users = set[int]()
    waiting_users = set[int | None]()
    for request in requests:
        if request.sent is not None and not request.is_final:
            waiting_users.add(request.user)
        if request.id in newly_done and request.user is not None:
            done_users.add(request.user)
    return done_users - waiting_users


# Notes


def _drop_replays(db: Connection, batches: Iterable[str]) -> None:
    """The retractions of these batches need not be repeated any more (noise_replay.py)."""
    for batch in batches:
        db.execute("DELETE FROM meta WHERE key GLOB ?", (f"retold/{batch}/*",))


def store_answer_marks(db: Connection, notes: Mapping[str, str]) -> None:
    db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", notes.items())


def has_answered_in_other_batch(db: Connection, marks: Mapping[str, str]) -> bool:
    """Whether somebody answered one of these in another batch."""
    sql = "SELECT 1 FROM json_each(?) AS said JOIN meta ON meta.key = said.key WHERE meta.value IS NOT said.value"
    text = json.dumps(dict(marks))
    row = db.execute(sql, (text,)).fetchone()
    return row is not None


def erase_answer_marks_and_replays(db: Connection, user: int | None) -> None:
    """Erase the marks of one user (None: of all), and the retractions of their batches."""
    if user is None:
        marks = f"{ANSWERED_PREFIX}*"
        batches = ["*"]
    else:
        marks = f"{ANSWERED_PREFIX}{user}/*"
        rows = db.execute("SELECT DISTINCT value FROM meta WHERE key GLOB ?", (marks,)).fetchall()
        batches = [*(batch for (batch,) in rows), f"{user} *"]
    _drop_replays(db, batches)
    db.execute("DELETE FROM meta WHERE key GLOB ?", (marks,))
