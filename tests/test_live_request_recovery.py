"""What people ask for outlives lost answers, kills and silent nodes: nothing is lost, nothing is taken back twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.loopback_site import (
    Killed,
    Site,
    are_close,
    close_nodes,
    drop_node_memory,
    make_site,
    rows_of_blocks,
    site_config,
)
from helpers.request_script import (
    LEAVERS,
    SHARING,
    act_at_rounds,
    collect_first_block,
    is_retraction,
    request_status,
    site_with_leavers,
    stored_upload_sizes,
    submit_request,
    user_with_items,
)
from tacita.core.codec import pack
from tacita.core.config import RunConfig, validate_model
from tacita.federation.rounds import make_initial_progress
from tacita.live.node import attempt_snapshot, question_handler, user_queries
from tacita.live.node.node import Node
from tacita.live.node.release_log import list_log_lines
from tacita.live.node.verbs import perform_verb
from tacita.live.server import coordinator
from tacita.live.server.attempts import Attempts
from tacita.live.server.certificates import build_certificate, certify_user
from tacita.live.server.open_requests import OpenRequest
from tacita.live.server.request_service import select_due_requests
from tacita.live.server.store import ServerStore
from tacita.live.wire import (
    Reply,
    RequestOutcome,
    ServerRequest,
    UserRequest,
    decode_reply,
    decode_request,
    encode_message,
    stamp_reply,
)
from tacita.round.unlearning_report import UnlearningReport
from tacita.runs.assembly import Machine, assemble_federation


def second_block(site: Site) -> None:
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    site.next_block()


def learned(site: Site) -> dict[str, np.ndarray]:
    results = {k: v for k, v in site.arrays().items() if k.startswith("now/heads/") or "/tally/" in k}
    assert len(results) > 3
    return results


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The model after two blocks in which nothing got lost."""
    site = site_with_leavers(tmp_path_factory.mktemp("survive") / "whole")
    site.next_block()
    second_block(site)
    assert all(entry["state"].startswith("done in block 0 after round 1") for entry in request_status(site))
    close_nodes(site)
    return learned(site)


def same(site: Site, whole: dict[str, np.ndarray]) -> None:
    """It was taken back once, and nobody has anything left that could be taken back again."""
    assert not stored_upload_sizes(site)[:LEAVERS].any()
    own_values = learned(site)
    assert own_values.keys() == whole.keys()
    for name, value in whole.items():
        assert are_close(own_values[name], value, 1e-9), name


def test_lost_retraction_is_retried_in_a_later_round(tmp_path: Path, whole: Any) -> None:
    """The node answered, the server heard nothing: it asks again in the next block, and hears all of it, once."""
    site = site_with_leavers(tmp_path / "lost", timeout=0.2, give_up=60.0)
    answers: list[dict[str, np.ndarray]] = []
    observations: dict[str, Any] = {}

    def lose(number: int, body: bytes, answer: Any) -> bytes | None:
        reply = bytes(answer())
        if not is_retraction(body):
            return reply
        answers.append(decode_reply(reply).arrays)
        return None if decode_request(body).head.block == 0 else reply

    site.transport.spoil = lose
    site.next_block()
    observations["status"], observations["told"] = request_status(site), stored_upload_sizes(site)
    with site.store as store:
        observations["open"] = store.list_pending("r")
    second_block(site)
    assert any(entry.any() for entry in answers[0].values())
    waits = (
        "open for a moment, tried in vain once, to be tried again in later rounds: block 0 round 2: 0 of the 1 nodes"
    )
    assert all(
        entry["state"].startswith(waits) and entry["age"] >= 0 and not entry["done"] for entry in observations["status"]
    )
    assert [entry["node"] for entry in observations["open"]] == ["n1"] * LEAVERS
    assert all(
        entry["tries"] == 1 and entry["state"] == "pending" and entry["age"] >= 0 for entry in observations["open"]
    )
    assert all(observations["told"][:LEAVERS] > 0)  # they have it still, for it was taken back by nobody
    assert all(entry["state"].startswith("done in block 1 after round 1") for entry in request_status(site))
    same(site, whole)
    close_nodes(site)


