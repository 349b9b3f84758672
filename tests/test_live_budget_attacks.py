"""What a server, or time, could do to the promises of a budget on nodes, tried: none of it works."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile_server import HostileServer, begin_site, private_tally_config, spent_budgets
from helpers.loopback_site import PATIENT, Site, close_nodes, make_site, play_blocks, rows_of_blocks, site_config
from helpers.node_accounts import dpps_config as dpps_of
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node import noise_replay, user_queries, verbs
from tacita.live.node.budgets import set_budget
from tacita.live.node.node import Node
from tacita.live.server.store import describe_run_progress
from tacita.live.wire import Reply, RequestOutcome, decode_reply, decode_request, encode_message
from tacita.privacy.calibration import compute_max_mu
from tacita.runs.assembly import Machine, assemble_federation

# Scores


def one_entry(n: int, weights: Any) -> dict[str, Any]:
    """A model of the server's own, which ranks what it wants to know of."""
    centre = np.zeros(n)
    centre[0] = 1.0
    return {
        "heads/inputs": np.arange(n, dtype=np.int32),
        "heads/scale": np.ones(n),
        "heads/centre": centre,
        "heads/weights": weights.astype(np.float32),
        "heads/liked": np.zeros(n, np.float32),
        "heads/repeat": np.zeros(1, np.float32),
        "heads/recency": np.zeros(1, np.float32),
    }


def test_scores_are_refused_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a node that sent them would tell, without noise, whether somebody has the one item that is ranked."""
    site = begin_site(tmp_path, private_tally_config(0.5))
    server = HostileServer(site, "validate")
    n, first = len(server.node.store.read_catalogue()), server.first.head.round
    block = server.node.open_runs["r"].federation.stream.blocks[0]
    wanted = int(np.bincount(block.valid.ids).argmax())
    pointed = np.zeros((n, n))
    pointed[:, wanted] = 1000.0
    before = spent_budgets(server.node)
    reports = [server.asks(one_entry(n, b), round=first + k) for k, b in enumerate((0 * pointed, pointed))]
    assert [(entry.head.verdict, entry.head.sums, entry.head.clients) for entry in reports] == [("ok", {}, 0)] * 2
    assert spent_budgets(server.node) == before
    ended = server.asks(one_entry(n, pointed), kind="close", round=first + 2)
    assert (ended.head.verdict, ended.head.sums) == ("ok", {})
    close_nodes(site)
    repeat = begin_site(tmp_path / "control", private_tally_config(0.5))
    server = HostileServer(repeat, "validate")
    monkeypatch.setattr(type(server.node.open_runs["r"].federation), "ledgers", ())
    reports = [server.asks(one_entry(n, b), round=first + k) for k, b in enumerate((0 * pointed, pointed))]
    less, more = (next(iter(entry.head.sums.values()))[0] for entry in reports)
    assert more > less
    close_nodes(repeat)


def test_private_run_keeps_its_last_round_and_explains_missing_scores(tmp_path: Path) -> None:
    """Also where a node lies and sends some."""
    site = make_site(tmp_path, dpps_of())

    def lying(number: int, body: bytes, answer: Any) -> bytes:
        reply, request = decode_reply(answer()), decode_request(body).head
        if request.kind not in ("validate", "close"):
            return encode_message(reply)
        assert reply.head.sums == {}
        more = {"sums": {"ndcg@20": (1.0 / (1 + request.round), 1)}, "clients": 1}
        return encode_message(Reply(reply.head.model_copy(update=more), reply.arrays))

    site.transport.spoil = lying
    play_blocks(site)
    with site.store as store:
        row = store.load_run("r")
    assert row.note is not None
    for result in row.note["plain"]["results"]:
        assert result["best_round"] == result["rounds"] == 3
        assert result["valid"] is None
        assert not [name for name in result if "@" in name]
        assert result["controls"] == {}
    assert "2 blocks done; no scores: what answers cost is counted" in describe_run_progress(row)
    reports = [
        release
        for release in site.transport.members[1].store.list_releases()
        if release["kind"] in ("validate", "close")
    ]
    assert {entry["kind"] for entry in reports} <= {"close"}
    assert all(entry["sees"] == "how many people spent how much of their budgets, rounded" for entry in reports)
    close_nodes(site)


# Noise


def test_node_restored_from_a_copy_draws_fresh_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: noise that follows what is stored comes again, and the difference is the one who paused, rank one."""
    site = begin_site(tmp_path, private_tally_config(8.0))
    server = HostileServer(site, "statistic")
    where, copy = server.node.folder, tmp_path / "copy"
    with server.node.store._write_transaction() as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'secret'", ("ab" * 32,))
    server.node.close()
    shutil.copytree(where, copy)

    def told(pause: bool) -> Any:
        shutil.rmtree(where)
        shutil.copytree(copy, where)
        with Node.open(where) as server.node:
            if pause:
                user_queries.set_pause(server.node.store, server.node.store.list_users()[1][3], True)
            reply = server.asks()
        assert reply.head.verdict == "ok"
        return reply.arrays["terms"]

    apart = np.abs(np.linalg.eigvalsh(told(False) - told(True)))
    assert (apart > 1e-6).sum() > 5
    monkeypatch.setattr(noise_replay, "draw_noise_seed", lambda *_: 0)
    apart = np.abs(np.linalg.eigvalsh(told(False) - told(True)))
    assert (apart > 1e-6).sum() == 1
    site.transport.members.pop(1)
    close_nodes(site)


