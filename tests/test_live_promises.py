"""What a server, or time, could do to the promises of a budget on nodes, tried: none of it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_live_ledger import config_of as dpps_of
from test_live_parity import Site, close_all, config_of, make_site, play
from test_live_requests import begin

from tacita.core.codec import digest_of
from tacita.core.config import RunConfig, validated
from tacita.live.node import session, verbs
from tacita.live.server.store import standing
from tacita.live.wire import Reply, Request, decode_reply, decode_request, encode


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

    def asks(self, arrays: dict[str, Any] | None = None, **head: Any) -> Any:
        held = self.node.store.model("r")
        known = {} if held is None else {name: array for name, (_, array) in held[1].items()}
        found = {n: a for n, a in (known | self.first.arrays | (arrays or {})).items() if n in self.first.head.names}
        if "/" not in head.get("kind", self.first.head.kind):
            found = {n: a for n, a in found.items() if not n.startswith("chosen")}
        names = {name: digest_of(array) for name, array in found.items()}
        asked = Request(self.first.head.model_copy(update={"names": names, **head}), found)
        return decode_reply(session.handle(self.node, encode(asked)))


def private_tally(epsilon: float = 1.0, blocks: int = 1, **privacy: Any) -> RunConfig:
    values = config_of("tally").model_dump(mode="json")
    values |= {"backbone": {"name": "tally"}, "privacy": {"epsilon": epsilon, "blocks": blocks, **privacy}}
    return validated(RunConfig, values, "the test")


def begun(folder: Path, config: RunConfig, **more: Any) -> Site:
    folder.mkdir(exist_ok=True)
    site = make_site(folder, config, **more)
    begin(site)
    return site


def spent(node: Any, run: str = "r") -> dict[str, float]:
    return {raw: verbs.perform(node, "ledger", {"user": raw})["runs"][run]["spent"] for raw in node.store.users()[1]}


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


def test_under_a_budget_nobody_is_told_scores_of_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a node that sent them would tell, without noise, whether somebody has the one item that is ranked."""
    site = begun(tmp_path, private_tally(0.5))
    server = Hostile(site, "validate")
    n, first = len(server.node.store.catalogue()), server.first.head.round
    block = server.node.held["r"].fed.stream.blocks[0]
    wanted = int(np.bincount(block.valid.ids).argmax())
    pointed = np.zeros((n, n))
    pointed[:, wanted] = 1000.0
    before = spent(server.node)
    told = [server.asks(one_entry(n, b), round=first + k) for k, b in enumerate((0 * pointed, pointed))]
    assert [(one.head.verdict, one.head.sums, one.head.clients) for one in told] == [("ok", {}, 0)] * 2
    assert spent(server.node) == before
    ended = server.asks(one_entry(n, pointed), kind="close", round=first + 2)
    assert (ended.head.verdict, ended.head.sums) == ("ok", {})
    close_all(site)
    again = begun(tmp_path / "control", private_tally(0.5))
    server = Hostile(again, "validate")
    monkeypatch.setattr(type(server.node.held["r"].fed), "ledgers", ())
    told = [server.asks(one_entry(n, b), round=first + k) for k, b in enumerate((0 * pointed, pointed))]
    less, more = (next(iter(one.head.sums.values()))[0] for one in told)
    assert more > less
    close_all(again)


def test_a_run_that_counts_keeps_its_last_round_and_says_why_there_are_no_scores(tmp_path: Path) -> None:
    """Also where a node lies and sends some."""
    site = make_site(tmp_path, dpps_of())

    def lying(number: int, body: bytes, answer: Any) -> bytes:
        reply, asked = decode_reply(answer()), decode_request(body).head
        if asked.kind != "validate":
            return encode(reply)
        assert reply.head.sums == {}
        more = {"sums": {"ndcg@20": (1.0 / (1 + asked.round), 1)}, "clients": 1}
        return encode(Reply(reply.head.model_copy(update=more), reply.arrays))

    site.transport.spoil = lying
    play(site)
    with site.store as store:
        row = store.run("r")
    assert row.note is not None
    for one in row.note["plain"]["results"]:
        assert one["best_round"] == one["rounds"] == 3
        assert one["valid"] is None
        assert not [name for name in one if "@" in name]
        assert one["controls"] == {}
    assert "2 blocks done; no scores: what answers cost is counted" in standing(row)
    assert all(one["kind"] not in ("validate", "close") for one in site.transport.members[1].store.ledger())
    close_all(site)
