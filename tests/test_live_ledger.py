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
from tacita.live.node.erased_spending import load_run_accounts
from tacita.live.node.node import Node
from tacita.live.wire import SPENT_BINS, decode_reply

TALLY = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 4.0, "blocks": 2}}


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    result = make_site(tmp_path, getattr(request, "param", None) or dpps_config())
    yield result
    close_nodes(result)


def test_nodes_charge_users_and_report_the_cost(site: Site) -> None:
    play_blocks(site)
    for node in site.transport.members.values():
        assert release_counts(node).max() > 0
        lines = [release for release in node.store.list_releases() if release["kind"] == "round"]
        assert lines
        assert all("at most" in line["epsilon"] and "a person" in line["epsilon"] for line in lines)
        _, raws = node.store.list_users()
        answer = verbs.perform_verb(node, "ledger", {"user": raws[0]})
        assert answer["user"] == raws[0]
        assert 0 < answer["runs"]["r"]["spent"] <= answer["runs"]["r"]["budget"]
        assert answer["runs"]["r"]["events"]["dpps: upload"]["times"] == release_counts(node)[0, 0]
        with pytest.raises(TacitaError):
            verbs.perform_verb(node, "ledger", {"user": "nobody here"})


def test_a_second_run_is_no_second_budget(site: Site) -> None:
    play_blocks(site)
    with site.store as store:
        store.create_run("again", site.config, PATIENT)
    site.run = "again"
    site.next_block()
    for node in site.transport.members.values():
        first, second = node.store.load_devices("r"), node.store.load_devices("again")
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
    observations: list[tuple[int, int]] = []

    def lossy(number: int, body: bytes, answer: Any) -> bytes | None:
        reply = answer()
        node = site.transport.members[number]
        state = node.store.load_devices("r")
        if state is not None and len(observations) < 3 and b'"kind":"round"' in body:
            before = release_counts(node).sum()
            repeat = question_handler.answer_message(node, body)
            assert without_timestamp(repeat) == without_timestamp(reply)
            assert release_counts(node).sum() == before
            observations.append((number, int(before)))
        return reply

    site.transport.spoil = lossy
    play_blocks(site)
    assert observations
    assert all(charged > 0 for _, charged in observations)


def test_refused_questions_charge_nobody(tmp_path: Path) -> None:
    result = make_site(tmp_path, dpps_config(), min_users=1000)
    with pytest.raises(TacitaError, match="min_users"):  # nobody answered the server
        play_blocks(result)
    for node in result.transport.members.values():
        for tag in ("now", "alone"):
            state = node.store.load_devices("r", tag)
            if state is not None:
                assert not state[1]["parts/dpps/times"].any()
    close_nodes(result)


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
        for user in node.store.list_users()[1][:5]:
            for run, report in read_user_accounts(node, user)["runs"].items():
                total, result = user_queries.list_costs(node.store, user, run, 0, 200)
                assert total == len(result)
                if not result:
                    continue
                assert all(entry["epsilon"] > 0 for entry in result)
                assert result[0]["spent"] == pytest.approx(report["spent"])
                first = result[-1]["spent"] - result[-1]["epsilon"]  # what came from the run before
                assert first == pytest.approx(0, abs=1e-9) or run == "again"
                assert first + sum(entry["epsilon"] for entry in result) == pytest.approx(report["spent"])
                checked += 1
    assert checked >= 15


def test_cost_is_stored_once_visible_to_its_user_and_erased_with_them(site: Site, tmp_path: Path) -> None:
    play_blocks(site)
    node = site.transport.members[1]
    ids, raws = node.store.list_users()
    charged = dict(rows(node, "SELECT user, count(*) FROM costs GROUP BY user"))
    state = node.store.load_devices("r")
    assert state is not None
    released = dict(zip(state[1]["users"].tolist(), state[1]["parts/dpps/times"][:, 0].tolist()))
    assert charged == {user: n for user, n in released.items() if n}
    node.export_user_data(tmp_path / "mine.jsonl", raws[0])
    lines = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    own_values = [entry for entry in lines if entry["kind"] == "cost"]
    assert len(own_values) == charged[int(ids[0])]
    assert {entry["user"] for entry in own_values} == {raws[0]}
    node.erase_user(raws[0])
    assert rows(node, "SELECT count(*) FROM costs WHERE user = ?", int(ids[0])) == [(0,)]
    assert rows(node, "SELECT count(*) FROM costs")[0][0] == sum(charged.values()) - charged[int(ids[0])]


def test_older_store_gets_the_cost_table_and_can_be_salvaged(site: Site, tmp_path: Path) -> None:
    node = site.transport.members[1]
    node.store.add_interactions([("ann", "i1", 1.0, None)])
    node.store.run_withdrawing_change(lambda db: db.execute("DROP TABLE costs"))
    node.close()
    node_file.salvage_lines(node.folder / node_file.STORE_FILE, tmp_path / "all.jsonl")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert kinds == ["user", "interaction"]
    with Node.open(node.folder) as repeat:
        assert user_queries.list_costs(repeat.store, "ann", "r", 0, 5) == (0, [])


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
        accounts = load_run_accounts(node.store, "r")
        assert accounts is not None
        ledger, account = accounts[0]
        both = zip(ledger.compute_spent_epsilon(account), account["budget"] * 1e-6, account["times"][:, 0], strict=True)
        shares = [spent / budget for spent, budget, times in both if times]
        assert shares
        bins = [sum(lo < share <= hi for share in shares) for lo, hi in pairwise((0.0, 0.25, 0.5, 0.75, 1.0))]
        for name, n in zip(SPENT_BINS, [*bins, 0], strict=True):
            expected[name] += n
    report = note["plain"]["results"][-1]["spent"]
    assert report == expected
    assert sum(report.values()) > 0
    close_nodes(site)


def test_runs_without_a_ledger_report_no_spending(tmp_path: Path) -> None:
    plain = {"data": DATA, "split": SPLIT, "backbone": MF, "train": {"rounds": 1}}
    site = make_site(tmp_path, validate_model(RunConfig, plain, "the test"))
    play_blocks(site)
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    assert all("spent" not in result for result in note["plain"]["results"])
    assert all(decode_reply(reply).head.spent == [] for _, _, reply in site.transport.log)
    close_nodes(site)
