"""The file behind a node's store: its tables, how it is opened safely, exported and scrubbed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection

from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, temporary_path
from tacita.live import database
from tacita.live.database import DamagedFile, connect_read_only, read_format_or_none
from tacita.live.json_object import JsonObject

STORE_FILE = "node.sqlite"
REMEDY = "restore a copy or export what can be read with `tacita node export`"
FORMAT = 2
COSTS_TABLE = """
CREATE TABLE IF NOT EXISTS costs (
    user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
    release INTEGER NOT NULL REFERENCES ledger,
    epsilon REAL, -- what it cost this person; null: no epsilon can be stated
    spent REAL, -- what they had spent in all when it left
    PRIMARY KEY (user, release)
) WITHOUT ROWID
"""  # made when a file is opened: files of this format came before it
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE users (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    raw TEXT NOT NULL UNIQUE,
    level TEXT NOT NULL DEFAULT 'learn' CHECK (level IN ('learn', 'keep'))
);
CREATE TABLE interactions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
    item TEXT NOT NULL,
    time REAL,
    rating REAL,
    released INTEGER NOT NULL DEFAULT 0 -- 1: was part of an exact sum that left; 2: of noised sums only
);
CREATE UNIQUE INDEX interaction_once ON interactions (user, item, ifnull(time, 'none'));
CREATE TABLE consent (
    user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
    item TEXT NOT NULL,
    level TEXT NOT NULL CHECK (level IN ('learn', 'keep')),
    PRIMARY KEY (user, item)
) WITHOUT ROWID;
CREATE TABLE consent_events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
    item TEXT,
    level TEXT NOT NULL
);
CREATE INDEX consent_events_of ON consent_events (user);
CREATE TABLE blocks (run TEXT, block INTEGER, time REAL NOT NULL, PRIMARY KEY (run, block)) WITHOUT ROWID;
CREATE TABLE assigned (
    interaction INTEGER NOT NULL REFERENCES interactions ON DELETE CASCADE,
    run TEXT NOT NULL,
    block INTEGER NOT NULL,
    PRIMARY KEY (interaction, run)
) WITHOUT ROWID;
CREATE INDEX assigned_to ON assigned (run, block);
CREATE TABLE devices (run TEXT, tag TEXT, note TEXT NOT NULL, arrays BLOB NOT NULL, PRIMARY KEY (run, tag));
CREATE TABLE models (run TEXT PRIMARY KEY, note TEXT NOT NULL, changed REAL NOT NULL);
CREATE TABLE model_arrays (run TEXT, name TEXT, sha TEXT NOT NULL, array BLOB NOT NULL, PRIMARY KEY (run, name));
CREATE TABLE replies (
    run TEXT, block INTEGER, round INTEGER, kind TEXT,
    request_sha TEXT NOT NULL,
    reply BLOB NOT NULL,
    PRIMARY KEY (run, block, round, kind)
);
CREATE TABLE ledger (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    run TEXT NOT NULL, block INTEGER NOT NULL, round INTEGER NOT NULL, kind TEXT NOT NULL,
    users INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    sees TEXT NOT NULL,
    epsilon TEXT NOT NULL
);
CREATE INDEX ledger_by_time ON ledger (time);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL, -- that it is for
    kind TEXT NOT NULL,
    payload TEXT NOT NULL,
    user INTEGER REFERENCES users ON DELETE CASCADE,
    created REAL NOT NULL,
    sent REAL, block INTEGER, round INTEGER, question TEXT, -- the answer that carried it first
    wanted TEXT, -- as it was sent, until it is done
    outcome TEXT -- what the server said of it last
);
CREATE INDEX requests_of ON requests (user);
CREATE INDEX requests_for ON requests (run);
"""

# Every table with people's data, as lines of an export: kind, columns, where they are. `one` limits it to a user.
_EXPORTED = {
    "user": (
        ("user", "consent"),
        "SELECT t.id, t.raw, t.level FROM users t WHERE (:one IS NULL OR t.id = :one)",
    ),
    "interaction": (
        ("user", "item", "time", "rating"),
        "SELECT t.id, (SELECT raw FROM users u WHERE u.id = t.user), t.item, t.time, t.rating "
        "FROM interactions t WHERE (:one IS NULL OR t.user = :one)",
    ),
    "consent": (
        ("user", "item", "level", "time"),
        "SELECT t.id, (SELECT raw FROM users u WHERE u.id = t.user), t.item, t.level, t.time "
        "FROM consent_events t WHERE (:one IS NULL OR t.user = :one)",
    ),
    "request": (
        ("request", "run", "payload", "created", "sent", "outcome"),
        "SELECT t.id, t.kind, t.run, t.payload, t.created, t.sent, t.outcome "
        "FROM requests t WHERE (:one IS NULL OR t.user = :one)",
    ),
    "release": (
        ("time", "run", "block", "round", "what", "people", "bytes", "server sees", "epsilon"),
        "SELECT t.id, t.time, t.run, t.block, t.round, t.kind, t.users, t.bytes, t.sees, t.epsilon "
        "FROM ledger t WHERE true",
    ),
    "cost": (
        ("user", "time", "run", "block", "round", "what", "epsilon", "spent"),
        "SELECT t.id, (SELECT raw FROM users u WHERE u.id = c.user), t.time, t.run, t.block, t.round, t.kind, "
        "c.epsilon, c.spent FROM costs c JOIN ledger t ON t.id = c.release WHERE (:one IS NULL OR c.user = :one)",
    ),
}


