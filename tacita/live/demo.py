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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tacita.cli import console
from tacita.errors import TacitaError

NODES = ("library", "cinema", "school")
LONGEST = 240.0  # seconds for one block


def show(user: str, data_dir: Path | None, out: Path | None, quiet: bool) -> None:
    """Two blocks of MovieLens-100K over three nodes, then recommendations on one of them."""
    _need_engine()
    began = time.monotonic()
    folder = out if out is not None else Path(tempfile.mkdtemp(prefix="tacita-live-"))
    if out is not None:
        if out.exists():
            raise TacitaError(f"{out} exists; choose another --out.")
        out.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as running:
            _story(folder, user, data_dir, quiet, running)
        console.say(f"All processes are stopped; {time.monotonic() - began:.0f} s in all.")
        if out is not None:
            console.say(
                f"Server and nodes are in {out}; start them again with `tacita server up` and `tacita node run`."
            )
    finally:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)


def _story(folder: Path, user: str, data_dir: Path | None, quiet: bool, running: contextlib.ExitStack) -> None:
    from tacita.cli.server import watch

    console.tell(
        "[bold]tacita demo --live[/bold]: one server and three nodes on this machine, TLS and enrolment between them. "
        "Each node holds a third of the people of MovieLens-100K; only sums leave it."
    )
    if os.geteuid() == 0:
        console.say("You are root: while the demo runs, every account on this machine could become root through it.")
    with console.working("splitting MovieLens-100K over three nodes", quiet):
        files, items, home = _split(folder, data_dir)
    if user not in home:
        raise TacitaError(f"user '{user}' is not in MovieLens-100K; choose a number from 1 to 943.")
    server, port, link = folder / "server", _free_port(), _free_port()
    with console.working("making keys, a server and three nodes", quiet):
        _tacita("server", "init", server, "--host", "127.0.0.1", "--port", port, "--link-port", link)
        _tacita("server", "catalogue", "add", items, "--folder", server)
        for name in NODES:
            node = folder / name
            address = f"127.0.0.1:{port}"
            _tacita("node", "init", node, "--server", address, "--ca", server / "ca.pem", "--name", name)
            _tacita("server", "enroll", node / "node.key.pub", "--name", name, "--folder", server)
            _tacita("node", "import", files[name][0], "--folder", node)
    with console.working("starting the server and the nodes", quiet):
        as_root = ["--insecure-run-as-root"] if os.geteuid() == 0 else []
        running.enter_context(_process(folder / "server.log", "server", "up", "--folder", server, *as_root))
        _until(lambda: json.loads(_tacita("server", "status", "--json", "--folder", server))["up"], "the server")
        for name in NODES:
            running.enter_context(_process(folder / f"{name}.log", "node", "run", "--folder", folder / name))
    config = folder / "demo.toml"
    config.write_text(
        'seed = 1\n[backbone]\nname = "tally"\nrecency = 20.0\n',  # learns a block in one exchange
        encoding="utf-8",
    )
    _tacita("server", "train", config, "--folder", server, "--name", "demo", "--detach", "--timeout", 60)
    _tell_block(watch(server, "demo", quiet, LONGEST))
    with console.working("new interactions arrive on the nodes", quiet):
        for name in NODES:
            _tacita("node", "import", files[name][1], "--folder", folder / name)
    _tacita("server", "next-block", "demo", "--folder", server, "--detach")
    _tell_block(watch(server, "demo", quiet, LONGEST))
    node = folder / home[user]
    seen = json.loads(_tacita("node", "status", "--json", "--folder", node))
    console.tell(f"What node '{home[user]}' says of itself: {seen['server sees']}")
    found = json.loads(_tacita("node", "recommend", user, "--json", "--folder", node))
    console.tell(f"On node '{home[user]}', without asking anybody:")
    console.show_recommendations(user, found)


def _tell_block(results: list[dict[str, Any]]) -> None:
    last = results[-1]
    console.tell(
        f"Block {last['block']}: learned in one exchange of sums; NDCG@20 {last['ndcg@20']:.4f} over "
        f"{last['users']:,} people, of which the server got the sum and the count."
    )


def _split(folder: Path, data_dir: Path | None) -> tuple[dict[str, list[Path]], Path, dict[str, str]]:
    """Files for each node, first and second block, an item file for the operator, and where each person lives."""
    from tacita.data.sources import load

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
    return files, items, home


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


def _until(done: Any, what: str, most: float = 90.0) -> None:
    end = time.monotonic() + most
    while not done():
        if time.monotonic() > end:
            raise TacitaError(f"{what} did not start within {most:.0f} s.")
        time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _need_engine() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise TacitaError("the live mode needs Flower; install it with `pip install tacita[live]`.")
