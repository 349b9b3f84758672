"""Forgetting by going back, asked for on nodes: what the lab does with the same people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_live_parity import close, close_all, config_of, home, make_site, rows_of_blocks

from tacita.core.config import RunConfig, validated
from tacita.core.types import Request
from tacita.federation.requests import handle
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, start
from tacita.lab.assembling import Machine, assemble
from tacita.live.letters import check_each
from tacita.live.wire import decode_request

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
def test_who_leaves_from_a_node_is_forgotten_as_in_the_lab(
    tmp_path: Path, part: dict[str, Any], train: dict[str, Any]
) -> None:
    items = train.get("forget", 0)
    values = config_of("fedavg", 3, **{k: v for k, v in train.items() if k != "forget"}).model_dump(mode="json")
    config = validated(RunConfig, values | {"parts": [{"name": "withdrawal"}, part]}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble(config, Machine())
    person = next(raw for raw in fed.stream.user_ids if home(raw) == 1)
    key = int(fed.stream.user_keys[fed.stream.user_ids.index(person)])
    mine = fed.stream.blocks[0].train.row(fed.stream.user_ids.index(person))[:items]
    asked = Request("forget" if items else "leave", key, mine)
    progress, told = start(fed), []

    def on_round(report: Any, now: Progress) -> None:
        if not told:
            told.append(handle(fed, now, asked))

    block = fed.stream.blocks[0]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    node, waiting = site.transport.members[1], [True]

    def asks(number: int, body: bytes, answer: Any) -> bytes:
        reply = bytes(answer())
        if waiting and number == 1 and decode_request(body).head.kind == "round":
            waiting.clear()
            raw = sorted(fed.stream.item_ids[i] for i in mine)
            node.store.enqueue(asked.kind, "r", raw, node.store.user(person))
        return reply

    site.transport.spoil = asks
    site.next_block()
    begin_block(fed, progress, 0)
    run_block(fed, progress, on_round)
    end_block(fed, progress)
    with site.store as store:
        (event,) = [event for _, _, event in store.events("r") if event["event"] == "request"]
    done, want = event["done"][part["name"]], told[0][part["name"]]
    assert (done["rounds"], done["clients_asked"]) == (want["rounds"], want["clients_asked"])
    assert done.get("path") == want.get("path")
    assert close(site.arrays()["now/items"], progress.server.items)
    close_all(site)


@pytest.mark.parametrize(("name", "field"), [("cfru", "weight"), ("retraction", "psi"), ("retraction", "commitment")])
def test_what_nodes_say_of_single_uploads_is_bounded(name: str, field: str) -> None:
    values = config_of("fedavg", 3, **FIXED).model_dump(mode="json")
    config = validated(RunConfig, values | {"parts": [{"name": "withdrawal"}, {"name": name}]}, "the test")
    (part,) = [one for one in assemble(config, Machine()).parts if one.name == name]
    (found,) = [one for one in part.extra_fields(50) if one.name == field]
    arrays = {f"{field}/sender": np.array([7], np.uint64), f"{field}/each": np.zeros((1, *found.shape), np.float32)}
    assert check_each(found, arrays, 1)
    assert not check_each(found, {**arrays, f"{field}/each": arrays[f"{field}/each"] + 1e12}, 1)
