"""What devices kept before they answered for a request, until the server says whether that took effect.

Who takes something back forgets it in the moment of the answer. If the server never counts that answer, it has to ask
again, in a later round, and must not hear that there is nothing to take back. So the first answer of an attempt leaves
a copy of all devices of the run; it goes when the attempt has taken effect, and comes back when it came to nothing.
What was spent in between stays spent: it did leave.
"""

from __future__ import annotations

import sqlite3

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.types import Arrays
from tacita.lab.ledger import ACCOUNT
from tacita.round.device_state import PARTS

BEFORE = "before/"


def attempt_of(db: sqlite3.Connection, run: str) -> int:
    """The attempt that devices of a run took part in and of which nobody said how it ended; 0: none."""
    found = db.execute("SELECT value FROM meta WHERE key = 'attempt/' || ?", (run,)).fetchone()
    return 0 if found is None else int(found[0])


def keep(db: sqlite3.Connection, run: str, attempt: int) -> None:
    """A copy of the devices before the first answer of an attempt."""
    if attempt_of(db, run):
        return
    db.execute("INSERT INTO meta (key, value) VALUES ('attempt/' || ?, ?)", (run, attempt))
    copy = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) SELECT run, ?1 || tag, note, arrays FROM devices "
    db.execute(copy + "WHERE run = ?2 AND tag NOT LIKE ?1 || '%'", (BEFORE, run))


def end(db: sqlite3.Connection, run: str, failed: bool, where: str) -> None:
    """An attempt is over: its answers hold, or the devices are as they were."""
    if failed:
        found = "SELECT tag, note, arrays FROM devices WHERE run = ? AND tag LIKE ? || '%'"
        for tag, note, blob in db.execute(found, (run, BEFORE)).fetchall():
            name = tag.removeprefix(BEFORE)
            now = db.execute("SELECT arrays FROM devices WHERE run = ? AND tag = ?", (run, name)).fetchone()
            kept = unpack(blob, where)
            arrays = kept if now is None else _still_spent(kept, unpack(now[0], where))
            put = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)"
            db.execute(put, (run, name, note, pack(arrays)))
    db.execute("DELETE FROM devices WHERE run = ? AND tag LIKE ? || '%'", (run, BEFORE))
    db.execute("DELETE FROM meta WHERE key = 'attempt/' || ?", (run,))


def _still_spent(before: Arrays, now: Arrays) -> Arrays:
    """Devices as they were, with the accounts of now."""
    both, mine, yours = np.intersect1d(before["users"], now["users"], return_indices=True)
    accounts = {
        name for name in before.keys() & now.keys() if name.startswith(PARTS) and name.split("/")[-1] in ACCOUNT
    }
    made = dict(before)
    for name in accounts if len(both) else ():
        made[name] = before[name].copy()
        made[name][mine] = now[name][yours]
    return made
