"""One person's side of a node's file: what they have, what of it may leave, what left; a page of it, never all."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tacita.core.errors import TacitaError
from tacita.live.node import blocks
from tacita.live.node.answers import NO_EPSILON, REQUEST_PREFIX
from tacita.live.node.store import NodeStore

Preset = Literal["nothing", "some", "everything"]
PRESETS: dict[str, str] = {
    "nothing": "Nothing takes part. Everything stays on this device and still serves your own recommendations.",
    "some": "What takes part today goes on; whatever is new stays on this device until you switch it on.",
    "everything": "Everything takes part, also what you had switched off, and whatever is new.",
}
ItemSet = Literal["all", "part", "kept"]


@dataclass(frozen=True)
class ItemQuery:
    """Which of a person's items are meant."""

    items: Sequence[str] | None = None  # None: all
    only: ItemSet = "all"
    offset: int = 0
    limit: int = 25


def summarise_user(store: NodeStore, user: str) -> dict[str, Any]:
    """How much a person has, and how much of it takes part."""
    one = store.find_user(user)

    def ask(db: sqlite3.Connection) -> dict[str, Any]:
        level = str(db.execute("SELECT level FROM users WHERE id = ?", (one,)).fetchone()[0])
        has = int(db.execute("SELECT count(DISTINCT item) FROM interactions WHERE user = ?", (one,)).fetchone()[0])
        there = "EXISTS (SELECT 1 FROM interactions i WHERE i.user = c.user AND i.item = c.item)"
        other = f"SELECT count(*) FROM consent c WHERE c.user = ? AND c.level != ? AND {there}"
        others = int(db.execute(other, (one, level)).fetchone()[0])
        waits = blocks.is_paused(db, one)
        part = 0 if waits else has - others if level == "learn" else others
        mode = "some" if level == "keep" and others else "nothing" if level == "keep" else "everything"
        mode = "some" if level == "learn" and others else mode
        return {"items": has, "taking part": part, "paused": waits, "mode": mode, "new items": level == "learn"}

    return store.run_query(ask)


def list_items(store: NodeStore, user: str, look: ItemQuery) -> tuple[int, list[dict[str, Any]]]:
    """A page of what a person has, newest first, and how much there is of it."""
    one = store.find_user(user)
    given = {
        "user": one,
        "items": None if look.items is None else json.dumps(list(look.items)),
        "limit": look.limit,
        "offset": look.offset,
    }
    among = "" if look.items is None else "AND i.item IN (SELECT value FROM json_each(:items))"
    level = {"all": "", "part": f"AND {blocks.CONSENTED_SQL}", "kept": f"AND NOT {blocks.CONSENTED_SQL}"}[look.only]
    some = f"FROM interactions i WHERE i.user = :user {among} {level}"

    def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
        total = int(db.execute(f"SELECT count(DISTINCT i.item) {some}", given).fetchone()[0])
        # A group's first column is of its newest row: SQLite takes bare columns from where max() was found.
        page = (
            f"SELECT i.user, i.item, max(i.time) AS time, i.rating, max(i.released) AS released {some} "
            "GROUP BY i.item ORDER BY time DESC, i.item LIMIT :limit OFFSET :offset"
        )
        rows = db.execute(f"SELECT i.item, i.time, i.rating, i.released, {blocks.CONSENTED_SQL} FROM ({page}) i", given)
        names = ("item", "time", "rating", "left in a sum", "takes part")
        found = [dict(zip(names, row)) for row in rows.fetchall()]
        return total, [{**row, **{name: bool(row[name]) for name in names[3:]}} for row in found]

    return store.run_query(ask)


def check_has_item(store: NodeStore, user: str, item: str) -> None:
    """A sentence for an item that somebody does not have."""
    one = store.find_user(user)
    asked = "SELECT 1 FROM interactions WHERE user = ? AND item = ?"
    if store.run_query(lambda db: db.execute(asked, (one, item)).fetchone()) is None:
        raise TacitaError(f"you have no item '{item[:100]}' on this device.")


def apply_preset(store: NodeStore, user: str, preset: Preset) -> None:
    """One of the three words about everything; nothing that was sent is taken back by it."""
    one = store.find_user(user)

    def act(db: sqlite3.Connection) -> None:
        if preset == "some":
            put = (
                "INSERT OR REPLACE INTO consent (user, item, level) SELECT DISTINCT i.user, i.item, 'learn' "
                f"FROM interactions i WHERE i.user = ? AND {blocks.CONSENTED_SQL}"
            )
            db.execute(put, (one,))
        else:
            db.execute("DELETE FROM consent WHERE user = ?", (one,))
        level = "learn" if preset == "everything" else "keep"
        db.execute("UPDATE users SET level = ? WHERE id = ?", (level, one))
        log = "INSERT INTO consent_events (time, user, item, level) VALUES (?, ?, NULL, ?)"
        db.execute(log, (time.time(), one, level))

    store.run_withdrawal(act)


