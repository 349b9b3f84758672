"""What nodes may ask of a server: a hostile one stops no run, undoes no round and leaves nothing in the store."""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.loopback_site import (
    PATIENT,
    Killed,
    Site,
    are_close,
    close_nodes,
    drop_node_memory,
    make_site,
    play_blocks,
    rows_of_blocks,
    run_lab,
    site_config,
)
from helpers.request_script import (
    SHARING,
    act_at_rounds,
    collect_first_block,
    fixed_tally_config,
    request_status,
    submit_request,
    user_with_items,
)
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node import user_requests
from tacita.live.node.node import Node
from tacita.live.node.verbs import perform_verb
from tacita.live.node.withdrawal_batches import select_whole_batches
from tacita.live.server import coordinator
from tacita.live.server.open_requests import OpenRequest
from tacita.live.server.remote_devices import RemoteDevices
from tacita.live.server.request_service import group_requests
from tacita.live.wire import MAGIC, Reply, UserRequest, decode_reply, decode_request, encode_message
from tacita.round.fulfilment import can_fulfil
from tacita.runs.assembly import Machine, assemble_federation, build_plan


def spoiled(site: Site, change: Any) -> None:
    """Node 3's answers to `round`, as `change` makes them."""

    def spoil(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        message = decode_reply(reply)
        return change(message, reply) if number == 3 and message.head.kind == "round" else reply

    site.transport.spoil = spoil


def raw(said: Reply, requests: list[Any]) -> bytes:
    """A reply with requests that no model of ours would make."""
    head = {**said.head.model_dump(mode="json"), "requests": requests}
    text = json.dumps(head).encode()
    rest = encode_message(said)
    size = int.from_bytes(rest[len(MAGIC) : len(MAGIC) + 4], "big")
    return MAGIC + len(text).to_bytes(4, "big") + text + rest[len(MAGIC) + 4 + size :]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"id": 1, "kind": "share", "sender": 1, "items": [1], "time": "nan"},
        {"id": 1, "kind": "share", "sender": 1, "items": [[1]], "time": 0.0},
        {"id": 1, "kind": "share", "sender": -1, "items": [1], "time": 0.0},
        {"id": 1, "kind": "share", "sender": 2**64, "items": [1], "time": 0.0},
        {"id": 1, "kind": "make me root", "sender": 1, "items": [], "time": 0.0},
        {"id": 1, "kind": "share", "sender": True, "items": [1], "time": 0.0},
        {"id": 1, "kind": "share", "sender": 1, "items": [1], "time": 0.0, "more": 1},
    ],
    ids=str,
)
def test_malformed_request_makes_a_bad_reply(tmp_path: Path, request_: dict[str, Any]) -> None:
    site = make_site(tmp_path, site_config("fedavg"))
    observations = []

    def once(said: Reply, reply: bytes) -> bytes:
        observations.append(1)
        return raw(said, [request_]) if len(observations) == 1 else reply

    spoiled(site, once)
    play_blocks(site)
    with site.store as store:
        assert any(event["event"] == "bad reply" for _, _, event in store.list_events("r"))
        assert store.list_open_requests("r") == []
    close_nodes(site)


@pytest.mark.parametrize("kind", ["share", "forget", "leave"])
def test_requests_that_nothing_carries_out_change_no_round(tmp_path: Path, kind: str) -> None:
    config = site_config("fedavg")
    site = make_site(tmp_path, config)
    count = [0]

    def ask(said: Reply, reply: bytes) -> bytes:
        count[0] += 1
        wanted = UserRequest(id=count[0], kind=kind, sender=5, items=[7, 11], time=1.0)  # type: ignore[arg-type]
        return encode_message(Reply(said.head.model_copy(update={"requests": [wanted]}), said.arrays))

    spoiled(site, ask)
    play_blocks(site)
    assert are_close(site.arrays()["now/items"], run_lab(config).server.items)
    with site.store as store:
        reports = [event for _, _, event in store.list_events("r") if event["event"] == "request"]
        assert len(reports) == count[0] == 6
        assert all("nothing in this run can carry out" in entry["said"] for entry in reports)
        assert store.list_open_requests("r") == []
        remainder = store._fetch_rows("SELECT request FROM requests")
        assert [text for (text,) in remainder] == [""] * 6  # nothing of what was asked for is kept
    close_nodes(site)


