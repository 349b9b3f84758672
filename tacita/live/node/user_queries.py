"""One person's side of a node's file: what they have, what of it may leave, what left; a page of it, never all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, Literal

from tacita.core.errors import TacitaError
from tacita.live.json_object import JsonObject
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


Page = tuple[int, list[JsonObject]]  # how much there is, and a page of it


def summarise_user(store: NodeStore, user: str) -> JsonObject:
    """How much a person has, and how much of it takes part."""
    number = store.find_user(user)
    return store.run_query(lambda db: _query_user_summary(db, number))


def _query_user_summary(db: Connection, user: int) -> JsonObject:
    level = str(_query_first_value(db, "SELECT level FROM users WHERE id = ?", (user,)))
    n_items = int(_query_first_value(db, "SELECT count(DISTINCT item) FROM interactions WHERE user = ?", (user,)))
    has_item = "EXISTS (SELECT 1 FROM interactions i WHERE i.user = c.user AND i.item = c.item)"
    count_exceptions = f"SELECT count(*) FROM consent c WHERE c.user = ? AND c.level != ? AND {has_item}"
    n_exceptions = int(_query_first_value(db, count_exceptions, (user, level)))
    is_paused = blocks.is_paused(db, user)
    learns_new_items = level == "learn"
    n_taking_part = n_items - n_exceptions if learns_new_items else n_exceptions
    if n_exceptions:
        mode = "some"
    else:
        mode = "everything" if learns_new_items else "nothing"
    return {
        "items": n_items,
        "taking part": 0 if is_paused else n_taking_part,
        "paused": is_paused,
        "mode": mode,
        "new items": learns_new_items,
    }


def _query_first_value(db: Connection, sql: str, parameters: Any) -> Any:
    return db.execute(sql, parameters).fetchone()[0]


# Items


def list_user_items(store: NodeStore, user: str, query: ItemQuery) -> Page:
    """A page of what a person has, newest first, and how much there is of it."""
    parameters = {
        "user": store.find_user(user),
        "items": None if query.items is None else json.dumps(list(query.items)),
        "limit": query.limit,
        "offset": query.offset,
    }
    return store.run_query(lambda db: _read_item_page(db, query, parameters))


def _read_item_page(db: Connection, query: ItemQuery, parameters: JsonObject) -> Page:
    among_items = "" if query.items is None else "AND i.item IN (SELECT value FROM json_each(:items))"
    consent_filters = {"all": "", "part": f"AND {blocks.CONSENTED_SQL}", "kept": f"AND NOT {blocks.CONSENTED_SQL}"}
    source = f"FROM interactions i WHERE i.user = :user {among_items} {consent_filters[query.only]}"
    total = int(_query_first_value(db, f"SELECT count(DISTINCT i.item) {source}", parameters))
    # A group's first column is of its newest row: SQLite takes bare columns from where max() was found.
    page = (
        f"SELECT i.user, i.item, max(i.time) AS time, i.rating, max(i.released) AS released {source} "
        "GROUP BY i.item ORDER BY time DESC, i.item LIMIT :limit OFFSET :offset"
    )
    sql = f"SELECT i.item, i.time, i.rating, i.released, {blocks.CONSENTED_SQL} FROM ({page}) i"
    rows = []
    for item, at, rating, has_left, takes_part in db.execute(sql, parameters).fetchall():
        row = {
            "item": item,
            "time": at,
            "rating": rating,
            "left in a sum": bool(has_left),
            "takes part": bool(takes_part),
        }
        rows.append(row)
    return total, rows


def check_has_item(store: NodeStore, user: str, item: str) -> None:
    """Refuse an item that the person does not have."""
    number = store.find_user(user)
    sql = "SELECT 1 FROM interactions WHERE user = ? AND item = ?"
    row = store.run_query(lambda db: db.execute(sql, (number, item)).fetchone())
    if row is None:
        raise TacitaError(f"you have no item '{item[:100]}' on this device.")


# Consent


def apply_consent_preset(store: NodeStore, user: str, preset: Preset) -> None:
    """One of the three words about everything; nothing that was sent is taken back by it."""
    number = store.find_user(user)
    store.run_withdrawing_change(lambda db: _store_consent_preset(db, number, preset))


def _store_consent_preset(db: Connection, user: int, preset: Preset) -> None:
    if preset == "some":
        db.execute(
            "INSERT OR REPLACE INTO consent (user, item, level) SELECT DISTINCT i.user, i.item, 'learn' "
            f"FROM interactions i WHERE i.user = ? AND {blocks.CONSENTED_SQL}",
            (user,),
        )
    else:
        db.execute("DELETE FROM consent WHERE user = ?", (user,))
    level = "learn" if preset == "everything" else "keep"
    db.execute("UPDATE users SET level = ? WHERE id = ?", (level, user))
    event = (time.time(), user, level)
    db.execute("INSERT INTO consent_events (time, user, item, level) VALUES (?, ?, NULL, ?)", event)


def set_pause(store: NodeStore, user: str, paused: bool) -> None:
    """Nothing of a person leaves for now, or goes on as they had chosen."""
    number = store.find_user(user)
    if paused:
        store.run_withdrawing_change(lambda db: blocks.pause_user(db, number))
    else:
        store.run_withdrawing_change(lambda db: blocks.resume_user(db, number))


# Releases


def list_releases(store: NodeStore, user: str, offset: int, limit: int) -> Page:
    """What left this node, newest first, whether something of the person could be in it, and what it cost them."""
    parameters = {
        "user": store.find_user(user),
        "request": REQUEST_PREFIX,
        "uncounted": NO_EPSILON,
        "limit": limit,
        "offset": offset,
    }
    return store.run_query(lambda db: _read_release_page(db, parameters))


_IS_YOURS_SQL = (
    "CASE WHEN l.kind LIKE :request || '%' THEN EXISTS (SELECT 1 FROM requests r WHERE r.user = :user AND "
    "r.run = l.run AND :request || r.kind = l.kind AND r.sent <= l.time) "
    "ELSE EXISTS (SELECT 1 FROM assigned a JOIN interactions i ON i.id = a.interaction "
    "WHERE a.run = l.run AND a.block = l.block AND i.user = :user) END"
)
_RELEASE_COLUMNS = "l.time, l.run, l.block, l.round, l.kind, l.users, l.bytes, l.sees, l.epsilon"
_COST_COLUMNS = "c.epsilon, c.spent, c.user IS NOT NULL, l.epsilon != :uncounted"
_RELEASE_NAMES = ("time", "run", "block", "round", "kind", "people", "bytes", "sees", "epsilon")


def _read_release_page(db: Connection, parameters: JsonObject) -> Page:
    total = int(_query_first_value(db, "SELECT count(*) FROM ledger WHERE users > 0", ()))
    sql = (
        f"SELECT {_RELEASE_COLUMNS}, {_IS_YOURS_SQL}, {_COST_COLUMNS} "
        "FROM ledger l LEFT JOIN costs c ON c.release = l.id AND c.user = :user "
        "WHERE l.users > 0 ORDER BY l.id DESC LIMIT :limit OFFSET :offset"
    )
    releases = []
    rows = db.execute(sql, parameters).fetchall()
    for *columns, is_yours, cost, spent, is_charged, is_counted in rows:
        release = dict(zip(_RELEASE_NAMES, columns))
        release["yours"] = bool(is_charged or is_yours)
        release["cost"] = cost
        release["spent"] = spent
        if is_charged:
            description = _describe_charge(cost)
        else:
            description = _describe_free_release(str(release["kind"]), bool(is_counted), bool(is_yours))
        release["cost said"] = description
        releases.append(release)
    return total, releases


def _describe_charge(cost: float | None) -> str:
    return "cost you more than can be stated" if cost is None else f"cost you {cost:.3g}"


def _describe_free_release(kind: str, is_counted: bool, is_yours: bool) -> str:
    """Why a release cost a person nothing, and no promise where nothing was counted."""
    if is_counted:
        return "not charged to you"
    if not is_yours:
        return "cost you nothing"
    return "your wish, not counted" if kind.startswith(REQUEST_PREFIX) else "no noise, so not counted"


def list_costs(store: NodeStore, user: str, run: str, offset: int, limit: int) -> Page:
    """What each release of a run cost a person, newest first; together they are what the run cost them."""
    number = store.find_user(user)
    source = "FROM costs c JOIN ledger l ON l.id = c.release WHERE c.user = ? AND l.run = ?"
    columns = "l.time, l.block, l.round, l.sees, c.epsilon, c.spent"
    names = ("time", "block", "round", "sees", "epsilon", "spent")

    def read_page(db: Connection) -> Page:
        total = int(_query_first_value(db, f"SELECT count(*) {source}", (number, run)))
        sql = f"SELECT {columns} {source} ORDER BY l.id DESC LIMIT ? OFFSET ?"
        rows = db.execute(sql, (number, run, limit, offset)).fetchall()
        return total, [dict(zip(names, row)) for row in rows]

    return store.run_query(read_page)


def count_released_items(store: NodeStore, user: str) -> tuple[int, list[str]]:
    """How many of a person's items were part of a sum that left, and of which runs."""
    number = store.find_user(user)
    count_items = "SELECT count(DISTINCT item) FROM interactions WHERE user = ? AND released"
    select_runs = (
        "SELECT DISTINCT a.run FROM assigned a JOIN interactions i ON i.id = a.interaction "
        "WHERE i.user = ? AND i.released ORDER BY a.run"
    )

    def count(db: Connection) -> tuple[int, list[str]]:
        n_items = int(_query_first_value(db, count_items, (number,)))
        runs = [run for (run,) in db.execute(select_runs, (number,))]
        return n_items, runs

    return store.run_query(count)


# Users


def list_users(store: NodeStore, search: str, offset: int, limit: int) -> Page:
    """Who is on this node, for its owner: ids and how much each has, and nothing of what."""
    escaped = search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    pattern = f"%{escaped}%"
    source = "FROM users u WHERE u.raw LIKE ? ESCAPE '\\'"
    count_rows = "(SELECT count(*) FROM interactions i WHERE i.user = u.id)"

    def read_page(db: Connection) -> Page:
        total = int(_query_first_value(db, f"SELECT count(*) {source}", (pattern,)))
        sql = f"SELECT u.raw, {count_rows} {source} ORDER BY u.id LIMIT ? OFFSET ?"
        rows = db.execute(sql, (pattern, limit, offset)).fetchall()
        return total, [{"user": raw, "rows": n_rows} for raw, n_rows in rows]

    return store.run_query(read_page)
