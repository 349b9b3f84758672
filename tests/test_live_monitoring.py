"""What nodes tell beside their sums: how far controls get, which tacita they run, what their clock says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.loopback_site import close_nodes, make_site, play_blocks, site_config
from tacita import __version__
from tacita.core.errors import TacitaError
from tacita.live.node import controls, question_handler
from tacita.live.server.block_result import check_closing_reply
from tacita.live.server.overview import OverviewReader
from tacita.live.server.store import STORE_FILE
from tacita.live.wire import Reply, ReplyHead, decode_reply, encode_message, stamp_reply
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.central_training import evaluate_scorer
from tacita.runs.controls import make_linear_scorer, make_popular_scorer, make_random_scorer


def test_controls_on_a_node_with_all_users_equal_the_lab(tmp_path: Path) -> None:
    site = make_site(tmp_path, site_config("tally"))
    site.home = lambda user: 1
    with site.store as store:
        for name in ("n2", "n3"):
            store.revoke_node(name)
    play_blocks(site)
    fed = assemble_federation(site.config, Machine())
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    for block, result in zip(fed.stream.blocks, note["plain"]["results"], strict=True):
        for name, make in (("popular", make_popular_scorer), ("node", make_linear_scorer)):
            expected = evaluate_scorer(fed, block, make(fed, block)).compute_means()
            assert result["controls"][name] == pytest.approx(expected, rel=1e-6)
            assert expected["ndcg@20"] > 0
        chance = evaluate_scorer(fed, block, make_random_scorer(fed, block)).compute_means()["ndcg@20"]
        assert result["controls"]["random"]["ndcg@20"] == pytest.approx(chance, rel=0.5)
        assert result["controls"]["random"]["ndcg@20"] != chance  # the server cannot know a node's own draws
    close_nodes(site)


def test_control_over_other_users_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of three makes no linear model: what the two others reach is not what everybody reaches."""
    result = iter([None, "too little memory"] + [None] * 9)
    monkeypatch.setattr(controls, "find_skip_reason", lambda name, fed: next(result))
    site = make_site(tmp_path, site_config("tally"))
    play_blocks(site)
    with site.store as store:
        note = store.load_run("r").note
    assert note is not None
    assert [sorted(entry["controls"]) for entry in note["plain"]["results"]] == [
        ["popular", "random"],
        ["node", "popular", "random"],
    ]
    close_nodes(site)


def test_version_and_clock_are_reported_and_an_hours_drift_raises_an_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, sent = make_site(tmp_path, site_config("tally")), list[tuple[bytes, bytes]]()

    def changed(number: int, body: bytes, answer: Any) -> bytes | None:
        result = answer()
        sent.append((body, result))
        head = decode_reply(result).head
        ahead = {1: 3600.0, 2: -3600.0}.get(number, 0.0)
        return stamp_reply(result, "0.0.9" if number == 2 else head.version, head.time + ahead)

    site.transport.spoil = changed
    play_blocks(site)
    report = OverviewReader(tmp_path / STORE_FILE).read_node_reports()
    assert [report[n]["version"] for n in (1, 2, 3)] == [__version__, "0.0.9", __version__]
    assert report[1]["clock"] == pytest.approx(3600, abs=60)
    assert report[2]["clock"] == pytest.approx(-3600, abs=60)
    assert report[3]["clock"] == 0.0
    _sent_again_is_stamped_anew(site.transport.members[1], sent[-3], monkeypatch)
    close_nodes(site)


def _sent_again_is_stamped_anew(node: Any, said: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is the answer, not when it was sent."""
    body, first = said
    monkeypatch.setattr(question_handler.time, "time", lambda: 5.0)
    reply, before = decode_reply(question_handler.answer_message(node, body)), decode_reply(first)
    assert reply.head.time == 5.0
    assert reply.head.model_copy(update={"time": before.head.time}) == before.head


@pytest.mark.parametrize(("version", "at"), [("v" * 41, 1.0), ("1", -1.0), ("1", 1e13)])
def test_node_self_description_is_bounded(version: str, at: float) -> None:
    good = encode_message(Reply(ReplyHead(kind="x", run="r", block=0, round=0, verdict="ok")))
    assert decode_reply(stamp_reply(good, "a\x1bb", 1.0)).head.version == "a?b"
    with pytest.raises(TacitaError):
        decode_reply(stamp_reply(good, version, at))


def test_closing_reply_keeps_only_requested_fields() -> None:
    config = site_config("tally")

    def reply(**more: Any) -> Reply:
        head = ReplyHead(kind="close", run="r", block=0, round=1, verdict="ok", clients=5, **more)
        return decode_reply(encode_message(Reply(head)))

    check_closing_reply(reply(sums={"ndcg@20": (1.0, 5), "random ndcg@20": (0.5, 5), "node ndcg@20": (1.5, 5)}), config)
    check_closing_reply(reply(spent=[5, 0, 0, 0, 0]), config)
    for wrong in ({"spent": [5]}, {"sums": {"linear ndcg@20": (1.0, 5)}}, {"sums": {"random ndcg@20": (6.0, 5)}}):
        with pytest.raises(TacitaError):
            check_closing_reply(reply(**wrong), config)
    whole = encode_message(Reply(ReplyHead(kind="close", run="r", block=0, round=1, verdict="ok")))
    for many in (b'"spent":[-1]', b'"spent":[1,1,1,1,1,1]', b'"spent":["1"]'):
        assert b'"spent":[]' in whole
        changed = whole.replace(b'"spent":[]', many)
        size = int.from_bytes(whole[8:12], "big") + len(many) - len(b'"spent":[]')
        with pytest.raises(TacitaError, match="spent"):
            decode_reply(changed[:8] + size.to_bytes(4, "big") + changed[12:])
