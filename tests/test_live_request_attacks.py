"""What a server, a crash or a neighbour could make of requests on their way, tried: none of it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.loopback_site import (
    Killed,
    Loopback,
    Site,
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
    fixed_tally_config,
    is_retraction,
    request_status,
    site_with_leavers,
    stored_upload_sizes,
    submit_request,
    user_with_items,
)
from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.live.node import attempt_snapshot, attempts, question_handler
from tacita.live.server import coordinator, open_requests
from tacita.live.server.store import ServerStore
from tacita.live.wire import (
    MOST_REQUESTS,
    RequestOutcome,
    ServerRequest,
    UserRequest,
    decode_reply,
    decode_request,
    encode_message,
)
from tacita.runs.assembly import Machine, assemble_federation


class Stop(BaseException):
    """A server that goes on by itself from here."""


class Hostile:
    """Questions of a server's own making to node 1, from the first honest one of a kind."""

    def __init__(self, site: Site, kind: str) -> None:
        self.node, self.first = site.transport.members[1], Any

        def listen(number: int, body: bytes, answer: Any) -> bytes:
            request = decode_request(body)
            if number == 1 and request.head.kind.startswith(kind):
                self.first = request
                raise Stop
            return bytes(answer())

        site.transport.spoil = listen
        with pytest.raises(Stop):
            site.next_block()

    def asks(self, **head: Any) -> Any:
        state = self.node.store.load_model("r")
        known = {} if state is None else {name: array for name, (_, array) in state[1].items()}
        arrays = {name: array for name, array in (known | self.first.arrays).items() if name in self.first.head.names}
        if "/" not in head.get("kind", self.first.head.kind):
            arrays = {name: array for name, array in arrays.items() if not name.startswith("chosen")}
        names = {name: digest_array(array) for name, array in arrays.items()}
        server_request = ServerRequest(self.first.head.model_copy(update={"names": names, **head}), arrays)
        return decode_reply(question_handler.answer_message(self.node, encode_message(server_request)))


def budgeted(folder: Path) -> Site:
    values = site_config("tally").model_dump(mode="json")
    values |= {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0, "blocks": 4}}
    site = make_site(folder, validate_model(RunConfig, values, "the test"))
    collect_first_block(site)
    return site


