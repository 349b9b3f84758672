"""Under a budget nothing that leaves a node depends on exact data: replies, refusals, counts and waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile_server import HostileServer, begin_site, private_tally_config
from helpers.loopback_site import Site, close_nodes, rows_of_blocks, site_config
from tacita.core.config import RunConfig, validate_model
from tacita.core.types import Arrays
from tacita.live.node.node import Node
from tacita.live.node.user_run import _read_device_lists
from tacita.live.wire import Reply, decode_reply
from tacita.models.tally import budgeted_release
from tacita.runs.assembly import Machine, assemble_federation

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
    leavers = node.store.list_users()[1][:n_leavers]
    for leaver in leavers:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(leaver))
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
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
    stored = node.store.load_model("r")
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


# Waiting for others


def list_replies(site: Site, kind: str = "") -> list[Reply]:
    """What node 1 answered to questions of a kind."""
    replies = [decode_reply(reply) for number, _, reply in site.transport.log if number == 1]
    return [reply for reply in replies if reply.head.kind.startswith(kind)]


def silence_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums leave as they are, so that a test sees what the noise has to cover."""

    def draw_nothing(stream: Any, s: float, k: int) -> Any:
        return np.zeros((k, k))

    def draw_no_steps(stream: Any, deviation: float, grid: float, size: int) -> Any:
        return np.zeros(size)

    monkeypatch.setattr(budgeted_release, "draw_symmetric_noise", draw_nothing)
    monkeypatch.setattr(budgeted_release, "draw_whole_noise", draw_no_steps)


def play_second_block(folder: Path, n_fresh: int) -> tuple[Arrays, list[dict[str, Any]]]:
    """The terms of node 1 in a second block to which so many of its people bring something, and all heads."""
    site = begin_site(folder, private_tally_config(8.0, blocks=2))
    site.next_block()
    node = site.transport.members[1]
    fresh = set(node.store.list_users()[1][:n_fresh])
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    others = set(node.store.list_users()[1]) - fresh
    rows = [row for row in rows_of_blocks(site.config)[1] if row[0] not in others]
    known = {user for user, _, _ in rows_of_blocks(site.config)[0]}
    site.collect([row for row in rows if row[0] in known])
    site.transport.log.clear()
    site.next_block()
    replies = list_replies(site)
    heads = [reply.head.model_dump(exclude={"time", "have"}) for reply in replies]
    terms = [reply.arrays for reply in replies if "terms" in reply.arrays]
    close_nodes(site)
    return (terms[0] if terms else {}), heads


def test_one_person_moves_a_private_sum_by_one_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`min_users` is 5: the fifth person with something new must not switch on the terms of the four others."""
    silence_noise(monkeypatch)
    with_four, heads_of_four = play_second_block(tmp_path / "four", 4)
    with_five, heads_of_five = play_second_block(tmp_path / "five", 5)
    change = with_five["terms"] - with_four["terms"]
    assert 0 < np.linalg.norm(change) <= 1.0
    assert np.linalg.norm(with_four["terms"]) > 1.0
    assert heads_of_four == heads_of_five


def test_rows_of_noised_sums_still_wait_for_an_exact_one(tmp_path: Path) -> None:
    """Else a plain run could be subtracted from one that a person's new rows were not part of."""
    site = begin_site(tmp_path, private_tally_config(8.0))
    site.next_block()
    node = site.transport.members[1]
    users = node.store.list_users()[0].tolist()
    marks = node.store.run_query(lambda db: db.execute("SELECT DISTINCT released FROM interactions").fetchall())
    assert marks == [(2,)]
    with node.store._write_transaction() as db:  # an earlier exact sum had all but four people
        db.executemany("UPDATE interactions SET released = 1 WHERE user = ?", [(user,) for user in users[4:]])
    node.store.assign_block("plain", 0, least=5)
    assert set(node.store.read_block_rows("plain", 0).user.tolist()) == set(users[4:])
    close_nodes(site)


# Who is there


def play_first_block(folder: Path, config: RunConfig, silent: int = 0, absent: int = 0) -> list[dict[str, Any]]:
    """All heads of node 1 in a first block, where some people keep everything and others are not there at all."""
    site = begin_site(folder, config)
    node = site.transport.members[1]
    users = node.store.list_users()[1]
    for user in users[:silent]:
        node.store.set_consent(user, None, "keep")
    for user in users[silent : silent + absent]:
        node.erase_user(user)
    site.next_block()
    heads = [reply.head.model_dump(exclude={"time"}) for reply in list_replies(site)]
    close_nodes(site)
    return heads


def test_heads_of_private_replies_do_not_depend_on_who_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence_noise(monkeypatch)  # the model that goes down is the same then but for the sums
    config = private_tally_config(8.0)
    heads = play_first_block(tmp_path / "all", config)
    assert {head["clients"] for head in heads if head["kind"] in ("survey", "statistic")} == {5}
    assert all(head["spent"] == [] for head in heads)
    for name, changes in {"one": {"silent": 1}, "gone": {"absent": 1}, "few": {"silent": 26}}.items():
        neighbour = play_first_block(tmp_path / name, config, **changes)
        assert [drop_digests(head) for head in neighbour] == [drop_digests(head) for head in heads]
    plain = site_config("tally")
    exact = play_first_block(tmp_path / "plain", plain)
    without_one = play_first_block(tmp_path / "plain-one", plain, silent=1)
    assert [drop_digests(head) for head in exact] != [drop_digests(head) for head in without_one]


def drop_digests(head: dict[str, Any]) -> dict[str, Any]:
    """A head without digests of what the server sent."""
    return {name: value for name, value in head.items() if name != "have"}


def test_a_gap_in_one_history_changes_no_other(tmp_path: Path) -> None:
    """A column of times that is left out where one row has none would tell of that row."""
    for name, config in {"private": private_tally_config(8.0), "plain": site_config("tally")}.items():
        site = begin_site(tmp_path / name, config)
        node = site.transport.members[1]
        user = node.store.list_users()[1][0]
        item = node.store.read_history([node.store.find_user(user)]).item[0]
        node.store.add_interactions([(user, item, None, None)])
        site.next_block()
        columns = node.open_runs["r"].federation.stream.blocks[0].train.values
        assert ("time" in columns) == (name == "private")
        close_nodes(site)
