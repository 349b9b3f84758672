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
from tacita.live.node import unsettled
from tacita.live.wire import Wanted
from tacita.round.device_state import LISTS, rows_taken

NO_EPSILON = "no epsilon"
REQUEST = "request/"  # how the ledger calls what carries people's requests: this, and what they ask for

Model = tuple[dict[str, Any], dict[str, tuple[str, AnyArray]]]  # note, name -> (sha256, array)
Devices = tuple[dict[str, Any], Arrays]  # note, arrays with one row per entry of the array "users"


@dataclass(frozen=True)
class RequestNumber:
    """What tells one request of a server from another."""

    run: str
    block: int
    round: int
    kind: str


@dataclass(frozen=True)
class Release:
    """Something that left the device, as the ledger keeps it."""

    users: int  # how many people were summed
    n_bytes: int
    sees: str  # what the server can see, in a few words
    epsilon: str = NO_EPSILON
    costs: Sequence[tuple[int, float | None, float | None]] = ()  # of each who was charged: cost, and spent since then
    again: Mapping[str, bytes] = field(default_factory=dict)  # by which it is told once more as it was (retold.py)


@dataclass(frozen=True)
class Answer:
    """A reply, and what making it changed."""

    request_sha: str
    reply: bytes | None  # None: the request may be asked again
    now: Devices | None = None
    best: Devices | None = None
    model: Model | None = None
    ledger: Release | None = None
    sent: Sequence[Wanted] = ()  # the requests of people here that the reply carries
    released: bool = False  # the block's rows were part of a sum in the reply
    marks: Mapping[str, str] = field(default_factory=dict)  # what those who withdrew answer in this company only
    least: int = 0  # withdrawals leave together with those of so many people; 0: each by itself
    tags: tuple[str, str] = ("now", "best")
    attempt: int = 0  # of the server, to carry out requests: only when it took effect is the answer for good


def stored(db: sqlite3.Connection, asked: RequestNumber) -> tuple[str, bytes] | None:
    """The digest of a request that was answered, and the answer."""
    found = db.execute(
        "SELECT request_sha, reply FROM replies WHERE run = ? AND block = ? AND round = ? AND kind = ?",
        (asked.run, asked.block, asked.round, asked.kind),
    ).fetchone()
    return None if found is None else (str(found[0]), bytes(found[1]))


def put(db: sqlite3.Connection, asked: RequestNumber, answer: Answer, at: float) -> None:
    """Everything of an answer; people who were erased meanwhile do not come back."""
    run, block = asked.run, asked.block
    if answer.released:
        those = "SELECT interaction FROM assigned WHERE run = ? AND block = ?"
        db.execute(f"UPDATE interactions SET released = 1 WHERE id IN ({those})", (run, block))
    if answer.attempt:
        unsettled.keep(db, run, answer.attempt, block)
    here = [one for (one,) in db.execute("SELECT id FROM users")]
    known = set(here)
    for tag, devices in zip(answer.tags, (answer.now, answer.best), strict=True):
        if devices is None:
            continue
        note, blob = packed(devices, here)
        db.execute(
            "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)",
            (run, tag, note, blob),
        )
    if answer.model is not None:
        put_model(db, run, answer.model, at)
    put_reply(db, asked, answer)
    if answer.ledger is not None:
        db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", answer.ledger.again.items())
    lines = [] if answer.ledger is None else [(asked.kind, answer.ledger)]
    for kind, one in [*lines, *requests_left(answer.sent)]:
        told = (at, run, block, asked.round, kind, one.users, one.n_bytes, one.sees, one.epsilon)
        line = db.execute(
            "INSERT INTO ledger (time, run, block, round, kind, users, bytes, sees, epsilon) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            told,
        ).lastrowid
        charged = ((user, line, cost, spent) for user, cost, spent in one.costs if user in known)
        db.executemany("INSERT INTO costs (user, release, epsilon, spent) VALUES (?, ?, ?, ?)", charged)


