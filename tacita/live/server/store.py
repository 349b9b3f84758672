"""What a server holds, in one SQLite file: catalogue, enrolled nodes, runs and their models.

After each round the model, its number and the answers that counted are committed together, so a killed server goes on
from its last round. Of people it holds what they shared, and what they ask for until that is carried out; where a run
names people, what their nodes call them.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from tacita.core.codec import digest_array, unpack
from tacita.core.config import RunConfig, StrictModel, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays
from tacita.live.database import (
    read_format_or_none,
    replace_run_arrays,
    scrub_deleted_bytes,
    transaction,
    translate_errors,
)
from tacita.live.json_object import JsonObject
from tacita.live.server.open_requests import (
    ApplyResult,
    OpenRequest,
    ReceivedRequests,
    store_apply_result,
    store_received_requests,
)
from tacita.live.wire import MOST_REQUESTS, Catalogue, RequestOutcome, UserRequest

if TYPE_CHECKING:
    from tacita.live.server.node_query import AcceptedAnswer  # brings the models, which `server status` does not need

STORE_FILE = "server.sqlite"
FORMAT = 3
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# Numbers of nodes are unsigned 64-bit, which an INTEGER does not hold: they are kept as text.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE catalogue (number INTEGER PRIMARY KEY, item TEXT NOT NULL UNIQUE, title TEXT NOT NULL) STRICT;
CREATE TABLE nodes (name TEXT PRIMARY KEY, public_key TEXT NOT NULL UNIQUE, number TEXT UNIQUE,
    enrolled REAL NOT NULL, revoked REAL) STRICT;
CREATE TABLE runs (name TEXT PRIMARY KEY, config TEXT NOT NULL, options TEXT NOT NULL, created REAL NOT NULL,
    opened INTEGER NOT NULL, note TEXT) STRICT;
CREATE TABLE block_items (run TEXT NOT NULL, block INTEGER NOT NULL, n_items INTEGER NOT NULL,
    PRIMARY KEY (run, block)) STRICT;
CREATE TABLE arrays (run TEXT NOT NULL, name TEXT NOT NULL, sha TEXT NOT NULL, array BLOB NOT NULL,
    PRIMARY KEY (run, name)) STRICT;
CREATE TABLE accepted (run TEXT NOT NULL, block INTEGER NOT NULL, round INTEGER NOT NULL, kind TEXT NOT NULL,
    node TEXT NOT NULL, sha TEXT NOT NULL, clients INTEGER NOT NULL, time REAL NOT NULL,
    PRIMARY KEY (run, block, round, kind, node)) STRICT;
CREATE TABLE events (id INTEGER PRIMARY KEY, run TEXT NOT NULL, time REAL NOT NULL, event TEXT NOT NULL) STRICT;
CREATE TABLE requests (id INTEGER PRIMARY KEY, run TEXT NOT NULL, node TEXT NOT NULL, time REAL NOT NULL,
    number INTEGER NOT NULL, sender TEXT NOT NULL, request TEXT NOT NULL, outcome TEXT NOT NULL, done REAL,
    heard REAL, UNIQUE (run, node, number)) STRICT;
"""


@dataclass(frozen=True)
class NodeRow:
    name: str
    public_key: str
    number: int | None  # under which the engine knows it; None: not registered there yet
    enrolled: float
    revoked: float | None


@dataclass(frozen=True)
class RunRow:
    name: str
    config: RunConfig
    options: JsonObject  # quorum, timeout
    opened: int  # blocks that were opened
    note: JsonObject | None  # where it stands; None: nothing was committed yet


def _format_error(path: Path, format: Any) -> TacitaError:
    """A file that another version of the server wrote."""
    is_number = isinstance(format, str | int) and str(format).isdecimal()
    number = int(format) if is_number else 0
    named = f"format {number}" if number else "no format that is known"
    if number > FORMAT:
        return TacitaError(f"{path} was made by a newer tacita ({named}, this one reads {FORMAT}); update tacita.")
    return TacitaError(
        f"{path} was made by an older tacita ({named}, this one reads {FORMAT}); make a new server in another folder "
        "with `tacita server init`: people's data are on their nodes, which enrol there anew."
    )


