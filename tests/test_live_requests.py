"""What nodes may ask of a server: a hostile one stops no run, undoes no round and leaves nothing in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_live_parity import Site, close, close_all, config_of, lab, make_site, play

from tacita.core.errors import TacitaError
from tacita.live.wire import MAGIC, Reply, Wanted, decode_reply, encode


def spoiled(site: Site, change: Any) -> None:
    """Node 3's answers to `round`, as `change` makes them."""

    def spoil(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        said = decode_reply(reply)
        return change(said, reply) if number == 3 and said.head.kind == "round" else reply

    site.transport.spoil = spoil


def raw(said: Reply, requests: list[Any]) -> bytes:
    """A reply with requests that no model of ours would make."""
    head = {**said.head.model_dump(mode="json"), "requests": requests}
    text = json.dumps(head).encode()
    rest = encode(said)
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
def test_a_request_that_is_none_makes_a_bad_reply(tmp_path: Path, request_: dict[str, Any]) -> None:
    site = make_site(tmp_path, config_of("fedavg"))
    seen = []

    def once(said: Reply, reply: bytes) -> bytes:
        seen.append(1)
        return raw(said, [request_]) if len(seen) == 1 else reply

    spoiled(site, once)
    play(site)
    with site.store as store:
        assert any(event["event"] == "bad reply" for _, _, event in store.events("r"))
        assert store.open_requests("r") == []
    close_all(site)


@pytest.mark.parametrize("kind", ["share", "forget", "leave"])
def test_requests_that_nothing_carries_out_change_no_round(tmp_path: Path, kind: str) -> None:
    config = config_of("fedavg")
    site = make_site(tmp_path, config)
    count = [0]

    def ask(said: Reply, reply: bytes) -> bytes:
        count[0] += 1
        wanted = Wanted(id=count[0], kind=kind, sender=5, items=[7, 11], time=1.0)  # type: ignore[arg-type]
        return encode(Reply(said.head.model_copy(update={"requests": [wanted]}), said.arrays))

    spoiled(site, ask)
    play(site)
    assert close(site.arrays()["now/items"], lab(config).server.items)
    with site.store as store:
        told = [event for _, _, event in store.events("r") if event["event"] == "request"]
        assert len(told) == count[0] == 6
        assert all("nothing in this run can carry out" in one["said"] for one in told)
        assert store.open_requests("r") == []
        left = store._all("SELECT request FROM requests")
        assert [text for (text,) in left] == [""] * 6  # nothing of what was asked for is kept
    close_all(site)


def test_a_reply_over_more_people_than_were_asked_does_not_count(tmp_path: Path) -> None:
    from test_probes import Log, with_parts

    from tacita.round import parts

    parts._PARTS[Log.name] = Log
    try:
        config = with_parts("fedavg", Log, aggregation="fixed", denominator=40.0)
        site = make_site(tmp_path, config, insecure_single_user_uploads=True)

        def many(number: int, body: bytes, answer: Any) -> bytes:
            reply = bytes(answer())
            said = decode_reply(reply)
            if not said.head.kind.startswith("probe-log/"):
                return reply
            return encode(Reply(said.head.model_copy(update={"clients": 10**6, "weight": 1e6}), said.arrays))

        site.transport.spoil = many
        node = site.transport.members[1]
        play_with_a_leaver(site, node)
        with site.store as store:
            told = [event for _, _, event in store.events("r") if event["event"] == "request"]
        assert told
        assert "answered within" in told[0]["said"]
        close_all(site)
    finally:
        del parts._PARTS[Log.name]


def play_with_a_leaver(site: Site, node: Any) -> None:
    from test_live_parity import rows_of_blocks

    from tacita.lab.assembling import Machine, assemble

    fed = assemble(site.config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(site.config)[0])
    person = node.store.users()[1][0]
    node.store.enqueue("forget", "r", user=node.store.user(person))
    try:
        site.next_block()
    except TacitaError as error:
        raise AssertionError("a request stopped the run") from error
