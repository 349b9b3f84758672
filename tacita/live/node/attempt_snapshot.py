"""Copies of what devices kept before they answered for a request, until the server says whether that took effect.

Who takes something back forgets it at the moment of the answer. If the server never counts that answer, it has to ask
again in a later round, and the node must not reply that there is nothing to take back. So the first answer of an
attempt leaves a copy of all devices of the run. The copy goes when the attempt has taken effect, and comes back when
it failed. What was spent in between stays spent: it did leave. Users who came after the copy, or whose request the
server called done, do not go back.
"""

from __future__ import annotations

from collections.abc import Collection
from sqlite3 import Connection

import numpy as np

from tacita.core.codec import pack, unpack
from tacita.core.types import Arrays
from tacita.live.database import mark_for_scrub
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.round.device_state import PARTS, join_rows, take_rows

SNAPSHOT_PREFIX = "before/"
_ENDED_PREFIX = "attempt over/"

UNKNOWN_BLOCK = -1  # the block of an attempt that an older version began


# Attempts


def find_open_attempt(db: Connection, run: str) -> int:
    """The attempt that devices of a run took part in and whose end is not known; 0: none."""
    attempt, _, _ = read_attempt_state(db, run)
    return attempt


def read_attempt_state(db: Connection, run: str) -> tuple[int, int, int]:
    """That attempt, the block it belongs to, and the last one that is over."""
    sql = "SELECT (SELECT value FROM meta WHERE key = 'attempt/' || ?1), (SELECT value FROM meta WHERE key = ?2 || ?1)"
    current, last_ended = db.execute(sql, (run, _ENDED_PREFIX)).fetchone()
    text = "0" if current is None else str(current)
    attempt, _, block = text.partition(" ")
    attempt_block = int(block or UNKNOWN_BLOCK)
    return int(attempt), attempt_block, int(last_ended or 0)


def save_snapshot(db: Connection, run: str, attempt: int, block: int) -> None:
    """Copy the devices before the first answer of an attempt."""
    if find_open_attempt(db, run):
        return
    state = f"{attempt} {block}"
    db.execute("INSERT INTO meta (key, value) VALUES ('attempt/' || ?, ?)", (run, state))
    db.execute(
        "INSERT OR REPLACE INTO devices (run, tag, note, arrays) SELECT run, ?1 || tag, note, arrays FROM devices "
        "WHERE run = ?2 AND tag NOT LIKE ?1 || '%'",
        (SNAPSHOT_PREFIX, run),
    )


def end_attempt(db: Connection, run: str, failed: bool, where: str) -> None:
    """An attempt is over: its answers hold, or the devices are as they were."""
    attempt = find_open_attempt(db, run)
    if failed:
        _restore_snapshots(db, run, where)
    db.execute("DELETE FROM devices WHERE run = ? AND tag LIKE ? || '%'", (run, SNAPSHOT_PREFIX))
    db.execute("DELETE FROM meta WHERE key = 'attempt/' || ?", (run,))
    ended = (_ENDED_PREFIX, run, str(attempt))
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (? || ?, ?)", ended)


def close_all_attempts(db: Connection) -> None:
    """No attempt is open: there is nobody who could go back."""
    db.execute("DELETE FROM meta WHERE key GLOB 'attempt/*'")


# Copies


def _restore_snapshots(db: Connection, run: str, where: str) -> None:
    """Put the devices of the copies in place, with the accounts of now."""
    select_copies = "SELECT tag, note, arrays FROM devices WHERE run = ? AND tag LIKE ? || '%'"
    select_current = "SELECT arrays FROM devices WHERE run = ? AND tag = ?"
    put = "INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)"
    copies = db.execute(select_copies, (run, SNAPSHOT_PREFIX)).fetchall()
    for snapshot_tag, note, blob in copies:
        tag = snapshot_tag.removeprefix(SNAPSHOT_PREFIX)
        arrays = unpack(blob, where)
        current = db.execute(select_current, (run, tag)).fetchone()
        if current is not None:
            current_arrays = unpack(current[0], where)
            arrays = _restore_with_accounts(arrays, current_arrays)
        db.execute(put, (run, tag, note, pack(arrays)))


def drop_users_from_snapshot(db: Connection, run: str, users: Collection[int], where: str) -> None:
    """The requests of these users are done: whatever becomes of the attempt, they do not go back to before it."""
    select = "SELECT tag, arrays FROM devices WHERE run = ? AND tag LIKE ? || '%'"
    update = "UPDATE devices SET arrays = ? WHERE run = ? AND tag = ?"
    copies = db.execute(select, (run, SNAPSHOT_PREFIX)).fetchall()
    for tag, blob in copies:
        arrays = unpack(blob, where)
        is_settled = np.isin(arrays["users"], list(users))
        if is_settled.any():
            remaining_rows = np.flatnonzero(~is_settled)
            remaining = take_rows(arrays, remaining_rows)
            db.execute(update, (pack(remaining), run, tag))
            mark_for_scrub(db)


def _restore_with_accounts(before: Arrays, current: Arrays) -> Arrays:
    """Devices as they were, with the accounts of now; users who are in no copy stay as now."""
    users = current["users"]
    common, rows_before, current_rows = np.intersect1d(before["users"], users, return_indices=True)
    restored = dict(before)
    if len(common):
        for name in _list_account_names(before, current):
            account = before[name].copy()
            account[rows_before] = current[name][current_rows]
            restored[name] = account
    is_newcomer = ~np.isin(users, before["users"])
    if is_newcomer.any():
        newcomers = take_rows(current, np.flatnonzero(is_newcomer))
        restored = join_rows(restored, newcomers)
    order = np.argsort(restored["users"])
    return take_rows(restored, order)


def _list_account_names(before: Arrays, current: Arrays) -> set[str]:
    """Names of the account arrays that both states hold."""
    names = set[str]()
    for name in before.keys() & current.keys():
        array_name = name.split("/")[-1]
        if name.startswith(PARTS) and array_name in ACCOUNT_ARRAYS:
            names.add(name)
    return names
