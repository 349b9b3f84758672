"""What a node does when it sends nothing, and what a server does with a reply that nobody can have meant."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.loopback_site import (
    close_nodes,
    make_site,
    play_blocks,
    repeat_request,
    rows_of_blocks,
    same_server_arrays,
    same_sums,
    site_config,
    site_with_first_block,
    without_timestamp,
)
from tacita.core.errors import TacitaError
from tacita.live.node import question_handler
from tacita.live.node.answers import AnswerRecord, QuestionNumber
from tacita.live.node.node import Node
from tacita.live.node.store import NodeStore
from tacita.live.wire import (
    Reply,
    ReplyHead,
    decode_catalogue,
    decode_reply,
    decode_request,
    encode_catalogue,
    encode_message,
)
from tacita.runs.assembly import Machine, assemble_federation


def dump(node: Node) -> dict[str, list[Any]]:
    """Every row of every table of a node's store."""
    db = node.store._db
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.8e9
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# Refusals


@pytest.mark.parametrize("name", ["f3crec", "tally"])
def test_paused_node_continues_unchanged(tmp_path: Path, clock: Clock, name: str) -> None:
    """Every question comes too early, twice, and then in time: the answers are those of a node without a pause."""
    folders = [tmp_path / element for element in ("whole", "paused")]
    for folder in folders:
        folder.mkdir()
    whole = make_site(folders[0], site_config(name))
    paused = make_site(folders[1], site_config(name), min_seconds_between_rounds=60.0)
    play_blocks(whole)
    node, request = paused.transport.members[1], [(body, reply) for n, body, reply in whole.transport.log if n == 1]
    blocks, refused, answered = rows_of_blocks(paused.config), 0, {}
    for body, reply in request:
        head = decode_request(body).head
        if blocks and head.block == 2 - len(blocks):
            paused.collect(blocks.pop(0))
        for _ in range(2):
            clock.now += 1.0
            before = dump(node)
            early = decode_reply(question_handler.answer_message(node, body)).head
            if early.verdict == "refused":
                assert "pause" in early.said
                assert dump(node) == before
                refused += 1
        if early.verdict == "refused":
            clock.now = answered[head.kind] + 60.0  # counted from the last answer, not from a refusal
        assert without_timestamp(question_handler.answer_message(node, body)) == without_timestamp(reply)
        answered[head.kind] = clock.now
    assert refused >= 4
    assert len(node.store.list_releases()) == len(request)
    close_nodes(whole)
    close_nodes(paused)


def test_a_block_ends_on_a_node_that_keeps_its_scores(tmp_path: Path, clock: Clock) -> None:
    """The day's answers are used up when the block closes: no scores are told, and the best round is carried on."""
    folders = [tmp_path / name for name in ("whole", "spent")]
    for folder in folders:
        folder.mkdir()
    sites = [
        make_site(folder, site_config("f3crec"), max_releases_per_day=most)
        for folder, most in zip(folders, (1000, 6), strict=True)
    ]
    for site in sites:
        site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
        site.collect(rows_of_blocks(site.config)[0])
        site.next_block()  # three rounds, each validated: six releases
    whole, spent = (site.transport.members[1] for site in sites)
    last = decode_reply([reply for n, _, reply in sites[1].transport.log if n == 1][-1])
    assert (last.head.kind, last.head.verdict, last.head.sums) == ("close", "ok", {})
    assert "24 hours" in last.head.said
    assert len(spent.store.list_releases()) == 6
    for tag in ("now", "best"):
        assert spent.store.load_devices("r", tag)[0] == whole.store.load_devices("r", tag)[0]
        for key, value in whole.store.load_devices("r", tag)[1].items():
            np.testing.assert_array_equal(spent.store.load_devices("r", tag)[1][key], value)
    for site in sites:
        close_nodes(site)