class ServerStore:
    """The server's file; several processes of the same server may have it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise TacitaError(f"there is no server in {path.parent}; `tacita server init` makes one.")
        with self._translate_errors():
            format = read_format_or_none(path)
        if format != str(FORMAT):
            raise _format_error(path, format)
        with self._translate_errors():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.execute("PRAGMA busy_timeout = 30000")

    @staticmethod
    def create(path: Path) -> ServerStore:
        if path.exists():
            raise TacitaError(f"{path} exists; a server is made in a new folder.")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            path.chmod(0o600)
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN;{_SCHEMA}INSERT INTO meta VALUES ('format', '{FORMAT}');COMMIT;")
        return ServerStore(path)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> ServerStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _translate_errors(self) -> contextlib.AbstractContextManager[None]:
        return translate_errors(self.path, "restore a copy")

    @contextlib.contextmanager
    def _write_transaction(self) -> Iterator[Connection]:
        with self._translate_errors(), transaction(self._db):
            yield self._db

    def _fetch_rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self._translate_errors():
            return self._db.execute(sql, parameters).fetchall()

    # Catalogue

    def read_catalogue(self) -> Catalogue:
        """Raw id and title of every item, in the order of the item table."""
        rows = self._fetch_rows("SELECT item, title FROM catalogue ORDER BY number")
        return [(item, title) for item, title in rows]

    def count_items(self) -> int:
        """How many items a block would have now: enough to learn from, or a sentence."""
        rows = self._fetch_rows("SELECT count(*) FROM catalogue")
        n_items = int(rows[0][0])
        if n_items < 2:
            raise TacitaError("the catalogue has fewer than two items; `tacita server catalogue add FILE` fills it.")
        return n_items

    def add_items(self, items: Sequence[tuple[str, str]]) -> int:
        """Add items at the end; those that are there keep their place and get the title if they had none."""
        with self._write_transaction() as db:
            known = dict(db.execute("SELECT item, title FROM catalogue").fetchall())
            new_titles: dict[str, str] = {}
            for item, title in items:
                if item not in known:
                    new_titles[item] = new_titles.get(item) or title
                elif title and not known[item]:
                    db.execute("UPDATE catalogue SET title = ? WHERE item = ?", (title, item))
            for number, (item, title) in enumerate(new_titles.items(), len(known)):
                row = (number, item, title)
                db.execute("INSERT INTO catalogue (number, item, title) VALUES (?, ?, ?)", row)
        return len(new_titles)

    # Nodes

    def list_nodes(self) -> list[NodeRow]:
        rows = self._fetch_rows("SELECT name, public_key, number, enrolled, revoked FROM nodes ORDER BY enrolled, name")
        nodes = []
        for name, public_key, number, enrolled, revoked in rows:
            engine_number = None if number is None else int(number)
            nodes.append(NodeRow(name, public_key, engine_number, enrolled, revoked))
        return nodes

    def list_allowed_nodes(self) -> set[int]:
        """Numbers of the nodes that may take part."""
        enrolled = [node for node in self.list_nodes() if node.revoked is None]
        return {node.number for node in enrolled if node.number is not None}

    def add_node(self, name: str, public_key: str) -> None:
        _check_name("node", name)
        with self._write_transaction() as db:
            if db.execute("SELECT 1 FROM nodes WHERE name = ?", (name,)).fetchone():
                raise TacitaError(f"a node named '{name}' is enrolled already; choose another --name.")
            if db.execute("SELECT 1 FROM nodes WHERE public_key = ?", (public_key,)).fetchone():
                raise TacitaError("this key is or was enrolled already; a node that was revoked needs a new key.")
            row = (name, public_key, time.time())
            db.execute("INSERT INTO nodes (name, public_key, enrolled) VALUES (?, ?, ?)", row)

    def set_node_number(self, name: str, number: int) -> None:
        with self._write_transaction() as db:
            db.execute("UPDATE nodes SET number = ? WHERE name = ?", (str(number), name))

    def store_node_notes(self, notes: dict[int, JsonObject]) -> None:
        """What nodes said of themselves with their last answers: their version, how far off their clock is."""
        with self._write_transaction() as db:
            for number, note in notes.items():
                row = (str(number), json.dumps(note))
                db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('node/' || ?, ?)", row)

    def revoke_node(self, name: str) -> NodeRow:
        node_by_name = {node.name: node for node in self.list_nodes()}
        if name not in node_by_name:
            names = ", ".join(sorted(node_by_name)) or "none"
            raise TacitaError(f"no node is named '{name}'; enrolled nodes: {names}.")
        node = node_by_name[name]
        if node.revoked is not None:
            raise TacitaError(f"node '{name}' was revoked already.")
        with self._write_transaction() as db:
            db.execute("UPDATE nodes SET revoked = ? WHERE name = ?", (time.time(), name))
        return node

    # Runs

    def create_run(self, name: str, config: RunConfig, options: JsonObject) -> None:
        _check_name("run", name)
        with self._write_transaction() as db:
            if db.execute("SELECT 1 FROM runs WHERE name = ?", (name,)).fetchone():
                raise TacitaError(f"there is a run '{name}' already; choose another --name.")
            settings = config.model_dump_json()
            row = (name, settings, json.dumps(options), time.time())
            db.execute("INSERT INTO runs (name, config, options, created, opened) VALUES (?, ?, ?, ?, 0)", row)

    def list_runs(self) -> list[RunRow]:
        rows = self._fetch_rows("SELECT name, config, options, opened, note FROM runs ORDER BY created")
        return [_read_run_row(*row) for row in rows]

    def load_run(self, name: str) -> RunRow:
        rows = self._fetch_rows("SELECT name, config, options, opened, note FROM runs WHERE name = ?", name)
        if not rows:
            names = [other for (other,) in self._fetch_rows("SELECT name FROM runs ORDER BY created")]
            raise TacitaError(f"there is no run '{name}' on this server; runs: {', '.join(names) or 'none yet'}.")
        return _read_run_row(*rows[0])

    def open_block(self, name: str) -> int:
        """Open the next block with the catalogue as it is now; the one before must be done."""
        row = self.load_run(name)
        if row.opened > count_done_blocks(row):
            raise TacitaError(
                f"block {row.opened - 1} of run '{name}' is not done yet; `tacita server resume {name}` watches it."
            )
        n_items = self.count_items()
        with self._write_transaction() as db:
            db.execute("UPDATE runs SET opened = opened + 1 WHERE name = ?", (name,))
            block = (name, row.opened, n_items)
            db.execute("INSERT INTO block_items (run, block, n_items) VALUES (?, ?, ?)", block)
        return row.opened

    def list_block_sizes(self, name: str) -> list[int]:
        """Items of the catalogue in each opened block."""
        rows = self._fetch_rows("SELECT n_items FROM block_items WHERE run = ? ORDER BY block", name)
        return [n_items for (n_items,) in rows]

    def load_arrays(self, name: str) -> Arrays:
        rows = self._fetch_rows("SELECT name, array FROM arrays WHERE run = ?", name)
        where = str(self.path)
        return {array_name: unpack(blob, where)["array"] for array_name, blob in rows}

    def commit_round(
        self,
        run: str,
        note: JsonObject,
        arrays: Arrays,
        accepted: Sequence[AcceptedAnswer],
        received: ReceivedRequests,
        event: JsonObject,
        result: ApplyResult | None = None,
    ) -> None:
        """A round, or requests that were carried out, in one transaction.

        An answer that is there already means that a round was counted twice: refused. A request that is there already
        came with an earlier answer.
        """
        at = time.time()
        digested = {}
        for name, array in arrays.items():
            digested[name] = (digest_array(array), array)
        with self._write_transaction() as db:
            replace_run_arrays(db, "arrays", run, digested)
            for answer in accepted:
                _put_accepted(db, run, answer, at)
            store_received_requests(db, run, received, at)
            if result is not None:
                store_apply_result(db, run, result, at)
            db.execute("UPDATE runs SET note = ? WHERE name = ?", (json.dumps(note), run))
            db.execute("INSERT INTO events (run, time, event) VALUES (?, ?, ?)", (run, at, json.dumps(event)))

    def list_open_requests(self, run: str) -> list[OpenRequest]:
        """Requests that were not carried out yet, oldest first."""
        rows = self._fetch_rows(
            "SELECT id, node, request, outcome FROM requests WHERE run = ? AND request != '' ORDER BY id", run
        )
        requests = []
        for row_id, node, request_text, outcome_text in rows:
            request = _validate_json(UserRequest, request_text, "a request")
            outcome = _read_outcome(outcome_text)
            requests.append(OpenRequest(int(row_id), int(node), request, outcome))
        return requests

    def list_pending(self, run: str) -> list[JsonObject]:
        """Requests that are not carried out: since when, of which node, what was tried. Neither who nor what."""
        rows = self._fetch_rows(
            "SELECT r.id, ifnull(n.name, r.node), r.time, r.outcome FROM requests r LEFT JOIN nodes n "
            "ON n.number = r.node WHERE r.run = ? AND r.done IS NULL ORDER BY r.id",
            run,
        )
        now = time.time()
        pending = []
        for row_id, node, at, outcome_text in rows:
            outcome = _read_outcome(outcome_text).model_dump(include={"state", "tries", "said"})
            pending.append({"request": row_id, "node": node, "age": now - at, **outcome})
        return pending

    def list_outcomes(self, run: str) -> dict[int, list[RequestOutcome]]:
        """Outcomes of requests, by the node that has not read them yet."""
        rows = self._fetch_rows("SELECT node, outcome FROM requests WHERE run = ? AND heard IS NULL ORDER BY id", run)
        outcomes_by_node: dict[int, list[RequestOutcome]] = {}
        for node, outcome_text in rows:
            outcomes = outcomes_by_node.setdefault(int(node), [])
            outcomes.append(_read_outcome(outcome_text))
        return {node: outcomes[:MOST_REQUESTS] for node, outcomes in outcomes_by_node.items()}

    @property
    def needs_scrub(self) -> bool:
        """Whether there are bytes of something that was withdrawn."""
        return bool(self._fetch_rows("SELECT 1 FROM meta WHERE key = 'scrub'"))

    def scrub_deleted_bytes(self) -> bool:
        """Remove them; False: somebody reads the file, so it has to be done later."""
        with self._translate_errors():
            return scrub_deleted_bytes(self._db)

    def set_run_halted(self, run: str, stop: bool) -> None:
        """Order that a run stops, or may go on."""
        with self._write_transaction() as db:
            db.execute("DELETE FROM meta WHERE key = 'halt/' || ?", (run,))
            if stop:
                db.execute("INSERT INTO meta (key, value) VALUES ('halt/' || ?, '1')", (run,))

    def is_run_halted(self, run: str) -> bool:
        return bool(self._fetch_rows("SELECT 1 FROM meta WHERE key = 'halt/' || ?", run))

    def log_event(self, run: str, event: JsonObject) -> None:
        """An event that changes nothing."""
        with self._write_transaction() as db:
            row = (run, time.time(), json.dumps(event))
            db.execute("INSERT INTO events (run, time, event) VALUES (?, ?, ?)", row)

    def list_events(self, run: str, after: int = 0) -> list[tuple[int, float, JsonObject]]:
        rows = self._fetch_rows("SELECT id, time, event FROM events WHERE run = ? AND id > ? ORDER BY id", run, after)
        events = []
        for row_id, at, text in rows:
            events.append((row_id, at, json.loads(text)))
        return events

    def find_last_event(self, run: str) -> JsonObject | None:
        rows = self._fetch_rows("SELECT event FROM events WHERE run = ? ORDER BY id DESC LIMIT 1", run)
        return json.loads(rows[0][0]) if rows else None

    def find_last_answer_time(self, node: int | None) -> float | None:
        """When a node's answer last counted."""
        if node is None:
            return None
        rows = self._fetch_rows("SELECT max(time) FROM accepted WHERE node = ?", str(node))
        at: float | None = rows[0][0]
        return at


