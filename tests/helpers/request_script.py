"""Users who submit requests at chosen rounds of a live run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.loopback_site import (
    PATIENT,
    Site,
    make_site,
    rows_of_blocks,
    site_config,
)
from tacita.core.config import RunConfig, validate_model
from tacita.live.node.verbs import perform_verb
from tacita.live.wire import (
    decode_request,
)
from tacita.runs.assembly import Machine, assemble_federation

SHARING = "preset fedshare-local"
Act = Callable[[], Any]


def collect_first_block(site: Site, **options: Any) -> None:
    """The first block's data and catalogue."""
    with site.store as store:
        store._fetch_rows("UPDATE runs SET options = ?", json.dumps(PATIENT | options))
    fed = assemble_federation(site.config, Machine())
    site.publish(list(fed.stream.item_ids[: fed.stream.blocks[0].n_items]))
    site.collect(rows_of_blocks(site.config)[0])


def user_with_items(site: Site, number: int = 1, nth: int = 0) -> tuple[str, list[str]]:
    """Somebody on a node, and what they have of the catalogue."""
    node = site.transport.members[number]
    ids, raws = node.store.list_users()
    with site.store as store:
        known = {item for item, _ in store.read_catalogue()}
    return raws[nth], sorted(set(node.store.read_history([int(ids[nth])]).item) & known)


def act_at_rounds(
    site: Site, acts: dict[int, Act], lose: Callable[[int, Any], bool] = lambda number, head: False
) -> None:
    """Do something before node 1 answers a round."""
    remainder = dict(acts)

    def spoil(number: int, body: bytes, answer: Any) -> bytes | None:
        head = decode_request(body).head
        if number == 1 and head.kind == "round" and head.round in remainder:
            remainder.pop(head.round)()
        reply = bytes(answer())
        return None if lose(number, head) else reply

    site.transport.spoil = spoil


def submit_request(site: Site, kind: str, user: str, *items: str, number: int = 1) -> dict[str, Any]:
    answer = perform_verb(site.transport.members[number], "request", {"kind": kind, "user": user, "items": list(items)})
    return dict(answer["requests"][0])


def request_status(site: Site, number: int = 1) -> list[dict[str, Any]]:
    return list(perform_verb(site.transport.members[number], "status", {})["requests"])


def fixed_tally_config(model: str = "tally", **more: Any) -> Any:
    """One round a block: nothing that validation chooses."""
    values = site_config(model).model_dump(mode="json")
    values["backbone"] |= {"recency": 0.0, **({"mix": [0.2, 0.3, 0.5]} if model == "tally-order" else {}), **more}
    return validate_model(RunConfig, values, "the test")


LEAVERS = 5  # min_users of these nodes


def site_with_leavers(folder: Path, **options: Any) -> Site:
    """A run of tally in whose first round five people of node 1 ask to leave."""
    folder.mkdir()
    site = make_site(folder, fixed_tally_config())
    collect_first_block(site, **options)
    node = site.transport.members[1]
    for raw in node.store.list_users()[1][:LEAVERS]:
        node.store.enqueue_request("leave", "r", user=node.store.find_user(raw))
    return site


def is_retraction(body: bytes) -> bool:
    return decode_request(body).head.kind.startswith("statistic/retraction")


def stored_upload_sizes(site: Site) -> np.ndarray:
    """How many people of node 1 remember something that they told."""
    state = site.transport.members[1].store.load_devices("r")
    assert state is not None
    return np.diff(state[1]["lists/parts/statistic/told:"])