def left_before(db: sqlite3.Connection, asked: RequestNumber) -> int:
    """How often a question of a round was answered, whatever follows its name; that only grows, unlike devices' state.

    0 in a run that nothing happens to, so that noise is the lab's.
    """
    found = "SELECT count(*) FROM ledger WHERE run = ? AND block = ? AND round = ? AND (kind = ? OR kind GLOB ?)"
    name = asked.kind.split("/")[0]
    return int(db.execute(found, (asked.run, asked.block, asked.round, name, f"{name}/*")).fetchone()[0])


def request_bytes(one: Wanted) -> int:
    """What one request adds to the answer that carries it."""
    return len(one.model_dump_json().encode())


def requests_left(sent: Sequence[Wanted]) -> list[tuple[str, Release]]:
    """Lines of the ledger for what people here ask for: a line for each kind, which names nobody."""
    found = []
    for kind in sorted({one.kind for one in sent}):
        some = [one for one in sent if one.kind == kind]
        people, items = len({one.sender for one in some}), sum(len(one.items) for one in some)
        who = "1 person asks" if people == 1 else f"{people} people ask"
        what = f", {items} item number{'s' if items != 1 else ''}" if items else ", no item"
        sees = f"{who} the server to {kind}: made-up names{what} and times"
        found.append((f"{REQUEST}{kind}", Release(people, sum(map(request_bytes, some)), sees)))
    return found


def put_reply(db: sqlite3.Connection, asked: RequestNumber, answer: Answer) -> None:
    """Replies go once the server is past them; it validates a round before it commits it, so one more round stays."""
    # what an answer was is dropped; that there was one, and to what, stays while the block lasts
    if not unsettled.attempt_of(db, asked.run):  # devices may go back to before: what was answered then stays answered
        db.execute("DELETE FROM replies WHERE run = ? AND block < ?", (asked.run, asked.block))
    if not answer.attempt:  # which a server that was killed begins anew, however many rounds it took
        older = (asked.run, asked.block, asked.round - 1)
        db.execute("UPDATE replies SET reply = x'' WHERE run = ? AND block = ? AND round < ?", older)
    if answer.reply is not None:
        db.execute(
            "INSERT OR REPLACE INTO replies (run, block, round, kind, request_sha, reply) VALUES (?, ?, ?, ?, ?, ?)",
            (asked.run, asked.block, asked.round, asked.kind, answer.request_sha, answer.reply),
        )


def packed(devices: Devices, here: list[int]) -> tuple[str, bytes]:
    """The rows of the people who are here, ready to be stored."""
    note, arrays = devices
    n = len(arrays["users"])
    for name, array in arrays.items():
        if not name.startswith(LISTS) and (array.ndim == 0 or len(array) != n):
            raise ValueError(f"device array {name!r} has not one row for each of the {n} users")
    stays = np.isin(arrays["users"], here)
    return json.dumps(note), pack(arrays if stays.all() else rows_taken(arrays, np.flatnonzero(stays)))


def put_model(db: sqlite3.Connection, run: str, model: Model, at: float) -> None:
    """Replace what the server sent."""
    note, arrays = model
    db.execute("INSERT OR REPLACE INTO models (run, note, changed) VALUES (?, ?, ?)", (run, json.dumps(note), at))
    put_arrays(db, "model_arrays", run, arrays)


def drop_rows(db: sqlite3.Connection, user: int, where: str) -> None:
    """Take one user's rows out of every run's device arrays."""
    for run, tag, blob in db.execute("SELECT run, tag, arrays FROM devices").fetchall():
        arrays = unpack(blob, where)
        stays = arrays["users"] != user
        kept = pack(rows_taken(arrays, np.flatnonzero(stays)))
        db.execute("UPDATE devices SET arrays = ? WHERE run = ? AND tag = ?", (kept, run, tag))
