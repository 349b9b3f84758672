"""Under a budget nothing that leaves a node depends on exact data: replies, refusals, counts and waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.hostile_server import HostileServer, begin_site, private_tally_config
from helpers.loopback_site import Site, close_nodes, rows_of_blocks
from tacita.core.config import RunConfig, validate_model
from tacita.live.node.node import Node
from tacita.live.node.user_run import _read_device_lists
from tacita.runs.assembly import Machine, assemble

SPARSE_DATA = "synthetic:users=90,items=60,per_user=10,groups=4,drift=0.5,new=0.2"
N_PROBES = 30


def sparse_tally(epsilon: float = 8.0, blocks: int = 2) -> RunConfig:
    """A private tally of short lists, so that a batch of people has about half of the items."""
    values = private_tally_config(epsilon, blocks).model_dump(mode="json")
    return validate_model(RunConfig, values | {"data": SPARSE_DATA}, "the test")


# Retractions that are asked for again


class RetractionProbe:
    """A server that reports every attempt of a retraction as failed, and asks again."""

    def __init__(self, site: Site) -> None:
        self.server = HostileServer(site, "statistic/retraction")
        self.n_attempts = 0

    def ask(self, arrays: dict[str, Any] | None = None) -> Any:
        base = self.server.first.head
        attempt = base.attempt + self.n_attempts
        failed = [attempt - 1] if self.n_attempts else []
        self.n_attempts += 1
        return self.server.asks(
            arrays,
            round=base.round + self.n_attempts,
            attempt=attempt,
            resolved=max(0, attempt - 1),
            failed=failed,
        )


def begin_leaving(folder: Path, n_leavers: int = 5) -> tuple[RetractionProbe, Site, list[str]]:
    """People of node 1 leave after a block; the server stands before its question to them."""
    site = begin_site(folder, sparse_tally())
    site.next_block()
    node = site.transport.members[1]
    leavers = node.store.users()[1][:n_leavers]
    for leaver in leavers:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(leaver))
    site.publish(list(assemble(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    return RetractionProbe(site), site, leavers


def contributed_items(node: Node, users: list[str]) -> set[int]:
    """Every item that one of these users contributed to the run."""
    items = set[int]()
    for user in users:
        lists = _read_device_lists(node, node.store.find_user(user), "r", "now")
        assert lists is not None
        items |= set(lists["parts/statistic/told"].tolist())
    return items


def test_repeated_retraction_tells_nothing_of_who_has_an_item(tmp_path: Path) -> None:
    """A probe changes the scale of one item; the same bytes would mean that nobody of the batch has it."""
    probe, site, leavers = begin_leaving(tmp_path)
    node = probe.server.node
    truth = contributed_items(node, leavers)
    first = probe.ask()
    assert first.head.verdict == "ok"
    stored = node.store.model("r")
    assert stored is not None
    inputs = stored[1]["heads/inputs"][1][:N_PROBES]
    scale = stored[1]["heads/scale"][1]
    assert len(inputs) == N_PROBES
    is_held = np.isin(inputs, list(truth))
    assert 5 < is_held.sum() < N_PROBES - 5
    answers = []
    for place in range(N_PROBES):
        changed = scale.copy()
        changed[place] *= 1.001
        reply = probe.ask({"heads/scale": changed})
        repeats = reply.head.verdict == "ok" and np.array_equal(reply.arrays["terms"], first.arrays["terms"])
        answers.append(not repeats)
    n_right = int((np.array(answers) == is_held).sum())
    assert n_right == is_held.sum() < N_PROBES, f"{n_right} of {N_PROBES} items are read"
    assert answers == [True] * N_PROBES  # every probe is answered alike, whoever has the item
    assert np.array_equal(probe.ask({"heads/scale": scale}).arrays["terms"], first.arrays["terms"])
    close_nodes(site)
