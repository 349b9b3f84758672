"""Sums of a node are over as many people as it says: who adds nothing hides nobody, and chance decides who is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.hostile_server import HostileServer, begin_site, private_tally_config, spent_budgets
from helpers.loopback_site import DATA, SPLIT, Site, close_nodes, rows_of_blocks, site_config
from tacita.core.codec import digest_array
from tacita.core.config import RunConfig, validate_model
from tacita.live.node import question_handler, verbs
from tacita.live.node.queued_request import QueuedRequest
from tacita.live.node.withdrawal_batches import select_requests_to_send
from tacita.live.per_client_arrays import CHOSEN
from tacita.live.wire import Reply, ServerRequest, decode_reply, encode_message
from tacita.privacy.accounting import Event, compute_epsilon
from tacita.runs.assembly import Machine, assemble_federation, build_plan

DRAWN = {"kind": "poisson", "rate": 0.3}
ROUNDS = 5


def replies(site: Site, kind: str) -> list[Reply]:
    """What node 1 said to questions of a kind."""
    replys = [decode_reply(reply) for number, _, reply in site.transport.log if number == 1]
    return [entry for entry in replys if entry.head.kind.startswith(kind)]


def test_few_who_can_pay_show_in_no_refusal_of_a_private_tally(tmp_path: Path) -> None:
    site = begin_site(tmp_path, private_tally_config(1.0, blocks=2))
    node = site.transport.members[1]
    raws = node.store.list_users()[1]
    for raw in raws[4:]:  # four of thirty are left; min_users is 5
        verbs.perform_verb(node, "budget", {"user": raw, "epsilon": 0.0})
    site.next_block()
    report = [*replies(site, "survey"), *replies(site, "statistic")]
    assert [(entry.head.verdict, entry.head.clients) for entry in report] == [("ok", 5)] * 2  # noise protects the four
    assert [raw for raw, cost in spent_budgets(node).items() if cost] == raws[:4]
    close_nodes(site)


def test_private_tally_hides_the_number_of_contributors(tmp_path: Path) -> None:
    site = begin_site(tmp_path, private_tally_config(1.0, blocks=2))
    node = site.transport.members[1]
    raws = node.store.list_users()[1]
    for raw in raws[5:]:
        verbs.perform_verb(node, "budget", {"user": raw, "epsilon": 0.0})
    site.next_block()
    report = [*replies(site, "survey"), *replies(site, "statistic")]
    assert [(entry.head.verdict, entry.head.clients) for entry in report] == [("ok", 5)] * 2  # min_users
    assert [raw for raw, cost in spent_budgets(node).items() if cost] == raws[:5]
    close_nodes(site)


def next_block(site: Site) -> None:
    site.publish(list(assemble_federation(site.config, Machine()).stream.item_ids))
    site.collect(rows_of_blocks(site.config)[1])
    site.transport.log.clear()
    site.next_block()


@pytest.mark.parametrize("kind", ["leave", "forget"])
def test_users_without_uploads_do_not_count_towards_min_users_of_withdrawals(tmp_path: Path, kind: str) -> None:
    """Control: the sum of such a batch is, without noise, what the one of them had told."""
    site = begin_site(tmp_path, site_config("tally"))
    node = site.transport.members[1]
    raws = node.store.list_users()[1]
    for raw in raws[1:5]:
        node.store.set_consent(raw, None, "keep")
    site.next_block()
    items = [item for item, _ in node.store.read_catalogue()] if kind == "forget" else []
    for raw in raws[:5]:
        node.store.enqueue_request(kind, "r", items, user=node.store.find_user(raw))
    next_block(site)
    assert replies(site, "statistic/retraction") == []
    assert not any(want.sent for want in node.store.list_requests("r"))  # it waits for others, and is told with them
    close_nodes(site)


def test_withdrawal_waits_for_min_users() -> None:
    wants = [QueuedRequest(n, "r", "leave", [], n, 0.0) for n in range(8)]
    assert select_requests_to_send(wants, 5, True) == wants
    assert select_requests_to_send(wants, 5, True, empty_withdrawals={0, 1, 2}) == wants
    assert select_requests_to_send(wants, 5, True, empty_withdrawals={0, 1, 2, 3}) == []
    assert select_requests_to_send(wants, 5, True, empty_withdrawals=range(8)) == wants  # nothing is told
    assert select_requests_to_send(wants, 5, False, empty_withdrawals={0, 1, 2, 3}) == wants


def drawn_server(folder: Path) -> tuple[HostileServer, Site]:
    part = {"name": "dp-fedavg", "clip": 0.1, "epsilon": 2.0, "releases": ROUNDS}
    train = {"rounds": ROUNDS, "aggregation": "fixed", "denominator": 9.0, "participation": DRAWN}
    values: dict[str, Any] = {"data": DATA, "split": SPLIT, "seed": 5, "backbone": {"name": "mf", "dim": 4}}
    values |= {"method": "dp-fedavg", "train": train, "parts": [part]}
    site = begin_site(folder, validate_model(RunConfig, values, "the test"), insecure_single_user_uploads=True)
    return HostileServer(site, "round"), site


def test_sampling_counted_by_a_ledger_is_drawn_by_chance_alone(tmp_path: Path) -> None:
    """Control: those of one round, asked in all of them, lose 3.9 where 2 are counted."""
    server, site = drawn_server(tmp_path)
    first: Any = server.first
    assert CHOSEN not in first.head.names
    repeat = server.asks(kind="round.again-0-1.0")
    assert (repeat.head.verdict, "drawn anew by chance" in repeat.head.said) == ("refused", True)
    honest = server.asks()
    assert honest.head.verdict == "ok"
    state = server.node.store.load_model("r")
    assert state is not None
    arrays = {name: array for name, (_, array) in state[1].items()} | {
        CHOSEN: server.node.open_runs["r"].pseudonyms[:1]
    }
    named = {name: digest_array(array) for name, array in arrays.items()}
    server_request = ServerRequest(first.head.model_copy(update={"round": 1, "names": named}), arrays)
    reply = decode_reply(question_handler.answer_message(server.node, encode_message(server_request)))
    assert (reply.head.verdict, "drawn anew by chance" in reply.head.said) == ("refused", True)
    part = build_plan(site.config).parts[0]
    noise = part.compute_noise_multiplier()  # type: ignore[attr-defined]
    event = Event("round", "gaussian", 1.0, noise, "person", "central", 0.3, "poisson")
    once = Event("round", "gaussian", 1.0, noise / ROUNDS**0.5, "person", "central", 0.3, "poisson")
    counted, true = compute_epsilon([(event, ROUNDS)], 1e-5), compute_epsilon([(once, 1)], 1e-5)
    assert counted <= 2.0 < 3.9 < true
    assert np.isclose(max(spent_budgets(server.node).values()), compute_epsilon([(event, 1)], 1e-5), rtol=1e-3)
    close_nodes(site)


def test_users_who_share_everything_do_not_count_towards_min_users(tmp_path: Path) -> None:
    """Control: without noise, the sum of such a round is how one person's device moved."""
    values = site_config("fedavg").model_dump(mode="json") | {"parts": [{"name": "sharing", "groups": [1, 0, 0]}]}
    site = begin_site(tmp_path, validate_model(RunConfig, values, "the test"))
    node = site.transport.members[1]
    ids = node.store.list_users()[0].tolist()
    for entry in ids[1:]:
        node.store.enqueue_request("share", "r", node.store.read_history([entry]).item, user=entry)
    site.next_block()
    report = replies(site, "round")
    assert [(element.head.verdict, element.head.clients) for element in report] == [
        ("ok", len(ids)),
        ("refused", 0),
        ("refused", 0),
    ]
    assert "have something to say" in report[1].head.said
    close_nodes(site)
