"""What people on a node ask of the server, as the node's file keeps it: until it is done, and what became of it.

A request is for one run. Every answer to that run carries it until the server says that it has it, and the server
takes each once, so a lost answer loses none. The person's own device does its part with the first of these answers.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tacita.core.config import validate_model
from tacita.live.node import attempt_snapshot
from tacita.live.node.answers import QuestionNumber, request_size
from tacita.live.wire import MOST_REQUESTS, RequestOutcome, UserRequest

WITHDRAWALS = ("forget", "leave")
BUDGET = "budget"  # what somebody is willing to spend: kept like a request, and never sent


@dataclass(frozen=True)
class QueuedRequest:
    """What somebody here asks of the server of a run."""

    id: int
    run: str
    kind: str
    items: list[str]  # raw ids
    user: int | None  # None: of the whole node
    created: float
    sent: float | None = None  # when an answer first carried it
    carrier: QuestionNumber | None = None  # that answer
    sent_request: UserRequest | None = None  # as it was sent
    outcome: RequestOutcome | None = None
    n_items_sent: int = 0  # items that were sent
    n_bytes: int = 0

    @property
    def is_final(self) -> bool:
        return self.outcome is not None and self.outcome.is_final

    @property
    def is_refused(self) -> bool:
        return self.outcome is not None and self.outcome.state == "refused"


_COLUMNS = "id, run, kind, payload, user, created, sent, block, round, question, wanted, outcome"


def put_request(db: sqlite3.Connection, want: QueuedRequest) -> int:
    made = db.execute(
        "INSERT INTO requests (run, kind, payload, user, created) VALUES (?, ?, ?, ?, ?)",
        (want.run, want.kind, json.dumps({"items": want.items}), want.user, want.created),
    )
    return int(made.lastrowid or 0)


def list_requests(db: sqlite3.Connection, run: str | None = None) -> list[QueuedRequest]:
    """Requests for a run (None: for all), oldest first."""
    asked = f"SELECT {_COLUMNS} FROM requests WHERE (?1 IS NULL OR run = ?1) AND kind != ?2 ORDER BY id"
    return [_read_row(*row) for row in db.execute(asked, (run, BUDGET)).fetchall()]


def put_budget(db: sqlite3.Connection, user: int, run: str, millionths: int, at: float) -> None:
    """What somebody is willing to spend in a run ("": in every one), in millionths; no message says it."""
    db.execute(
        "INSERT INTO requests (run, kind, payload, user, created, sent) VALUES (?, ?, ?, ?, ?, ?)",
        (run, BUDGET, json.dumps({"millionths": millionths}), user, at, at),
    )


def read_budgets(db: sqlite3.Connection, run: str) -> dict[int, int]:
    """What people here said last that they are willing to spend in a run, in millionths."""
    asked = "SELECT user, payload FROM requests WHERE kind = ? AND run IN ('', ?) AND user IS NOT NULL ORDER BY id"
    return {int(user): int(json.loads(said)["millionths"]) for user, said in db.execute(asked, (BUDGET, run))}


def _read_row(
    id: int, run: str, kind: str, payload: str, user: int | None, created: float, *more: str | float | int | None
) -> QueuedRequest:
    sent, block, round, question, wanted, outcome = more
    said = json.loads(payload)
    carrier = None if sent is None else QuestionNumber(run, int(block or 0), int(round or 0), str(question))
    return QueuedRequest(
        id,
        run,
        kind,
        said.get("items", []),
        user,
        created,
        None if sent is None else float(sent),
        carrier,
        None if wanted is None else validate_model(UserRequest, json.loads(str(wanted)), "a request"),
        None if outcome is None else validate_model(RequestOutcome, json.loads(str(outcome)), "an outcome"),
        int(said.get("told", 0)),
        int(said.get("bytes", 0)),
    )


def mark_sent(db: sqlite3.Connection, number: QuestionNumber, sent: Sequence[UserRequest], at: float) -> bool:
    """An answer carries these; returns whether some of them are carried for the first time."""
    made = db.executemany(
        "UPDATE requests SET sent = ?, block = ?, round = ?, question = ?, wanted = ?, "
        "payload = json_set(payload, '$.told', ?, '$.bytes', ?) WHERE id = ? AND sent IS NULL",
        (
            (
                at,
                number.block,
                number.round,
                number.kind,
                one.model_dump_json(),
                len(one.items),
                request_size(one),
                one.id,
            )
            for one in sent
        ),
    )
    return made.rowcount > 0


def record_outcomes(db: sqlite3.Connection, run: str, outcomes: Iterable[RequestOutcome], where: str) -> None:
    """What the server says of requests that were sent to it; what is done stays so, and no copy has it any more."""
    fresh = set[int]()
    for one in outcomes:
        said = one.model_dump_json()
        heard = db.execute(
            "UPDATE requests SET outcome = ?1, wanted = CASE WHEN NOT ?2 THEN wanted WHEN kind = 'share' "
            "THEN json_set(wanted, '$.items', json('[]')) END "  # under which name something lies at the server
            "WHERE id = ?3 AND run = ?4 AND sent IS NOT NULL AND outcome IS NOT ?1 "
            "AND (outcome IS NULL OR json_extract(outcome, '$.state') NOT IN ('done', 'refused'))",
            (said, one.is_final, one.id, run),
        )
        fresh |= {one.id} if heard.rowcount and one.state == "done" else set()
    if fresh:
        mine = [one for one in list_requests(db, run) if one.kind != "share"]
        open_ = {one.user for one in mine if one.sent is not None and not one.is_final}  # may have to go back for these
        done = {one.user for one in mine if one.id in fresh and one.user is not None} - open_
        attempt_snapshot.drop_settled_users(db, run, {one for one in done if one is not None}, where)
        over = [(told, batch) for told, batch in group_batches(mine).items() if all(one.is_final for one in batch)]
        _drop_replays(db, [digest_batch(*told, batch) for told, batch in over])
        _drop_replays(db, [f"{one.user} {digest_batch(*told, [one])}" for told, batch in over for one in batch])


def select_due(
    wants: Collection[QueuedRequest], least: int, together: bool, idle: Collection[int] = ()
) -> list[QueuedRequest]:
    """What the next answer carries: all that the server has not said it has.

    `together`: who withdraws is asked what to take back, so withdrawals leave only with those of `least` people.
    `idle`: nothing is taken back by these, so they hide nobody; `least` others have to be with them, or none.
    """
    known = [one for one in wants if one.outcome is None][:MOST_REQUESTS]
    if not together:
        return known
    fresh = [one for one in known if one.sent is None and one.kind in WITHDRAWALS]
    short = set[str]()
    for kind in WITHDRAWALS:
        mine = [one for one in fresh if one.kind == kind]
        telling = {one.user for one in mine if one.id not in idle}
        if len({one.user for one in mine}) < least or 0 < len(telling) < least:
            short.add(kind)
    return [one for one in known if one.sent is not None or one.kind not in short]


def select_whole_batches(wants: Collection[QueuedRequest], users: Collection[int], least: int) -> list[QueuedRequest]:
    """The withdrawals of some people, if they are all, and nobody else, who withdrew with the same answers; else none.

    A batch is who left with one answer, whatever the server says of some of them later: a batch without those whom it
    calls done would be another sum, and the difference of both what these few had told.
    """
    asked, people = set(users), set[int | None]()
    meant = [
        one
        for one in group_batches(wants).values()
        if not all(want.is_final for want in one) and asked & _batch_users(one)
    ]
    for batch in meant:
        people |= _batch_users(batch)
        if len(_batch_users(batch)) < least or any(one.is_final for one in batch):
            return []
    return [one for batch in meant for one in batch] if asked == people and len(asked) >= least else []


def group_batches(wants: Iterable[QueuedRequest]) -> dict[tuple[QuestionNumber | None, str], list[QueuedRequest]]:
    """People's withdrawals by the answer that they left with, oldest first."""
    found: dict[tuple[QuestionNumber | None, str], list[QueuedRequest]] = {}
    for one in sorted(wants, key=lambda one: one.id):
        if one.sent is not None and one.kind in WITHDRAWALS and one.user is not None:
            found.setdefault((one.carrier, one.kind), []).append(one)
    return found


