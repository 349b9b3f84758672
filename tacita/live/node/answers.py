"""What an answered request leaves in a node's file: the reply, devices, model and ledger, all in one transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sqlite3 import Connection

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.types import AnyArray, Arrays
from tacita.live.database import replace_run_arrays
from tacita.live.json_object import JsonObject
from tacita.live.node import attempt_snapshot
from tacita.live.wire import Reply, RequestHead, UserRequest
from tacita.round.device_state import LISTS, take_rows

NO_EPSILON = "no epsilon"
REQUEST_PREFIX = "request/"  # how the ledger calls what carries people's requests: this, and what they ask for

DigestedArray = tuple[str, AnyArray]  # sha256, array
StoredModel = tuple[JsonObject, dict[str, DigestedArray]]  # note, arrays by name
UserCost = tuple[int, float | None, float | None]  # whose, what a release cost them, what they had spent then
StoredDevices = tuple[JsonObject, Arrays]  # note, arrays with one row per entry of the array "users"


@dataclass(frozen=True)
class QuestionNumber:
    """What tells one request of a server from another."""

    run: str
    block: int
    round: int
    kind: str


def make_question_number(head: RequestHead) -> QuestionNumber:
    return QuestionNumber(head.run, head.block, head.round, head.kind)


@dataclass(frozen=True)
class ReleaseRecord:
    """Something that left the device, as the ledger keeps it."""

    users: int  # how many people were summed
    n_bytes: int
    sees: str  # what the server can see, in a few words
    epsilon: str = NO_EPSILON
    costs: Sequence[UserCost] = ()  # of each who was charged
    replay_notes: Mapping[str, bytes] = field(default_factory=dict)  # by which it can be sent again (noise_replay.py)


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
    reply: bytes | None  # None: the server may ask again
    now: StoredDevices | None = None
    best: StoredDevices | None = None
    model: StoredModel | None = None
    release: ReleaseRecord | None = None
    sent_requests: Sequence[UserRequest] = ()  # the requests of people here that the reply carries
    releases_block: bool = False  # the block's rows were part of a sum in the reply
    has_noise: bool = False  # that sum counts epsilon: it shows no row by itself
    marks: Mapping[str, str] = field(default_factory=dict)  # what those who withdrew answer in this batch only
    min_batch: int = 0  # withdrawals leave together with those of so many people; 0: each by itself
    tags: tuple[str, str] = ("now", "best")
    attempt: int = 0  # of the server, to carry out requests: the answer is for good only when it took effect


# Writing an answer


def put_answer(db: Connection, number: QuestionNumber, answer: AnswerRecord, at: float) -> None:
    """Store everything of an answer; people who were erased meanwhile do not come back."""
    if answer.releases_block:
        _mark_released_interactions(db, number, answer.has_noise)
    if answer.attempt:
        attempt_snapshot.save_snapshot(db, number.run, answer.attempt, number.block)
    user_ids = [user for (user,) in db.execute("SELECT id FROM users")]
    _put_devices(db, number.run, answer, user_ids)
    if answer.model is not None:
        put_model(db, number.run, answer.model, at)
    put_reply(db, number, answer)
    release = answer.release
    if release is not None:
        db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", release.replay_notes.items())
        _put_release(db, number, number.kind, release, at, set(user_ids))
    for kind, request_release in make_request_log_lines(answer.sent_requests):
        _put_release(db, number, kind, request_release, at, set(user_ids))


def _mark_released_interactions(db: Connection, number: QuestionNumber, has_noise: bool) -> None:
    """The rows of a block were part of a sum that left: 1 of an exact one, 2 of noised ones only."""
    assigned = "SELECT interaction FROM assigned WHERE run = ? AND block = ?"
    mark = "2 WHERE released = 0 AND" if has_noise else "1 WHERE"
    db.execute(f"UPDATE interactions SET released = {mark} id IN ({assigned})", (number.run, number.block))


def _put_devices(db: Connection, run: str, answer: AnswerRecord, user_ids: list[int]) -> None:
    sql = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)"
    states = (answer.now, answer.best)
    for tag, devices in zip(answer.tags, states, strict=True):
        if devices is not None:
            note, blob = pack_user_rows(devices, user_ids)
            db.execute(sql, (run, tag, note, blob))


def _put_release(
    db: Connection, number: QuestionNumber, kind: str, release: ReleaseRecord, at: float, user_ids: set[int]
) -> None:
    """Write a line of the ledger, and what it cost each user who is still on the node."""
    place = (at, number.run, number.block, number.round)
    content = (kind, release.users, release.n_bytes, release.sees, release.epsilon)
    line = db.execute(
        "INSERT INTO ledger (time, run, block, round, kind, users, bytes, sees, epsilon) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*place, *content),
    ).lastrowid
    charged = []
    for user, cost, spent in release.costs:
        if user in user_ids:
            charged.append((user, line, cost, spent))
    db.executemany("INSERT INTO costs (user, release, epsilon, spent) VALUES (?, ?, ?, ?)", charged)


def put_reply(db: Connection, number: QuestionNumber, answer: AnswerRecord) -> None:
    """Store a reply and drop those that the server is past.

    That a question was answered stays noted while its block lasts. The server validates a round before it commits it,
    so the bytes of one more round stay. While an attempt is open, devices may go back: then earlier blocks stay
    answered. A killed server begins an attempt again, however many rounds it took, so its replies stay.
    """
    run = number.run
    if not attempt_snapshot.find_open_attempt(db, run):
        db.execute("DELETE FROM replies WHERE run = ? AND block < ?", (run, number.block))
    if not answer.attempt:
        previous = (run, number.block, number.round - 1)
        db.execute("UPDATE replies SET reply = x'' WHERE run = ? AND block = ? AND round < ?", previous)
    if answer.reply is not None:
        db.execute(
            "INSERT OR REPLACE INTO replies (run, block, round, kind, request_sha, reply) VALUES (?, ?, ?, ?, ?, ?)",
            (run, number.block, number.round, number.kind, answer.request_sha, answer.reply),
        )


def pack_user_rows(devices: StoredDevices, known_users: list[int]) -> tuple[str, bytes]:
    """The rows of the users who are on the node, ready to be stored."""
    note, arrays = devices
    users = arrays["users"]
    n_users = len(users)
    for name, array in arrays.items():
        has_rows = array.ndim > 0 and len(array) == n_users
        if not has_rows and not name.startswith(LISTS):
            raise ValueError(f"device array {name!r} has not one row for each of the {n_users} users")
    is_known = np.isin(users, known_users)
    if not is_known.all():
        arrays = take_rows(arrays, np.flatnonzero(is_known))
    return json.dumps(note), pack(arrays)


def put_model(db: Connection, run: str, model: StoredModel, at: float) -> None:
    """Replace what the server sent."""
    note, arrays = model
    db.execute("INSERT OR REPLACE INTO models (run, note, changed) VALUES (?, ?, ?)", (run, json.dumps(note), at))
    replace_run_arrays(db, "model_arrays", run, arrays)


def drop_user_rows(db: Connection, user: int, where: str) -> None:
    """Take one user's rows out of every run's device arrays."""
    for run, tag, blob in db.execute("SELECT run, tag, arrays FROM devices").fetchall():
        arrays = unpack(blob, where)
        other_rows = np.flatnonzero(arrays["users"] != user)
        packed = pack(take_rows(arrays, other_rows))
        db.execute("UPDATE devices SET arrays = ? WHERE run = ? AND tag = ?", (packed, run, tag))


# Reading answers


def find_stored_reply(db: Connection, number: QuestionNumber) -> tuple[str, bytes] | None:
    """The digest of a request that was answered, and the answer."""
    row = db.execute(
        "SELECT request_sha, reply FROM replies WHERE run = ? AND block = ? AND round = ? AND kind = ?",
        (number.run, number.block, number.round, number.kind),
    ).fetchone()
    if row is None:
        return None
    sha, reply = row
    return str(sha), bytes(reply)


def count_answers(db: Connection, number: QuestionNumber) -> int:
    """How often a question of a round was answered, whatever follows its name; that only grows, unlike devices' state.

    0 in a run that nothing happens to, so that noise is the lab's.
    """
    sql = "SELECT count(*) FROM ledger WHERE run = ? AND block = ? AND round = ? AND (kind = ? OR kind GLOB ?)"
    name = number.kind.split("/")[0]
    place = (number.run, number.block, number.round)
    row = db.execute(sql, (*place, name, f"{name}/*")).fetchone()
    return int(row[0])


# Requests in the ledger


def count_request_bytes(request: UserRequest) -> int:
    """How many bytes one request adds to the answer that carries it."""
    return len(request.model_dump_json().encode())


def make_request_log_lines(requests: Sequence[UserRequest]) -> list[tuple[str, ReleaseRecord]]:
    """Lines of the ledger for carried requests: a line for each kind, which names nobody."""
    lines = []
    for kind in sorted({request.kind for request in requests}):
        same_kind = [request for request in requests if request.kind == kind]
        n_users = len({request.sender for request in same_kind})
        n_items = sum(len(request.items) for request in same_kind)
        n_bytes = sum(count_request_bytes(request) for request in same_kind)
        subject = "1 person asks" if n_users == 1 else f"{n_users} people ask"
        sees = f"{subject} the server to {kind}: made-up names{_describe_item_count(n_items)} and times"
        release = ReleaseRecord(n_users, n_bytes, sees)
        lines.append((f"{REQUEST_PREFIX}{kind}", release))
    return lines


def _describe_item_count(n_items: int) -> str:
    if n_items == 0:
        return ", no item"
    return f", {n_items} item number{'s' if n_items != 1 else ''}"
