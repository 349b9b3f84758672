"""What an operator watches, read from the server's file in a few queries however many nodes there are. Names nobody."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tacita.live.database import connect_read_only, translate_errors
from tacita.live.wire import SCORE_QUESTIONS

RECENT = 20_000  # events that are looked through for what nodes said last
_SCORES = ", ".join(f"'{one}'" for one in SCORE_QUESTIONS)


class OverviewReader:
    """Looks at a server's file, which others write to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _query(self, query: Callable[[sqlite3.Connection], Any]) -> Any:
        with translate_errors(self._path, "restore a copy"), contextlib.closing(connect_read_only(self._path)) as db:
            return query(db)

    def last_answers(self) -> dict[int, float]:
        """When each node's answer last counted."""
        asked = "SELECT node, max(time) FROM accepted GROUP BY node"
        return {int(node): at for node, at in self._query(lambda db: db.execute(asked).fetchall())}

    def last_errors(self) -> dict[int, tuple[float, str]]:
        """What each node, or the server of its answer, last said was wrong."""
        asked = (
            "SELECT json_extract(event, '$.node'), max(id), time, json_extract(event, '$.said') FROM events "
            "WHERE id > (SELECT ifnull(max(id), 0) FROM events) - ? "
            "AND json_extract(event, '$.event') IN ('refused', 'bad reply') GROUP BY 1"
        )
        rows = self._query(lambda db: db.execute(asked, (RECENT,)).fetchall())
        return {int(node): (at, said) for node, _, at, said in rows if node is not None}

    def node_reports(self) -> dict[int, dict[str, Any]]:
        """What nodes said of themselves when they answered last: version, clock, and when that was."""
        asked = "SELECT key, value FROM meta WHERE key LIKE 'node/%'"
        rows = self._query(lambda db: db.execute(asked).fetchall())
        return {int(key.removeprefix("node/")): json.loads(value) for key, value in rows}

    def rounds(self, run: str, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """A run's rounds, the latest first: who answered, refused or was waited for, seconds and bytes."""

        def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
            is_round = "run = ? AND json_extract(event, '$.event') = 'round'"
            ids = [one for (one,) in db.execute(f"SELECT id FROM events WHERE {is_round} ORDER BY id DESC", (run,))]
            page = ids[offset : offset + limit + 1]  # one more: the events of a round follow the round before it
            if not page[:limit]:
                return len(ids), []
            first = page[limit] if len(page) > limit else 0
            between = "SELECT id, time, event FROM events WHERE run = ? AND id BETWEEN ? AND ? ORDER BY id"
            rows = db.execute(between, (run, first, page[0])).fetchall()
            counted = _count_answers(db, run)
            return len(ids), _build_timeline(rows, counted, first)[::-1]

        found: tuple[int, list[dict[str, Any]]] = self._query(ask)
        return found

    def requests(self, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """What people asked for: of which run and node, how old, how far. Neither who nor what."""

        def ask(db: sqlite3.Connection) -> tuple[int, list[dict[str, Any]]]:
            total = int(db.execute("SELECT count(*) FROM requests").fetchone()[0])
            page = (
                "SELECT r.id, r.run, ifnull(n.name, r.node), r.time, r.done, json_extract(r.outcome, '$.state'), "
                "json_extract(r.outcome, '$.said'), r.heard FROM requests r LEFT JOIN nodes n ON n.number = r.node "
                "ORDER BY r.done IS NOT NULL, r.id DESC LIMIT ? OFFSET ?"
            )
            names = ("request", "run", "node", "time", "done", "state", "said", "heard")
            rows = [dict(zip(names, row)) for row in db.execute(page, (limit, offset)).fetchall()]
            now = time.time()
            return total, [{**row, "age": (row["done"] or now) - row["time"]} for row in rows]

        found: tuple[int, list[dict[str, Any]]] = self._query(ask)
        return found

    def request_states(self) -> dict[str, int]:
        asked = "SELECT json_extract(outcome, '$.state'), count(*) FROM requests GROUP BY 1"
        return dict(self._query(lambda db: db.execute(asked).fetchall()))

    def count_release_spread(self, run: str) -> list[dict[str, int]]:
        """How many people can have been part of how many sums, at most: what nodes said of their numbers."""

        def ask(db: sqlite3.Connection) -> list[dict[str, int]]:
            asked = (
                "SELECT n, sum(most), count(*) FROM (SELECT count(*) AS n, max(clients) AS most FROM accepted "
                f"WHERE run = ? AND kind NOT IN ({_SCORES}) AND clients > 0 GROUP BY node) GROUP BY n ORDER BY n"
            )
            names = ("releases", "people at most", "nodes")
            return [dict(zip(names, row)) for row in db.execute(asked, (run,)).fetchall()]

        found: list[dict[str, int]] = self._query(ask)
        return found

    def count_refusals(self, run: str, block: int) -> int:
        """How many nodes refused something since a block of a run began."""
        asked = (
            "SELECT count(DISTINCT json_extract(event, '$.node')) FROM events WHERE run = ?1 "
            "AND json_extract(event, '$.event') = 'refused' AND id > ifnull((SELECT max(id) FROM events WHERE run = ?1 "
            "AND json_extract(event, '$.event') = 'block' AND json_extract(event, '$.block') = ?2), 0)"
        )
        return int(self._query(lambda db: db.execute(asked, (run, block)).fetchone()[0]))


def _count_answers(db: sqlite3.Connection, run: str) -> dict[tuple[int, int], int]:
    """Nodes that counted, by block and number of the round's question."""
    asked = (
        "SELECT block, round, count(DISTINCT node) FROM accepted WHERE run = ? "
        f"AND kind NOT IN ({_SCORES}) GROUP BY block, round"
    )
    return {(block, round): n for block, round, n in db.execute(asked, (run,)).fetchall()}


def _build_timeline(
    rows: list[tuple[int, float, str]], counted: dict[tuple[int, int], int], first: int
) -> list[dict[str, Any]]:
    """Rounds with what happened since the one before."""
    made: list[dict[str, Any]] = []
    refused, bad, waited, began = set[str](), set[str](), 0, None
    for number, at, text in rows:
        event = json.loads(text)
        kind = event.get("event")
        if kind == "refused":
            refused.add(str(event["node"]))
        elif kind == "bad reply":
            bad.add(str(event["node"]))
        elif kind == "waiting":
            waited = max(waited, int(event["needed"]) - int(event["answered"]))
        elif kind == "block":
            began = at
        elif kind == "round" and number > first:
            shown = {
                name: event.get(name)
                for name in ("block", "round", "asked", "clients", "valid", "bytes_up", "bytes_down")
            }
            answered = counted.get((int(event["block"]), int(event["round"]) - 1), 0)
            seconds = None if began is None else round(at - began, 1)
            more = {"answered": answered, "refused": len(refused), "bad": len(bad), "late": waited, "seconds": seconds}
            made.append({"time": at, **shown, **more})
        if kind == "round":
            refused, bad, waited, began = set(), set(), 0, at
    return made