def test_a_reply_over_more_people_than_were_asked_does_not_count(tmp_path: Path) -> None:
    from helpers.upload_log import UploadLog, config_with_parts
    from tacita.round import registry as parts

    parts._PARTS[UploadLog.name] = UploadLog
    try:
        config = config_with_parts("fedavg", UploadLog, aggregation="fixed", denominator=40.0)
        site = make_site(tmp_path, config, insecure_single_user_uploads=True)
        with site.store as store:  # nobody else is asked twice
            store._fetch_rows("UPDATE runs SET options = ?", json.dumps(PATIENT | {"give_up": 1.0}))

        def many(number: int, body: bytes, answer: Any) -> bytes:
            reply = bytes(answer())
            message = decode_reply(reply)
            if not message.head.kind.startswith("probe-log/"):
                return reply
            return encode_message(
                Reply(message.head.model_copy(update={"clients": 10**6, "weight": 1e6}), message.arrays)
            )

        site.transport.spoil = many
        node = site.transport.members[1]
        play_with_a_leaver(site, node)
        with site.store as store:
            reports = [event for _, _, event in store.list_events("r") if event["event"] == "request"]
        assert reports
        assert "answered within" in reports[0]["said"]
        close_nodes(site)
    finally:
        del parts._PARTS[UploadLog.name]


def play_with_a_leaver(site: Site, node: Any) -> None:
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(site.config)[0])
    person = node.store.list_users()[1][0]
    node.store.enqueue_request("forget", "r", user=node.store.find_user(person))
    try:
        site.next_block()
    except TacitaError as error:
        raise AssertionError("a request stopped the run") from error


# What people ask for with the node's own verbs


def given(site: Site) -> list[tuple[int, str]]:
    arrays = site.arrays()
    with site.store as store:
        items = [item for item, _ in store.read_catalogue()]
    if "now/given/item" not in arrays:
        return []
    return [(int(s), items[i]) for s, i in zip(arrays["now/given/sender"], arrays["now/given/item"], strict=True)]


def found_in_server(site: Site, *needles: bytes) -> set[bytes]:
    files = [path for path in site.folder.iterdir() if path.is_file()]
    assert any(file.name == "server.sqlite" for file in files)
    state = b"".join(file.read_bytes() for file in files)
    return {needle for needle in needles if needle in state}


def needles(site: Site, request: int, sender: int | None = None) -> list[bytes]:
    """A shared row as the server would hold it: the time of sharing, and whose it is."""
    want = next(entry for entry in site.transport.members[1].store.list_requests() if entry.id == request)
    result = [struct.pack("<d", want.created), repr(want.created).encode()]
    return result if sender is None else [*result, struct.pack("<Q", sender), str(sender).encode()]


def test_share_unshare_and_leave_take_effect_with_the_round_that_carries_them(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config(SHARING, rounds=8, patience=100))
    collect_first_block(site)
    user, items = user_with_items(site)
    observations: dict[str, Any] = {}

    def look(name: str) -> None:
        observations[name] = (
            given(site),
            request_status(site),
            found_in_server(site, *observations.get("needles", [])),
        )

    def share() -> None:
        observations["first"] = submit_request(site, "share", user, *items[:3])["request"]
        observations["second"] = submit_request(site, "share", user, *items[3:5])["request"]

    def unshare() -> None:
        observations["sender"] = given(site)[0][0]
        observations["needles"] = needles(site, observations["first"])
        look("shared")
        submit_request(site, "unshare", user, *items[:3])

    def leave() -> None:
        look("unshared")
        observations["needles"] = needles(site, observations["second"], observations["sender"])
        observations["there"] = found_in_server(site, *observations["needles"])
        submit_request(site, "leave", user)

    act_at_rounds(site, {1: share, 3: unshare, 5: leave, 7: lambda: look("left")})
    site.next_block()
    shared, report, counterpart = observations["shared"]
    assert sorted(item for _, item in shared) == items[:5]
    assert len(counterpart) >= 1  # the search finds what is there
    assert [entry["state"] for entry in report] == ["done in block 0 after round 2: shared"] * 2
    remainder, report, counterpart = observations["unshared"]
    assert sorted(item for _, item in remainder) == items[3:5]
    assert report[-1]["state"].startswith("done in block 0 after round 4: taken out of the server's record")
    assert counterpart == set()  # nothing of the rows that were taken back
    assert len(observations["there"]) >= 2
    gone, report, counterpart = observations["left"]
    assert (gone, counterpart) == ([], set())
    assert report[-1]["done"]
    assert report[-1]["certificate"]["residual risk"].startswith("Nothing in this run unlearns")
    assert not any(item in json.dumps(report) for item in items)
    with site.store as store:
        assert [e["kind"] for _, _, e in store.list_events("r") if e["event"] == "request"] == [
            "share",
            "share",
            "unshare",
            "leave",
        ]
        assert store.list_outcomes("r") == {}  # the node knows
    close_nodes(site)