def set_pause(store: NodeStore, user: str, paused: bool) -> None:
    """Nothing of a person leaves for now, or goes on as they had chosen."""
    one = store.find_user(user)
    store.run_withdrawal(lambda db: blocks.pause_user(db, one) if paused else blocks.resume_user(db, one))


def list_releases(store: NodeStore, user: str, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """What left this node, newest first, whether something of the person could be in it, and what it cost them."""
    one = store.find_user(user)
    names = ("time", "run", "block", "round", "kind", "people", "bytes", "sees", "epsilon")
    mine = (
        "CASE WHEN l.kind LIKE :request || '%' THEN EXISTS (SELECT 1 FROM requests r WHERE r.user = :user AND "
        "r.run = l.run AND :request || r.kind = l.kind AND r.sent <= l.time) "
        "ELSE EXISTS (SELECT 1 FROM assigned a JOIN interactions i ON i.id = a.interaction "
        "WHERE a.run = l.run AND a.block = l.block AND i.user = :user) END"
    )
    columns = "l.time, l.run, l.block, l.round, l.kind, l.users, l.bytes, l.sees, l.epsilon"
    paid = "c.epsilon, c.spent, c.user IS NOT NULL, l.epsilon != :uncounted"

    def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
        total = int(db.execute("SELECT count(*) FROM ledger WHERE users > 0").fetchone()[0])
        page = (
            f"SELECT {columns}, {mine}, {paid} FROM ledger l LEFT JOIN costs c ON c.release = l.id AND c.user = :user "
            "WHERE l.users > 0 ORDER BY l.id DESC LIMIT :limit OFFSET :offset"
        )
        given = {"user": one, "request": REQUEST_PREFIX, "uncounted": NO_EPSILON, "limit": limit, "offset": offset}
        found = []
        for *row, yours, cost, spent, charged, others in db.execute(page, given).fetchall():
            said = _describe_cost(str(row[4]), cost, bool(charged), bool(others), bool(yours))
            more = {"yours": bool(charged or yours), "cost": cost, "spent": spent, "cost said": said}
            found.append({**dict(zip(names, row)), **more})
        return total, found

    return store.run_query(ask)


def _describe_cost(kind: str, cost: float | None, charged: bool, others: bool, yours: bool) -> str:
    """What a release cost a person: a number where it was counted, and no promise where it was not."""
    if charged:
        return "cost you more than can be stated" if cost is None else f"cost you {cost:.3g}"
    if others:
        return "not charged to you"
    if not yours:
        return "cost you nothing"
    return "your wish, not counted" if kind.startswith(REQUEST_PREFIX) else "no noise, so not counted"


def list_costs(store: NodeStore, user: str, run: str, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """What each release of a run cost a person, newest first; together they are what the run cost them."""
    one = store.find_user(user)
    some = "FROM costs c JOIN ledger l ON l.id = c.release WHERE c.user = ? AND l.run = ?"
    names = ("time", "block", "round", "sees", "epsilon", "spent")

    def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
        total = int(db.execute(f"SELECT count(*) {some}", (one, run)).fetchone()[0])
        page = f"SELECT l.time, l.block, l.round, l.sees, c.epsilon, c.spent {some} ORDER BY l.id DESC LIMIT ? OFFSET ?"
        return total, [dict(zip(names, row)) for row in db.execute(page, (one, run, limit, offset)).fetchall()]

    return store.run_query(ask)


def count_released_items(store: NodeStore, user: str) -> tuple[int, list[str]]:
    """How many of a person's items were part of a sum that left, and of which runs."""
    one = store.find_user(user)

    def ask(db: sqlite3.Connection) -> tuple[int, list[str]]:
        n = "SELECT count(DISTINCT item) FROM interactions WHERE user = ? AND released"
        runs = (
            "SELECT DISTINCT a.run FROM assigned a JOIN interactions i ON i.id = a.interaction "
            "WHERE i.user = ? AND i.released ORDER BY a.run"
        )
        return int(db.execute(n, (one,)).fetchone()[0]), [run for (run,) in db.execute(runs, (one,))]

    return store.run_query(ask)


def list_users(store: NodeStore, search: str, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
    """Who is on this node, for its owner: ids and how much each has, and nothing of what."""
    like = "%" + search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"

    def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
        some = "FROM users u WHERE u.raw LIKE ? ESCAPE '\\'"
        total = int(db.execute(f"SELECT count(*) {some}", (like,)).fetchone()[0])
        count = "(SELECT count(*) FROM interactions i WHERE i.user = u.id)"
        page = f"SELECT u.raw, {count} {some} ORDER BY u.id LIMIT ? OFFSET ?"
        return total, [{"user": raw, "rows": n} for raw, n in db.execute(page, (like, limit, offset)).fetchall()]

    return store.run_query(ask)
