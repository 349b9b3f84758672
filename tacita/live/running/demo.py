"""`tacita demo --live`: a server and three nodes on this machine, in processes as their owners would start them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.data.sources import load_interactions

RUN = "demo"
NODES = ("library", "cinema", "school")
BLOCK_TIMEOUT = 240.0  # seconds for one block
CUTS = (0.7, 0.8, 0.87, 0.94)  # two blocks for the script, three for requests from the pages
SETTINGS = {"seed": 1, "backbone": {"name": "tally", "recency": 20.0}}  # learns a block in one exchange


@dataclass(frozen=True)
class DemoData:
    """The people of each node, their interactions in each block, and the items with their titles."""

    files: dict[str, list[Path]]  # by node, a file for each block
    items: list[tuple[str, str]]
    home: dict[str, str]  # node by person
    first_block_items: dict[str, list[str]]  # of each person

    def find_home_node(self, user: str) -> str:
        if user not in self.home:
            raise TacitaError(f"user '{user}' is not in MovieLens-100K; choose a number from 1 to 943.")
        return self.home[user]


@contextlib.contextmanager
def make_demo_folder(out: Path | None) -> Iterator[Path]:
    """Make a folder for the demo; without a name it is removed afterwards."""
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


def make_demo_site(folder: Path, people: DemoData) -> None:
    """Make keys, a server with a catalogue, and three enrolled nodes that hold their first block."""
    from tacita.live.running.node_setup import make_node  # late, as below: these need what tacita[live] brings
    from tacita.live.running.server import ServerConfig, create_server, enroll_node, open_store

    server = folder / "server"
    port = _find_free_port()
    config = ServerConfig(host="127.0.0.1", port=port, link_port=_find_free_port())
    create_server(server, config, [])
    with open_store(server) as store:
        store.add_items(people.items)
    for name in NODES:
        values = {"name": name, "server": f"127.0.0.1:{port}"}
        node = make_node(folder / name, values, server / "ca.pem")
        enroll_node(server, Path(node["public key"]), name)
    import_block(folder, people, block=0)


def import_block(folder: Path, people: DemoData, block: int) -> None:
    """Import the interactions of each node's people in a block."""
    from tacita.live.running import node_client

    for name in NODES:
        path = people.files[name][block].absolute()
        node_client.ask_node(folder / name, "import", file=str(path))


@contextlib.contextmanager
def run_demo_site(folder: Path) -> Iterator[Path]:
    """Run the server and the nodes while the context is open; yields the server's folder."""
    from tacita.live.running.server import is_up

    server = folder / "server"
    with contextlib.ExitStack() as processes:
        as_root = ["--insecure-run-as-root"] if os.geteuid() == 0 else []
        processes.enter_context(_run_process(folder / "server.log", "server", "up", "--folder", server, *as_root))
        _wait_until(lambda: is_up(server), "the server")
        for name in NODES:
            processes.enter_context(_run_process(folder / f"{name}.log", "node", "run", "--folder", folder / name))
        yield server


def begin_run(folder: Path) -> None:
    from tacita.live.running import orders
    from tacita.methods import resolve_config

    config = resolve_config(SETTINGS, "the demo")
    terms = orders.RunTerms("all", timeout=60.0, give_up=3600.0)
    orders.begin_run(folder / "server", RUN, config, terms)


def open_next_block(folder: Path) -> None:
    from tacita.live.running import orders

    orders.open_block(folder / "server", RUN)


def write_demo_data(folder: Path, data_dir: Path | None) -> DemoData:
    """MovieLens-100K as files: blocks for each node, items for the operator."""
    table = load_interactions("ml-100k", data_dir=data_dir)
    assert table.timestamp is not None
    home = {raw: NODES[n % len(NODES)] for n, raw in enumerate(table.user_ids)}
    times = table.timestamp.tolist()
    sorted_times = sorted(times)
    block_ends = [sorted_times[int(share * len(times))] for share in CUTS]
    files = {name: _list_block_files(folder, name) for name in NODES}
    lines: dict[Path, list[str]] = {}
    for paths in files.values():
        lines |= {path: ["user,item,timestamp"] for path in paths}
    first_block_items: dict[str, list[str]] = {}
    for user_row, item_row, at in zip(table.user.tolist(), table.item.tolist(), times, strict=True):
        user = table.user_ids[user_row]
        item = table.item_ids[item_row]
        block = bisect_left(block_ends, at)
        path = files[home[user]][block]
        lines[path].append(f"{user},{item},{at}")
        if block == 0:
            first_block_items.setdefault(user, []).append(item)
    for path, texts in lines.items():
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    items = [(item, table.titles.get(item, "")) for item in table.item_ids]
    return DemoData(files, items, home, first_block_items)


def _list_block_files(folder: Path, node: str) -> list[Path]:
    n_blocks = len(CUTS) + 1
    return [folder / f"{node}-{block}.csv" for block in range(n_blocks)]


@contextlib.contextmanager
def _run_process(log: Path, *words: object) -> Iterator[None]:
    """Run a server or node in the background; at the end it stops as Ctrl-C would stop it."""
    command = [sys.executable, "-m", "tacita", *map(str, words)]
    with open(log, "wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
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


def _wait_until(is_done: Callable[[], bool], subject: str, most: float = 90.0) -> None:
    end = time.monotonic() + most
    while not is_done():
        if time.monotonic() > end:
            raise TacitaError(f"{subject} did not start within {most:.0f} s.")
        time.sleep(0.5)


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