def test_a_small_node_learns_a_round_once_and_beside_the_run(tmp_path: Path) -> None:
    """Asked again it learns nothing twice; when there are enough people it starts as if it had not refused."""
    site = site_with_first_block(tmp_path, "fedavg", min_users=1000)
    with pytest.raises(TacitaError, match="min_users"):
        site.next_block()
    number, body, _ = site.transport.log[0]
    node = site.transport.members[number]
    before = dump(node)
    assert {row[1] for row in before["devices"]} == {"alone", "best alone"}
    assert not before["blocks"] + before["assigned"] + before["replies"] + before["ledger"]
    assert decode_reply(question_handler.answer_message(node, body)).head.verdict == "refused"
    node.open_runs.clear()
    assert decode_reply(question_handler.answer_message(node, body)).head.verdict == "refused"
    after = dump(node)
    del before["models"], after["models"]  # when the model came
    assert after == before
    node.config = node.config.model_copy(update={"min_users": 5})
    other = make_site(tmp_path / "other", site.config) if (tmp_path / "other").mkdir() is None else site
    other.collect(rows_of_blocks(site.config)[0])
    node.open_runs.clear()
    own_values, fresh = (
        decode_reply(question_handler.answer_message(element, body))
        for element in (node, other.transport.members[number])
    )
    assert own_values.head.verdict == fresh.head.verdict == "ok"
    assert same_sums(own_values, fresh)
    close_nodes(site)
    close_nodes(other)


# Who counts as having something new


def test_import_joins_only_with_enough_users_with_usable_rows(tmp_path: Path) -> None:
    """Rows of unknown items, or of items a sum holds already, do not hide one person's import."""
    site = site_with_first_block(tmp_path, "fedavg")
    site.next_block()
    number, _, reply = site.transport.log[0]
    node = site.transport.members[number]
    first, *others = node.store.list_users()[1]
    items = [item for item, _ in node.store.read_catalogue()]
    had = {user: item for user, item, _ in rows_of_blocks(site.config)[0]}
    node.store.add_interactions([(first, item, 2e9, None) for item in items[:20]])
    node.store.add_interactions([(user, "not in the catalogue", 2e9, None) for user in others])
    node.store.add_interactions([(user, had[user], 2e9, None) for user in others])
    repeat = repeat_request(site, "second")
    assert repeat.head.verdict == "ok"
    assert same_sums(repeat, decode_reply(reply))
    close_nodes(site)


def test_unusable_rows_wait_for_a_later_block(tmp_path: Path) -> None:
    with NodeStore.create(tmp_path / "node.sqlite") as store:
        store.add_interactions([(f"u{n}", "a", None, 5.0) for n in range(3)])
        assert store.assign_block("one", 0, 3, ["a"], 4.0) == 3
        store.commit_answer(QuestionNumber("one", 0, 0, "statistic"), AnswerRecord("", b"", releases_block=True))
        store.add_interactions([("u0", "b", None, 5.0), ("u1", "b", None, 3.0), ("u2", "c", None, 5.0)])
        assert store.assign_block("two", 0, 3, ["a", "b"], 4.0) == 3  # one person's row would be the difference
        assert store.read_block_rows("two", 0).item == ["a", "a", "a"]
        store.add_interactions([("u1", "b", 1.0, 4.0), ("u2", "b", 1.0, 4.0)])
        assert store.assign_block("three", 0, 3, ["a", "b"], 4.0) == 6
        assert store.assign_block("three", 1, 1, ["a", "b", "c"], 4.0) == 1


# What so many people cannot have said

Change = Callable[[Reply], Reply]


def head(**changes: Any) -> Change:
    return lambda reply: Reply(reply.head.model_copy(update=changes), reply.arrays)


