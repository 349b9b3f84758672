"""Share, take back and leave as people on a real node do it, with kills in between, and what the server has then."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

from live_cluster import eventually
from live_site import Site, config_of, done, items_of_blocks, make_data, rows_of_blocks, said

pytestmark = pytest.mark.live

NODES = ("library", "cinema")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    config = config_of(make_data(tmp_path))
    result = Site(tmp_path)
    try:
        result.publish(items_of_blocks(config)[0])
        for name in NODES:
            result.make_node(name, secret="a secret")
            rows = [row for row in rows_of_blocks(config)[0] if NODES[int(row[0][-4:], 16) % 2] == name]
            result.collect(name, rows, "first")
        result.up()
        for name in NODES:
            result.run_node(name)
        result.wait_online(*NODES)
        yield result
    finally:
        result.stop()


def state_of(site: Site, number: int) -> dict[str, Any]:
    """How a request stands, as the node's file has it."""
    sql = "SELECT sent, coalesce(outcome, '{}') FROM requests WHERE id = ?"
    ((sent, outcome),) = site.rows("library", sql, number)
    return {"sent": sent, **json.loads(outcome)}


def asks(site: Site, *words: str) -> int:
    document = json.loads(done("node", *words, "--folder", site.folder / "library", "--json"))
    return int(document["requests"][0]["request"])


def wait_done(site: Site, number: int) -> dict[str, Any]:
    try:
        eventually(lambda: state_of(site, number).get("state") == "done", 180, f"request {number} is done")
    except AssertionError as error:
        raise AssertionError(f"{error}: {state_of(site, number)}\n{site.logs()}") from None
    return state_of(site, number)


def files_hold(folder: Path, needles: list[bytes]) -> set[str]:
    """Where any of some bytes are found."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(file.relative_to(folder)) for file in files if any(needle in file.read_bytes() for needle in needles)}


def test_people_share_take_back_and_leave_through_kills(site: Site) -> None:
    config = config_of(
        site.folder / "everything.csv",
        backbone={"name": "mf", "dim": 8},
        method="fedshare-local",
        train={"rounds": 2000, "patience": 2000, "participation": {"kind": "all"}},
    )
    site.train("r", config)
    user = site.rows("library", "SELECT raw FROM users ORDER BY id LIMIT 1")[0][0]
    own = "SELECT DISTINCT i.item FROM interactions i JOIN users u ON u.id = i.user WHERE u.raw = ? ORDER BY i.item"
    items = [item for (item,) in site.rows("library", own, user)]
    eventually(lambda: site.rounds_done("r") >= 1, 180, "a round")
    first, second = asks(site, "share", user, *items[:2]), asks(site, "share", user, items[2])
    for candidate in (first, second):
        assert wait_done(site, candidate)["certificate"]["verdict"] == "shared"
    arrays = site.arrays("r")
    (sender,) = set(arrays["now/given/sender"].tolist())
    assert len(arrays["now/given/item"]) == 3
    times = {entry: at for entry, at in site.rows("library", "SELECT id, created FROM requests")}

    def needles(number: int) -> list[bytes]:
        return [struct.pack("<d", times[number]), repr(times[number]).encode()]

    assert "server.sqlite" in " ".join(files_hold(site.server, needles(first)))
    wait_done(site, asks(site, "unshare", user, *items[:2]))
    assert len(site.arrays("r")["now/given/item"]) == 1
    eventually(lambda: not files_hold(site.server, needles(first)), 180, "nothing is left of what was taken back")

    last = asks(site, "leave", user)
    site.running["library"].kill(whole=True)
    site.running["server"].kill(whole=True)
    site.up()
    site.run_node("library")
    report = wait_done(site, last)
    assert report["round"] >= 1
    assert "now/given/item" not in site.arrays("r")
    assert [event["kind"] for event in site.events("r", "request")] == ["share", "share", "unshare", "leave"]
    eventually(lambda: not files_hold(site.server, needles(second)), 180, "nothing is left of what was shared")
    # Flower keeps the last answers to a server that was killed, with the name under which somebody left
    name = [struct.pack("<Q", sender), str(sender).encode()]
    assert not [entry for entry in files_hold(site.server, name) if "link.db" not in entry]
    shown = done("node", "status", "--folder", site.folder / "library")
    assert f"request {last}: leave of user {user}, run r: done in block 0 after round" in " ".join(shown.split())
    repeat = said("node", "leave", user, "--folder", site.folder / "library")
    assert f"user '{user}' has left run 'r' already." in repeat
