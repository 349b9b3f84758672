"""What devices kept before they answered for a request, until the server says whether that took effect.

Who takes something back forgets it in the moment of the answer. If the server never counts that answer, it has to ask
again, in a later round, and must not hear that there is nothing to take back. So the first answer of an attempt leaves
a copy of all devices of the run; it goes when the attempt has taken effect, and comes back when it came to nothing.
What was spent in between stays spent: it did leave. Who came after the copy, or was told that their request is done,
does not go back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.types import Arrays
from tacita.live.database import mark_for_scrub
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.round.device_state import PARTS, join_rows, take_rows

SNAPSHOT_PREFIX = "before/"
_ENDED_PREFIX = "attempt over/"


UNKNOWN_BLOCK = -1  # the block of an attempt that an older version began


def find_open_attempt(db: sqlite3.Connection, run: str) -> int:
    """The attempt that devices of a run took part in and of which nobody said how it ended; 0: none."""
    return read_attempt_state(db, run)[0]


def read_attempt_state(db: sqlite3.Connection, run: str) -> tuple[int, int, int]:
    """That attempt, the block it belongs to, and the last one that is over."""
    said = "SELECT (SELECT value FROM meta WHERE key = 'attempt/' || ?1), (SELECT value FROM meta WHERE key = ?2 || ?1)"
    now, over = db.execute(said, (run, _ENDED_PREFIX)).fetchone()
    attempt, _, block = ("0" if now is None else str(now)).partition(" ")
    return int(attempt), int(block or UNKNOWN_BLOCK), int(over or 0)


def save_snapshot(db: sqlite3.Connection, run: str, attempt: int, block: int) -> None:
    """A copy of the devices before the first answer of an attempt."""
    if find_open_attempt(db, run):
        return
    db.execute("INSERT INTO meta (key, value) VALUES ('attempt/' || ?, ?)", (run, f"{attempt} {block}"))
    copy = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) SELECT run, ?1 || tag, note, arrays FROM devices "
    db.execute(copy + "WHERE run = ?2 AND tag NOT LIKE ?1 || '%'", (SNAPSHOT_PREFIX, run))


def end_attempt(db: sqlite3.Connection, run: str, failed: bool, where: str) -> None:
    """An attempt is over: its answers hold, or the devices are as they were."""
    mine = find_open_attempt(db, run)
    if failed:
        found = "SELECT tag, note, arrays FROM devices WHERE run = ? AND tag LIKE ? || '%'"
        for tag, note, blob in db.execute(found, (run, SNAPSHOT_PREFIX)).fetchall():
            name = tag.removeprefix(SNAPSHOT_PREFIX)
            now = db.execute("SELECT arrays FROM devices WHERE run = ? AND tag = ?", (run, name)).fetchone()
            kept = unpack(blob, where)
            arrays = kept if now is None else _restore_with_accounts(kept, unpack(now[0], where))
            put = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)"
            db.execute(put, (run, name, note, pack(arrays)))
    db.execute("DELETE FROM devices WHERE run = ? AND tag LIKE ? || '%'", (run, SNAPSHOT_PREFIX))
    db.execute("DELETE FROM meta WHERE key = 'attempt/' || ?", (run,))
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (? || ?, ?)", (_ENDED_PREFIX, run, str(mine)))


def drop_settled_users(db: sqlite3.Connection, run: str, users: Collection[int], where: str) -> None:
    """What these people took back is done: whatever becomes of the attempt, they do not go back to before it."""
    found = "SELECT tag, arrays FROM devices WHERE run = ? AND tag LIKE ? || '%'"
    for tag, blob in db.execute(found, (run, SNAPSHOT_PREFIX)).fetchall():
        arrays = unpack(blob, where)
        stays = np.flatnonzero(~np.isin(arrays["users"], list(users)))
        if len(stays) < len(arrays["users"]):
            kept = pack(take_rows(arrays, stays))
            db.execute("UPDATE devices SET arrays = ? WHERE run = ? AND tag = ?", (kept, run, tag))
            mark_for_scrub(db)


def forget_attempts(db: sqlite3.Connection) -> None:
    """No attempt is open: nobody is here who could go back."""
    db.execute("DELETE FROM meta WHERE key GLOB 'attempt/*'")


def _restore_with_accounts(before: Arrays, now: Arrays) -> Arrays:
    """Devices as they were, with the accounts of now; who is in no copy stays as now."""
    both, mine, yours = np.intersect1d(before["users"], now["users"], return_indices=True)
    accounts = {
        name for name in before.keys() & now.keys() if name.startswith(PARTS) and name.split("/")[-1] in ACCOUNT_ARRAYS
    }
    made = dict(before)
    for name in accounts if len(both) else ():
        made[name] = before[name].copy()
        made[name][mine] = now[name][yours]
    others = np.flatnonzero(~np.isin(now["users"], before["users"]))
    joined = join_rows(made, take_rows(now, others)) if len(others) else made
    return take_rows(joined, np.argsort(joined["users"]))
