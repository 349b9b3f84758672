"""What a node holds, in one SQLite file that only its own process opens: histories, consent, models, ledger.

Everything that is acknowledged was committed with `synchronous=FULL`. A round is one transaction: the reply is
stored together with what it changed, so a repeated request finds the reply and nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import numpy as np

from tacita.core.codec import unpack
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Longs
from tacita.live.database import mark_for_scrub, scrub_deleted_bytes
from tacita.live.json_object import JsonObject
from tacita.live.node import answers, attempt_snapshot, blocks, request_queue
from tacita.live.node import store_file as node_file
from tacita.live.node.answers import AnswerRecord, QuestionNumber, StoredDevices, StoredModel
from tacita.live.node.queued_request import QueuedRequest, check_request_kind
from tacita.live.node.store_connection import StoreConnection
from tacita.live.wire import Catalogue, RequestOutcome

LEVELS = ("learn", "keep")

SpendingNotes = Callable[[int | None], dict[str, int]]  # what stays of a user (None: of all)
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


class NodeStore(StoreConnection):
    """The node's file: histories, consent, blocks, models, devices, requests and ledger."""

    @staticmethod
    def create(path: Path, secret: str | None = None) -> NodeStore:
        """A new file with its own secret; `secret` is for tests that need known draws."""
        if secret is None:
            secret = secrets.token_hex(32)
        node_file.create_store_file(path, secret)
        return NodeStore.open(path)

    @staticmethod
    def open(path: Path) -> NodeStore:
        """Look at the file without touching it, then open it for this process alone."""
        with contextlib.ExitStack() as resources:
            resources.enter_context(node_file.lock_store_file(path))
            node_file.refuse_unknown_format(path)
            db = node_file.connect_store(path)
            resources.callback(db.close)
            with node_file.translate_errors(path):
                scrub_deleted_bytes(db)  # if an erasure was cut short
            return NodeStore(db, path, resources.pop_all())

    # Histories

    def add_interactions(self, rows: Iterable[Interaction]) -> tuple[int, int]:
        """Add users and interactions; what is already there stays as it is. Returns how many are new of both."""
        interactions = list(rows)
        raw_ids = dict.fromkeys(raw_id for raw_id, _, _, _ in interactions)
        with self._write_transaction() as db:
            user_ids, n_new_users = _enrol_users(db, raw_ids)
            n_before = db.total_changes
            db.executemany(
                "INSERT OR IGNORE INTO interactions (user, item, time, rating) VALUES (?, ?, ?, ?)",
                ((user_ids[raw_id], item, at, rating) for raw_id, item, at, rating in interactions),
            )
            n_new_rows = db.total_changes - n_before
        self.changes += 1
        return n_new_users, n_new_rows

    def list_users(self) -> tuple[Longs, list[str]]:
        """Ids, ascending, and raw ids."""
        rows = self._fetch_all("SELECT id, raw FROM users ORDER BY id")
        user_ids = [user_id for user_id, _ in rows]
        raw_ids = [raw_id for _, raw_id in rows]
        return np.array(user_ids, np.int64), raw_ids

    def find_user(self, raw: str) -> int:
        row = self._fetch_one("SELECT id FROM users WHERE raw = ?", (raw,))
        if row is None:
            raise unknown_user_error(raw)
        return int(row[0])

    def read_history(self, users: Sequence[int] | None = None, run: str = "") -> InteractionRows:
        """Everything of some users (None: of all), whatever their consent: for what stays on this node."""
        user_filter = ""
        parameters = [run]
        if users is not None:
            user_filter = "WHERE i.user IN (SELECT value FROM json_each(?))"
            parameters.append(json.dumps([int(user) for user in users]))
        return self._query_rows(
            "SELECT i.user, i.item, i.time, i.rating, ifnull(a.block, -1) FROM interactions i "
            f"LEFT JOIN assigned a ON a.interaction = i.id AND a.run = ? {user_filter} ORDER BY i.id",
            parameters,
        )

    def _query_rows(self, sql: str, parameters: Sequence[Any]) -> InteractionRows:
        rows = self._fetch_all(sql, parameters)
        users = [row[0] for row in rows]
        items = [row[1] for row in rows]
        times = [row[2] for row in rows]
        ratings = [row[3] for row in rows]
        row_blocks = [row[4] for row in rows]
        return InteractionRows(
            user=np.array(users, np.int64),
            item=items,
            time=_to_doubles(times),
            rating=_to_doubles(ratings),
            block=np.array(row_blocks, np.int64),
        )

    # Consent

    def set_consent(self, user: str, item: str | None, level: str) -> None:
        """Whether an item, or everything of a user, may take part in sums.

        A level for everything takes back permissions for single items, never a `keep`.
        """
        if level not in LEVELS:
            raise TacitaError(f"'{level[:100]}' is no consent; say 'learn' or 'keep'.")
        number = self.find_user(user)
        with self._write_transaction() as db:
            if item is None:
                db.execute("UPDATE users SET level = ? WHERE id = ?", (level, number))
                db.execute("DELETE FROM consent WHERE user = ? AND level = 'learn'", (number,))
            else:
                consent = (number, item, level)
                db.execute("INSERT OR REPLACE INTO consent (user, item, level) VALUES (?, ?, ?)", consent)
            event = (time.time(), number, item, level)
            db.execute("INSERT INTO consent_events (time, user, item, level) VALUES (?, ?, ?, ?)", event)
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
        """Close a block with all that is in no block yet and may and can be learned from. Returns how many it got.

        `items`, `min_rating`: what the run can learn from; the rest waits for a block that can. A block that exists, or
        that a later one has overtaken, gets nothing more. What was never part of a sum joins what was only together
        with that of at least `least` people who have something new in it. Otherwise a sum with it and one without it,
        of two runs, would differ by what a few did.
        """
        training_filter = blocks.TrainingFilter(None if items is None else list(items), min_rating)
        with self._write_transaction() as db:
            n_assigned = blocks.assign_interactions(db, run, block, least, training_filter)
            if n_assigned is None:
                return 0
            self.changes += 1
        return n_assigned

    def reopen_block(self, run: str, block: int) -> None:
        """Take a run's last block back if nothing of it left: its interactions are free for whoever asks next."""
        with self._write_transaction() as db:
            self.changes += blocks.reopen_block(db, run, block)

    def find_last_block(self, run: str) -> int:
        """The latest block of a run that was opened here; -1: none."""
        with self._read_connection() as db:
            block = blocks.find_latest_block(db, run)
        return -1 if block is None else block

    def read_block_rows(self, run: str, block: int) -> InteractionRows:
        """What a block may learn from now: consent that was taken back since takes its rows out."""
        return self._query_rows(
            "SELECT i.user, i.item, i.time, i.rating, a.block FROM assigned a JOIN interactions i "
            f"ON i.id = a.interaction WHERE a.run = ?1 AND a.block = ?2 AND {blocks.ALLOWED_SQL} "
            f"AND {blocks.build_zero_budget_filter('?1')} ORDER BY i.id",
            (run, block),
        )

    # Devices and models

    def load_devices(self, run: str, tag: str = "now") -> StoredDevices | None:
        """The private state of the node's users, current ("now") or of the best round ("best").

        Where a node has too few people for a sum, what they train alone has tags of its own.
        """
        row = self._fetch_one("SELECT note, arrays FROM devices WHERE run = ? AND tag = ?", (run, tag))
        if row is None:
            return None
        note, blob = row
        return json.loads(note), unpack(blob, str(self.path))

    def load_model(self, run: str) -> StoredModel | None:
        """What the server sent last."""
        with self._read_connection() as db:
            model = db.execute("SELECT note FROM models WHERE run = ?", (run,)).fetchone()
            rows = db.execute("SELECT name, sha, array FROM model_arrays WHERE run = ?", (run,)).fetchall()
        if model is None:
            return None
        arrays = {}
        for name, sha, blob in rows:
            content = unpack(blob, str(self.path))
            arrays[name] = (sha, content["array"])
        return json.loads(model[0]), arrays

    def find_latest_run(self) -> str | None:
        """The run whose model came last."""
        row = self._fetch_one("SELECT run FROM models ORDER BY changed DESC, run LIMIT 1")
        return None if row is None else str(row[0])

    def find_stored_reply(self, number: QuestionNumber) -> tuple[str, bytes] | None:
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
            request_queue.store_answer_marks(db, answer.marks)
            sends_new_requests = request_queue.mark_sent(db, number, answer.sent_requests, time.time())
            if sends_new_requests and answer.min_batch:
                request_queue.move_small_batches_to_next(db, number, answer.min_batch)
            self.changes += sends_new_requests  # the data it learns from changes
        return True

    # Ledger and requests

    def list_releases(self, after: int = 0) -> list[JsonObject]:
        """Everything that left the device, oldest first."""
        names = ("id", "time", "run", "block", "round", "kind", "users", "bytes", "sees", "epsilon")
        rows = self._fetch_all(f"SELECT {', '.join(names)} FROM ledger WHERE id > ? ORDER BY id", (after,))
        return [dict(zip(names, row)) for row in rows]

    def count_releases_since(self, at: float, kind: str | None = None) -> tuple[int, float | None]:
        """How many releases there were after a moment, and when the last one was (of a kind, or of all).

        Requests are none: they travel with answers. Lines of nobody are refusals, which older versions wrote down.
        """
        releases = f"FROM ledger WHERE users > 0 AND kind NOT LIKE '{answers.REQUEST_PREFIX}%' AND"
        with self._read_connection() as db:
            (count,) = db.execute(f"SELECT count(*) {releases} time > ?", (at,)).fetchone()
            (last,) = db.execute(f"SELECT max(time) {releases} (? IS NULL OR kind = ?)", (kind, kind)).fetchone()
        return int(count), last

    def enqueue_request(self, kind: str, run: str, items: Sequence[str] = (), user: int | None = None) -> int:
        """Keep a request for the server of a run until a reply can carry it."""
        check_request_kind(kind)
        request = QueuedRequest(0, run, kind, list(items), user, time.time())
        with self._write_transaction() as db:
            return request_queue.insert_request(db, request)

    def declare_budget(self, user: str, millionths: int, run: str | None = None) -> None:
        """How much somebody is willing to spend, in one run or in all; an answer in progress starts again."""
        number = self.find_user(user)
        with self._write_transaction() as db:
            request_queue.put_budget(db, number, run or "", millionths, time.time())
            self.changes += 1  # who declares 0 is in no block any more
            self.withdrawals += 1

    def read_declared_budgets(self, run: str) -> dict[int, int]:
        """What people here are willing to spend in a run, in millionths; who declared nothing is not in it."""
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
                scrub_deleted_bytes(db)

    def list_user_runs(self, user: int) -> list[str]:
        """The runs that learn from something of a person."""
        sql = "SELECT DISTINCT a.run FROM assigned a JOIN interactions i ON i.id = a.interaction WHERE i.user = ?"
        return sorted(run for (run,) in self._fetch_all(sql, (user,)))

    def list_runs(self) -> list[str]:
        """The runs whose model has come to this node."""
        return [run for (run,) in self._fetch_all("SELECT run FROM models ORDER BY run")]

    def list_private_items(self, user: int) -> set[str]:
        """Items of a person that never leave."""
        sql = f"SELECT DISTINCT i.item FROM interactions i WHERE i.user = ? AND NOT {blocks.ALLOWED_SQL}"
        return {item for (item,) in self._fetch_all(sql, (user,))}

    # Catalogue

    def read_catalogue(self) -> Catalogue:
        """The items the operator published: raw id and title, in the order of the item table."""
        row = self._fetch_one("SELECT value FROM meta WHERE key = 'catalogue'")
        if row is None:
            return []
        return [(item, title) for item, title in json.loads(row[0])]

    def extend_catalogue(self, items: Sequence[tuple[str, str]]) -> bool:
        """Take a longer catalogue, or new titles; known items must keep their places. Returns whether it was taken."""
        known_items = self.read_catalogue()
        n_common = min(len(items), len(known_items))
        new_ids = [item for item, _ in items[:n_common]]
        known_ids = [item for item, _ in known_items[:n_common]]
        if new_ids != known_ids:
            raise TacitaError(
                "the server published a catalogue whose first items differ from the one this node has; an operator "
                "only adds items at its end (is this the same server?)."
            )
        if len(items) < len(known_items) or list(items) == known_items:
            return False
        pairs = [[item, title] for item, title in items]
        text = json.dumps(pairs, ensure_ascii=False)
        with self._write_transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('catalogue', ?)", (text,))
        self.changes += 1
        return True

    # For the owner

    def count_rows(self) -> dict[str, int]:
        """How much there is of everything, for people."""
        queries = {
            "users": "SELECT count(*) FROM users",
            "interactions": "SELECT count(*) FROM interactions",
            "kept": f"SELECT count(*) FROM interactions i WHERE NOT {blocks.ALLOWED_SQL}",
            "releases": f"SELECT count(*) FROM ledger WHERE kind NOT LIKE '{answers.REQUEST_PREFIX}%'",
            "requests waiting": "SELECT count(*) FROM requests WHERE sent IS NULL",
        }
        counts = {}
        with self._read_connection() as db:
            for name, sql in queries.items():
                (count,) = db.execute(sql).fetchone()
                counts[name] = int(count)
        return counts

    def count_learning_users(self) -> int:
        """People of whom at least one interaction may take part in sums."""
        has_budget = blocks.build_zero_budget_filter("''")
        row = self._fetch_one(
            f"SELECT count(DISTINCT i.user) FROM interactions i WHERE {blocks.ALLOWED_SQL} AND {has_budget}"
        )
        return int(row[0])

    def export_user_data(self, path: Path, user: str | None = None) -> int:
        """Histories, consent and ledger as JSON lines; returns how many lines."""
        number = None if user is None else self.find_user(user)
        with self._read_connection() as db:
            return node_file.export_lines(db, path, number)

    def erase_user(self, user: str | None, keep: SpendingNotes | None = None) -> dict[str, int]:
        """Remove a user (None: everybody) so that no byte of it stays in the file; the ledger names nobody.

        `keep`: numbers that stay in their place, by digests of whom they are about (erased_spending.py).
        """
        number = None if user is None else self.find_user(user)
        with self._write_transaction() as db:
            if keep is not None:
                notes = keep(number)
                db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", notes.items())
            count_rows = "SELECT count(*) FROM interactions WHERE ? IS NULL OR user = ?"
            (n_rows,) = db.execute(count_rows, (number, number)).fetchone()
            n_users = db.execute("DELETE FROM users WHERE ? IS NULL OR id = ?", (number, number)).rowcount
            if number is None:
                _erase_user_tables(db)
            else:
                answers.drop_user_rows(db, number, str(self.path))
            blocks.resume_user(db, number)
            request_queue.erase_answer_marks_and_replays(db, number)
            mark_for_scrub(db)
            self.changes += 1
            self.withdrawals += 1
        with self._read_connection() as db:
            scrub_deleted_bytes(db)
        return {"interactions": int(n_rows), "users": n_users}


def _enrol_users(db: Connection, raw_ids: Iterable[str]) -> tuple[dict[str, int | None], int]:
    """The id of each user, new or known, and how many are new."""
    user_ids: dict[str, int | None] = {}
    n_new_users = 0
    for raw_id in raw_ids:
        row = db.execute("SELECT id FROM users WHERE raw = ?", (raw_id,)).fetchone()
        if row is None:
            user_ids[raw_id] = db.execute("INSERT INTO users (raw) VALUES (?)", (raw_id,)).lastrowid
            n_new_users += 1
        else:
            user_ids[raw_id] = row[0]
    return user_ids, n_new_users


def _erase_user_tables(db: Connection) -> None:
    """Drop what is about users in all tables that name no single one."""
    for table in ("devices", "replies", "requests", "consent_events"):
        db.execute(f"DELETE FROM {table}")
    attempt_snapshot.close_all_attempts(db)


def unknown_user_error(user: str) -> TacitaError:
    return TacitaError(f"this node has nothing of user '{user[:100]}'; check the id, or import a file first.")


def _to_doubles(values: Sequence[float | None]) -> Doubles:
    numbers = [np.nan if value is None else value for value in values]
    return np.array(numbers, np.float64)
