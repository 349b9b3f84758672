"""SQLite for both stores: to look without touching, one transaction, arrays in cells, errors as sentences."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any
from urllib.parse import quote

from tacita.core.codec import pack
from tacita.core.errors import DiskFull, TacitaError
from tacita.core.types import AnyArray

log = logging.getLogger(__name__)


class DamagedFile(TacitaError):
    """A file that is not, or not any more, what a store wrote."""


def connect_read_only(path: Path) -> Connection:
    address = quote(str(path.absolute()))
    return sqlite3.connect(f"file:{address}?mode=ro", uri=True, isolation_level=None)


def read_format_or_none(path: Path) -> Any:
    """What a file says of its format, None: nothing; a damaged one is an error of SQLite, and stays as it is."""
    with contextlib.closing(connect_read_only(path)) as db:
        verdict = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
            return None
        row = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    return None if row is None else row[0]


@contextlib.contextmanager
def transaction(db: Connection) -> Iterator[Connection]:
    """Everything in it is on the disk when this returns, or nothing is."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def translate_errors(path: Path, remedy: str) -> Iterator[None]:
    """What the database says, as a sentence; the remedy is for a damaged file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise DiskFull(path) from None
        raise TacitaError(f"cannot use {path}: {error}.") from None
    except sqlite3.IntegrityError:
        raise  # a mistake of ours, not of the file
    except sqlite3.ProgrammingError as error:
        if "closed" not in str(error):
            raise
        raise TacitaError(f"{path} is closed: its process is stopping.") from None
    except sqlite3.DatabaseError as error:
        raise damaged_file_error(path, str(error), remedy) from None


def damaged_file_error(path: Path, why: str, remedy: str) -> DamagedFile:
    reason = " ".join(why.split())[:200].rstrip(".")
    return DamagedFile(f"{path} is damaged: {reason}; {remedy}.")


def mark_for_scrub(db: Connection) -> None:
    """Note, in the transaction of a deletion, that old bytes are still to be removed."""
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('scrub', '1')")


def scrub_deleted_bytes(db: Connection) -> bool:
    """After a deletion: no old page in the file, no old frame in the log. False: somebody reads it, so not yet."""
    if db.execute("SELECT 1 FROM meta WHERE key = 'scrub'").fetchone() is None:
        return True
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        db.execute("VACUUM")
        if db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            return False
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            return False
        raise
    db.execute("DELETE FROM meta WHERE key = 'scrub'")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return True


def vacuum_unless_in_use(path: Path) -> bool:
    """Remove what was deleted from a file that another program keeps; False: it is in use, so not yet."""
    if not path.is_file():
        return True
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=10.0)) as db:
            db.execute("VACUUM")
            (is_busy, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        log.warning("%s still has the bytes of what was deleted: %s", path, error)
        return False
    return not is_busy


def replace_run_arrays(db: Connection, table: str, run: str, arrays: Mapping[str, tuple[str, AnyArray]]) -> None:
    """Replace a run's arrays, which come with their digests; an array with the same digest is not written again."""
    stored_shas = dict(db.execute(f"SELECT name, sha FROM {table} WHERE run = ?", (run,)).fetchall())
    for name in stored_shas.keys() - arrays.keys():
        db.execute(f"DELETE FROM {table} WHERE run = ? AND name = ?", (run, name))
    put = f"INSERT OR REPLACE INTO {table} (run, name, sha, array) VALUES (?, ?, ?, ?)"
    for name, (sha, array) in arrays.items():
        if stored_shas.get(name) != sha:
            blob = pack({"array": array})
            db.execute(put, (run, name, sha, blob))
