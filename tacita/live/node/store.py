"""What a node holds, in one SQLite file that only its own process opens: histories, consent, models, ledger.

Everything that is acknowledged was committed with `synchronous=FULL`. A round is one transaction: the reply is
stored together with what it changed, so a repeated request finds the reply and nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tacita.core.codec import unpack
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Longs
from tacita.live.database import mark_for_scrub, scrub, transaction
from tacita.live.node import answers, attempt_snapshot, blocks, request_queue
from tacita.live.node import store_file as node_file
from tacita.live.node.answers import AnswerRecord, QuestionNumber, StoredDevices, StoredModel
from tacita.live.node.request_queue import QueuedRequest
from tacita.live.wire import RequestOutcome

LEVELS = ("learn", "keep")
REQUEST_KINDS = ("share", "unshare", "forget", "leave")

Result = TypeVar("Result")
Interaction = tuple[str, str, float | None, float | None]  # raw user, raw item, time, rating


@dataclass(frozen=True)
class InteractionRows:
    """Interactions in the order in which they were imported; nan where there is no time or rating."""

    user: Longs
    item: list[str]
    time: Doubles
    rating: Doubles
    block: Longs  # of the run asked about; -1: in none

    def __len__(self) -> int:
        return len(self.item)


class NodeStore:
    """The node's file. All methods may be called from any thread of the process that opened it."""

    def __init__(self, db: sqlite3.Connection, path: Path, held: contextlib.ExitStack) -> None:
        self.path = path
        self.changes = 0  # counts what touched histories or consent since the file was opened
        self.withdrawals = 0  # counts what may have taken something back since then
        self._db, self._resources = db, held
        self._lock = threading.RLock()

    @staticmethod
    def create(path: Path, secret: str | None = None) -> NodeStore:
        """A new file with its own secret; `secret` is for tests that need known draws."""
        node_file.create_file(path, secrets.token_hex(32) if secret is None else secret)
        return NodeStore.open(path)

    @staticmethod
    def open(path: Path) -> NodeStore:
        """Look at the file without touching it, then open it for this process alone."""
        with contextlib.ExitStack() as held:
            held.enter_context(node_file.lock_file(path))
            node_file.check_format(path)
            db = node_file.connect(path)
            held.callback(db.close)
            with node_file.translate_errors(path):
                scrub(db)  # if an erasure was cut short
            return NodeStore(db, path, held.pop_all())

    def close(self) -> None:
        with self._lock:
            self._resources.close()

    def __enter__(self) -> NodeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _read_connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock, node_file.translate_errors(self.path):
            yield self._db

    @contextlib.contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """One transaction: everything in it is on the disk when this returns, or nothing is."""
        with self._lock, node_file.translate_errors(self.path), transaction(self._db):
            yield self._db

    def run_query(self, query: Callable[[sqlite3.Connection], Result]) -> Result:
        """What a query of this room finds."""
        with self._read_connection() as db:
            return query(db)

    def run_withdrawal(self, act: Callable[[sqlite3.Connection], Result]) -> Result:
        """A change of this room to what may leave, in one transaction: sums that are being made are made anew."""
        with self._write_transaction() as db:
            found = act(db)
            self.changes += 1
            self.withdrawals += 1
        return found

    @property
    def secret(self) -> str:
        """What the node's own draws are made from; never logged, exported or sent."""
        with self._read_connection() as db:
            return str(db.execute("SELECT value FROM meta WHERE key = 'secret'").fetchone()[0])

    def read_notes(self, prefix: str) -> dict[str, Any]:
        """What is noted under names that begin so."""
        with self._read_connection() as db:
            found = db.execute("SELECT key, value FROM meta WHERE key GLOB ? || '*'", (prefix,)).fetchall()
        return {str(key): value for key, value in found}

    # Histories

    def add_interactions(self, rows: Iterable[Interaction]) -> tuple[int, int]:
        """New users and new interactions; what is already there stays as it is."""
        listed = list(rows)
        raws = list(dict.fromkeys(row[0] for row in listed))
        with self._write_transaction() as db:
            ids = {raw: one for raw in raws for (one,) in db.execute("SELECT id FROM users WHERE raw = ?", (raw,))}
            fresh = [raw for raw in raws if raw not in ids]
            for raw in fresh:
                ids[raw] = db.execute("INSERT INTO users (raw) VALUES (?)", (raw,)).lastrowid
            before = db.total_changes
            db.executemany(
                "INSERT OR IGNORE INTO interactions (user, item, time, rating) VALUES (?, ?, ?, ?)",
                ((ids[user], item, at, rating) for user, item, at, rating in listed),
            )
            n_rows = db.total_changes - before
        self.changes += 1
        return len(fresh), n_rows

    def users(self) -> tuple[Longs, list[str]]:
        """Ids, ascending, and raw ids."""
        with self._read_connection() as db:
            found = db.execute("SELECT id, raw FROM users ORDER BY id").fetchall()
        return np.array([one for one, _ in found], np.int64), [raw for _, raw in found]

    def find_user(self, raw: str) -> int:
        with self._read_connection() as db:
            found = db.execute("SELECT id FROM users WHERE raw = ?", (raw,)).fetchone()
        if found is None:
            raise unknown_user_error(raw)
        return int(found[0])

    def history(self, users: Sequence[int] | None = None, run: str = "") -> InteractionRows:
        """Everything of some users (None: of all), whatever their consent: for what stays on this node."""
        whose = "" if users is None else "WHERE i.user IN (SELECT value FROM json_each(?))"
        given = () if users is None else (json.dumps([int(one) for one in users]),)
        return self._query_rows(
            "SELECT i.user, i.item, i.time, i.rating, ifnull(a.block, -1) FROM interactions i "
            f"LEFT JOIN assigned a ON a.interaction = i.id AND a.run = ? {whose} ORDER BY i.id",
            (run, *given),
        )

    def _query_rows(self, sql: str, given: tuple[Any, ...]) -> InteractionRows:
        with self._read_connection() as db:
            found = db.execute(sql, given).fetchall()
        user, item, at, rating, block = zip(*found) if found else ((), (), (), (), ())
        return InteractionRows(
            np.array(user, np.int64), list(item), _to_doubles(at), _to_doubles(rating), np.array(block, np.int64)
        )

    # Consent

    def set_consent(self, user: str, item: str | None, level: str) -> None:
        """Whether an item, or everything of a user, may take part in sums.

        A word about everything takes back permissions for single items, never a `keep`.
        """
        if level not in LEVELS:
            raise TacitaError(f"'{level[:100]}' is no consent; say 'learn' or 'keep'.")
        one = self.find_user(user)
        with self._write_transaction() as db:
            if item is None:
                db.execute("UPDATE users SET level = ? WHERE id = ?", (level, one))
                db.execute("DELETE FROM consent WHERE user = ? AND level = 'learn'", (one,))
            else:
                db.execute("INSERT OR REPLACE INTO consent (user, item, level) VALUES (?, ?, ?)", (one, item, level))
            db.execute(
                "INSERT INTO consent_events (time, user, item, level) VALUES (?, ?, ?, ?)",
                (time.time(), one, item, level),
            )
            self.changes += 1
            self.withdrawals += 1

    # Blocks

    def assign_block(
        self,
        run: str,
        block: int,
        least: int = 1,
        items: Sequence[str] | None = None,
        min_rating: float | None = None,
    ) -> int:
        """Close a block: it gets all that may and can be learned from and is in no block yet. Returns how many it got.

        `items`, `min_rating`: what the run can learn from; the rest waits for a block that can. A block that exists, or
        that a later one has overtaken, gets nothing more. What was never part of a sum joins what was only together
        with that of at least `least` people who have something new in it: otherwise a sum with it and one without it,
        of two runs, would differ by what a few did.
        """
        usable = blocks.TrainingFilter(None if items is None else list(items), min_rating)
        with self._write_transaction() as db:
            got = blocks.assign_interactions(db, run, block, least, usable)
            self.changes += got is not None
        return got or 0

    def reopen_block(self, run: str, block: int) -> None:
        """Take a run's last block back if nothing was told of it: what it got is free for whoever asks next."""
        with self._write_transaction() as db:
            self.changes += blocks.reopen_block(db, run, block)

    def last_block(self, run: str) -> int:
        """The latest block of a run that was opened here; -1: none."""
        with self._read_connection() as db:
            found = blocks.latest_block(db, run)
        return -1 if found is None else found

    def block_rows(self, run: str, block: int) -> InteractionRows:
        """What a block may learn from now: consent that was taken back since takes its rows out."""
        return self._query_rows(
            "SELECT i.user, i.item, i.time, i.rating, a.block FROM assigned a JOIN interactions i "
            f"ON i.id = a.interaction WHERE a.run = ? AND a.block = ? AND {blocks.ALLOWED_SQL} ORDER BY i.id",
            (run, block),
        )

    # What the devices and the server's model look like

    def devices(self, run: str, tag: str = "now") -> StoredDevices | None:
        """The private state of the node's users, current ("now") or of the best round ("best").

        What a node learns beside a run in which it has too few people goes by tags of its own.
        """
        with self._read_connection() as db:
            found = db.execute("SELECT note, arrays FROM devices WHERE run = ? AND tag = ?", (run, tag)).fetchone()
        return None if found is None else (json.loads(found[0]), unpack(found[1], str(self.path)))

    def model(self, run: str) -> StoredModel | None:
        """What the server sent last."""
        with self._read_connection() as db:
            note = db.execute("SELECT note FROM models WHERE run = ?", (run,)).fetchone()
            found = db.execute("SELECT name, sha, array FROM model_arrays WHERE run = ?", (run,)).fetchall()
        if note is None:
            return None
        return json.loads(note[0]), {name: (sha, unpack(blob, str(self.path))["array"]) for name, sha, blob in found}

    def latest_run(self) -> str | None:
        """The run whose model came last."""
        with self._read_connection() as db:
            found = db.execute("SELECT run FROM models ORDER BY changed DESC, run LIMIT 1").fetchone()
        return None if found is None else str(found[0])

    def stored_reply(self, number: QuestionNumber) -> tuple[str, bytes] | None:
        """The digest of a request that was answered, and the answer."""
        with self._read_connection() as db:
            return answers.find_stored_reply(db, number)

    def commit_answer(
        self, number: QuestionNumber, answer: AnswerRecord, unless_withdrawn_since: int | None = None
    ) -> bool:
        """A handled request in one transaction: the reply, all it changed, what it let out.

        Nothing is done, and False returned, if somebody withdrew since `withdrawals` had that value.
        """
        with self._write_transaction() as db:
            if unless_withdrawn_since is not None and self.withdrawals != unless_withdrawn_since:
                return False
            answers.put_answer(db, number, answer, time.time())
            request_queue.put_notes(db, answer.marks)
            fresh = request_queue.mark_sent(db, number, answer.sent_requests, time.time())
            if fresh and answer.min_batch:
                request_queue.join_small_batches(db, number, answer.min_batch)
            self.changes += fresh  # the data it learns from changes
        return True

    # Ledger and requests

    def list_releases(self, after: int = 0) -> list[dict[str, Any]]:
        """Everything that left the device, oldest first."""
        names = ("id", "time", "run", "block", "round", "kind", "users", "bytes", "sees", "epsilon")
        with self._read_connection() as db:
            found = db.execute(f"SELECT {', '.join(names)} FROM ledger WHERE id > ? ORDER BY id", (after,)).fetchall()
        return [dict(zip(names, row)) for row in found]

    def count_releases(self, at: float, kind: str | None = None) -> tuple[int, float | None]:
        """How many releases there were after a moment, and when the last one was (of a kind, or of all).

        Requests are none: they travel with answers. Lines of nobody are refusals, which older versions wrote down.
        """
        some = f"FROM ledger WHERE users > 0 AND kind NOT LIKE '{answers.REQUEST_PREFIX}%' AND"
        with self._read_connection() as db:
            count = db.execute(f"SELECT count(*) {some} time > ?", (at,)).fetchone()[0]
            last = db.execute(f"SELECT max(time) {some} (? IS NULL OR kind = ?)", (kind, kind)).fetchone()[0]
        return int(count), last

    def enqueue_request(self, kind: str, run: str, items: Sequence[str] = (), user: int | None = None) -> int:
        """Keep a request for the server of a run until a reply can carry it."""
        if kind not in REQUEST_KINDS:
            raise TacitaError(f"'{kind[:100]}' is no request; known: {', '.join(REQUEST_KINDS)}.")
        with self._write_transaction() as db:
            return request_queue.put_request(db, QueuedRequest(0, run, kind, list(items), user, time.time()))

    def declare_budget(self, user: str, millionths: int, run: str | None = None) -> None:
        """How much somebody is willing to spend, in one run or in all; an answer that is being made is made again."""
        one = self.find_user(user)
        with self._write_transaction() as db:
            request_queue.put_budget(db, one, run or "", millionths, time.time())
            self.withdrawals += 1

    def declared_budgets(self, run: str) -> dict[int, int]:
        """What people here are willing to spend in a run, in millionths; who said nothing is not in it."""
        with self._read_connection() as db:
            return request_queue.read_budgets(db, run)

    def list_requests(self, run: str | None = None) -> list[QueuedRequest]:
        """What people here asked of the server of a run (None: of all), oldest first."""
        with self._read_connection() as db:
            return request_queue.list_requests(db, run)

    def record_outcomes(self, run: str, outcomes: Sequence[RequestOutcome]) -> None:
        """What the server says of their requests."""
        if outcomes:
            with self._write_transaction() as db:
                request_queue.record_outcomes(db, run, outcomes, str(self.path))
            with self._read_connection() as db:
                scrub(db)

    def list_user_runs(self, user: int) -> list[str]:
        """The runs that learn from something of a person."""
        asked = "SELECT DISTINCT a.run FROM assigned a JOIN interactions i ON i.id = a.interaction WHERE i.user = ?"
        with self._read_connection() as db:
            return sorted(run for (run,) in db.execute(asked, (user,)))

    def runs(self) -> list[str]:
        """The runs that were heard of here."""
        with self._read_connection() as db:
            return [run for (run,) in db.execute("SELECT run FROM models ORDER BY run")]

    def list_private_items(self, user: int) -> set[str]:
        """Items of a person that never leave."""
        asked = f"SELECT DISTINCT i.item FROM interactions i WHERE i.user = ? AND NOT {blocks.ALLOWED_SQL}"
        with self._read_connection() as db:
            return {item for (item,) in db.execute(asked, (user,))}

    # Catalogue

    def catalogue(self) -> list[tuple[str, str]]:
        """The items the operator published: raw id and title, in the order of the item table."""
        with self._read_connection() as db:
            found = db.execute("SELECT value FROM meta WHERE key = 'catalogue'").fetchone()
        return [(item, title) for item, title in json.loads(found[0])] if found is not None else []

    def set_catalogue(self, items: Sequence[tuple[str, str]]) -> bool:
        """Take a longer catalogue, or new titles; known items must keep their places. Returns whether it was taken."""
        held = self.catalogue()
        if [item for item, _ in items[: len(held)]] != [item for item, _ in held[: len(items)]]:
            raise TacitaError(
                "the server published a catalogue whose first items differ from the one this node has; an operator "
                "only adds items at its end (is this the same server?)."
            )
        if len(items) < len(held) or list(items) == held:
            return False
        with self._write_transaction() as db:
            listed = json.dumps([[item, title] for item, title in items], ensure_ascii=False)
            db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('catalogue', ?)", (listed,))
        self.changes += 1
        return True

    # What the owner may ask

    def counts(self) -> dict[str, int]:
        """How much there is of everything, for people."""
        asked = {
            "users": "SELECT count(*) FROM users",
            "interactions": "SELECT count(*) FROM interactions",
            "kept": f"SELECT count(*) FROM interactions i WHERE NOT {blocks.ALLOWED_SQL}",
            "releases": f"SELECT count(*) FROM ledger WHERE kind NOT LIKE '{answers.REQUEST_PREFIX}%'",
            "requests waiting": "SELECT count(*) FROM requests WHERE sent IS NULL",
        }
        with self._read_connection() as db:
            return {name: int(db.execute(sql).fetchone()[0]) for name, sql in asked.items()}

    def count_learning_users(self) -> int:
        """People of whom at least one interaction may take part in sums."""
        with self._read_connection() as db:
            asked = f"SELECT count(DISTINCT i.user) FROM interactions i WHERE {blocks.ALLOWED_SQL}"
            return int(db.execute(asked).fetchone()[0])

    def export(self, path: Path, user: str | None = None) -> int:
        """Histories, consent and ledger as JSON lines; returns how many lines."""
        whose = None if user is None else self.find_user(user)
        with self._read_connection() as db:
            return node_file.export_lines(db, path, whose)

    def erase(self, user: str | None, keep: Callable[[int | None], dict[str, int]] | None = None) -> dict[str, int]:
        """Remove a user (None: everybody) so that no byte of it stays in the file; the ledger names nobody.

        `keep`: numbers that stay in their place, by digests of whom they are about (remembered.py).
        """
        one = None if user is None else self.find_user(user)
        with self._write_transaction() as db:
            stays = {} if keep is None else keep(one)
            db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", stays.items())
            lines = db.execute("SELECT count(*) FROM interactions WHERE ? IS NULL OR user = ?", (one, one))
            gone = {"interactions": int(lines.fetchone()[0])}
            gone["users"] = db.execute("DELETE FROM users WHERE ? IS NULL OR id = ?", (one, one)).rowcount
            if one is None:
                for table in ("devices", "replies", "requests", "consent_events"):
                    db.execute(f"DELETE FROM {table}")
                attempt_snapshot.forget_attempts(db)
            else:
                answers.drop_user_rows(db, one, str(self.path))
            blocks.resume_user(db, one)
            request_queue.erase_notes(db, one)
            mark_for_scrub(db)
            self.changes += 1
            self.withdrawals += 1
        with self._read_connection() as db:
            scrub(db)
        return gone


def unknown_user_error(user: str) -> TacitaError:
    return TacitaError(f"this node has nothing of user '{user[:100]}'; check the id, or import a file first.")


def _to_doubles(values: Sequence[float | None]) -> Doubles:
    return np.array([np.nan if v is None else v for v in values], np.float64)
