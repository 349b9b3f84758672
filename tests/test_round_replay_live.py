"""Forgetting by going back, asked for on nodes: what the lab does with the same people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.loopback_site import are_close, close_nodes, home_node, make_site, rows_of_blocks, site_config
from helpers.request_script import act_at_rounds, collect_first_block, request_status
from helpers.request_script import submit_request as submit_user_request
from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, begin_block, end_block, make_initial_progress, run_block
from tacita.live.node.question_handler import answer_message as handle_request
from tacita.live.node.user_requests import submit_request
from tacita.live.per_client_arrays import CHOSEN, is_valid_client_field
from tacita.live.wire import RequestOutcome, ServerRequest, decode_reply, decode_request, encode_message
from tacita.round.request import Request as AskedFor
from tacita.runs.assembly import Machine, assemble_federation

FIXED: dict[str, Any] = {"aggregation": "fixed", "denominator": 40.0}


@pytest.mark.parametrize(
    ("part", "train"),
    [
        ({"name": "fru", "share": 0.5}, {"local_epochs": 2}),
        ({"name": "fru", "share": 0.5}, {"local_epochs": 2, "forget": 2}),  # items that the server does not hear of
        ({"name": "cufru", "keep": 1.0}, {}),  # which half of the rows is longest, rounding may decide
        ({"name": "cfru"}, {}),
        ({"name": "retraction", "ratio": 0.1}, FIXED),
        ({"name": "retraction", "checkpoint_every": 1}, FIXED),
    ],
    ids=["fru", "fru-items", "cufru", "cfru", "retraction", "checkpoint"],
)
def test_leaving_from_a_node_equals_the_lab(tmp_path: Path, part: dict[str, Any], train: dict[str, Any]) -> None:
    items = train.get("forget", 0)
    values = site_config("fedavg", 3, **{k: v for k, v in train.items() if k != "forget"}).model_dump(mode="json")
    config = validate_model(RunConfig, values | {"parts": [{"name": "withdrawal"}, part]}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    person = next(raw for raw in fed.stream.user_ids if home_node(raw) == 1)
    key = int(fed.stream.user_keys[fed.stream.user_ids.index(person)])
    own_values = fed.stream.blocks[0].train.row(fed.stream.user_ids.index(person))[:items]
    asked_for = AskedFor("forget" if items else "leave", key, own_values)
    progress = make_initial_progress(fed)
    reports: list[Any] = []

    def on_round(report: Any, now: Progress) -> None:
        if not reports:
            reports.append(handle_requests(fed, now, asked_for))

    block = fed.stream.blocks[0]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    node, waiting = site.transport.members[1], [True]

    def asks(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        if waiting and number == 1 and decode_request(body).head.kind == "round":
            waiting.clear()
            raw = sorted(fed.stream.item_ids[i] for i in own_values)
            node.store.enqueue_request(asked_for.kind, "r", raw, node.store.find_user(person))
        return reply

    site.transport.spoil = asks
    site.next_block()
    begin_block(fed, progress, 0)
    run_block(fed, progress, on_round)
    end_block(fed, progress)
    with site.store as store:
        (event,) = [event for _, _, event in store.list_events("r") if event["event"] == "request"]
    done, want = event["done"][part["name"]], reports[0][part["name"]].to_json()
    assert (done["rounds"], done["clients_asked"]) == (want["rounds"], want["clients_asked"])
    assert done.get("path") == want.get("path")
    assert are_close(site.arrays()["now/items"], progress.server.items)
    close_nodes(site)


def test_leaving_that_waits_for_others_is_not_certified_as_done(tmp_path: Path) -> None:
    """With min_users = 2 the first waits at the server; once the second leaves, too, both are told that it is done."""
    values = site_config("fedavg", 4, **FIXED).model_dump(mode="json")
    parts = [{"name": "withdrawal"}, {"name": "retraction", "ratio": 0.1, "min_users": 2}]
    config = validate_model(RunConfig, values | {"parts": parts}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    collect_first_block(site)
    node = site.transport.members[1]
    first, second = node.store.list_users()[1][:2]
    statuses = []

    def leave_second() -> None:
        statuses.extend(request_status(site))
        submit_user_request(site, "leave", second)

    act_at_rounds(site, {0: lambda: submit_user_request(site, "leave", first), 2: leave_second})
    site.next_block()
    (early,) = statuses
    assert early["state"] == "waits at the server: waits until enough people have asked"
    assert early["certificate"]["verified"] == "nothing to verify yet"
    assert early["certificate"]["taken"] == "nothing yet"
    assert "effective at" not in early["certificate"]
    late = request_status(site)
    assert [status["state"].split(":")[0] for status in late] == ["done in block 0 after round 3"] * 2
    assert all(status["certificate"]["method"] == "retraction" for status in late)
    with site.store as store:
        assert not store._fetch_rows("SELECT 1 FROM requests WHERE sender != ''")  # nobody is known by name any more
    close_nodes(site)


@pytest.mark.parametrize(("name", "field"), [("cfru", "weight"), ("retraction", "psi"), ("retraction", "commitment")])
def test_per_client_uploads_of_nodes_are_bounded(name: str, field: str) -> None:
    values = site_config("fedavg", 3, **FIXED).model_dump(mode="json")
    config = validate_model(RunConfig, values | {"parts": [{"name": "withdrawal"}, {"name": name}]}, "the test")
    (part,) = [entry for entry in assemble_federation(config, Machine()).parts if entry.name == name]
    (result,) = [entry for entry in part.fields(50).extra if entry.name == field]
    arrays = {f"{field}/sender": np.array([7], np.uint64), f"{field}/each": np.zeros((1, *result.shape), np.float32)}
    assert is_valid_client_field(result, arrays, 1)
    assert not is_valid_client_field(result, {**arrays, f"{field}/each": arrays[f"{field}/each"] + 1e12}, 1)


# A server that looks for one person among those who withdraw


class Hostile:
    """Questions of a server's own making to one node that sends sums only, from a request that it did get."""

    def __init__(self, site: Any, number: int = 1) -> None:
        self.node = site.transport.members[number]
        self.first: Any = None

        def listen(to: int, body: bytes, answer: Any) -> bytes:
            self.first = self.first or (decode_request(body) if to == number else None)
            return bytes(answer())

        site.transport.spoil = listen
        with pytest.raises(TacitaError):  # the honest one names people, which no such node takes part in
            site.next_block()
        assert self.first is not None

    def asks(self, kind: str, round: int, chosen: list[int] | None = None, done: tuple[int, ...] = ()) -> Any:
        names, arrays = dict(self.first.head.names), dict(self.first.arrays)
        if chosen is not None:
            arrays[CHOSEN] = np.array(chosen, np.uint64)
            names[CHOSEN] = digest_array(arrays[CHOSEN])
        reports = [RequestOutcome(id=entry, state="done") for entry in done]
        head = self.first.head.model_copy(update={"kind": kind, "round": round, "names": names, "told": reports})
        return decode_reply(handle_request(self.node, encode_message(ServerRequest(head, arrays)))).head

    def forgets(self, people: list[int]) -> None:
        for user in people:
            self.node.store.enqueue_request("forget", "r", self.node.store.read_history([user]).item[:1], user)


