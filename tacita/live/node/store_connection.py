"""The connection behind a node's store: one lock, one transaction at a time, and counters of changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Self, TypeVar

from tacita.live.database import transaction
from tacita.live.json_object import JsonObject
from tacita.live.node import store_file as node_file

Result = TypeVar("Result")


class StoreConnection:
    """An open file of a node. All methods may be called from any thread of the process that opened it."""

    def __init__(self, db: Connection, path: Path, resources: contextlib.ExitStack) -> None:
        self.path = path
        self.changes = 0  # counts what touched histories or consent since the file was opened
        self.withdrawals = 0  # counts what may have taken something back since then
        self._db = db
        self._resources = resources
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _read_connection(self) -> Iterator[Connection]:
        with self._lock, node_file.translate_errors(self.path):
            yield self._db

    @contextlib.contextmanager
    def _write_transaction(self) -> Iterator[Connection]:
        """One transaction: everything in it is on the disk when this returns, or nothing is."""
        with self._lock, node_file.translate_errors(self.path), transaction(self._db):
            yield self._db

    def run_query(self, query: Callable[[Connection], Result]) -> Result:
        """The result of a query."""
        with self._read_connection() as db:
            return query(db)

    def run_withdrawing_change(self, act: Callable[[Connection], Result]) -> Result:
        """A change to what may leave, in one transaction: an answer in progress starts again."""
        with self._write_transaction() as db:
            result = act(db)
            self.changes += 1
            self.withdrawals += 1
        return result

    def _fetch_all(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._read_connection() as db:
            return db.execute(sql, parameters).fetchall()

    def _fetch_one(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        with self._read_connection() as db:
            return db.execute(sql, parameters).fetchone()

    @property
    def secret(self) -> str:
        """What the node's own draws are made from; never logged, exported or sent."""
        (secret,) = self._fetch_one("SELECT value FROM meta WHERE key = 'secret'")
        return str(secret)

    def read_notes(self, prefix: str) -> JsonObject:
        """The notes whose names begin so."""
        rows = self._fetch_all("SELECT key, value FROM meta WHERE key GLOB ? || '*'", (prefix,))
        return {str(key): value for key, value in rows}
