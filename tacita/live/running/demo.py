"""`tacita demo --live`: a server and three nodes on this machine, as their owners would start them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.data.sources import load

RUN = "demo"
NODES = ("library", "cinema", "school")
LONGEST = 240.0  # seconds for one block


@dataclass(frozen=True)
class People:
    """Who lives on which node, what each node's people did in the first and second block, and the items."""

    files: dict[str, list[Path]]
    items: Path
    home: dict[str, str]

    def home_of(self, user: str) -> str:
        if user not in self.home:
            raise TacitaError(f"user '{user}' is not in MovieLens-100K; choose a number from 1 to 943.")
        return self.home[user]


@contextlib.contextmanager
def own_folder(out: Path | None) -> Iterator[Path]:
    """A new folder for the demo; without a name it is gone afterwards."""
    if find_spec("flwr") is None:
        raise TacitaError("the live mode needs Flower; install it with `pip install tacita[live]`.")
    if out is not None:
        if out.exists():
            raise TacitaError(f"{out} exists; choose another --out.")
        out.mkdir(parents=True)
        yield out
        return
    folder = Path(tempfile.mkdtemp(prefix="tacita-live-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_site(folder: Path, people: People) -> None:
    """Keys, a server with a catalogue, and three enrolled nodes that hold their first block."""
    server, port, link = folder / "server", _free_port(), _free_port()
    _tacita("server", "init", server, "--host", "127.0.0.1", "--port", port, "--link-port", link)
    _tacita("server", "catalogue", "add", people.items, "--folder", server)
    for name in NODES:
        node = folder / name
        address = f"127.0.0.1:{port}"
        _tacita("node", "init", node, "--server", address, "--ca", server / "ca.pem", "--name", name)
        _tacita("server", "enroll", node / "node.key.pub", "--name", name, "--folder", server)
    bring(folder, people, block=0)


def bring(folder: Path, people: People, block: int) -> None:
    """Import what each node's people did in a block."""
    for name in NODES:
        _tacita("node", "import", people.files[name][block], "--folder", folder / name)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """The server and the nodes, until this is left; gives the server's folder."""
    server = folder / "server"
    with contextlib.ExitStack() as processes:
        as_root = ["--insecure-run-as-root"] if os.geteuid() == 0 else []
        processes.enter_context(_process(folder / "server.log", "server", "up", "--folder", server, *as_root))
        _until(lambda: json.loads(_tacita("server", "status", "--json", "--folder", server))["up"], "the server")
        for name in NODES:
            processes.enter_context(_process(folder / f"{name}.log", "node", "run", "--folder", folder / name))
        yield server


def begin_run(folder: Path) -> None:
    config = folder / f"{RUN}.toml"
    config.write_text(
        'seed = 1\n[backbone]\nname = "tally"\nrecency = 20.0\n',  # learns a block in one exchange
        encoding="utf-8",
    )
    _tacita("server", "train", config, "--folder", folder / "server", "--name", RUN, "--detach", "--timeout", 60)


def next_block(folder: Path) -> None:
    _tacita("server", "next-block", RUN, "--folder", folder / "server", "--detach")


def ask_node(node: Path, *words: str) -> Any:
    """What a node answers its owner, read from JSON."""
    return json.loads(_tacita("node", *words, "--json", "--folder", node))


def split(folder: Path, data_dir: Path | None) -> People:
    """MovieLens-100K as files: two blocks for each node, items for the operator."""
    table = load("ml-100k", data_dir=data_dir)
    assert table.timestamp is not None
    home = {raw: NODES[n % len(NODES)] for n, raw in enumerate(table.user_ids)}
    cut = sorted(table.timestamp.tolist())[int(0.8 * len(table.timestamp))]
    files = {name: [folder / f"{name}-{block}.csv" for block in (0, 1)] for name in NODES}
    lines: dict[Path, list[str]] = {path: ["user,item,timestamp"] for both in files.values() for path in both}
    for user, item, at in zip(table.user.tolist(), table.item.tolist(), table.timestamp.tolist(), strict=True):
        raw = table.user_ids[user]
        lines[files[home[raw]][int(at > cut)]].append(f"{raw},{table.item_ids[item]},{at}")
    for path, text in lines.items():
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
    items = folder / "items.tsv"
    rows = [f"{item}\t{table.titles.get(item, '')}" for item in table.item_ids]
    items.write_text("\n".join(["item\ttitle", *rows]) + "\n", encoding="utf-8")
    return People(files, items, home)


def _tacita(*words: object) -> str:
    """A command as a person would type it; its answer."""
    done = subprocess.run(_command(*words), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise TacitaError(f"`tacita {words[0]} {words[1]}` failed: {said[-1] if said else 'no reason given'}")
    return done.stdout


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tacita", *map(str, words)]


@contextlib.contextmanager
def _process(log: Path, *words: object) -> Iterator[None]:
    """A server or node in the background, stopped at the end as Ctrl-C would."""
    with open(log, "wb") as held:
        child = subprocess.Popen(_command(*words), stdout=held, stderr=held, start_new_session=True)
    try:
        time.sleep(0.2)
        if child.poll() is not None:
            raise TacitaError(f"`tacita {words[0]} {words[1]}` did not start; {log} says why.")
        yield
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)


def _until(done: Callable[[], bool], what: str, most: float = 90.0) -> None:
    end = time.monotonic() + most
    while not done():
        if time.monotonic() > end:
            raise TacitaError(f"{what} did not start within {most:.0f} s.")
        time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