def _batch_users(batch: Iterable[QueuedRequest]) -> set[int | None]:
    return {one.user for one in batch}


def join_small_batches(db: sqlite3.Connection, number: QuestionNumber, least: int) -> None:
    """Batches that fell below `least` because people erased themselves go with the batch that leaves now.

    Only where nobody of them answered anything yet: who did stays in the company of then.
    """
    batches = group_batches(list_requests(db, number.run))
    for (carrier, kind), batch in batches.items():
        small = len(_batch_users(batch)) < least and not any(one.is_final for one in batch)
        if carrier == number or not small or (number, kind) not in batches or _has_answered(db, batch):
            continue
        move = "UPDATE requests SET block = ?, round = ?, question = ? WHERE id = ?"
        db.executemany(move, ((number.block, number.round, number.kind, one.id) for one in batch))


def _has_answered(db: sqlite3.Connection, batch: Iterable[QueuedRequest]) -> bool:
    """Whether somebody of these answered a question about what they withdraw."""
    asked = "SELECT 1 FROM meta WHERE key GLOB ?"
    return any(db.execute(asked, (f"{_ANSWERED_PREFIX}{one.user}/*",)).fetchone() is not None for one in batch)


_ANSWERED_PREFIX = "answered/"  # a person, and what was asked of them when they withdrew


