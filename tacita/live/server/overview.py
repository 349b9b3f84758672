"""What an operator watches, read from the server's file in a few queries however many nodes there are. Names nobody."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from tacita.live.database import connect_read_only, translate_errors
from tacita.live.json_object import JsonObject
from tacita.live.wire import SCORE_QUESTIONS

RECENT = 20_000  # events that are looked through for what nodes said last
_SCORES = ", ".join(f"'{kind}'" for kind in SCORE_QUESTIONS)
_ROUND_FIELDS = ("block", "round", "asked", "clients", "valid", "bytes_up", "bytes_down")

Result = TypeVar("Result")


AnswerCounts = dict[tuple[int, int], int]  # by block and number of the round's question
Page = tuple[int, list[JsonObject]]  # how much there is, and a page of it
EventRow = tuple[int, float, str]  # number, time, JSON


class OverviewReader:
    """Looks at a server's file, which others write to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _query(self, query: Callable[[Connection], Result]) -> Result:
        with translate_errors(self._path, "restore a copy"), contextlib.closing(connect_read_only(self._path)) as db:
            return query(db)

    def _fetch(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._query(lambda db: db.execute(sql, parameters).fetchall())

    # Nodes

    def read_last_answer_times(self) -> dict[int, float]:
        """When each node's answer last counted."""
        rows = self._fetch("SELECT node, max(time) FROM accepted GROUP BY node")
        return {int(node): at for node, at in rows}

    def read_last_errors(self) -> dict[int, tuple[float, str]]:
        """The last error of each node: what it said, or what the server said of its answer."""
        rows = self._fetch(
            "SELECT json_extract(event, '$.node'), max(id), time, json_extract(event, '$.said') FROM events "
            "WHERE id > (SELECT ifnull(max(id), 0) FROM events) - ? "
            "AND json_extract(event, '$.event') IN ('refused', 'bad reply') GROUP BY 1",
            (RECENT,),
        )
        errors = {}
        for node, _, at, message in rows:
            if node is not None:
                errors[int(node)] = (at, message)
        return errors

    def read_node_reports(self) -> dict[int, JsonObject]:
        """What nodes said of themselves when they answered last: version, clock, and when that was."""
        rows = self._fetch("SELECT key, value FROM meta WHERE key LIKE 'node/%'")
        reports = {}
        for key, value in rows:
            number = key.removeprefix("node/")
            reports[int(number)] = json.loads(value)
        return reports

    # Rounds

    def read_round_page(self, run: str, offset: int, limit: int) -> Page:
        """A run's rounds, the latest first: who answered, refused or was waited for, seconds and bytes."""
        return self._query(lambda db: _read_rounds(db, run, offset, limit))

    def count_release_spread(self, run: str) -> list[dict[str, int]]:
        """How many people can have been part of how many sums, at most: what nodes said of their numbers."""
        rows = self._fetch(
            "SELECT n, sum(most), count(*) FROM (SELECT count(*) AS n, max(clients) AS most FROM accepted "
            f"WHERE run = ? AND kind NOT IN ({_SCORES}) AND clients > 0 GROUP BY node) GROUP BY n ORDER BY n",
            (run,),
        )
        names = ("releases", "people at most", "nodes")
        return [dict(zip(names, row)) for row in rows]

    def count_refusals(self, run: str, block: int) -> int:
        """How many nodes refused something since a block of a run began."""
        rows = self._fetch(
            "SELECT count(DISTINCT json_extract(event, '$.node')) FROM events WHERE run = ?1 "
            "AND json_extract(event, '$.event') = 'refused' AND id > ifnull((SELECT max(id) FROM events WHERE run = ?1 "
            "AND json_extract(event, '$.event') = 'block' AND json_extract(event, '$.block') = ?2), 0)",
            (run, block),
        )
        return int(rows[0][0])

    # Requests

    def read_request_page(self, offset: int, limit: int) -> Page:
        """People's requests: of which run and node, how old, how far. Neither who nor what."""
        return self._query(lambda db: _read_requests(db, offset, limit))

    def count_request_states(self) -> dict[str, int]:
        return dict(self._fetch("SELECT json_extract(outcome, '$.state'), count(*) FROM requests GROUP BY 1"))


def _read_requests(db: Connection, offset: int, limit: int) -> Page:
    (total,) = db.execute("SELECT count(*) FROM requests").fetchone()
    sql = (
        "SELECT r.id, r.run, ifnull(n.name, r.node), r.time, r.done, json_extract(r.outcome, '$.state'), "
        "json_extract(r.outcome, '$.said'), r.heard FROM requests r LEFT JOIN nodes n ON n.number = r.node "
        "ORDER BY r.done IS NOT NULL, r.id DESC LIMIT ? OFFSET ?"
    )
    names = ("request", "run", "node", "time", "done", "state", "said", "heard")
    now = time.time()
    requests = []
    for row in db.execute(sql, (limit, offset)).fetchall():
        request = dict(zip(names, row))
        end = request["done"] or now
        request["age"] = end - request["time"]
        requests.append(request)
    return int(total), requests


# Rounds from events


def _read_rounds(db: Connection, run: str, offset: int, limit: int) -> Page:
    select_ids = "SELECT id FROM events WHERE run = ? AND json_extract(event, '$.event') = 'round' ORDER BY id DESC"
    ids = [row_id for (row_id,) in db.execute(select_ids, (run,))]
    page = ids[offset : offset + limit + 1]  # one more: the events of a round follow the round before it
    if not page[:limit]:
        return len(ids), []
    first = page[limit] if len(page) > limit else 0
    select_events = "SELECT id, time, event FROM events WHERE run = ? AND id BETWEEN ? AND ? ORDER BY id"
    rows = db.execute(select_events, (run, first, page[0])).fetchall()
    timeline = _build_timeline(rows, _count_answers(db, run), first)
    return len(ids), timeline[::-1]


def _count_answers(db: Connection, run: str) -> AnswerCounts:
    """Nodes whose answers counted."""
    sql = (
        "SELECT block, round, count(DISTINCT node) FROM accepted WHERE run = ? "
        f"AND kind NOT IN ({_SCORES}) GROUP BY block, round"
    )
    rows = db.execute(sql, (run,)).fetchall()
    return {(block, round): n_nodes for block, round, n_nodes in rows}


@dataclass
class _RoundEvents:
    """What happened since the round before."""

    refused: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    n_late: int = 0
    start: float | None = None

    def add_event(self, kind: str, event: JsonObject, at: float) -> None:
        if kind == "refused":
            self.refused.add(str(event["node"]))
        elif kind == "bad reply":
            self.bad.add(str(event["node"]))
        elif kind == "waiting":
            n_missing = int(event["needed"]) - int(event["answered"])
            self.n_late = max(self.n_late, n_missing)
        elif kind == "block":
            self.start = at

    def describe_round(self, event: JsonObject, n_answered: int, at: float) -> JsonObject:
        shown = {name: event.get(name) for name in _ROUND_FIELDS}
        seconds = None
        if self.start is not None:
            seconds = round(at - self.start, 1)
        return {
            "time": at,
            **shown,
            "answered": n_answered,
            "refused": len(self.refused),
            "bad": len(self.bad),
            "late": self.n_late,
            "seconds": seconds,
        }


def _build_timeline(rows: list[EventRow], n_answers: AnswerCounts, first: int) -> list[JsonObject]:
    """Rounds with what happened since the one before."""
    timeline = []
    events = _RoundEvents()
    for row_id, at, text in rows:
        event = json.loads(text)
        kind = event.get("event")
        if kind != "round":
            events.add_event(kind, event, at)
            continue
        if row_id > first:
            last_round = int(event["round"]) - 1
            place = (int(event["block"]), last_round)
            n_answered = n_answers.get(place, 0)
            timeline.append(events.describe_round(event, n_answered, at))
        events = _RoundEvents(start=at)
    return timeline
