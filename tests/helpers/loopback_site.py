"""A server and three nodes in this process, joined by a transport that a test can disturb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.types import Arrays
from tacita.data import splits
from tacita.data.sources import load_interactions
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.live.node import question_handler
from tacita.live.node.node import Node, NodeConfig
from tacita.live.server.coordinator import STORE_FILE, continue_run
from tacita.live.server.store import ServerStore
from tacita.live.wire import ServerRequest, decode_reply, decode_request, encode_message, stamp_reply
from tacita.methods import find_part_class, list_preset_names, list_preset_parts
from tacita.round.part import implements
from tacita.round.registry import is_lab_only
from tacita.runs.assembly import Machine, assemble_federation, build_plan

DATA = "synthetic:users=90,items=60,per_user=30,groups=4,drift=0.5,new=0.2"
SPLIT = {"kind": "blocks", "n_blocks": 2, "base_share": 0.7}
PATIENT = {"pause": 0.0, "give_up": 60.0}  # a server that waits for slow machines
_MF = {"name": "mf", "dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "fedavg": {"backbone": {"name": "mf", "dim": 8}, "method": "fedavg"},
    "f3crec": {"backbone": {"name": "mf", "dim": 8}, "method": "f3crec", "parts": [{"name": "replay", "top_n": 10}]},
    "tally": {"backbone": {"name": "tally", "ridge": 20.0, "min_item": 2, "keep": 20}},
    "tally-order": {"backbone": {"name": "tally-order", "ridge": 20.0, "min_item": 2, "keep": 20, "order_back": False}},
    "ncf": {"backbone": {"name": "ncf", "dim": 8}, "method": "f3crec", "parts": [{"name": "replay", "top_n": 10}]},
}
# Parts that remember more items than this catalogue has; and people here share nothing unless they ask for it.
_CHANGED = {"replay": {"name": "replay", "top_n": 10}, "sharing": {"name": "sharing", "groups": [0, 0, 1]}}


def site_config(name: str, rounds: int = 3, **train: Any) -> RunConfig:
    values = {"data": DATA, "split": SPLIT, "seed": 5, "train": {"rounds": rounds, **train}, **MODELS[name]}
    return validate_model(RunConfig, values, "the test")


def rows_of_blocks(config: RunConfig) -> list[list[tuple[str, str, float]]]:
    """The raw rows that the lab cuts into each block."""
    table = load_interactions(config.data)
    split = assemble_federation(config, Machine()).config.split
    order, cuts = splits.order_rows(table, np.arange(len(table.user)), split, Draws(split.seed))
    assert table.timestamp is not None
    rows = [(table.user_ids[table.user[r]], table.item_ids[table.item[r]], float(table.timestamp[r])) for r in order]
    return [rows[lo:hi] for lo, hi in pairwise(cuts)]


@dataclass
class Loopback:
    """Nodes in this process; `spoil` may swallow or change what travels."""

    members: dict[int, Node]
    spoil: Any = lambda number, body, answer: answer()
    log: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    def list_online_nodes(self) -> list[int]:
        return sorted(self.members)

    def exchange(self, requests: Mapping[int, bytes], timeout: float) -> dict[int, bytes]:
        out = {}
        for number, body in requests.items():
            reply = self.spoil(
                number, body, lambda n=number, b=body: question_handler.answer_message(self.members[n], b)
            )
            if reply is not None:
                self.log.append((number, body, reply))
                out[number] = reply
        return out


def home_node(user: str) -> int:
    return 1 + sum(user.encode()) % 3


@dataclass
class Site:
    """A server's folder and three nodes that know each other."""

    folder: Path
    config: RunConfig
    transport: Loopback
    run: str = "r"
    home: Callable[[str], int] = home_node

    @property
    def store(self) -> ServerStore:
        return ServerStore(self.folder / STORE_FILE)

    def publish(self, items: list[str]) -> None:
        with self.store as store:
            store.add_items([(item, f"title of {item}") for item in items])

    def collect(self, rows: list[tuple[str, str, float]]) -> None:
        for number, node in self.transport.members.items():
            node.store.add_interactions([(u, i, t, None) for u, i, t in rows if self.home(u) == number])

    def next_block(self) -> None:
        with self.store as store:
            store.open_block(self.run)
        continue_run(self.folder, self.run, self.transport)

    def arrays(self) -> Arrays:
        with self.store as store:
            return store.load_arrays(self.run)