def array(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(reply: Reply) -> Reply:
        wrong = np.ascontiguousarray(change(reply.arrays[name].copy()), reply.arrays[name].dtype)
        return Reply(reply.head, reply.arrays | {name: wrong})

    return changed


def entry(value: float) -> Callable[[Any], Any]:
    def put(one: Any) -> Any:
        one.reshape(-1)[-1] = value
        return one

    return put


COMMON = [("weight", head(weight=1e11)), ("expected", head(expected=1e6)), ("expected", head(expected=0.0))]
SCORES = [
    ("sums/ndcg@20", head(sums={"ndcg@20": (1e3, 10)}, clients=10)),
    ("sums/ndcg@20", head(sums={"ndcg@20": (0.5, 10**8)})),
    ("'secret@20'", head(sums={"secret@20": (0.5, 1)})),
]
WRONG: dict[str, dict[str, list[tuple[str, Change]]]] = {
    "tally": {
        "survey": [
            ("counts", array("counts", lambda one: one + 10**6)),
            ("counts", array("counts", lambda one: one - 10**6)),
        ],
        "statistic": [
            *COMMON,
            ("pairs", array("pairs", entry(1e300))),
            ("pairs", array("pairs", entry(-1.0))),
            ("pairs", array("pairs", lambda one: one + one.max() + 1)),
            ("touched", array("touched", lambda one: one + 1e6)),
            ("repeats", array("repeats", lambda one: one + 1e12)),
            ("repeats", array("repeats", lambda one: one - 1)),
        ],
        "validate": SCORES,
        "close": SCORES,
    },
    "ncf": {
        "round": [
            *COMMON,
            ("rows", array("rows", entry(3e38))),
            ("rows", array("rows", entry(-3e38))),
            ("heads/", lambda reply: array(next(n for n in reply.arrays if "heads/" in n), entry(3e38))(reply)),
        ],
        "validate": SCORES,
    },
    "reg": {"round": [("proximal.share", array("proximal.share", lambda one: one + 1e6))]},
}


def settings_of(name: str) -> Any:
    if name == "tally":  # read through some of its items
        model = {"name": "tally", "ridge": 20.0, "min_item": 2, "keep": 20, "most_inputs": 30}
        return site_config("tally").model_copy(update={"backbone": model})
    if name == "ncf":
        model = {"name": "ncf", "dim": 8, "share_mlp": True}
        return site_config("fedavg", 1).model_copy(update={"backbone": model})
    return site_config("fedavg", 1).model_copy(update={"method": "reg"})


@pytest.mark.parametrize("name", list(WRONG))
def test_impossible_values_are_refused_by_field_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Node 3 tells every lie once before it answers as it should; the run ends as if it had not."""
    for folder in ("site", "whole"):
        (tmp_path / folder).mkdir()
    site, whole = (make_site(tmp_path / folder, settings_of(name)) for folder in ("site", "whole"))
    todo = {kind: list(lies) for kind, lies in WRONG[name].items()}

    def lying(number: int, body: bytes, answer: Any) -> bytes:
        reply = decode_reply(answer())
        lies = todo.get(reply.head.kind, [])
        later = name != "reg" or reply.head.block == 1  # there is nothing to pull to in the first block
        if number != 3 or not lies or not later or reply.head.verdict != "ok":
            return encode_message(reply)
        word, lie = lies.pop(0)
        message = encode_message(lie(reply))
        assert message != encode_message(reply)
        expect.append(word)
        return message

    expect: list[str] = []
    caplog.set_level(logging.WARNING, "tacita.live.server.remote_devices")
    site.transport.spoil = lying
    play_blocks(site)
    messages = [record.getMessage() for record in caplog.records if record.name == "tacita.live.server.remote_devices"]
    assert not any(todo.values())
    assert len(messages) == len(expect)
    for line, word in zip(messages, expect, strict=True):
        assert word in line
    play_blocks(whole)
    assert same_server_arrays(site, whole)
    close_nodes(site)
    close_nodes(whole)


def test_a_reply_brings_no_more_requests_than_it_may() -> None:
    inputs = {"kind": "train", "run": "r", "block": 0, "round": 0, "verdict": "ok"}
    with pytest.raises(ValueError, match="requests"):
        ReplyHead(**inputs, requests=[{}] * 1001)


def test_remote_messages_cannot_inject_terminal_codes() -> None:
    loud = "x\x1b]0;owned\x1b[2J y"
    head = ReplyHead(kind="round", run="r", block=0, round=0, verdict="refused", said=loud)
    assert head.said == "x?]0;owned?[2J y"
    assert decode_catalogue(encode_catalogue([("a", loud), ("b", "Amélie 七人の侍")])) == [
        ("a", "x?]0;owned?[2J y"),
        ("b", "Amélie 七人の侍"),
    ]