def leavers_of(folder: Path) -> tuple[HostileServer, Site, list[str]]:
    """Five people of node 1 leave after a block under a budget; the server stands before its question to them."""
    site = begin_site(folder, private_tally_config(1.0, blocks=2))
    site.next_block()
    node = site.transport.members[1]
    raws = node.store.list_users()[1][:5]
    for raw in raws:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(raw))
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    return HostileServer(site, "statistic/retraction"), site, raws


def test_repeated_retraction_replays_its_noise_and_others_are_limited(tmp_path: Path) -> None:
    """A server says that every attempt came to nothing: what it hears again is nothing new, and costs nothing."""
    server, site, raws = leavers_of(tmp_path)
    base, tried = server.first.head, 0

    def asks(**arrays: Any) -> Any:
        nonlocal tried
        number = base.attempt + tried
        failed = [number - 1] if tried else []
        tried += 1
        changed = {f"heads/{name}": value for name, value in arrays.items()}
        return server.asks(
            changed, round=base.round + tried, attempt=number, resolved=max(0, number - 1), failed=failed
        )

    first = asks()
    assert first.head.verdict == "ok"
    paid = spent_budgets(server.node)
    assert all(paid[raw] > 1.0 for raw in raws)  # beyond the budget: taking back is not refused
    for _ in range(4):
        repeat = asks()
        assert repeat.head.verdict == "ok"
        assert np.array_equal(repeat.arrays["terms"], first.arrays["terms"])
    assert spent_budgets(server.node) == paid
    stored_state = server.node.store.load_model("r")
    assert stored_state is not None
    scale, costs = stored_state[1]["heads/scale"][1], [paid[raws[0]]]
    others = [asks(scale=scale * np.linspace(1, more, len(scale))) for more in (1.5, 2.0, 3.0)]
    assert [entry.head.verdict for entry in others] == ["ok", "ok", "refused"]  # three in all
    assert "noise of its own" in others[-1].head.said
    for other in others[:2]:
        assert (other.arrays["terms"] != first.arrays["terms"]).mean() > 0.9
    costs.append(spent_budgets(server.node)[raws[0]])
    assert costs[1] > costs[0]
    assert np.array_equal(asks(scale=scale).arrays["terms"], first.arrays["terms"])  # the honest one is not lost
    assert spent_budgets(server.node)[raws[0]] == costs[1]
    assert _kept(server.node) == 3
    server.node.store.record_outcomes(
        "r", [RequestOutcome(id=request.id, state="done") for request in server.node.store.list_requests("r")]
    )
    assert _kept(server.node) == 0
    close_nodes(site)


def _kept(node: Any, whose: str = "") -> int:
    """How much is kept of what was told."""
    request = "SELECT count(*) FROM meta WHERE key GLOB ?"
    return int(node.store.run_query(lambda db: db.execute(request, (f"retold/{whose}*",)).fetchone())[0])


def test_identified_users_have_a_release_limit(tmp_path: Path) -> None:
    """A node whose owner lets the server name people is asked about other company each time: people have a limit."""
    site = begin_site(tmp_path, private_tally_config(1.0, blocks=2), insecure_single_user_uploads=True)
    site.next_block()
    node = site.transport.members[1]
    ids, raws = node.store.list_users()
    for raw in raws[:6]:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(raw))
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    server = HostileServer(site, "statistic/retraction")
    base, verdicts = server.first.head, []
    all_users = np.sort(server.first.arrays["chosen"])
    for n in range(5):
        number = base.attempt + n
        chosen = {"chosen": np.delete(all_users, n)}
        reply = server.asks(
            chosen, round=base.round + n, attempt=number, resolved=max(0, number - 1), failed=[number - 1] if n else []
        )
        verdicts.append(reply.head.verdict)
    assert verdicts == ["ok", "ok", "ok", "refused", "refused"]
    assert 0 < _kept(node, f"{ids[0]} ") < _kept(node)
    node.erase_user(raws[0])
    assert _kept(node, f"{ids[0]} ") == 0
    close_nodes(site)


# Budgets


def test_node_bounds_the_servers_delta(tmp_path: Path) -> None:
    """At a delta of 0.999 a budget buys many times the loss that it buys at 1e-5."""
    assert compute_max_mu(0.1, 0.999) > 100 * compute_max_mu(0.1, 1e-5)
    site = begin_site(tmp_path, private_tally_config(0.1, delta=0.999))
    server = HostileServer(site, "")
    reply = server.asks()
    assert reply.head.verdict == "refused"
    assert "max_delta" in reply.head.said
    assert server.node.store.list_releases() == []
    close_nodes(site)
    allowed = begin_site(tmp_path / "allowed", private_tally_config(0.1, delta=1e-4), max_delta=1e-4)
    assert HostileServer(allowed, "").asks().head.verdict == "ok"
    close_nodes(allowed)


