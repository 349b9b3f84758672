"""What an answered request leaves in a node's file: the reply, devices, model and ledger, all in one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.types import AnyArray, Arrays
from tacita.live.database import put_arrays
from tacita.live.node import attempt_snapshot
from tacita.live.wire import Reply, RequestHead, UserRequest
from tacita.round.device_state import LISTS, take_rows

NO_EPSILON = "no epsilon"
REQUEST_PREFIX = "request/"  # how the ledger calls what carries people's requests: this, and what they ask for

StoredModel = tuple[dict[str, Any], dict[str, tuple[str, AnyArray]]]  # note, name -> (sha256, array)
StoredDevices = tuple[dict[str, Any], Arrays]  # note, arrays with one row per entry of the array "users"


@dataclass(frozen=True)
class QuestionNumber:
    """What tells one request of a server from another."""

    run: str
    block: int
    round: int
    kind: str


def number_question(head: RequestHead) -> QuestionNumber:
    return QuestionNumber(head.run, head.block, head.round, head.kind)


@dataclass(frozen=True)
class ReleaseRecord:
    """Something that left the device, as the ledger keeps it."""

    users: int  # how many people were summed
    n_bytes: int
    sees: str  # what the server can see, in a few words
    epsilon: str = NO_EPSILON
    costs: Sequence[tuple[int, float | None, float | None]] = ()  # of each who was charged: cost, and spent since then
    replay_notes: Mapping[str, bytes] = field(
        default_factory=dict
    )  # by which it is told once more as it was (retold.py)


@dataclass(frozen=True)
class NodeAnswer:
    """A reply that is ready to be sent, and what of people leaves with it."""

    reply: Reply
    release: ReleaseRecord | None = None

    @property
    def is_answered(self) -> bool:
        return self.reply.head.verdict == "ok"


@dataclass(frozen=True)
class AnswerRecord:
    """A reply, and what making it changed."""

    request_sha: str
    reply: bytes | None  # None: the request may be asked again
    now: StoredDevices | None = None
    best: StoredDevices | None = None
    model: StoredModel | None = None
    release: ReleaseRecord | None = None
    sent_requests: Sequence[UserRequest] = ()  # the requests of people here that the reply carries
    releases_block: bool = False  # the block's rows were part of a sum in the reply
    marks: Mapping[str, str] = field(default_factory=dict)  # what those who withdrew answer in this company only
    min_batch: int = 0  # withdrawals leave together with those of so many people; 0: each by itself
    tags: tuple[str, str] = ("now", "best")
    attempt: int = 0  # of the server, to carry out requests: only when it took effect is the answer for good


def find_stored_reply(db: sqlite3.Connection, number: QuestionNumber) -> tuple[str, bytes] | None:
    """The digest of a request that was answered, and the answer."""
    found = db.execute(
        "SELECT request_sha, reply FROM replies WHERE run = ? AND block = ? AND round = ? AND kind = ?",
        (number.run, number.block, number.round, number.kind),
    ).fetchone()
    return None if found is None else (str(found[0]), bytes(found[1]))


def put_answer(db: sqlite3.Connection, number: QuestionNumber, answer: AnswerRecord, at: float) -> None:
    """Everything of an answer; people who were erased meanwhile do not come back."""
    run, block = number.run, number.block
    if answer.releases_block:
        those = "SELECT interaction FROM assigned WHERE run = ? AND block = ?"
        db.execute(f"UPDATE interactions SET released = 1 WHERE id IN ({those})", (run, block))
    if answer.attempt:
        attempt_snapshot.save_snapshot(db, run, answer.attempt, block)
    here = [one for (one,) in db.execute("SELECT id FROM users")]
    known = set(here)
    for tag, devices in zip(answer.tags, (answer.now, answer.best), strict=True):
        if devices is None:
            continue
        note, blob = pack_rows(devices, here)
        db.execute(
            "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)",
            (run, tag, note, blob),
        )
    if answer.model is not None:
        put_model(db, run, answer.model, at)
    put_reply(db, number, answer)
    if answer.release is not None:
        db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", answer.release.replay_notes.items())
    lines = [] if answer.release is None else [(number.kind, answer.release)]
    for kind, one in [*lines, *list_request_releases(answer.sent_requests)]:
        told = (at, run, block, number.round, kind, one.users, one.n_bytes, one.sees, one.epsilon)
        line = db.execute(
            "INSERT INTO ledger (time, run, block, round, kind, users, bytes, sees, epsilon) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            told,
        ).lastrowid
        charged = ((user, line, cost, spent) for user, cost, spent in one.costs if user in known)
        db.executemany("INSERT INTO costs (user, release, epsilon, spent) VALUES (?, ?, ?, ?)", charged)


def count_answers(db: sqlite3.Connection, number: QuestionNumber) -> int:
    """How often a question of a round was answered, whatever follows its name; that only grows, unlike devices' state.

    0 in a run that nothing happens to, so that noise is the lab's.
    """
    found = "SELECT count(*) FROM ledger WHERE run = ? AND block = ? AND round = ? AND (kind = ? OR kind GLOB ?)"
    name = number.kind.split("/")[0]
    return int(db.execute(found, (number.run, number.block, number.round, name, f"{name}/*")).fetchone()[0])


def request_size(request: UserRequest) -> int:
    """What one request adds to the answer that carries it."""
    return len(request.model_dump_json().encode())


def list_request_releases(sent: Sequence[UserRequest]) -> list[tuple[str, ReleaseRecord]]:
    """Lines of the ledger for what people here ask for: a line for each kind, which names nobody."""
    found = []
    for kind in sorted({one.kind for one in sent}):
        some = [one for one in sent if one.kind == kind]
        people, items = len({one.sender for one in some}), sum(len(one.items) for one in some)
        who = "1 person asks" if people == 1 else f"{people} people ask"
        what = f", {items} item number{'s' if items != 1 else ''}" if items else ", no item"
        sees = f"{who} the server to {kind}: made-up names{what} and times"
        found.append((f"{REQUEST_PREFIX}{kind}", ReleaseRecord(people, sum(map(request_size, some)), sees)))
    return found


def put_reply(db: sqlite3.Connection, number: QuestionNumber, answer: AnswerRecord) -> None:
    """Replies go once the server is past them; it validates a round before it commits it, so one more round stays."""
    # what an answer was is dropped; that there was one, and to what, stays while the block lasts
    if not attempt_snapshot.find_open_attempt(
        db, number.run
    ):  # devices may go back to before: what was answered then stays answered
        db.execute("DELETE FROM replies WHERE run = ? AND block < ?", (number.run, number.block))
    if not answer.attempt:  # which a server that was killed begins anew, however many rounds it took
        older = (number.run, number.block, number.round - 1)
        db.execute("UPDATE replies SET reply = x'' WHERE run = ? AND block = ? AND round < ?", older)
    if answer.reply is not None:
        db.execute(
            "INSERT OR REPLACE INTO replies (run, block, round, kind, request_sha, reply) VALUES (?, ?, ?, ?, ?, ?)",
            (number.run, number.block, number.round, number.kind, answer.request_sha, answer.reply),
        )


def pack_rows(devices: StoredDevices, known_users: list[int]) -> tuple[str, bytes]:
    """The rows of the people who are here, ready to be stored."""
    note, arrays = devices
    n = len(arrays["users"])
    for name, array in arrays.items():
        if not name.startswith(LISTS) and (array.ndim == 0 or len(array) != n):
            raise ValueError(f"device array {name!r} has not one row for each of the {n} users")
    stays = np.isin(arrays["users"], known_users)
    return json.dumps(note), pack(arrays if stays.all() else take_rows(arrays, np.flatnonzero(stays)))


def put_model(db: sqlite3.Connection, run: str, model: StoredModel, at: float) -> None:
    """Replace what the server sent."""
    note, arrays = model
    db.execute("INSERT OR REPLACE INTO models (run, note, changed) VALUES (?, ?, ?)", (run, json.dumps(note), at))
    put_arrays(db, "model_arrays", run, arrays)


def drop_user_rows(db: sqlite3.Connection, user: int, where: str) -> None:
    """Take one user's rows out of every run's device arrays."""
    for run, tag, blob in db.execute("SELECT run, tag, arrays FROM devices").fetchall():
        arrays = unpack(blob, where)
        stays = arrays["users"] != user
        kept = pack(take_rows(arrays, np.flatnonzero(stays)))
        db.execute("UPDATE devices SET arrays = ? WHERE run = ? AND tag = ?", (kept, run, tag))
