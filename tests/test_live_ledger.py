"""Budgets on nodes: charged in the file before an answer leaves, once for what is sent twice, shown to their owner."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.loopback_site import DATA, PATIENT, SPLIT, Site, close_nodes, make_site, play_blocks, without_timestamp
from helpers.node_accounts import MF, dpps_config, release_counts
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node import question_handler, user_queries, verbs
from tacita.live.node import store_file as node_file
from tacita.live.node.budgets import read_user_accounts
from tacita.live.node.erased_spending import load_accounts
from tacita.live.node.node import Node
from tacita.live.wire import SPENT_BINS, decode_reply

TALLY = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 4.0, "blocks": 2}}


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = make_site(tmp_path, getattr(request, "param", None) or dpps_config())
    yield made
    close_nodes(made)


def test_nodes_charge_users_and_report_the_cost(site: Site) -> None:
    play_blocks(site)
    for node in site.transport.members.values():
        assert release_counts(node).max() > 0
        lines = [one for one in node.store.list_releases() if one["kind"] == "round"]
        assert lines
        assert all("at most" in one["epsilon"] and "a person" in one["epsilon"] for one in lines)
        _, raws = node.store.users()
        told = verbs.perform_verb(node, "ledger", {"user": raws[0]})
        assert told["user"] == raws[0]
        assert 0 < told["runs"]["r"]["spent"] <= told["runs"]["r"]["budget"]
        assert told["runs"]["r"]["events"]["dpps: upload"]["times"] == release_counts(node)[0, 0]
        with pytest.raises(TacitaError):
            verbs.perform_verb(node, "ledger", {"user": "nobody here"})


def test_a_second_run_is_no_second_budget(site: Site) -> None:
    play_blocks(site)
    with site.store as store:
        store.create_run("again", site.config, PATIENT)
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


@pytest.mark.parametrize("site", [dpps_config(releases=2)], indirect=True)
def test_users_without_budget_are_left_out(site: Site) -> None:
    play_blocks(site)
    for node in site.transport.members.values():
        assert release_counts(node).max() == 2


def test_charge_is_stored_once_before_the_reply_leaves(site: Site) -> None:
    """An answer that gets lost is asked for again: the same bytes, and nobody pays twice."""
    seen: list[tuple[int, int]] = []

    def lossy(number: int, body: bytes, answer: Any) -> bytes | None:
        reply = answer()
        node = site.transport.members[number]
        held = node.store.devices("r")
        if held is not None and len(seen) < 3 and b'"kind":"round"' in body:
            before = release_counts(node).sum()
            again = question_handler.answer_message(node, body)
            assert without_timestamp(again) == without_timestamp(reply)
            assert release_counts(node).sum() == before
            seen.append((number, int(before)))
        return reply

    site.transport.spoil = lossy
    play_blocks(site)
    assert seen
    assert all(charged > 0 for _, charged in seen)


def test_refused_questions_charge_nobody(tmp_path: Path) -> None:
    made = make_site(tmp_path, dpps_config(), min_users=1000)
    with pytest.raises(TacitaError, match="min_users"):  # nobody answered the server
        play_blocks(made)
    for node in made.transport.members.values():
        for tag in ("now", "alone"):
            held = node.store.devices("r", tag)
            if held is not None:
                assert not held[1]["parts/dpps/times"].any()
    close_nodes(made)


# What each release cost each person


def rows(node: Node, sql: str, *given: Any) -> list[tuple[Any, ...]]:
    return node.store.run_query(lambda db: db.execute(sql, given).fetchall())


@pytest.mark.parametrize(
    "site",
    [dpps_config(), validate_model(RunConfig, {"data": DATA, "split": SPLIT, "seed": 5, **TALLY}, "the test")],
    indirect=True,
    ids=["dpps", "tally"],
)
def test_costs_of_releases_add_up_to_spending(site: Site) -> None:
    play_blocks(site)
    with site.store as store:
        store.create_run("again", site.config, PATIENT)
    site.run = "again"
    with contextlib.suppress(TacitaError):  # where nobody's budget is left, every node refuses
        site.next_block()
    checked = 0
    for node in site.transport.members.values():
        for user in node.store.users()[1][:5]:
            for run, told in read_user_accounts(node, user)["runs"].items():
                total, found = user_queries.list_costs(node.store, user, run, 0, 200)
                assert total == len(found)
                if not found:
                    continue
                assert all(one["epsilon"] > 0 for one in found)
                assert found[0]["spent"] == pytest.approx(told["spent"])
                first = found[-1]["spent"] - found[-1]["epsilon"]  # what came from the run before
                assert first == pytest.approx(0, abs=1e-9) or run == "again"
                assert first + sum(one["epsilon"] for one in found) == pytest.approx(told["spent"])
                checked += 1
    assert checked >= 15


def test_cost_is_stored_once_visible_to_its_user_and_erased_with_them(site: Site, tmp_path: Path) -> None:
    play_blocks(site)
    node = site.transport.members[1]
    ids, raws = node.store.users()
    charged = dict(rows(node, "SELECT user, count(*) FROM costs GROUP BY user"))
    held = node.store.devices("r")
    assert held is not None
    released = dict(zip(held[1]["users"].tolist(), held[1]["parts/dpps/times"][:, 0].tolist()))
    assert charged == {user: n for user, n in released.items() if n}
    node.export(tmp_path / "mine.jsonl", raws[0])
    lines = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    mine = [one for one in lines if one["kind"] == "cost"]
    assert len(mine) == charged[int(ids[0])]
    assert {one["user"] for one in mine} == {raws[0]}
    node.erase(raws[0])
    assert rows(node, "SELECT count(*) FROM costs WHERE user = ?", int(ids[0])) == [(0,)]
    assert rows(node, "SELECT count(*) FROM costs")[0][0] == sum(charged.values()) - charged[int(ids[0])]


def test_older_store_gets_the_cost_table_and_can_be_salvaged(site: Site, tmp_path: Path) -> None:
    node = site.transport.members[1]
    node.store.add_interactions([("ann", "i1", 1.0, None)])
    node.store.run_withdrawal(lambda db: db.execute("DROP TABLE costs"))
    node.close()
    node_file.salvage_lines(node.folder / node_file.STORE_FILE, tmp_path / "all.jsonl")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert kinds == ["user", "interaction"]
    with Node.open(node.folder) as again:
        assert user_queries.list_costs(again.store, "ann", "r", 0, 5) == (0, [])


# What the operator hears of spending


def test_only_who_lets_servers_see_people_tells_how_budgets_are_spent(tmp_path: Path) -> None:
    silent = make_site(tmp_path, dpps_config(releases=12))
    play_blocks(silent)
    assert all(decode_reply(reply).head.spent == [] for _, _, reply in silent.transport.log)
    close_nodes(silent)
    (tmp_path / "open").mkdir()
    site = make_site(tmp_path / "open", dpps_config(releases=12), insecure_single_user_uploads=True)
    play_blocks(site)
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    expected = dict.fromkeys(SPENT_BINS, 0)
    for node in site.transport.members.values():
        found = load_accounts(node.store, "r")
        assert found is not None
        ledger, account = found[0]
        both = zip(ledger.epsilon(account), account["budget"] * 1e-6, account["times"][:, 0], strict=True)
        shares = [spent / budget for spent, budget, times in both if times]
        assert shares
        bins = [sum(lo < one <= hi for one in shares) for lo, hi in pairwise((0.0, 0.25, 0.5, 0.75, 1.0))]
        for name, n in zip(SPENT_BINS, [*bins, 0], strict=True):
            expected[name] += n
    told = note["plain"]["results"][-1]["spent"]
    assert told == expected
    assert sum(told.values()) > 0
    close_nodes(site)


def test_runs_without_a_ledger_report_no_spending(tmp_path: Path) -> None:
    plain = {"data": DATA, "split": SPLIT, "backbone": MF, "train": {"rounds": 1}}
    site = make_site(tmp_path, validate_model(RunConfig, plain, "the test"))
    play_blocks(site)
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    assert all("spent" not in one for one in note["plain"]["results"])
    assert all(decode_reply(reply).head.spent == [] for _, _, reply in site.transport.log)
    close_nodes(site)