def test_a_request_survives_kills_between_acknowledgement_and_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies when it has committed a request and before it has carried it out, a node when it has sent it."""
    result = {}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        site = result[name] = make_site(tmp_path / name, site_config(SHARING, rounds=6, patience=100))
        collect_first_block(site)
        user, items = user_with_items(site)
        act_at_rounds(site, {1: lambda s=site, u=user, i=items: submit_request(s, "share", u, *i[:4])})
    site, deaths = result["killed"], []
    plain, carry_out = site.transport.spoil, coordinator.apply_requests

    def kill_node(number: int, body: bytes, answer: Any) -> bytes | None:
        head = decode_request(body).head
        reply = plain(number, body, answer)
        if number == 1 and (head.kind, head.round) == ("round", 1) and "node" not in deaths:
            deaths.append("node")
            site.transport.members[1].close()
            drop_node_memory(site)
            site.transport.members[1] = Node.open(site.folder / "node1")
            return None
        return reply

    def kill_server(*given_: Any) -> Any:
        if "server" not in deaths:
            deaths.append("server")
            raise Killed
        return carry_out(*given_)

    site.transport.spoil = kill_node
    monkeypatch.setattr(coordinator, "apply_requests", kill_server)
    with pytest.raises(Killed):
        site.next_block()
    with site.store as store:
        assert len(store.list_open_requests("r")) == 1
    drop_node_memory(site)
    coordinator.continue_run(site.folder, "r", site.transport)
    result["whole"].next_block()
    assert deaths == ["node", "server"]
    assert len(given(site)) == 4
    own_values, yours = site.arrays(), result["whole"].arrays()
    assert own_values.keys() == yours.keys()
    assert all(np.array_equal(own_values[name], yours[name]) for name in own_values if not name.endswith("given/time"))
    for entry in result.values():
        assert request_status(entry)[0]["state"] == "done in block 0 after round 2: shared"
        close_nodes(entry)


def test_late_reply_loses_no_request(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config(SHARING, rounds=5, patience=100))
    collect_first_block(site, quorum=2)
    user, items = user_with_items(site)
    act_at_rounds(
        site,
        {1: lambda: submit_request(site, "share", user, items[0])},
        lose=lambda number, head: number == 1 and head.round in (1, 2),
    )
    site.next_block()
    assert [item for _, item in given(site)] == [items[0]]
    assert request_status(site)[0]["state"] == "done in block 0 after round 3: shared"
    close_nodes(site)


def test_impossible_requests_are_refused_in_one_sentence(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config(SHARING, rounds=2))
    collect_first_block(site)
    user, items = user_with_items(site)
    node = site.transport.members[1]
    node.store.add_interactions([(user, "of another world", 1.0, None)])
    with pytest.raises(TacitaError, match="takes part in no run yet"):
        submit_request(site, "share", user, items[0])
    site.next_block()
    other = next(item for item, _ in node.store.read_catalogue() if item not in items)
    node.set_consent(user, items[1], "keep")
    for kind, words, match in (
        ("share", ["nobody"], "nothing of user 'nobody'"),
        ("share", [user, "of another world"], "not in the server's catalogue"),
        ("share", [user, other], "has no item"),
        ("share", [user, items[1]], "marked 'keep'"),
        ("unshare", [user], "does not share anything"),
        ("forget", [user, items[0]], "can forget"),
    ):
        with pytest.raises(TacitaError, match=match):
            submit_request(site, kind, *words)
    assert submit_request(site, "share", user)["items"] == len(items) - 1  # all but what is kept
    with pytest.raises(TacitaError, match="shares all of that"):
        submit_request(site, "share", user, items[0])
    assert submit_request(site, "unshare", user, items[0])["state"] == "queued"
    submit_request(site, "leave", user)
    with pytest.raises(TacitaError, match="has left run 'r' already"):
        submit_request(site, "leave", user)
    close_nodes(site)


def test_a_request_goes_to_the_run_that_is_meant(tmp_path: Path) -> None:
    """Two runs over the same people: only the one that is named hears of it, whichever asks first."""
    site = make_site(tmp_path, site_config(SHARING, rounds=2))
    collect_first_block(site)
    user, items = user_with_items(site)
    site.next_block()
    with site.store as store:
        store.create_run("other", site.config, PATIENT)
    perform_verb(site.transport.members[1], "request", {"kind": "share", "user": user, "items": items[:2], "run": "r"})
    other = Site(site.folder, site.config, site.transport, "other")
    other.next_block()
    assert given(other) == []
    assert request_status(site)[0]["state"] == "queued"
    site.collect(rows_of_blocks(site.config)[1])
    site.next_block()
    assert len(given(site)) == 2
    close_nodes(site)


# tally forgets live


ENDED = '{"id": 1, "state": "done"}'


def told_by_devices(site: Site) -> Any:
    """How many people have told of each item in each block, as their devices remember it."""
    result = np.zeros_like(site.arrays()["now/parts/tally/touched"])
    for node in site.transport.members.values():
        state = node.store.load_devices("r")
        assert state is not None
        lists = {name.rpartition(":")[2]: v for name, v in state[1].items() if name.startswith("lists/parts/statistic")}
        np.add.at(result, (lists["block"], lists["item"]), 1)
    return result


@pytest.mark.parametrize(
    ("kind", "least", "model"),
    [
        ("leave", 1, "tally"),
        ("forget", 1, "tally"),
        ("leave", 3, "tally"),
        ("leave", 1, "tally-order"),
        ("forget", 1, "tally-order"),
    ],
)
def test_tally_forgets_live_exactly(tmp_path: Path, kind: str, least: int, model: str) -> None:
    """Five people of one node withdraw together what they told in two blocks, beside a run that never heard of it."""
    sites = {}
    for name in ("asked", "never"):
        (tmp_path / name).mkdir()
        sites[name] = make_site(tmp_path / name, fixed_tally_config(model), min_contributors=least)
        collect_first_block(sites[name])
    site, never = sites["asked"], sites["never"]
    raws = site.transport.members[1].store.list_users()[1][:5]
    gone = {raw: user_with_items(site, nth=n)[1][:3] for n, raw in enumerate(raws)}
    for raw, items in gone.items():
        node = never.transport.members[1]
        node.store.enqueue_request(kind, "r", items if kind == "forget" else [], node.store.find_user(raw))
    with node.store._write_transaction() as db:  # nothing of it is ever told
        db.execute("UPDATE requests SET sent = 1, block = 0, round = 0, question = '', outcome = ?", (ENDED,))
    for entry in sites.values():
        entry.next_block()
    words = {raw: items if kind == "forget" else [] for raw, items in gone.items()}
    for raw in raws[:4]:
        waits = submit_request(site, kind, raw, *words[raw])
    assert waits["state"].startswith("queued: 4 of the 5 people have asked")
    fed = assemble_federation(site.config, Machine())
    for entry in sites.values():
        entry.publish(list(fed.stream.item_ids))
        entry.collect(rows_of_blocks(site.config)[1])
    submit_request(site, kind, raws[4], *words[raws[4]])
    for entry in sites.values():
        entry.next_block()
    report = request_status(site)
    assert [element["state"].split(":")[0] for element in report] == ["done in block 1 after round 1"] * 5
    assert report[0]["certificate"]["method"] == model
    own_values, yours = site.arrays(), never.arrays()
    names = [name for name in yours if name.startswith(("now/heads/", "best/heads/")) or "/tally/" in name]
    assert len(names) > 5
    sums = {name.rpartition("/")[2] for name in names}
    assert {"contexts.total", "after.total", "before.total"} <= sums or model == "tally"
    for name in names:  # sums of order are whole numbers: nothing stays behind
        if name.rpartition("/")[2].startswith(("contexts.", "after.", "before.")):
            assert np.array_equal(own_values[name], yours[name]), name
    for name in names if least == 1 else ():  # what is rare among those who stay was not rare when it was told
        assert are_close(own_values[name], yours[name], 1e-9), name
    assert np.array_equal(own_values["now/parts/tally/touched"], told_by_devices(site))
    assert not np.any(own_values.get("now/parts/statistic/asked", np.zeros(0)))
    close_nodes(site)
    close_nodes(never)


def test_question_about_a_subset_of_withdrawals_is_refused(tmp_path: Path) -> None:
    site = make_site(tmp_path, fixed_tally_config())
    collect_first_block(site)
    raws = site.transport.members[1].store.list_users()[1][:6]
    for raw in raws[:5]:
        site.transport.members[1].store.enqueue_request(
            "leave", "r", user=site.transport.members[1].store.find_user(raw)
        )
    site.next_block()
    node = site.transport.members[1]
    wants = node.store.list_requests("r")
    assert all(want.is_final for want in wants)
    open_ = [replace(want, outcome=None) for want in wants]
    users = [entry.user for entry in open_ if entry.user is not None]
    assert select_whole_batches(open_, users, 5)
    assert not select_whole_batches(open_, users[:4], 1)  # a sum without one of them
    assert not select_whole_batches(open_, [*users, 99], 5)
    assert not select_whole_batches(open_, users, 6)
    assert not select_whole_batches(wants, users, 5)  # they were asked already
    close_nodes(site)


@pytest.mark.parametrize(
    ("part", "able"),
    [
        ("retraction", {"forget": False, "leave": True, "share": False}),
        ("fru", {"forget": True, "leave": True, "share": False}),
    ],
)
def test_leave_is_supported_without_item_requests(part: str, able: dict[str, bool]) -> None:
    train = {"aggregation": "fixed", "denominator": 6.0}
    values = {"data": "synthetic:users=20", "train": train, "parts": [{"name": "withdrawal"}, {"name": part}]}
    plan = build_plan(validate_model(RunConfig, values, "the test"))
    assert {kind: can_fulfil(plan, kind) for kind in able} == able
    assert "`tacita node leave ann` takes everything back" in user_requests.UNSUPPORTED["single"].format(user="ann")


def test_unshare_uses_the_sender_key_of_the_share(tmp_path: Path) -> None:
    """Whatever the owner of the node allows by then: under another name nothing would be found."""
    config = site_config(SHARING, rounds=6, patience=100)
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    node = site.transport.members[1]
    node.store._db.execute(
        "UPDATE meta SET value='ab12' WHERE key='secret'"
    )  # parity tests have none: one name for all
    collect_first_block(site)
    user, items = user_with_items(site)
    observations: list[list[str]] = []

    def unshare() -> None:
        observations.append(sorted(item for _, item in given(site)))
        node.config = node.config.model_copy(update={"insecure_single_user_uploads": False})
        node.open_runs.clear()
        submit_request(site, "unshare", user, *items[:3])

    act_at_rounds(site, {
        1: lambda: submit_request(site, "share", user, *items[:3]),
        3: unshare,
        5: lambda: observations.append(sorted(item for _, item in given(site))),
    })  # fmt: skip
    with contextlib.suppress(TacitaError):
        site.next_block()
    assert observations == [sorted(items[:3]), []]
    close_nodes(site)


def test_withdrawals_of_two_nodes_are_independent(tmp_path: Path) -> None:
    def asked(number: int, node: int, sender: int, kind: Any = "leave") -> OpenRequest:
        return OpenRequest(number, node, UserRequest(id=number, kind=kind, sender=sender, items=[], time=0.0))

    wanted = [asked(1, 7, 1), asked(2, 8, 2), asked(3, 7, 3), asked(4, 8, 4, "unshare"), asked(5, 7, 1)]
    assert [[entry.number for entry in group] for group in group_requests(wanted)] == [[1, 3], [2], [4], [5]]


def test_partial_withdrawal_sum_removes_nothing() -> None:
    remote = RemoteDevices(transport=None, run="r", allowed_nodes=set, catalogue=list)  # type: ignore[arg-type]
    remote.locations.add_requesters({1: 7, 2: 7, 3: 8})
    homes = {7: np.array([1, 2], np.uint64), 8: np.array([3], np.uint64)}
    values = np.array([1, 2, 3], np.uint64)
    remote._check_requesters(values, homes, {7: None, 8: None})  # type: ignore[dict-item]
    with pytest.raises(TacitaError, match="1 of the 3 people who withdraw live on nodes that refused"):
        remote._check_requesters(values, homes, {7: None})  # type: ignore[dict-item]
    others = np.array([1, 4], np.uint64)  # rounds that are played again may do without somebody
    remote._check_requesters(others, homes, {7: None})  # type: ignore[dict-item]