def hostile_to(folder: Path) -> Hostile:
    values = site_config("fedavg", 6).model_dump(mode="json")
    parts = [{"name": "withdrawal"}, {"name": "fru", "keep": 1.0}]
    config = validate_model(RunConfig, values | {"parts": parts}, "the test")
    site = make_site(folder, config, insecure_single_user_uploads=False)
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(site.config)[0])
    return Hostile(site)


def test_withdrawal_sums_never_differ_by_one_user(tmp_path: Path) -> None:
    server = hostile_to(tmp_path)
    people = server.node.store.list_users()[0].tolist()[:10]
    assert server.asks("round", 0).verdict == "ok"
    server.forgets(people[:6])
    messages = server.asks("round", 1).requests
    batch = [entry.sender for entry in messages]
    assert len(batch) == 6
    assert server.asks("fru/stored-0-0/1.1", 2, batch[:5]).verdict == "refused"
    assert server.asks("fru/stored-0-0/1.2", 2, batch).clients == 6
    assert server.asks("fru/stored-0-0/1.3", 2, batch).clients == 6  # the same company: an answer that got lost
    assert server.asks("fru/stored-0-1/1.4", 2, batch).clients == 6  # another round is another question
    for name in ("stored-0-00", "stored-0-0-1", "stored-0-0_", "back-1"):
        with pytest.raises(TacitaError, match="no question"):
            server.asks(f"fru/{name}/1.4", 2, batch)
    assert server.asks("fru/stored-0-0/1.5", 2, batch[1:], (messages[0].id,)).verdict == "refused"  # "done", falsely
    assert server.asks("fru/back/1.6", 2, batch[1:]).verdict == "refused"
    server.forgets([people[0], *people[6:]])  # somebody in two batches
    senders = [
        request.sender for request in server.asks("round", 2, done=tuple(entry.id for entry in messages)).requests
    ]
    assert len(senders) == 5
    assert server.asks("fru/stored-0-0/2.1", 3, senders).verdict == "refused"
    assert server.asks("fru/stored-0-2/2.2", 3, senders).clients == 5