def make_answer_marks(meant: Iterable[QueuedRequest], question: str, each_batch: bool) -> dict[str, str]:
    """What a node notes of a question that people answered when they withdrew: by person, who was in their batch.

    A question of a part (`fru/stored-0-3`) is about what devices keep, and one person's part of two sums could be
    told apart: it is answered in one company only, and there again if the answer got lost. A batch that somebody was
    erased from is another company. `each_batch`: it is about what this withdrawal takes back, so it is asked anew with
    the next one.
    """
    stem = question.split("/")[: 1 if each_batch else 2]
    found: dict[str, str] = {}
    for (carrier, kind), batch in group_batches(meant).items():
        said = _batch_key(carrier, kind)
        for one in batch:
            name = json.dumps([one.run, *stem, *(said if each_batch else [])])
            found.setdefault(f"{_ANSWERED_PREFIX}{one.user}/{name}", digest_batch(carrier, kind, batch))
    return found


def digest_batch(carrier: QuestionNumber | None, kind: str, batch: Iterable[QueuedRequest]) -> str:
    """What a batch of people is called: by the answer they left with and by who they are."""
    people = sorted({one.user or 0 for one in batch})
    return hashlib.sha256(json.dumps([_batch_key(carrier, kind), people]).encode()).hexdigest()


def list_batch_digests(wants: Iterable[QueuedRequest], users: Collection[int], least: int) -> set[str]:
    """What those are called who tell what they take back: their batches; where the server names people, each alone."""
    if least:
        return {
            digest_batch(*told, batch)
            for told, batch in group_batches(select_whole_batches(list(wants), users, least)).items()
        }
    open_ = [one for one in wants if one.user in users and not one.is_final]
    found = {
        f"{one.user} {digest_batch(*told, [one])}" for told, batch in group_batches(open_).items() for one in batch
    }
    return found | {f"{one} nothing" for one in set(users) - {one.user for one in open_}}


def _batch_key(carrier: QuestionNumber | None, kind: str) -> list[str | int]:
    return [] if carrier is None else [*vars(carrier).values(), kind]


def _drop_replays(db: sqlite3.Connection, companies: Iterable[str]) -> None:
    """What these told when they withdrew is not to be told again (retold.py)."""
    db.executemany("DELETE FROM meta WHERE key GLOB ?", ((f"retold/{one}/*",) for one in companies))


def put_notes(db: sqlite3.Connection, notes: Mapping[str, str]) -> None:
    db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", notes.items())


def has_conflict(db: sqlite3.Connection, notes: Mapping[str, str]) -> bool:
    """Whether somebody answered one of these in other company."""
    asked = "SELECT 1 FROM json_each(?) AS said JOIN meta ON meta.key = said.key WHERE meta.value IS NOT said.value"
    return db.execute(asked, (json.dumps(dict(notes)),)).fetchone() is not None


def erase_notes(db: sqlite3.Connection, user: int | None) -> None:
    """Of one person (None: of everybody), and what their company told."""
    mine = f"{_ANSWERED_PREFIX}{'' if user is None else f'{user}/'}*"
    theirs = [one for (one,) in db.execute("SELECT DISTINCT value FROM meta WHERE key GLOB ?", (mine,))]
    _drop_replays(db, ["*"] if user is None else [*theirs, f"{user} *"])
    db.execute("DELETE FROM meta WHERE key GLOB ?", (mine,))


def collect_withdrawn(wants: Collection[QueuedRequest]) -> dict[int, set[str] | None]:
    """What is learned from no more, by person; None: everything of theirs."""
    found: dict[int, set[str] | None] = {}
    for one in wants:
        if one.user is None or one.sent is None or one.kind not in WITHDRAWALS:
            continue
        held = found.setdefault(one.user, set())
        if one.kind == "leave":
            found[one.user] = None
        elif held is not None:
            held |= set(one.items)
    return found
