"""A server and its nodes as their owners run them: `python -m tacita ...`, every process ended by its id."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from live_cluster import eventually, free_port

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.types import Arrays
from tacita.data import splits
from tacita.data.sources import load_interactions
from tacita.live.node.node import Node, NodeConfig
from tacita.live.processes import _is_same_process, _list_descendants_with_start_times, _read_stat
from tacita.live.running import node_client
from tacita.live.server.coordinator import STORE_FILE
from tacita.live.server.store import ServerStore, count_done_blocks
from tacita.live.tls_certificates import make_node_key
from tacita.methods import resolve_config
from tacita.runs.assembly import Machine, assemble_federation

NODES = ("library", "cinema", "school")
MADE = "synthetic:users=120,items=300,per_user=20,groups=4,drift=0.9,new=0.2"
SPLIT = {"kind": "blocks", "n_blocks": 2, "base_share": 0.7}
FIRST_TIME = 1_234_500_000  # far from any time at which a test runs

UP = ("server", "up", "--insecure-run-as-root")  # tests may run as root

Row = tuple[str, str, int]


def tacita(*words: object, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """A command as a person types it."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout, check=False)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tacita", *map(str, words)]


def done(*words: object) -> str:
    """A command that must work; what it printed."""
    result = tacita(*words)
    assert result.returncode == 0, f"tacita {' '.join(map(str, words))}: {result.stderr[-2000:]}"
    return result.stdout


def said(*words: object, timeout: float = 60.0) -> str:
    """A command that must fail with one sentence; the sentence."""
    result = tacita(*words, timeout=timeout)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode not in (0, -9), (words, result)
    assert "Traceback" not in result.stderr, result.stderr
    return " ".join(" ".join(lines).split())


# Data


def make_data(folder: Path) -> Path:
    """Interactions of people whose ids and times are found wherever they are written."""
    table = load_interactions(MADE)
    assert table.timestamp is not None
    order = np.argsort(table.timestamp, kind="stable")
    lines = ["user,item,timestamp"]
    for n, row in enumerate(order):
        lines.append(
            f"{person(table.user_ids[table.user[row]])},{table.item_ids[table.item[row]]},{FIRST_TIME + 7 * n}"
        )
    path = folder / "everything.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def person(name: str) -> str:
    return f"person-{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def home(user: str) -> str:
    """The node on which a person lives."""
    return NODES[int(user[-4:], 16) % len(NODES)]


def rows_of_blocks(config: RunConfig) -> list[list[Row]]:
    """The raw rows that the lab cuts into each block."""
    table = load_interactions(config.data)
    split = assemble_federation(config, Machine()).config.split
    order, cuts = splits.order_rows(table, np.arange(len(table.user)), split, Draws(split.seed))
    assert table.timestamp is not None
    rows = [(table.user_ids[table.user[r]], table.item_ids[table.item[r]], int(table.timestamp[r])) for r in order]
    return [rows[lo:hi] for lo, hi in pairwise(cuts)]


def items_of_blocks(config: RunConfig) -> list[list[str]]:
    """The catalogue as the lab comes to know it."""
    stream = assemble_federation(config, Machine()).stream
    return [list(stream.item_ids[: block.n_items]) for block in stream.blocks]


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    text = "\n".join(["user,item,timestamp", *(f"{u},{i},{t}" for u, i, t in rows)]) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def config_of(data: Path, rounds: int = 3, **more: Any) -> RunConfig:
    values = {"data": str(data), "split": SPLIT, "seed": 5, "train": {"rounds": rounds}, **more}
    return resolve_config(values, "the test")


# Processes