def test_erased_user_is_in_no_difference_of_sums(tmp_path: Path) -> None:
    server = hostile_to(tmp_path)
    store = server.node.store
    people = store.list_users()[0].tolist()
    raw = dict(zip(*(user if isinstance(user, list) else user.tolist() for user in store.list_users()), strict=True))
    assert server.asks("round", 0).verdict == "ok"
    server.forgets(people[:6])
    batch = [request.sender for request in server.asks("round", 1).requests]
    assert server.asks("fru/stored-0-0/1.1", 2, batch).clients == 6
    store.erase_user(raw[people[0]])
    senders = [request.sent_request.sender for request in store.list_requests("r") if request.sent_request is not None]
    assert len(senders) == 5
    assert server.asks("fru/stored-0-0/1.2", 2, senders).verdict == "refused"  # the six less these are the one
    assert server.asks("fru/stored-0-1/1.3", 2, senders).clients == 5  # nobody has answered this


def test_remainder_of_a_batch_joins_the_next(tmp_path: Path) -> None:
    server = hostile_to(tmp_path)
    store = server.node.store
    people = store.list_users()[0].tolist()
    raw = dict(zip(*(user if isinstance(user, list) else user.tolist() for user in store.list_users()), strict=True))
    assert server.asks("round", 0).verdict == "ok"
    server.forgets(people[:5])
    assert len(server.asks("round", 1).requests) == 5
    store.erase_user(raw[people[0]])
    senders = [request.sent_request.sender for request in store.list_requests("r") if request.sent_request is not None]
    assert server.asks("fru/stored-0-0/1.1", 2, senders).verdict == "refused"  # four
    server.forgets(people[5:10])
    assert server.asks("round", 2).verdict == "ok"
    both = [request.sent_request.sender for request in store.list_requests("r") if request.sent_request is not None]
    assert len(both) == 9
    assert server.asks("fru/stored-0-0/2.1", 3, [entry for entry in both if entry not in senders]).verdict == "refused"
    assert server.asks("fru/stored-0-0/2.2", 3, both).clients == 9


def test_users_without_uploads_do_not_count_towards_min_users(tmp_path: Path) -> None:
    """And needs not ask: nothing is queued that would cost the others a run."""
    server = hostile_to(tmp_path)
    store = server.node.store
    people = store.list_users()[0].tolist()[:6]
    assert server.asks("round", 0).verdict == "ok"
    server.forgets(people)
    batch = [request.sender for request in server.asks("round", 1).requests]
    assert server.asks("fru/stored-0-3/1.1", 2, batch).verdict == "refused"  # a round that nobody has kept
    assert server.asks("fru/stored-0-0/1.2", 2, batch).verdict == "ok"
    raw = store.list_users()[1][7]
    late = next(
        entry
        for entry, _ in store.read_catalogue()
        if entry not in set(store.read_history([store.find_user(raw)]).item)
    )
    store.add_interactions([(raw, late, 1e9, None)])
    with pytest.raises(TacitaError, match="nothing of that was ever learned from"):
        submit_request(server.node, "forget", raw, [late])
    known = str(store.read_history([store.find_user(raw)]).item[0])
    assert submit_request(server.node, "forget", raw, [late, known])


def test_requests_use_at_most_the_rounds_nodes_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third who asks is refused in one sentence, and the run goes on to its end."""
    monkeypatch.setattr("tacita.live.server.remote_devices.MOST_PLAYED", 5)
    values = site_config("fedavg", 5).model_dump(mode="json")
    config = validate_model(RunConfig, values | {"parts": [{"name": "withdrawal"}, {"name": "fru"}]}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(config)[0])
    node, people = site.transport.members[1], site.transport.members[1].store.list_users()[0].tolist()

    def asks(number: int, body: bytes, answer: Any) -> bytes:
        if number == 1 and decode_request(body).head.kind == "round" and len(people) > 3:
            entry = people.pop()
            node.store.enqueue_request("forget", "r", node.store.read_history([entry]).item[:1], entry)
        return bytes(answer())

    site.transport.spoil = asks
    people[4:] = people[4:7]
    site.next_block()
    with site.store as store:
        reports = [event for _, _, event in store.list_events("r") if event["event"] == "request"]
        done = [event for _, _, event in store.list_events("r") if event["event"] == "block done"]
    assert [element["done"]["fru"]["rounds"] for element in reports if "done" in element] == [1, 2]
    assert "ask again in the next block" in reports[2]["said"]
    assert len(done) == 1
    close_nodes(site)