def test_users_without_a_budget_use_the_nodes_default(tmp_path: Path) -> None:
    values = site_config("fedavg").model_dump(mode="json")
    values |= {"parts": [{"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0}]}  # counted, and nothing refused
    site = begin_site(tmp_path, validate_model(RunConfig, values, "the test"), max_epsilon=2.0)
    node = site.transport.members[1]
    raws = node.store.list_users()[1]
    for raw in raws[:5]:
        verbs.perform_verb(node, "budget", {"user": raw, "epsilon": 20.0})
    site.next_block()
    paid = spent_budgets(node)
    assert {paid[raw] for raw in raws[:5]} == {3.0}  # three rounds
    assert {paid[raw] for raw in raws[5:]} == {2.0}
    close_nodes(site)


def test_one_users_budget_does_not_stop_the_node(tmp_path: Path) -> None:
    site = begin_site(tmp_path, private_tally_config(0.5))
    server = HostileServer(site, "")
    raw = server.node.store.list_users()[1][0]
    for message in (999_999.9999999999, 1e6, float("inf"), float("nan"), -0.1):
        with pytest.raises(TacitaError, match="from 0 to 100"):
            set_budget(server.node, raw, message)
    server.node.store.declare_budget(raw, 10**12)  # as an older version kept it
    assert server.asks().head.verdict == "ok"
    close_nodes(site)


def test_spending_survives_erasure_and_return(tmp_path: Path) -> None:
    config = private_tally_config(0.5)
    site = begin_site(tmp_path, config)
    site.next_block()
    node = site.transport.members[1]
    back, rows = node.store.list_users()[1][:5], []
    for raw in back:
        state = node.store.read_history([node.store.find_user(raw)])
        rows += [(raw, item, float(at), None) for item, at in zip(state.item, state.time, strict=True)]
    before = spent_budgets(node)
    assert min(before[raw] for raw in back) > 0.4
    for _ in range(2):  # twice is not twice as much
        for raw in back:
            node.erase_user(raw)
        results = [
            entry for entry in node.store.run_query(lambda db: db.execute("SELECT key, value FROM meta").fetchall())
        ]
        assert not [element for element in results if back[0] in str(element)]
        node.store.add_interactions(rows)
    with site.store as store:
        store.create_run("again", config, PATIENT)
    site.run = "again"
    with contextlib.suppress(TacitaError):  # nobody has anything left to tell
        site.next_block()
    state = node.store.load_devices("again")
    assert state is not None
    assert not state[1]["parts/statistic/times"][:, :3].any()
    after = spent_budgets(node, "again")
    assert [after[raw] for raw in back] == pytest.approx([before[raw] for raw in back])
    node.erase_user(None)
    assert (
        len(node.store.run_query(lambda db: db.execute("SELECT 1 FROM meta WHERE key GLOB 'spent/*'").fetchall())) >= 5
    )
    close_nodes(site)


def test_erasure_without_spending_leaves_no_record(tmp_path: Path) -> None:
    site = begin_site(tmp_path, site_config("tally"))
    site.next_block()
    node = site.transport.members[1]
    node.erase_user(None)
    assert node.store.run_query(lambda db: db.execute("SELECT 1 FROM meta WHERE key GLOB 'spent/*'").fetchall()) == []
    close_nodes(site)


# Who decides that rows of others join


@pytest.mark.parametrize("has_new_item", [False, True])
def test_nobody_switches_on_what_others_took_again(tmp_path: Path, has_new_item: bool) -> None:
    """After an ordinary run all items were in a sum; in a private run repeats of all join, whoever has a new item."""
    site = make_site(tmp_path, site_config("tally"), min_users=2)
    site.publish([f"i{item}" for item in range(24)])
    rows = [(f"p{user}", f"i{(user + item) % 11}", float(item)) for user in range(40) for item in range(4)]
    site.collect(rows)
    site.next_block()
    with site.store as store:
        store.create_run("p", private_tally_config(1.0, blocks=2), PATIENT)
    site.run = "p"
    site.next_block()
    again = [(user, item, time + 5000) for user, item, time in rows]
    extra = [("p0", "i11", 9000.0)] if has_new_item else []
    site.collect(again + extra)
    site.next_block()
    counts = []
    for node in site.transport.members.values():
        sql = (
            "SELECT count(DISTINCT i.user) FROM interactions i JOIN assigned a ON a.interaction = i.id "
            "WHERE a.run = 'p' AND a.block = 1"
        )
        with node.store._read_connection() as db:
            counts.append(db.execute(sql).fetchone()[0])
    assert sum(counts) == 40
    close_nodes(site)