def test_ordinary_replies_cannot_be_undone_and_noise_is_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undone and asked for again without one person, a noised sum would show that person in the difference."""
    site = budgeted(tmp_path)
    server = Hostile(site, "statistic")
    assert "no request raises" in server.asks(attempt=1).head.said
    first = server.asks()
    assert first.head.verdict == "ok"
    assert "no request raises" in server.asks(kind="close", attempt=1).head.said

    def again() -> Any:
        """The same once more, had the node forgotten that it answered."""
        server.node.open_runs.clear()
        with server.node.store._write_transaction() as db:
            db.execute("DELETE FROM replies")
        return server.asks(best_round=0)

    monkeypatch.setattr(question_handler, "advance_run", lambda *_: None)  # nor that the round is over
    second = again()
    assert second.head.verdict == "ok"
    pairs = [(first.arrays[name], second.arrays[name]) for name in first.arrays if name.startswith("terms")]
    assert pairs
    assert all(entry.shape != other.shape or (entry != other).mean() > 0.9 for entry, other in pairs)
    close_nodes(site)


def test_attempt_ends_with_its_block(tmp_path: Path) -> None:
    site = site_with_leavers(tmp_path / "site")
    server, config = Hostile(site, "statistic/retraction"), site.config
    run, node = "r", server.node
    node.store.run_withdrawing_change(lambda db: attempt_snapshot.save_snapshot(db, run, 3, 0))

    def said(**head: Any) -> str:
        try:
            attempts.resolve_attempt(node, server.first.head.model_copy(update=head), config)
        except question_handler.Refusal as why:
            return str(why)
        return ""

    assert said(attempt=3) == ""
    assert "ends with its block" in said(attempt=3, block=1)
    assert "is over" in said(attempt=2)
    assert said(attempt=0, resolved=3) == ""
    assert "is over" in said(attempt=3)
    assert said(attempt=4) == ""
    close_nodes(site)


def test_attempt_older_than_the_servers_list_counts_as_failed() -> None:
    many = list(range(10, 10 + MOST_REQUESTS))
    assert attempts._has_failed(5, many)
    assert not attempts._has_failed(5, many[:-1])  # it lists all there are
    assert attempts._has_failed(10, many)
    assert not attempts._has_failed(10 + MOST_REQUESTS, many)


def test_attempt_snapshot_is_deleted_when_done_or_erased(tmp_path: Path) -> None:
    """Whatever a server says later, what was called done does not come back; nor is it in a byte of the file."""
    site = site_with_leavers(tmp_path / "site")
    server = Hostile(site, "statistic/retraction")
    node = server.node
    stored_state = node.store.load_devices("r")
    assert stored_state is not None
    ptr, ids = stored_state[1]["lists/parts/statistic/told:"], stored_state[1]["lists/parts/statistic/told:item"]
    needles = [ids[ptr[n] : ptr[n + 1]].tobytes() for n in range(LEAVERS)]
    assert server.asks().head.verdict == "ok"
    assert node.store.load_devices("r", "before/now") is not None
    assert any(needle in _file(node) for needle in needles)
    done = [RequestOutcome(id=request.id, state="done") for request in node.store.list_requests("r")]
    node.store.record_outcomes("r", done[:1])
    copy = node.store.load_devices("r", "before/now")
    assert copy is not None
    assert len(copy[1]["users"]) == len(stored_state[1]["users"]) - 1
    node.store.record_outcomes("r", done)
    assert not any(needle in _file(node) for needle in needles)
    node.store.run_withdrawing_change(
        lambda db: attempt_snapshot.end_attempt(db, "r", True, "here")
    )  # "it failed", says a server that lies
    after = node.store.load_devices("r")
    assert after is not None
    assert after[1]["users"].tolist() == stored_state[1]["users"].tolist()
    assert not stored_upload_sizes(site)[:LEAVERS].any()
    assert stored_upload_sizes(site)[LEAVERS:].any()
    node.store.run_withdrawing_change(lambda db: attempt_snapshot.save_snapshot(db, "r", 9, 0))
    node.store.erase_user(None)
    assert node.store.load_devices("r", "before/now") is None
    assert node.store.run_query(lambda db: attempt_snapshot.find_open_attempt(db, "r")) == 0
    close_nodes(site)


def _file(node: Any) -> bytes:
    path = node.store.path
    return b"".join(entry.read_bytes() for entry in path.parent.glob(f"{path.name}*"))


def test_serial_number_is_not_reused_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answered before the crash, and is away after it, must not take a later attempt for that one."""
    values = fixed_tally_config().model_dump(mode="json")
    values["split"] |= {"n_blocks": 4, "base_share": 0.5}
    config = validate_model(RunConfig, values, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    collect_first_block(site, timeout=0.2, give_up=60.0)
    node, fed, rows = site.transport.members[1], assemble_federation(config, Machine()), rows_of_blocks(config)
    for raw in node.store.list_users()[1][:LEAVERS]:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(raw))
    effective: list[float] = []

    def lose(number: int, body: bytes, answer: Any) -> bytes | None:
        reply = bytes(answer())
        if is_retraction(body):
            effective.append(sum(float(np.abs(array).sum()) for array in decode_reply(reply).arrays.values()))
        return None if is_retraction(body) and decode_request(body).head.block == 0 else reply

    def more(block: int) -> None:
        site.publish(list(fed.stream.item_ids[: fed.stream.blocks[block].n_items]))
        site.collect(rows[block])

    site.transport.spoil = lose
    site.next_block()
    commit, deaths, looks = ServerStore.commit_round, list[int](), list[int]()

    def kill(store: ServerStore, *given_: Any) -> None:
        if len(given_) == 7 and given_[-1] is not None and given_[-1].needs_scrub and not deaths:
            deaths.append(1)
            raise Killed
        commit(store, *given_)

    monkeypatch.setattr(ServerStore, "commit_round", kill)
    more(1)
    with pytest.raises(Killed):
        site.next_block()

    def nodes(self: Loopback) -> list[int]:
        looks.append(1)
        return [2, 3] if len(looks) == 1 else sorted(self.members)

    monkeypatch.setattr(Loopback, "list_online_nodes", nodes)
    drop_node_memory(site)
    coordinator.continue_run(site.folder, "r", site.transport)
    more(2)
    site.next_block()
    assert all(entry["state"].startswith("done") for entry in request_status(site))
    assert request_status(site)[0]["certificate"]["taken"] == "what was learned out of the model"
    assert effective[-1] > 0
    assert not stored_upload_sizes(site)[:LEAVERS].any()
    close_nodes(site)


