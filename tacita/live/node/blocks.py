"""Which interactions of a node belong to which block of a run: what it may learn from, and what has to wait."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from sqlite3 import Connection

# An item's own level stands before the person's general one.
CONSENTED_SQL = """coalesce((SELECT level FROM consent c WHERE c.user = i.user AND c.item = i.item),
    (SELECT level FROM users u WHERE u.id = i.user)) = 'learn'"""
# Nothing leaves of who takes a pause, whatever they chose.
ALLOWED_SQL = f"({CONSENTED_SQL} AND NOT EXISTS (SELECT 1 FROM meta m WHERE m.key = 'paused/' || i.user))"


def build_zero_budget_filter(run: str) -> str:
    """SQL that leaves out who declared a budget of 0, last of all for this run (an SQL expression) or for every one.

    They want nothing to be worked out about them, so a run that counts nothing may not have them either.
    """
    declared = f"kind = 'budget' AND user IS NOT NULL AND run IN ('', {run})"
    last_of_each = f"SELECT max(id) FROM requests WHERE {declared} GROUP BY user"
    return (
        f"i.user NOT IN (SELECT user FROM requests WHERE id IN ({last_of_each}) "
        "AND json_extract(payload, '$.millionths') = 0)"
    )


_DUE_SQL = f"""FROM interactions i
    WHERE NOT EXISTS (SELECT 1 FROM assigned a WHERE a.interaction = i.id AND a.run = :run) AND {ALLOWED_SQL}
    AND {build_zero_budget_filter(":run")}
    AND (:items IS NULL OR i.item IN (SELECT value FROM json_each(:items)))
    AND (:rating IS NULL OR i.rating >= :rating)"""
# The same item at another time adds nothing to what a sum already holds of a person.
_NEW_SQL = "AND NOT EXISTS (SELECT 1 FROM interactions r WHERE r.user = i.user AND r.item = i.item AND r.released = 1)"


@dataclass(frozen=True)
class TrainingFilter:
    """What a run can learn from; None: everything."""

    items: list[str] | None = None
    min_rating: float | None = None


def assign_interactions(
    db: Connection, run: str, block: int, min_newcomers: int, training_filter: TrainingFilter
) -> int | None:
    """Give a block what is due and return how many interactions it got; None: it is closed already.

    What was never in a sum joins the block only if at least `min_newcomers` people have something new in it.
    """
    last_block = find_latest_block(db, run)
    if last_block is not None and block <= last_block:
        return None
    items = None if training_filter.items is None else json.dumps(training_filter.items)
    parameters = {"run": run, "block": block, "items": items, "rating": training_filter.min_rating}
    db.execute("INSERT INTO blocks (run, block, time) VALUES (?, ?, ?)", (run, block, time.time()))
    count_users = f"SELECT count(DISTINCT i.user) {_DUE_SQL}"
    (n_users,) = db.execute(count_users, parameters).fetchone()
    (n_newcomers,) = db.execute(f"{count_users} {_NEW_SQL}", parameters).fetchone()
    only_released = "AND i.released = 1" if n_newcomers < min_newcomers <= n_users else ""
    put = f"INSERT INTO assigned (interaction, run, block) SELECT i.id, :run, :block {_DUE_SQL} {only_released}"
    return int(db.execute(put, parameters).rowcount)


def reopen_block(db: Connection, run: str, block: int) -> bool:
    """Take a block back if it is the last one and nothing of it left; return whether it was."""
    sql = "SELECT 1 FROM ledger WHERE run = ? AND block = ? AND users > 0"
    release = db.execute(sql, (run, block)).fetchone()
    if block != find_latest_block(db, run) or release is not None:
        return False
    for table in ("assigned", "blocks"):
        db.execute(f"DELETE FROM {table} WHERE run = ? AND block = ?", (run, block))
    return True


def list_assigned_items(db: Connection, run: str, user: int) -> set[str]:
    """A person's items that belong to a block of a run."""
    sql = (
        "SELECT DISTINCT i.item FROM interactions i JOIN assigned a ON a.interaction = i.id "
        "WHERE i.user = ? AND a.run = ?"
    )
    return {str(item) for (item,) in db.execute(sql, (user, run))}


def find_latest_block(db: Connection, run: str) -> int | None:
    """The last block of a run that was opened here."""
    block: int | None
    (block,) = db.execute("SELECT max(block) FROM blocks WHERE run = ?", (run,)).fetchone()
    return block


def pause_user(db: Connection, user: int) -> None:
    """Nothing of a person takes part until `resume_user`; what they chose for their items stays."""
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('paused/' || ?, ?)", (user, time.time()))


def resume_user(db: Connection, user: int | None) -> None:
    """End a person's pause (None: everybody's)."""
    db.execute("DELETE FROM meta WHERE key LIKE 'paused/%' AND (?1 IS NULL OR key = 'paused/' || ?1)", (user,))


def is_paused(db: Connection, user: int) -> bool:
    row = db.execute("SELECT 1 FROM meta WHERE key = 'paused/' || ?", (user,)).fetchone()
    return row is not None