@pytest.mark.parametrize("node_too", [False, True])
def test_kills_between_reply_and_effect_apply_a_request_once(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch, node_too: bool
) -> None:
    site = site_with_leavers(tmp_path / "killed")
    deaths: list[str] = []
    commit, sent = ServerStore.commit_round, list[bytes]()

    def kill(store: ServerStore, *given_: Any) -> None:
        if given_[-1] is not None and given_[-1].needs_scrub and not deaths:
            deaths.append("server")
            raise Killed
        commit(store, *given_)

    def watch(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        sent.extend([reply] if is_retraction(body) else [])
        return reply

    site.transport.spoil = watch
    monkeypatch.setattr(ServerStore, "commit_round", lambda store, *given_: kill(store, *_whole(given_)))
    with pytest.raises(Killed):
        site.next_block()
    if node_too:
        site.transport.members[1].close()
        site.transport.members[1] = Node.open(site.folder / "node1")
    drop_node_memory(site)
    coordinator.continue_run(site.folder, "r", site.transport)
    second_block(site)
    assert len(sent) == 2
    first, second = (stamp_reply(entry, "", 0.0) for entry in sent)
    assert first == second  # the same question, the same bytes but for the clock
    assert deaths == ["server"]
    same(site, whole)
    close_nodes(site)


def _whole(given_: tuple[Any, ...]) -> tuple[Any, ...]:
    return given_ if len(given_) == 7 else (*given_, None)


def test_stale_question_undoes_nothing(tmp_path: Path, whole: Any) -> None:
    """One that lay on the way until the retraction had taken effect says nothing of it: it is refused."""
    site = site_with_leavers(tmp_path / "stale")
    late: list[bytes] = []

    def keep(number: int, body: bytes, answer: Any) -> bytes:
        if number == 1 and decode_request(body).head.kind == "validate" and not late:
            late.append(body)
        reply = bytes(answer())
        if number == 1 and is_retraction(body):
            request = decode_request(late[0])
            other = request.head.model_copy(update={"kind": "close"})  # never answered
            stale = decode_reply(
                question_handler.answer_message(
                    site.transport.members[1], encode_message(ServerRequest(other, request.arrays))
                )
            )
            assert stale.head.verdict == "refused"
            assert "older than an answer" in stale.head.said
        return reply

    site.transport.spoil = keep
    site.next_block()
    second_block(site)
    assert late
    same(site, whole)
    close_nodes(site)


def test_requests_of_a_silent_node_wait_and_raise_an_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that plays rounds: each vain attempt is undone on the node, the run goes on, and the last one holds."""
    monkeypatch.setattr(coordinator, "MOST_TRIES", 2)
    values = site_config("preset retraction").model_dump(mode="json")
    values["train"] |= {"rounds": 7, "patience": 100}
    site = make_site(tmp_path, validate_model(RunConfig, values, "the test"))
    collect_first_block(site, timeout=0.05)
    user, _ = user_with_items(site)
    node, observations = site.transport.members[1], dict[str, Any]()

    def deaf(number: int, body: bytes, answer: Any) -> bytes | None:
        head = decode_request(body).head
        if number == 1 and head.kind == "round" and head.round == 1 and "asked" not in observations:
            observations["asked"] = submit_request(site, "leave", user)["request"]
        if number == 1 and head.attempt and "before" not in observations:
            observations["before"] = node.store.load_devices("r")
        reply = bytes(answer())
        if number == 1 and head.attempt and head.round < 5:
            observations["state"] = request_status(site)[0]["state"]
            return None
        if (
            number == 1
            and head.round == 2
            and not head.attempt
            and "after" not in observations
            and "before" in observations
        ):
            observations["after"] = node.store.run_query(lambda db: attempt_snapshot.find_open_attempt(db, "r"))
        return reply

    site.transport.spoil = deaf
    site.next_block()
    assert observations["after"] == 0  # undone with the next question, whatever that is
    assert observations["state"].startswith("open for a moment, tried in vain once")
    entry = request_status(site)[0]
    assert entry["state"].startswith("done in block 0 after round")
    assert int(entry["state"].split("round ")[1].split(":")[0]) > 5
    assert entry["effect"].startswith("effective since")
    assert "what was learned out of the model; verified by nobody" in entry["effect"]
    with site.store as store:
        events = [event for _, _, event in store.list_events("r")]
        assert [e["tries"] for e in events if e["event"] == "request stuck"] == [2]
        assert [e.get("tries", 0) for e in events if e["event"] == "request"] == [1, 2, 0]
        assert store.list_open_requests("r") == store.list_pending("r") == []
        note = store.load_run("r").note
        assert note is not None
        assert (note["attempts"]["resolved"], note["attempts"]["failed"]) == (3, [1, 2])
    close_nodes(site)


def test_failed_requests_back_off_and_block_later_ones() -> None:
    def open_(number: int, sender: int, **told: Any) -> OpenRequest:
        wanted = UserRequest(id=number, kind="forget", sender=sender)
        return OpenRequest(number, 7, wanted, RequestOutcome(id=number, **{"state": "heard", **told}))

    def server(block: int, round: int) -> Any:
        return type("Server", (), {"block": block, "round": round})

    last = {"state": "pending", "block": 1, "round": 10}

    def first(tries: int) -> int:
        return next(r for r in range(10, 80) if select_due_requests([open_(1, 1, tries=tries, **last)], server(1, r)))

    when = {tries: first(tries) for tries in (1, 2, 3, 9)}
    assert when == {1: 11, 2: 12, 3: 14, 9: 74}
    assert select_due_requests([open_(1, 1, tries=9, **last)], server(2, 0))  # a new block is a new chance
    waiting = [open_(1, 1, tries=3, **last), open_(2, 1), open_(3, 2)]
    assert [entry.number for entry in select_due_requests(waiting, server(1, 11))] == [3]
    assert [entry.number for entry in select_due_requests(waiting, server(1, 14))] == [1, 2, 3]


def test_rollback_restores_devices_but_not_spending(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("fedavg"))
    store = site.transport.members[1].store
    before = {"users": np.array([1, 2]), "private": np.ones((2, 3)), "parts/p/spent": np.array([[1], [2]])}
    after = {"users": np.array([2, 3]), "private": np.zeros((2, 3)), "parts/p/spent": np.array([[7], [8]])}

    def put(arrays: Any) -> None:
        with store._write_transaction() as db:
            row = ("r", "now", "{}", pack(arrays))
            db.execute("INSERT OR REPLACE INTO devices (run, tag, note, arrays) VALUES (?, ?, ?, ?)", row)

    for failed in (True, False):
        put(before)
        store.run_withdrawing_change(lambda db: attempt_snapshot.save_snapshot(db, "r", 4, 0))
        put(after)
        store.run_withdrawing_change(
            lambda db: attempt_snapshot.save_snapshot(db, "r", 4, 0)
        )  # a second answer of the same attempt
        assert store.run_query(lambda db: attempt_snapshot.find_open_attempt(db, "r")) == 4
        store.run_withdrawing_change(lambda db, failed=failed: attempt_snapshot.end_attempt(db, "r", failed, "here"))
        state = store.load_devices("r")
        assert state is not None
        assert state[1]["users"].tolist() == ([1, 2, 3] if failed else [2, 3])
        assert state[1]["private"].all(axis=1).tolist() == ([True, True, False] if failed else [False, False])
        assert state[1]["parts/p/spent"].tolist() == ([[1], [7], [8]] if failed else [[7], [8]])  # a newcomer's, too
        assert store.load_devices("r", "before/now") is None
        assert store.run_query(lambda db: attempt_snapshot.find_open_attempt(db, "r")) == 0
    close_nodes(site)


def test_sent_requests_are_in_the_release_log_and_certificate(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config(SHARING, rounds=5, patience=100))
    collect_first_block(site)
    user, items = user_with_items(site)
    node = site.transport.members[1]
    act_at_rounds(site, {
        1: lambda: submit_request(site, "share", user, *items[:3]),
        3: lambda: submit_request(site, "unshare", user, *items[:2]),
    })  # fmt: skip
    site.next_block()
    lines = {
        release["kind"]: release
        for release in reversed(node.store.list_releases())
        if release["kind"].startswith("request/")
    }
    assert lines.keys() == {"request/share", "request/unshare"}
    sent = lines["request/share"]
    assert (sent["users"], sent["block"], sent["round"]) == (1, 0, 1)
    assert sent["sees"] == "1 person asks the server to share: made-up names, 3 item numbers and times"
    assert 50 < sent["bytes"] < 200
    assert user not in str(lines)
    assert not any(item in str(lines) for item in items)
    log = list_log_lines(perform_verb(node, "ledger", {}))
    assert any("1 person asks the server to unshare: made-up names, 2 item numbers" in entry for entry in log)
    answer = perform_verb(node, "ledger", {"user": user})
    assert [(request["kind"], request["items told"]) for request in answer["requests"]] == [
        ("share", 3),
        ("unshare", 2),
    ]
    assert answer["requests"][0]["bytes"] == sent["bytes"]
    assert "the wish to share, 3 item numbers, a made-up name and the time" in list_log_lines(answer)[0]
    counted, _ = node.store.count_releases_since(0.0)
    assert counted == sum(not release["kind"].startswith("request/") for release in node.store.list_releases())
    _, rows = user_queries.list_releases(node.store, node.store.list_users()[1][1], 0, 100)
    assert not any(row["yours"] for row in rows if row["kind"].startswith("request/"))  # somebody else's
    report = request_status(site)
    assert report[0]["certificate"]["taken"] == ""
    assert report[1]["certificate"]["taken"] == "2 shared items out of the record"
    assert (report[1]["certificate"]["effective block"], report[1]["certificate"]["effective after round"]) == (0, 4)
    assert abs(float(report[1]["certificate"]["effective at"]) - time.time()) < 600
    assert (
        "in block 0 after round 4; taken: 2 shared items out of the record; verified by nobody" in report[1]["effect"]
    )
    close_nodes(site)


def test_part_that_did_not_unlearn_is_not_certified() -> None:
    config = site_config("preset retraction")
    fed = assemble_federation(config, Machine())
    server = make_initial_progress(fed).server
    report = UnlearningReport(details={"people": 1})
    certificate = build_certificate([report], (server, server), "unshare")
    user_certificate = certify_user(certificate, "unshare", 0)
    assert user_certificate.verdict == "taken out of the server's record; not unlearned"
    assert user_certificate.removal == "nothing: the server held none of it"
    assert user_certificate.method == "the record of what is shared"


def test_a_node_that_lies_about_times_reorders_nothing(tmp_path: Path) -> None:
    """Times that a node made up are brought between what was carried out last and the server's own clock."""
    site = make_site(tmp_path, site_config(SHARING, rounds=5, patience=100))
    collect_first_block(site)
    count = [0]

    def lie(number: int, body: bytes, answer: Any) -> bytes:
        reply = decode_reply(answer())
        if number == 3 and reply.head.kind == "round":
            count[0] += 1
            at = [1e11, 0.0, time.time() - 1e6, 1e12, 5.0][reply.head.round % 5]
            wanted = UserRequest(id=count[0], kind="share", sender=77, items=[count[0]], time=at)
            return encode_message(Reply(reply.head.model_copy(update={"requests": [wanted]}), reply.arrays))
        return encode_message(reply)

    site.transport.spoil = lie
    began = time.time()
    site.next_block()
    times = site.arrays()["now/given/time"]
    assert len(times) == count[0] == 5
    assert began < times[0] <= times[-1] <= time.time()
    assert (np.diff(times) > 0).all()  # in the order in which they were carried out
    close_nodes(site)


def test_the_time_of_a_request_is_bounded_by_what_the_server_has_seen() -> None:
    attempts = Attempts()
    times = [attempts.order_request_time(value, 100.0) for value in (50.0, 10.0, 1e12, 99.0)]
    times.append(
        Attempts.from_note({"attempts": attempts.to_note()}).order_request_time(0.0, 200.0)
    )  # after a restart, too
    assert np.allclose(times, [50.0, 50.0, 100.0, 100.0, 100.0])
    assert (np.diff(times) > 0).all()  # none is taken for older than what was there before it