def create_store_file(path: Path, secret: str) -> None:
    """A new file that appears whole or not at all."""
    if path.exists():
        raise TacitaError(f"{path} exists; a node's file is never made anew, choose another folder.")
    side = temporary_path(path)
    try:
        descriptor = os.open(side, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.close(descriptor)
        with translate_errors(path), contextlib.closing(sqlite3.connect(side, isolation_level=None)) as db:
            db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
            meta = (("format", FORMAT), ("secret", secret))
            db.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta)
            db.execute("PRAGMA journal_mode = WAL")
        os.rename(side, path)
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
        for end in ("", "-wal", "-shm", "-journal"):
            side.with_name(side.name + end).unlink(missing_ok=True)


@contextlib.contextmanager
def lock_store_file(path: Path) -> Iterator[None]:
    """Keep a second process away from the file; the lock goes with the process, however it ends."""
    if not path.is_file():
        raise TacitaError(f"there is no node in {path.parent}: {path.name} is missing; `tacita node init` makes one.")
    try:
        lock_path = path.with_name(path.name + ".lock")
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise disk_error(path, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise locked_error(path) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(lock)


def locked_error(path: Path) -> TacitaError:
    return TacitaError(f"another process has {path} open; a node's file belongs to one process, stop the other first.")


def is_locked(path: Path) -> bool:
    """Whether a process has the file open as its own."""
    try:
        with open(path.with_name(path.name + ".lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # not there yet, or a file system without locks
    return False


def refuse_unknown_format(path: Path) -> None:
    """Refuse a damaged file or one of another version, without writing to it."""
    try:
        format = read_format_or_none(path)
    except sqlite3.Error as error:
        raise damaged_file_error(path, str(error)) from None
    if not isinstance(format, int):
        raise damaged_file_error(path, "it does not say its format")
    if format > FORMAT:
        raise TacitaError(
            f"{path} was made by a newer tacita (format {format}, this one reads {FORMAT}); update tacita."
        )
    if format < FORMAT:
        raise DamagedFile(
            f"{path} was made by an older tacita (format {format}, this one reads {FORMAT}); `tacita node export` "
            "still writes out what it holds of people, then make a new node in another folder."
        )


def connect_store(path: Path) -> Connection:
    with translate_errors(path):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        for setting in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "busy_timeout = 10000",
            "secure_delete = ON",
            "temp_store = MEMORY",  # nothing of a person in a temporary file
        ):
            db.execute(f"PRAGMA {setting}")
        db.execute(COSTS_TABLE)
        return db


def damaged_file_error(path: Path, why: str) -> DamagedFile:
    return database.damaged_file_error(path, why, REMEDY)


def translate_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    return database.translate_errors(path, REMEDY)


# Taking data out


def export_lines(db: Connection, path: Path, user: int | None) -> int:
    """Everything that belongs to people as JSON lines; returns how many."""
    return _write_new_json_lines(path, iter_export_lines(db, user))


def salvage_lines(store: Path, path: Path) -> int:
    """What can still be read of a damaged file, which stays as it is."""
    with lock_store_file(store), contextlib.closing(connect_read_only(store)) as db:
        return _write_new_json_lines(path, iter_export_lines(db, None, stop_at_damage=True))


def iter_export_lines(db: Connection, user: int | None, stop_at_damage: bool = False) -> Iterator[JsonObject]:
    """Everything that belongs to people, line by line; with a user, only theirs."""
    for kind, (names, sql) in _EXPORTED.items():
        if kind == "cost" and not _has_costs_table(db):
            continue
        last_id: int | None = None
        try:
            for row_id, *values in db.execute(f"{sql} ORDER BY t.id", {"one": user}):
                last_id = row_id
                yield {"kind": kind, **dict(zip(names, values))}
        except sqlite3.Error:
            if not stop_at_damage:
                raise
            yield from _read_backwards(db, kind, last_id)


def _has_costs_table(db: Connection) -> bool:
    row = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'costs'").fetchone()
    return row is not None


def _read_backwards(db: Connection, kind: str, last_id: int | None) -> Iterator[JsonObject]:
    """The rows behind a damaged spot, read backwards down to the spot."""
    names, sql = _EXPORTED[kind]
    lines = []
    with contextlib.suppress(sqlite3.Error):
        for row_id, *values in db.execute(f"{sql} ORDER BY t.id DESC", {"one": None}):
            if last_id is not None and row_id <= last_id:
                break
            lines.append({"kind": kind, **dict(zip(names, values))})
    yield from reversed(lines)
    yield {"kind": "damage", "in": kind}


def _write_new_json_lines(path: Path, lines: Iterator[JsonObject]) -> int:
    """Write to the side, sync, then rename; only the owner can read the file."""
    if path.exists():
        raise TacitaError(f"{path} exists; choose another file.")
    side = temporary_path(path)
    count = 0
    try:
        descriptor = os.open(side, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="utf-8") as out:
            for count, line in enumerate(lines, 1):  # noqa: B007
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.rename(side, path)
    except OSError as error:
        raise disk_error(path, error) from None
    finally:
        side.unlink(missing_ok=True)
    return count
