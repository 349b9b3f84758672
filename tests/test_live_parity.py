"""Lab and live are one code: nodes that answer a server give what the lab gives, and a broken round changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.config import RunConfig, validated
from tacita.data import splits
from tacita.data.sources import load
from tacita.errors import TacitaError
from tacita.live import session
from tacita.live.coordinator import STORE, continue_run
from tacita.live.node import Node, NodeConfig
from tacita.live.server_store import ServerStore
from tacita.live.wire import Request, decode_reply, decode_request, encode
from tacita.rng import Draws
from tacita.rounds import Progress, begin_block, end_block, run_block, run_stream, start
from tacita.runs import Machine, assemble
from tacita.types import Arrays

DATA = "synthetic:users=90,items=60,per_user=30,groups=4,drift=0.5,new=0.2"
SPLIT = {"kind": "blocks", "n_blocks": 2, "base_share": 0.7}
MODELS: dict[str, dict[str, Any]] = {
    "fedavg": {"backbone": {"name": "mf", "dim": 8}, "method": "fedavg"},
    "f3crec": {"backbone": {"name": "mf", "dim": 8}, "method": "f3crec", "parts": [{"name": "replay", "top_n": 10}]},
    "tally": {"backbone": {"name": "tally", "ridge": 20.0, "min_item": 2}},
    "ncf": {"backbone": {"name": "ncf", "dim": 8}, "method": "f3crec", "parts": [{"name": "replay", "top_n": 10}]},
}


def config_of(name: str, rounds: int = 3, **train: Any) -> RunConfig:
    values = {"data": DATA, "split": SPLIT, "seed": 5, "train": {"rounds": rounds, **train}, **MODELS[name]}
    return validated(RunConfig, values, "the test")


def rows_of_blocks(config: RunConfig) -> list[list[tuple[str, str, float]]]:
    """The raw rows that the lab cuts into each block."""
    table = load(config.data)
    order = splits._in_time(table, np.arange(len(table.user)), config.split, Draws(config.split.seed))
    assert table.timestamp is not None
    rows = [(table.user_ids[table.user[r]], table.item_ids[table.item[r]], float(table.timestamp[r])) for r in order]
    return [rows[lo:hi] for lo, hi in pairwise(splits._cuts(len(rows), config.split))]


@dataclass
class Loopback:
    """Nodes in this process; `spoil` may swallow or change what travels."""

    members: dict[int, Node]
    spoil: Any = lambda number, body, answer: answer()
    log: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    def nodes(self) -> list[int]:
        return sorted(self.members)

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        out = {}
        for number, body in requests.items():
            reply = self.spoil(number, body, lambda n=number, b=body: session.handle(self.members[n], b))
            if reply is not None:
                self.log.append((number, body, reply))
                out[number] = reply
        return out


@dataclass
class Site:
    """A server's folder and three nodes that know each other."""

    folder: Path
    config: RunConfig
    transport: Loopback
    run: str = "r"

    @property
    def store(self) -> ServerStore:
        return ServerStore(self.folder / STORE)

    def publish(self, items: list[str]) -> None:
        with self.store as store:
            store.add_items([(item, f"title of {item}") for item in items])

    def collect(self, rows: list[tuple[str, str, float]]) -> None:
        for number, node in self.transport.members.items():
            node.store.add([(u, i, t, None) for u, i, t in rows if home(u) == number])

    def next_block(self) -> None:
        with self.store as store:
            store.open_block(self.run)
        continue_run(self.folder, self.run, self.transport)

    def arrays(self) -> Arrays:
        with self.store as store:
            return store.arrays(self.run)


def home(user: str) -> int:
    return 1 + sum(user.encode()) % 3


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    config = getattr(request, "param", None) or config_of("fedavg")
    made = make_site(tmp_path, config)
    yield made
    for node in made.transport.members.values():
        node.close()


def make_site(folder: Path, config: RunConfig, **more: Any) -> Site:
    ServerStore.create(folder / STORE).close()
    members = {}
    with ServerStore(folder / STORE) as store:
        for number in (1, 2, 3):
            where = folder / f"node{number}"
            Node.create(
                where,
                validated(NodeConfig, {"name": f"n{number}", "server": "localhost:1", "min_users": 5, **more}, "test"),
                secret="",
            )
            members[number] = Node.open(where)
            store.add_node(f"n{number}", f"key {number}")
            store.set_number(f"n{number}", number)
        store.new_run("r", config, {"pause": 0.0, "give_up": 1.0})
    return Site(folder, config, Loopback(members))


def lab(config: RunConfig) -> Progress:
    fed = assemble(config, Machine())
    progress = start(fed)
    run_stream(fed, progress, lambda report, now: None)
    return progress


def play(site: Site) -> None:
    """Both blocks, the catalogue as the lab comes to know it."""
    fed = assemble(site.config, Machine())
    for block, rows in zip(fed.stream.blocks, rows_of_blocks(site.config), strict=True):
        site.publish(list(fed.stream.item_ids[: block.n_items]))
        site.collect(rows)
        site.next_block()


def close(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return one.shape == other.shape and bool(np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other))


@pytest.mark.parametrize("site", [config_of(name) for name in MODELS], indirect=True, ids=list(MODELS))
def test_nodes_give_what_the_lab_gives(site: Site) -> None:
    play(site)
    whole = lab(site.config)
    arrays = site.arrays()
    assert close(arrays["now/items"], whole.server.items)
    for name, head in whole.server.heads.items():
        assert close(arrays[f"now/heads/{name}"], head)
    for part, held in whole.server.parts.items():
        for name, value in held.items():
            assert close(arrays[f"now/parts/{part}/{name}"], value), (part, name)
    with site.store as store:
        note = store.run("r").note
        assert note is not None
        for live, there in zip(note["plain"]["results"], whole.results, strict=True):
            assert live["best_round"] == there["best_round"]
            for metric in ("ndcg@20", "recall@20", "valid", "users"):
                assert live[metric] == pytest.approx(there[metric], rel=1e-4)
    if whole.clients.private.shape[1]:
        fed = assemble(site.config, Machine())
        number = {raw: n for n, raw in enumerate(fed.stream.user_ids)}
        for node in site.transport.members.values():
            found = node.store.devices("r", "now")
            assert found is not None
            raw_of = dict(zip(*node.store.users(), strict=True))
            rows = [number[raw_of[one]] for one in found[1]["users"]]
            assert close(found[1]["private"], whole.clients.private[rows])