def test_a_silent_node_is_waited_for_once_a_round(tmp_path: Path) -> None:
    site = site_with_leavers(tmp_path / "site", timeout=0.05, give_up=60.0)
    node, observations = site.transport.members[1], list[str]()
    raws = node.store.list_users()[1][LEAVERS : 2 * LEAVERS]
    for raw in raws:
        node.store.enqueue_request(
            "forget", "r", sorted(node.store.read_history([node.store.find_user(raw)]).item), node.store.find_user(raw)
        )

    def deaf(number: int, body: bytes, answer: Any) -> bytes | None:
        kind = decode_request(body).head.kind
        observations.extend([kind] if kind.startswith("statistic/") else [])
        return None if kind.startswith("statistic/") else bytes(answer())

    site.transport.spoil = deaf
    site.next_block()
    assert len(set(observations)) == 1  # the second group is not asked while the first was met with silence
    with site.store as store:
        assert {entry["tries"] for entry in store.list_pending("r")} == {1}
        assert len(store.list_pending("r")) == 2 * LEAVERS
    close_nodes(site)


def test_a_node_cannot_fill_the_server_with_requests_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_requests, "MOST_OPEN", 3)
    site = make_site(tmp_path, site_config("fedavg"))
    some = [(node, UserRequest(id=n, kind="leave", sender=n)) for node in (1, 2) for n in range(1, 7 - node)]
    with site.store as store:
        for _ in range(2):  # sent again with every answer
            with store._write_transaction() as db:
                open_requests.store_received_requests(db, "r", open_requests.ReceivedRequests(some), 1.0)
        results = [(entry.node, entry.request.id) for entry in store.list_open_requests("r")]
        assert results == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
        assert [event["said"].split(" requests")[0] for _, _, event in store.list_events("r")] == ["2", "1", "2", "1"]
        with store._write_transaction() as db:
            db.execute("UPDATE requests SET done = 2, request = '' WHERE number < 3")
            open_requests.store_received_requests(db, "r", open_requests.ReceivedRequests(some), 3.0)
        assert [entry.request.id for entry in store.list_open_requests("r") if entry.node == 1] == [3, 4, 5]
    close_nodes(site)


def test_certificate_hides_the_uploads_of_others(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config(SHARING, rounds=5, patience=100))
    collect_first_block(site)
    (entry, items), (other, _) = user_with_items(site), user_with_items(site, nth=1)
    store = site.transport.members[1].store

    def leave() -> None:
        for raw in (entry, other):
            store.enqueue_request("leave", "r", user=store.find_user(raw))

    act_at_rounds(site, {1: lambda: submit_request(site, "share", entry, *items[:6]), 3: leave})
    site.next_block()
    remainder = {line["user"]: line["certificate"] for line in request_status(site) if line["kind"] == "leave"}
    assert remainder[entry]["taken"].startswith("6 shared items out of the record")
    assert "shared items" not in remainder[other]["taken"]
    assert remainder[other]["shared items"] == 0
    close_nodes(site)