def _put_accepted(db: Connection, run: str, answer: AcceptedAnswer, at: float) -> None:
    place = (run, answer.block, answer.round, answer.kind)
    content = (str(answer.node), answer.sha, answer.clients, at)
    db.execute(
        "INSERT INTO accepted (run, block, round, kind, node, sha, clients, time) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*place, *content),
    )


_Model = TypeVar("_Model", bound=StrictModel)


def _validate_json(model: type[_Model], text: str, what: str) -> _Model:
    return validate_model(model, json.loads(text), what)


def _read_outcome(text: str) -> RequestOutcome:
    return _validate_json(RequestOutcome, text, "an outcome")


def _check_name(what: str, name: str) -> None:
    """Names become parts of file names and of messages."""
    if not _NAME.fullmatch(name):
        raise TacitaError(
            f"'{name[:100]}' cannot be the name of a {what}; give --name of letters, digits, '.', '_' and '-'."
        )


def count_done_blocks(row: RunRow) -> int:
    """How many blocks of a run are done."""
    if row.note is None:
        return 0
    state = row.note["plain"]
    return len(state["results"])


def _read_run_row(name: str, config_text: str, options: str, opened: int, note: str | None) -> RunRow:
    config = validate_model(RunConfig, json.loads(config_text), f"the settings of run '{name}'")
    progress = None if note is None else json.loads(note)
    return RunRow(name, config, json.loads(options), opened, progress)


def describe_run_progress(row: RunRow) -> str:
    """How far a run is, for people."""
    n_done = count_done_blocks(row)
    if row.note is None:
        return "waits for its first round" if row.opened else "no block is open"
    state = row.note["plain"]
    if n_done == row.opened:
        last_result = state["results"][-1] if n_done else {}
        unscored = last_result.get("unscored", "")
        blocks_done = f"{n_done} block{'s' if n_done != 1 else ''} done"
        return f"{blocks_done}; {unscored}" if unscored else blocks_done
    if not state["in_block"]:
        return f"opens block {n_done}"
    model = row.note["now"]
    return f"block {model['block']}, round {model['round']}"
