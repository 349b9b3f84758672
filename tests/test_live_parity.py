"""Lab and live are one code: nodes that answer a server give what the lab gives, and a broken round changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.accepted_answers import list_accepted
from helpers.loopback_site import (
    DATA,
    MODELS,
    PATIENT,
    SPLIT,
    Killed,
    Site,
    are_close,
    close_nodes,
    drop_node_memory,
    home_node,
    make_site,
    play_blocks,
    repeat_request,
    rows_of_blocks,
    run_lab,
    same_server_arrays,
    same_sums,
    site_config,
    site_with_first_block,
    without_timestamp,
)
from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.federation.devices import LocalDevices
from tacita.live.node import question_handler
from tacita.live.node.node import Node
from tacita.live.per_client_arrays import derive_run_secret
from tacita.live.server.coordinator import STORE_FILE, continue_run
from tacita.live.wire import ServerRequest, decode_reply, decode_request, encode_message
from tacita.runs.assembly import Machine, assemble_federation


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    config = getattr(request, "param", None) or site_config("fedavg")
    result = make_site(tmp_path, config)
    yield result
    for node in result.transport.members.values():
        node.close()


@pytest.mark.parametrize("site", [site_config(name) for name in MODELS], indirect=True, ids=list(MODELS))
def test_nodes_equal_the_lab(site: Site) -> None:
    play_blocks(site)
    whole = run_lab(site.config)
    arrays = site.arrays()
    assert are_close(arrays["now/items"], whole.server.items)
    for name, head in whole.server.heads.items():
        assert are_close(arrays[f"now/heads/{name}"], head)
    for part, state in whole.server.parts.items():
        for name, value in state.items():
            result = arrays[f"now/parts/{part}/{name}"]
            if name == "commitment":  # a digest knows no nearly
                assert result.shape == value.shape
            elif value.dtype == np.uint64:  # people, in whatever order their nodes answered
                assert np.array_equal(np.sort(result), np.sort(value)), (part, name)
            else:
                assert are_close(result, value), (part, name)
    with site.store as store:
        note = store.load_run("r").note
        assert note is not None
        for live, result in zip(note["plain"]["results"], whole.results, strict=True):
            assert live["best_round"] == result["best_round"]
            for metric in ("ndcg@20", "recall@20", "valid", "users"):
                assert live[metric] == pytest.approx(result[metric], rel=1e-4)
    if whole.clients.private.shape[1]:
        fed = assemble_federation(site.config, Machine())
        number = {raw: n for n, raw in enumerate(fed.stream.user_ids)}
        for node in site.transport.members.values():
            outcome = node.store.load_devices("r", "now")
            assert outcome is not None
            raw_of = dict(zip(*node.store.list_users(), strict=True))
            rows = [number[raw_of[user]] for user in outcome[1]["users"]]
            assert are_close(outcome[1]["private"], whole.clients.private[rows])


# What can go wrong on the way


def test_a_lost_reply_is_sent_again_and_counts_once(site: Site, tmp_path: Path) -> None:
    """Every third answer gets lost after the node has committed it."""
    asked = 0

    def lossy(number: int, body: bytes, answer: Any) -> bytes | None:
        nonlocal asked
        asked += 1
        reply = answer()
        return None if asked % 3 == 0 else reply

    site.transport.spoil = lossy
    play_blocks(site)
    whole = make_site(tmp_path / "whole", site.config) if (tmp_path / "whole").mkdir() is None else None
    assert whole is not None
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    with site.store as store, whole.store as other:
        assert list_accepted(store, "r") == list_accepted(other, "r")
        assert len(list_accepted(store, "r")) == 3 * 2 * (3 + 3 + 1)  # nodes, blocks, trained, validated and closed
    close_nodes(whole)


@pytest.mark.parametrize("site", [site_config("fedavg"), site_config("f3crec"), site_config("tally")], indirect=True)
@pytest.mark.parametrize("stop", [1, 5, 8, 12, 20])
def test_a_killed_server_goes_on_as_if_nothing_had_happened(site: Site, tmp_path: Path, stop: int) -> None:
    """Killed while it waits for some answer: a new process goes on from the last commit."""
    asked = 0

    def deadly(number: int, body: bytes, answer: Any) -> bytes:
        nonlocal asked
        asked += 1
        reply: bytes = answer()
        if asked == stop:
            raise Killed
        return reply

    site.transport.spoil = deadly
    fed = assemble_federation(site.config, Machine())
    for block, rows in zip(fed.stream.blocks, rows_of_blocks(site.config), strict=True):
        site.publish(list(fed.stream.item_ids[: block.n_items]))
        site.collect(rows)
        try:
            site.next_block()
        except Killed:
            drop_node_memory(site)
            continue_run(site.folder, "r", site.transport)
    (tmp_path / "whole").mkdir()
    whole = make_site(tmp_path / "whole", site.config)
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    close_nodes(whole)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_node_loses_nothing(site: Site, tmp_path: Path, when: str) -> None:
    """Killed before or after it has committed its answer; started again from its file."""
    asked = 0

    def deadly(number: int, body: bytes, answer: Any) -> bytes | None:
        nonlocal asked
        asked += 1
        if asked in (4, 11, 17):
            if when == "after":
                answer()
            site.transport.members[number].close()
            drop_node_memory(site)
            site.transport.members[number] = Node.open(site.folder / f"node{number}")
            return None
        return bytes(answer())

    site.transport.spoil = deadly
    play_blocks(site)
    (tmp_path / "whole").mkdir()
    whole = make_site(tmp_path / "whole", site.config)
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    for number, node in site.transport.members.items():
        assert node.store.list_releases()[0]["users"] > 0
        lines = [(r["block"], r["round"], r["kind"]) for r in node.store.list_releases()]
        assert len(lines) == len(set(lines)), number  # each release was counted once
    close_nodes(whole)


def test_malformed_and_wrong_sums_are_not_aggregated(site: Site, tmp_path: Path) -> None:
    """A node that answers nonsense is asked again; a sum that does not fit is refused before it is made."""
    spoilt = 0

    def bad(number: int, body: bytes, answer: Any) -> bytes:
        nonlocal spoilt
        reply = bytes(answer())
        spoilt += 1
        if spoilt % 4:
            return reply
        read = decode_reply(reply)
        kinds = [b"", b"GET / HTTP/1.1", reply[:100], reply[:-7] + b"1234567"]
        if "rows" in read.arrays:
            kinds = [
                encode_message(type(read)(read.head, read.arrays | {"rows": np.zeros((2, 2), np.float32)})),
                encode_message(type(read)(read.head.model_copy(update={"round": 77}), read.arrays)),
                encode_message(type(read)(read.head, {k: v for k, v in read.arrays.items() if k != "rows"})),
                encode_message(type(read)(read.head, read.arrays | {"rows": read.arrays["rows"] * np.nan})),
            ]
        return kinds[spoilt // 4 % 4]

    site.transport.spoil = bad
    play_blocks(site)
    (tmp_path / "whole").mkdir()
    whole = make_site(tmp_path / "whole", site.config)
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    close_nodes(whole)


def test_a_node_answers_one_question_under_one_number(site: Site) -> None:
    """The same round for another table would let a server compare two answers."""
    play_blocks(site)
    last = site.transport.log[-1]
    node = site.transport.members[last[0]]
    assert without_timestamp(question_handler.answer_message(node, last[1])) == without_timestamp(last[2])
    request = decode_request(last[1])
    changed = ServerRequest(request.head.model_copy(update={"best_round": request.head.best_round + 1}), request.arrays)
    answer = decode_reply(question_handler.answer_message(node, encode_message(changed)))
    assert answer.head.verdict == "refused"
    assert answer.arrays == {}


def test_a_small_node_sends_nothing_but_still_learns(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("fedavg"), min_users=1000)
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    site.collect(rows_of_blocks(site.config)[0])
    with pytest.raises(TacitaError, match="min_users"):
        site.next_block()
    for number, node in site.transport.members.items():
        assert node.store.list_releases() == []
        user = node.store.list_users()[1][0]
        node.refresh_snapshot()
        assert len(node.recommend(user, 5)) == 5, number
    assert all(decode_reply(reply).arrays == {} for _, _, reply in site.transport.log)
    close_nodes(site)


def test_a_late_joiner_gets_the_whole_model_and_takes_part(site: Site) -> None:
    late = site.transport.members.pop(3)
    with site.store as store:
        store.revoke_node("n3")
    fed = assemble_federation(site.config, Machine())
    blocks = rows_of_blocks(site.config)
    site.publish(list(fed.stream.item_ids))
    site.collect(blocks[0])
    site.next_block()
    with site.store as store:
        store.add_node("later", "another key")
        store.set_node_number("later", 4)
    late.store.add_interactions([(u, i, t, None) for u, i, t in blocks[0] + blocks[1] if home_node(u) == 3])
    site.transport.members[4] = late
    site.collect(blocks[1])
    site.next_block()
    with site.store as store:
        took_part = {(block, node) for block, _, kind, node, _ in list_accepted(store, "r") if kind == "round"}
    assert took_part == {(0, 1), (0, 2), (1, 1), (1, 2), (1, 4)}
    late.refresh_snapshot()
    user = late.store.list_users()[1][0]
    assert late.recommend(user, 3)[0]["title"].startswith("title of")
    late.close()


def test_private_and_unknown_items_never_take_part(site: Site) -> None:
    """Consent `keep` and items outside the catalogue stay on the node, and out of every message."""
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    site.collect(rows_of_blocks(site.config)[0])
    node = site.transport.members[1]
    person = node.store.list_users()[1][0]
    node.store.add_interactions([(person, "not in the catalogue", 1.0, None)])
    node.store.set_consent(person, None, "keep")
    site.next_block()
    assert person not in {node.store.list_users()[1][u] for u in np.flatnonzero(node_trained(node))}
    assert all(b"not in the catalogue" not in body + reply for _, body, reply in site.transport.log)


def test_nothing_of_a_person_is_on_the_server(site: Site) -> None:
    play_blocks(site)
    names = {u.encode() for u, _, _ in rows_of_blocks(site.config)[0]}
    names = {b'"' + name + b'"' for name in names} | {name for name in names if len(name) > 3}
    assert names
    for path in site.folder.glob(f"{STORE_FILE}*"):
        content = path.read_bytes()
        assert not [name for name in names if name in content], path
    for _, _, reply in site.transport.log:
        assert not [name for name in names if name in reply]


@pytest.mark.parametrize("site", [site_config("f3crec"), site_config("tally")], indirect=True, ids=["f3crec", "tally"])
def test_a_node_never_computes_with_arrays_that_do_not_fit(site: Site) -> None:
    """Compiled loops trust shapes and places: a hostile server must not get that far."""
    play_blocks(site)
    number, body, _ = next(
        entry for entry in reversed(site.transport.log) if decode_request(entry[1]).head.kind == "validate"
    )
    request = decode_request(body)
    node = site.transport.members[number]
    state = node.store.load_model("r")
    assert state is not None
    whole = {name: array for name, (_, array) in state[1].items()}

    def send(run: str, **changed: Any) -> bytes:
        arrays = {name: array for name, array in {**whole, **changed}.items() if array is not None}
        names = {name: digest_array(array) for name, array in arrays.items()}
        return question_handler.answer_message(
            node, encode_message(ServerRequest(request.head.model_copy(update={"run": run, "names": names}), arrays))
        )

    assert decode_reply(send("fresh")).head.verdict == "ok"
    before = node.store.list_releases()
    bad: list[dict[str, Any]] = [
        {"items": whole["items"][:-1]},
        {"items": np.zeros((len(whole["items"]), 999), np.float32)},
        {"items": whole["items"].astype(np.float64)},
        {"catalogue": np.frombuffer(b"[1, 2", np.uint8)},
        {"catalogue": np.frombuffer(b'[["a"]]', np.uint8)},
        {"heads/other": np.zeros(3, np.float32)},
        {"anything/at all": np.zeros(3, np.float32)},
        {"parts-received/unknown/table": whole["items"]},
    ]
    if "heads/column" in whole:
        nothing = {"heads/column": np.zeros(0, np.int32), "heads/ptr": np.zeros(0, np.int32)}
        far = whole["heads/column"].copy()
        far[0] = 10_000_000
        bad += [
            {"heads/column": far},
            {"heads/column": -far},
            {"heads/ptr": whole["heads/ptr"][:-1]},
            {"heads/ptr": whole["heads/ptr"][::-1].copy()},
            {"heads/known": np.array([10_000_000], np.int32)},
            {"heads/inputs": np.array([10_000_000], np.int32)},
            {"heads/weights": whole["heads/weights"][:5]},
            {"heads/repeat": np.zeros(0, np.float32)},
            {"heads/ptr": wrapping(whole["heads/ptr"])},  # in 32 bits its differences look right
            {"heads/weights": np.zeros((0, 40), np.float32), **nothing, "heads/known": np.zeros(1, np.int32)},
            {"heads/inputs": np.zeros(len(whole["items"]), np.int32)},
            {"heads/recency": np.array([-1.0], np.float32)},
            {"heads/weights": whole["heads/weights"] * np.float32(1e30)},
        ]
    else:
        bad += [
            {"parts-received/replay/table": np.zeros((5, 3), np.float32)},
            {"parts-received/replay/table": np.zeros((10_000, 8), np.float32)},
            {"parts-received/replay/list": np.zeros((5, 8), np.float32)},
        ]
    for n, changed in enumerate(bad):
        assert decode_reply(send(f"bad{n}", **changed)).head.verdict == "refused", changed
    assert decode_reply(send("bad", items=None)).head.verdict == "refused"
    assert node.store.list_releases() == before
    assert node.store.load_model("bad0") is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_request_is_refused_or_answered_never_a_crash(fuzzed: Site, data: st.DataObject) -> None:
    _, body, _ = data.draw(st.sampled_from(fuzzed.transport.log[:12]))
    at = data.draw(st.integers(0, min(len(body), 5000) - 1))
    much = data.draw(st.binary(min_size=0, max_size=8))
    changed = body[:at] + much + body[at + data.draw(st.integers(0, 8)) :]
    node = fuzzed.transport.members[1]
    with contextlib.suppress(TacitaError):
        assert isinstance(question_handler.answer_message(node, changed), bytes)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    result = make_site(tmp_path_factory.mktemp("fuzzed"), site_config("f3crec"))
    play_blocks(result)
    yield result
    close_nodes(result)


def node_trained(node: Node) -> Any:
    result = node.store.load_devices("r", "now")
    assert result is not None
    return result[1]["took_part"]


# What a curious server tries


def test_two_runs_never_differ_by_few_users(tmp_path: Path) -> None:
    """An import of one person between two runs waits until enough others have something new."""
    site = site_with_first_block(tmp_path)
    site.next_block()
    number, _, reply = site.transport.log[0]
    node = site.transport.members[number]
    person = node.store.list_users()[1][0]
    items = [item for item, _ in node.store.read_catalogue()]
    node.store.add_interactions([(person, item, 2e9, None) for item in items[:20]])
    repeat = repeat_request(site, "second")
    assert repeat.head.verdict == "ok"
    assert same_sums(repeat, decode_reply(reply))
    all_users = [(raw, item, 2e9 + 1, None) for raw in node.store.list_users()[1] for item in items[:2]]
    node.store.add_interactions(all_users)
    assert not same_sums(repeat_request(site, "third"), repeat)
    close_nodes(site)


def test_settings_of_a_run_stay_and_people_are_not_sampled(tmp_path: Path) -> None:
    site = site_with_first_block(tmp_path)
    site.next_block()
    message = repeat_request(site, "r", round=0, block=1, train={"patience": 7})
    assert message.head.verdict == "refused"
    assert "settings" in message.head.said
    for train in ({"participation": {"kind": "fraction", "rate": 0.9}}, {"negatives": 0}, {"local_epochs": 1000}):
        assert repeat_request(site, "other", train=train).head.verdict == "refused", train
    for changed in ({"round": 1}, {"kind": "train"}, {"block": 5000}, {"round": 10**6}):
        assert repeat_request(site, "another", **changed).head.verdict == "refused", changed
    close_nodes(site)


def test_a_node_whose_model_came_before_later_settings_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_with_first_block(tmp_path)
    site.next_block()
    store = site.transport.members[site.transport.log[0][0]].store
    run = decode_request(site.transport.log[0][1]).head.run
    state = store.load_model(run)
    assert state is not None
    before = json.loads(state[0]["config"])
    del before["split"]["repeats"], before["evaluate"]["hidden_items"], before["date_format"], before["decimal"]
    monkeypatch.setattr(store, "load_model", lambda run: ({**state[0], "config": json.dumps(before)}, state[1]))
    assert "settings" not in repeat_request(site, run, kind="validate").head.said
    before["seed"] += 1
    assert "settings" in repeat_request(site, run, kind="validate").head.said
    close_nodes(site)


def test_a_refusal_counts_nobody_and_is_no_release(tmp_path: Path) -> None:
    site = site_with_first_block(tmp_path, min_users=1000)
    with pytest.raises(TacitaError, match="minimum"):
        site.next_block()
    for _, _, reply in site.transport.log:
        assert not any(letter.isdigit() for letter in decode_reply(reply).head.said)
    assert not any(node.store.list_releases() for node in site.transport.members.values())
    close_nodes(site)


@pytest.mark.parametrize("name", ["fedavg", "tally"])
def test_after_everybody_refused_the_block_can_be_asked_for_again(tmp_path: Path, name: str) -> None:
    """Nothing was told of the block, so what people add still joins it."""
    site = make_site(tmp_path, site_config(name), min_users=15)
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    rows = rows_of_blocks(site.config)[0]
    few = sorted({u for u, _, _ in rows})[:20]
    site.collect([row for row in rows if row[0] in few])
    with pytest.raises(TacitaError, match="refused"):
        site.next_block()
    site.collect(rows)
    continue_run(site.folder, "r", site.transport)
    with site.store as store:
        counted = [n for _, _, kind, _, n in list_accepted(store, "r") if kind in ("round", "statistic")]
    assert len(counted) >= 3
    assert min(counted) >= 15
    close_nodes(site)


def wrapping(ptr: Any) -> Any:
    """Borders that run far out of the array and come back, whose 32-bit differences are not negative."""
    out = ptr.copy()
    out[1:4] = [2**31 - 1, -(2**31), -1]
    return out


def test_refusals_do_not_reveal_few_users(tmp_path: Path) -> None:
    """A matrix that overflows for whoever has an item got another sentence than one that does not."""
    site = site_with_first_block(tmp_path, min_users=1000)
    with pytest.raises(TacitaError, match="minimum"):
        site.next_block()
    _, body, _ = site.transport.log[0]
    node = site.transport.members[1]
    request = decode_request(body)
    n = len(request.arrays["items"])
    message = set()
    for item in range(n):
        loud = np.zeros((n, n), np.float32)
        loud[item] = 9e5
        heads = {"weights": loud, "column": np.zeros(0, np.int32), "ptr": np.zeros(0, np.int32)}
        arrays = {**request.arrays, **{f"heads/{k}": v for k, v in heads.items()}}
        arrays["heads/known"] = np.array([n], np.int32)
        names = {name: digest_array(array) for name, array in arrays.items()}
        for kind in ("validate", "close"):
            head = request.head.model_copy(update={"run": f"{kind}{item}", "names": names, "kind": kind})
            reply = decode_reply(
                question_handler.answer_message(node, encode_message(ServerRequest(head, arrays)))
            ).head
            message.add((kind, reply.verdict, reply.said, len(reply.sums)))
    assert len(message) == 2
    assert node.store.list_releases() == []
    close_nodes(site)


def whole_sum(reply: Any, name: str, shape: tuple[int, ...]) -> Any:
    """One sum of a reply, whole."""
    if name in reply.arrays:
        return reply.arrays[name]
    values = np.zeros(shape)
    values.reshape(-1)[reply.arrays[f"{name}/at"]] = reply.arrays[f"{name}/value"]
    return values


def test_statistic_leaves_out_items_below_min_contributors(tmp_path: Path) -> None:
    site = site_with_first_block(tmp_path, min_contributors=6)
    site.next_block()
    reply = decode_reply(site.transport.log[0][2])
    n = len(site.transport.members[1].store.read_catalogue())
    touched, pairs = whole_sum(reply, "touched", (n,)), whole_sum(reply, "pairs", (n, n))
    assert touched[touched > 0].min() >= 6
    rare = touched == 0
    assert rare.any()
    assert pairs.any()
    assert not pairs[rare].any()
    assert not pairs[:, rare].any()
    close_nodes(site)


@pytest.mark.parametrize("backbone", ["tally", "tally-order"])
def test_contributor_counts_carry_noise(tmp_path: Path, backbone: str) -> None:
    more = {"order_back": False} if backbone == "tally-order" else {}
    values = {
        "data": DATA,
        "split": SPLIT,
        "seed": 5,
        "backbone": {"name": backbone, "ridge": 20.0, "min_item": 2, "keep": 20, **more},
        "method": "dpps",
        "parts": [{"name": "dpps", "clip": 1.0, "releases": 4}],
    }
    site = make_site(tmp_path, validate_model(RunConfig, values, "test"), min_contributors=5)
    play_blocks(site)
    observations = 0
    for _, body, reply in site.transport.log:
        report = decode_reply(reply)
        if report.head.verdict == "ok" and "touched" in report.arrays:
            observations += 1
            counts = report.arrays["touched"]
            assert not np.array_equal(counts, np.rint(counts)), decode_request(body).head
    assert observations >= 4
    close_nodes(site)


def test_round_reply_hides_who_touched_a_row(tmp_path: Path) -> None:
    site = site_with_first_block(tmp_path, "fedavg")
    site.next_block()
    sent = {name.partition("/")[0] for name in decode_reply(site.transport.log[0][2]).arrays}
    assert sent == {"rows"}
    close_nodes(site)


def test_user_who_withdraws_during_a_sum_is_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_with_first_block(tmp_path, "fedavg")
    node = site.transport.members[1]
    person = node.store.list_users()[1][0]
    whole, real, done = len(node.store.list_users()[1]), LocalDevices.exchange, []

    def slow(self: Any, *given: Any) -> Any:
        report = real(self, *given)
        if not done:
            done.append(node.store.set_consent(person, None, "keep"))
        return report

    monkeypatch.setattr(LocalDevices, "exchange", slow)
    site.next_block()
    first = next(decode_reply(reply) for number, _, reply in site.transport.log if number == 1)
    assert first.head.clients == whole - 1
    close_nodes(site)


def test_draws_of_two_runs_have_nothing_in_common() -> None:
    assert derive_run_secret("s", "one") != derive_run_secret("s", "two") != derive_run_secret("t", "two")
    assert derive_run_secret("", "one") == ""


# What goes wrong at the server


def test_a_node_revoked_during_a_round_does_not_count(site: Site) -> None:
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids))
    site.collect(rows_of_blocks(site.config)[0])

    def revoking(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        if number == 3 and len(site.transport.log) == 2:
            with site.store as store:
                store.revoke_node("n3")
        return reply

    site.transport.spoil = revoking
    site.next_block()
    with site.store as store:
        assert {node for _, _, _, node, _ in list_accepted(store, "r")} == {1, 2}


@pytest.mark.parametrize("site", [site_config("fedavg"), site_config("tally")], indirect=True, ids=["fedavg", "tally"])
def test_hostile_node_cannot_stop_or_bias_a_run(site: Site, tmp_path: Path) -> None:
    """What node 3 sends first is always wrong; asked again it answers as it should, and nothing of the rest is left."""
    observations: set[tuple[Any, ...]] = set()
    turn = 0

    def hostile(number: int, body: bytes, answer: Any) -> bytes:
        nonlocal turn
        read = decode_reply(answer())
        head = read.head
        mark = (head.block, head.round, head.kind)
        if number != 3 or mark in observations:
            return encode_message(read)
        observations.add(mark)
        turn += 1
        changes: list[dict[str, Any]] = [{"weight": 1e11}, {"clients": 10**8}, {"sums": {"ndcg@20": (5.0, 2)}}]
        if head.kind in ("validate", "close"):
            return encode_message(type(read)(head.model_copy(update={"sums": {"ndcg@20": (1e3, 10)}})))
        bad = dict(read.arrays)
        kind = turn % 5
        if kind < 2:
            return encode_message(type(read)(head.model_copy(update=changes[kind]), bad))
        if kind == 2:
            bad["repeats" if "repeats" in bad else "other"] = np.zeros(64)
        elif kind == 3:
            first = next(iter(bad))
            bad[first] = bad[first][:-1]
        else:
            bad["more"] = np.zeros(3)
        return encode_message(type(read)(head, bad))

    site.transport.spoil = hostile
    play_blocks(site)
    (tmp_path / "whole").mkdir()
    whole = make_site(tmp_path / "whole", site.config)
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    close_nodes(whole)


def test_titles_and_other_runs_do_not_affect_a_run(site: Site) -> None:
    """A killed round is repeated though the catalogue got titles and another run knows more items."""
    fed = assemble_federation(site.config, Machine())
    with site.store as store:
        store.add_items([(item, "") for item in fed.stream.item_ids])
    site.collect(rows_of_blocks(site.config)[0])
    asked = 0

    def deadly(number: int, body: bytes, answer: Any) -> bytes:
        nonlocal asked
        asked += 1
        reply = bytes(answer())
        if asked == 8:
            raise Killed
        return reply

    site.transport.spoil = deadly
    with pytest.raises(Killed):
        site.next_block()
    with site.store as store:
        store.add_items([(fed.stream.item_ids[0], "a title at last"), ("quite new", "an item")])
        store.create_run("second", site.config, PATIENT)
        store.open_block("second")
    continue_run(site.folder, "second", site.transport)
    continue_run(site.folder, "r", site.transport)
    with site.store as store:
        result = store.load_run("r").note
        assert result is not None
        assert len(result["plain"]["results"]) == 1
    assert site.transport.members[1].store.read_catalogue()[0][1] == "a title at last"