class Running:
    """A `tacita` command in the background, with all that it starts."""

    def __init__(self, log: Path, *words: object) -> None:
        self.log, self.words = log, words
        self.begin = log.stat().st_size if log.exists() else 0
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(log, "ab") as state:
            self.process = subprocess.Popen(
                command(*words), stdout=state, stderr=state, stdin=subprocess.DEVNULL, start_new_session=True, env=env
            )
        self._family: set[tuple[int, str]] = set()

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What it has written since it was started."""
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    def family(self) -> list[int]:
        """All processes below it that live."""
        self._family |= set(_list_descendants_with_start_times(self.pid))
        return [pid for pid, begun in self._family if _is_same_process(pid, begun)]

    def of(self, word: str) -> list[int]:
        """Those of the family whose command line has a word."""
        return [pid for pid in self.family() if word in command_line(pid)]

    def kill(self, whole: bool) -> None:
        """SIGKILL to the process and, if asked, to all below it at the same moment."""
        below = self.family() if whole else []
        for pid in (self.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        """As Ctrl-C would; then leave nothing."""
        self.family()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Of a process, without those it has started."""
    fields = _read_stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Site:
    """A server's folder and nodes around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, folder / "server"
        self.port, self.link_port = free_port(), free_port()
        self.running: dict[str, Running] = {}
        self._ended: list[Running] = []
        where = ["--host", "127.0.0.1", "--port", self.port, "--link-port", self.link_port]
        done("server", "init", self.server, *where)

    # The server

    def up(self) -> Running:
        entry = self._start("server", *UP, "--folder", self.server)
        self._wait_for(entry, "serving nodes on", 90)
        return entry

    def publish(self, items: list[str], name: str = "items") -> None:
        path = self.folder / f"{name}.csv"
        path.write_text("\n".join(["item,title", *(f"{i},Title of {i}" for i in items)]) + "\n", encoding="utf-8")
        done("server", "catalogue", "add", path, "--folder", self.server)

    def train(self, name: str, config: RunConfig, *more: object) -> None:
        """Begin a run; `wait` tells when it is done."""
        from tacita.core.config import to_toml

        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(config.model_copy(update={"data": "ml-100k"})), encoding="utf-8")
        done("server", "train", path, "--folder", self.server, "--timeout", 60, "--detach", *more)

    def next_block(self, name: str) -> None:
        done("server", "next-block", name, "--folder", self.server, "--detach")

    def wait(self, name: str, timeout: float = 120.0) -> None:
        """Until all blocks of a run that were opened are done."""
        with self.store() as store:

            def ready() -> bool:
                row, last = store.load_run(name), store.find_last_event(name)
                assert last is None or last["event"] != "stopped", last
                return count_done_blocks(row) == row.opened

            try:
                eventually(ready, timeout, f"run '{name}' is done")
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.logs()}") from None

    def store(self) -> ServerStore:
        return ServerStore(self.server / STORE_FILE)

    def arrays(self, run: str) -> Arrays:
        with self.store() as store:
            return store.load_arrays(run)

    def events(self, run: str, kind: str = "") -> list[dict[str, Any]]:
        with self.store() as store:
            results = [event for _, _, event in store.list_events(run)]
        return [entry for entry in results if not kind or entry["event"] == kind]

    def rounds_done(self, run: str) -> int:
        return len(self.events(run, "round"))

    # Nodes

    def make_node(self, name: str, secret: str | None = None, enroll: bool = True) -> Path:
        """With a known secret through Python, since no command takes one; else as its owner would."""
        folder, address = self.folder / name, f"127.0.0.1:{self.port}"
        if secret is None:
            done("node", "init", folder, "--server", address, "--ca", self.server / "ca.pem", "--name", name)
        else:
            values = {"name": name, "server": address, "min_contributors": 1}  # the lab leaves out nothing
            config = validate_model(NodeConfig, values, "the test")
            Node.create(
                folder, config, self.server / "ca.pem", secret, also=lambda result: make_node_key(result / config.key)
            )
        if enroll:
            done("server", "enroll", folder / "node.key.pub", "--name", name, "--folder", self.server)
        return folder

    def collect(self, name: str, rows: Iterable[Row], file: str) -> dict[str, Any]:
        path = write_rows(self.folder / f"{name}-{file}.csv", rows)
        document: dict[str, Any] = json.loads(done("node", "import", path, "--folder", self.folder / name, "--json"))
        return document

    def run_node(self, name: str) -> Running:
        return self._start(name, "node", "run", "--folder", self.folder / name)

    def connection(self, name: str) -> str:
        """What the running node says of its connection; empty while it starts."""
        try:
            return str(node_client.ask_daemon(self.folder / name, "status").get("connection", ""))
        except Exception:
            return ""

    def wait_online(self, *names: str, timeout: float = 90.0) -> None:
        for name in names:
            self.wait_connection(name, lambda now: now.startswith("online"), timeout)

    def wait_connection(self, name: str, fits: Callable[[str], bool], timeout: float = 60.0) -> str:
        found = ""

        def ready() -> bool:
            nonlocal found
            found = self.connection(name)
            return fits(found)

        try:
            eventually(ready, timeout, f"the connection of {name}")
        except AssertionError as error:
            raise AssertionError(f"{error}: '{found}'\n{self.logs()}") from None
        return found

    def ledger(self, name: str, run: str) -> list[tuple[int, int, str]]:
        """(block, round, kind) of all that left a node, as its file has it."""
        request = "SELECT block, round, kind FROM ledger WHERE run = ? ORDER BY id"
        return [(b, r, k) for b, r, k in self.rows(name, request, run)]

    def rows(self, name: str, sql: str, *given: object) -> list[tuple[Any, ...]]:
        """Rows of a node's file, which may be in use."""
        with contextlib.closing(
            sqlite3.connect(f"file:{self.folder / name / 'node.sqlite'}?mode=ro", uri=True, timeout=10)
        ) as db:
            return db.execute(sql, given).fetchall()

    # All

    def _start(self, name: str, *words: object) -> Running:
        if name in self.running:
            self._ended.append(self.running[name])
        entry = self.running[name] = Running(self.folder / f"{name}.log", *words)
        return entry

    def _wait_for(self, one: Running, text: str, timeout: float) -> None:
        def ready() -> bool:
            assert one.process.poll() is None or text in one.text(), one.text()[-3000:]
            one.family()
            return text in one.text()

        eventually(ready, timeout, f"'{text}' in {one.log.name}")

    def stop(self) -> None:
        for name in sorted(self.running, key=lambda name: name == "server"):  # the server last
            self.running[name].stop()
        for entry in self._ended:
            entry.stop()

    def logs(self) -> str:
        """The ends of all logs, for a test that failed."""
        files = [entry.log for entry in self.running.values()]
        files += [self.server / "flower" / "superlink.log", *self.folder.glob("*/flower/client.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in files if path.exists())


def hashes(folder: Path, skip: tuple[str, ...] = (".lock", "-shm", ".log")) -> dict[str, str]:
    """Every file of a folder that holds something, and what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size and not path.name.endswith(skip)
    }


def distance(one: Any, other: Any) -> float:
    """|a - b| / |b|."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert one.shape == other.shape
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-300))