def make_site(folder: Path, config: RunConfig, **more: Any) -> Site:
    plan = build_plan(config)
    single = any(entry.seen == "each" for part in plan.parts for entry in part.fields(1).extra)
    more = {"insecure_single_user_uploads": plan.identifies_clients or single} | more
    ServerStore.create(folder / STORE_FILE).close()
    members = {}
    with ServerStore(folder / STORE_FILE) as store:
        for number in (1, 2, 3):
            where = folder / f"node{number}"
            Node.create(
                where,
                validate_model(
                    NodeConfig,
                    {"name": f"n{number}", "server": "localhost:1", "min_users": 5, "min_contributors": 1, **more},
                    "test",
                ),
                secret="",
            )
            members[number] = Node.open(where)
            store.add_node(f"n{number}", f"key {number}")
            store.set_node_number(f"n{number}", number)
        store.create_run("r", config, PATIENT)
    return Site(folder, config, Loopback(members))


def run_lab(config: RunConfig) -> Progress:
    fed = assemble_federation(config, Machine())
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    return progress


def play_blocks(site: Site) -> None:
    """Both blocks, the catalogue as the lab comes to know it."""
    fed = assemble_federation(site.config, Machine())
    for block, rows in zip(fed.stream.blocks, rows_of_blocks(site.config), strict=True):
        site.publish(list(fed.stream.item_ids[: block.n_items]))
        site.collect(rows)
        site.next_block()


def without_timestamp(reply: bytes) -> bytes:
    """A reply without what is told of the moment it was sent."""
    return stamp_reply(reply, "", 0.0)


def are_close(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return one.shape == other.shape and bool(np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other))


MODELS |= {
    f"preset {name}": {
        "backbone": _MF,
        "method": name,
        "parts": [_CHANGED[part["name"]] for part in list_preset_parts(name) if part["name"] in _CHANGED] or None,
    }
    for name in list_preset_names()
    if name not in MODELS
    and not any(is_lab_only(part["name"]) for part in list_preset_parts(name))
    and not any(implements(find_part_class(part["name"]), "noise_sum") for part in list_preset_parts(name))
}  # noise on a sum is drawn where the sum is made: once in the lab, on nodes once each
MODELS["preset retraction"]["train"] = {"rounds": 3, "aggregation": "fixed"}
MODELS["preset fedrec"]["train"] = {"rounds": 3, "objective": "squared", "aggregation": "per-row", "batch_size": 1000}
MODELS["preset lipm-learned"]["backbone"] = {**_MF, "init_std": 0.5}  # else all losses are log 2 but for rounding
MODELS["lipm"] = {
    "backbone": {"name": "interest", "dim": 8, "tower": [16, 8], "last": 6, "lr": 0.01},
    "method": "lipm",
    "train": {"rounds": 3, "batches": "people", "optimiser": "lazy-adam", "aggregation": "weighted"},
}
MODELS["pfedrec"] = {"backbone": {"name": "pfedrec", "dim": 8}, "method": "spp"}
MODELS["fedpergnn without neighbours"] = {"backbone": {"name": "fedpergnn", "dim": 8}, "method": "fedavg"}
MODELS["ego"] = {"backbone": {"name": "ego", "dim": 8}, "method": "fedavg"}


class Killed(BaseException):
    """The process is gone."""


def drop_node_memory(site: Site) -> None:
    """What a process that was killed had in memory."""
    for node in site.transport.members.values():
        node.open_runs.clear()


def same_server_arrays(one: Site, other: Site) -> bool:
    own_values, yours = one.arrays(), other.arrays()
    return own_values.keys() == yours.keys() and all(np.array_equal(own_values[k], yours[k]) for k in own_values)


def close_nodes(site: Site) -> None:
    for node in site.transport.members.values():
        node.close()


def site_with_first_block(folder: Path, name: str = "tally", **more: Any) -> Site:
    site = make_site(folder, site_config(name), **more)
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[0])
    return site


def repeat_request(site: Site, run: str, **changes: Any) -> Any:
    """The last request again under another run, with other settings; the answer of the node that got it."""
    number, body, _ = site.transport.log[0]
    head = decode_request(body).head
    settings = head.config | {"train": head.config["train"] | changes.pop("train", {})}
    server_request = ServerRequest(
        head.model_copy(update={"run": run, "config": settings, **changes}), decode_request(body).arrays
    )
    return decode_reply(question_handler.answer_message(site.transport.members[number], encode_message(server_request)))


def same_sums(one: Any, other: Any) -> bool:
    same = one.arrays.keys() == other.arrays.keys()
    return same and all(np.array_equal(v, other.arrays[name]) for name, v in one.arrays.items())
