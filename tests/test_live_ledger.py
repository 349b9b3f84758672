"""Budgets on nodes: charged in the file before an answer leaves, once for what is sent twice, shown to their owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_live_parity import DATA, SPLIT, Site, but_when, close_all, make_site, play

from tacita.core.config import RunConfig, validated
from tacita.core.errors import TacitaError
from tacita.live.node import session, verbs
from tacita.live.node.node import Node

MF = {"name": "mf", "dim": 8}


def config_of(**dpps: Any) -> RunConfig:
    part = {"name": "dpps", "clip": 0.01, "releases": 50, **dpps}
    values = {"data": DATA, "split": SPLIT, "seed": 5, "train": {"rounds": 3}, "backbone": MF}
    return validated(RunConfig, {**values, "method": "dpps", "parts": [part]}, "the test")


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = make_site(tmp_path, getattr(request, "param", None) or config_of())
    yield made
    close_all(made)


def times(node: Node, run: str = "r") -> np.ndarray:
    held = node.store.devices(run)
    assert held is not None
    return np.asarray(held[1]["parts/dpps/times"])


def test_nodes_charge_their_people_and_say_what_it_cost(site: Site) -> None:
    play(site)
    for node in site.transport.members.values():
        assert times(node).max() > 0
        lines = [one for one in node.store.ledger() if one["kind"] == "round"]
        assert lines
        assert all("at most" in one["epsilon"] and "a person" in one["epsilon"] for one in lines)
        _, raws = node.store.users()
        told = verbs.perform(node, "ledger", {"user": raws[0]})
        assert told["user"] == raws[0]
        assert 0 < told["runs"]["r"]["spent"] <= told["runs"]["r"]["budget"]
        assert told["runs"]["r"]["events"]["dpps: upload"]["times"] == times(node)[0, 0]
        with pytest.raises(TacitaError):
            verbs.perform(node, "ledger", {"user": "nobody here"})


def test_a_second_run_is_no_second_budget(site: Site) -> None:
    play(site)
    with site.store as store:
        store.new_run("again", site.config, {"pause": 0.0, "give_up": 1.0})
    site.run = "again"
    site.next_block()
    for node in site.transport.members.values():
        first, second = node.store.devices("r"), node.store.devices("again")
        assert first is not None
        assert second is not None
        spent = dict(zip(first[1]["users"].tolist(), first[1]["parts/dpps/spent"][:, 0]))
        for user, units, released in zip(
            second[1]["users"], second[1]["parts/dpps/spent"], second[1]["parts/dpps/times"][:, 0]
        ):
            assert units[1] == (spent.get(int(user), 0) if released else units[1])
        assert second[1]["parts/dpps/spent"][:, 1].max() > 0


@pytest.mark.parametrize("site", [config_of(releases=2)], indirect=True)
def test_who_has_spent_their_budget_stays_silent(site: Site) -> None:
    play(site)
    for node in site.transport.members.values():
        assert times(node).max() == 2


def test_what_was_charged_is_in_the_file_before_the_answer_leaves_and_only_once(site: Site) -> None:
    """An answer that gets lost is asked for again: the same bytes, and nobody pays twice."""
    seen: list[tuple[int, int]] = []

    def lossy(number: int, body: bytes, answer: Any) -> bytes | None:
        reply = answer()
        node = site.transport.members[number]
        held = node.store.devices("r")
        if held is not None and len(seen) < 3 and b'"kind":"round"' in body:
            before = times(node).sum()
            again = session.handle(node, body)
            assert but_when(again) == but_when(reply)
            assert times(node).sum() == before
            seen.append((number, int(before)))
        return reply

    site.transport.spoil = lossy
    play(site)
    assert seen
    assert all(charged > 0 for _, charged in seen)


def test_where_nothing_leaves_nobody_pays(tmp_path: Path) -> None:
    made = make_site(tmp_path, config_of(), min_users=1000)
    with pytest.raises(TacitaError, match="min_users"):  # nobody answered the server
        play(made)
    for node in made.transport.members.values():
        for tag in ("now", "alone"):
            held = node.store.devices("r", tag)
            if held is not None:
                assert not held[1]["parts/dpps/times"].any()
    close_all(made)
