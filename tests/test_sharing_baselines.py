"""What FedShare is compared with: a server that is a client, mended graphs, perturbed data (spec C.1-3, H.C)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import federate, make_backbone, make_block, make_stream, no_total, started
from test_shared_graph import given_of, many_edges, table_of

from tacita.core.errors import TacitaError
from tacita.core.types import Floats, Given, Ragged, Requests, ServerState, Stream
from tacita.federation.requests import handle
from tacita.federation.rounds import Progress, run_round
from tacita.methods import World, build_parts
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_mending import GraphMending
from tacita.methods.sharing.mending import DENIED, Effort, Scorer, fingerprints, mend
from tacita.methods.sharing.refining import Aims, Batch, Descent, Told, Unit
from tacita.methods.sharing.server_client import ServerClient
from tacita.methods.sharing.sharing import SOME
from tacita.round.plan import Federation, to_serve


def people(n: int = 40, n_items: int = 30) -> Stream:
    rng = np.random.default_rng(5)
    mine = [rng.permutation(n_items)[: rng.integers(4, 12)].tolist() for _ in range(n)]
    return make_stream(make_block(0, n_items, [m[:-2] for m in mine], [m[-2:-1] for m in mine], [m[-1:] for m in mine]))


def fed_with(*specs: dict[str, Any], stream: Stream | None = None, **train: Any) -> Federation:
    settings = {"objective": "bpr", "negatives": 1, "aggregation": "weighted", "optimiser": "lazy-adam"} | train
    fed = federate(stream or people(), make_backbone("ego", lr=0.05, item_lr_scale=1.0), **settings)
    parts = build_parts(list(specs), World(fed.backbone, fed.draws, fed.config.train))
    for part in parts:
        part.check(fed.stream.n_items)
    return replace(fed, parts=parts)


def play(fed: Federation, progress: Progress, rounds: int) -> ServerState:
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress.server


def after(fed: Federation, rounds: int = 3) -> ServerState:
    return play(fed, started(fed), rounds)


# the server as one client more (C.1)


def test_without_shared_edges_the_server_as_a_client_changes_no_bit() -> None:
    nobody = {"name": "sharing", "groups": [0, 0, 1]}
    plain, with_part = after(fed_with()), after(fed_with(nobody, {"name": "server-client"}))
    np.testing.assert_array_equal(plain.items, with_part.items)
    assert not np.array_equal(plain.items, after(fed_with({"name": "sharing"}, {"name": "server-client"})).items)


def server_part(aggregation: str = "weighted", **options: Any) -> ServerClient:
    train = {"aggregation": aggregation} | ({"denominator": 10.0} if aggregation == "fixed" else {})
    (part,) = fed_with({"name": "server-client", **options}, **train).parts
    assert isinstance(part, ServerClient)
    return part


def states(given: Given) -> tuple[ServerState, ServerState]:
    """What a round began with, and what clients of weight 12 made of it."""
    before = ServerState(table_of(14, 6), {}, given=given)
    return before, before.with_items(before.items + table_of(14, 6, seed=9) / 10)


def alone(part: ServerClient, before: ServerState) -> Floats:
    """The table where the server is the only client."""
    return part.server_step(before, before, replace(no_total(before), weight=0.0, n_clients=0)).items


def test_the_server_enters_the_mean_by_the_number_of_its_edges() -> None:
    before, server = states(many_edges(5, 14))
    part, edges = server_part(), len(before.given)
    total = replace(no_total(before, 3), weight=12.0)
    mine = alone(part, before)
    assert np.abs(mine - before.items).max() > 1e-3
    expected = (12 * server.items + edges * mine) / (12 + edges)
    made = part.server_step(before, server, total)
    np.testing.assert_allclose(made.items, expected, atol=1e-6)
    assert part.server_notes(made)["server_share"] == pytest.approx(edges / (12 + edges))


def test_its_share_of_the_mean_can_be_capped() -> None:
    before, server = states(many_edges(5, 14))
    total = replace(no_total(before, 3), weight=12.0)
    made = server_part(weight_cap=0.25).server_step(before, server, total)
    np.testing.assert_allclose(made.items, 0.75 * server.items + 0.25 * alone(server_part(), before), atol=1e-6)
    nothing_else = server_part(weight_cap=0.25).server_step(before, before, no_total(before))
    np.testing.assert_array_equal(nothing_else.items, before.items)


@pytest.mark.parametrize("aggregation", ["mean", "fixed", "per-row"])
def test_it_joins_every_kind_of_mean(aggregation: str) -> None:
    before, server = states(given_of([(1, 0), (1, 2), (2, 2), (2, 5)]))
    touched = np.zeros(14)
    touched[:4] = 3.0
    total = replace(no_total(before, 3), sums={"rows": np.zeros((14, 6)), "rows.touched": touched})
    mine, own = alone(server_part(), before), (server.items, before.items)
    part = server_part(aggregation, layers=3)
    made = part.server_step(before, server, total).items
    others = {"mean": 3.0, "fixed": 10.0, "per-row": touched[:, None]}[aggregation]
    expected = (others * own[0] + mine) / (others + 1.0)
    if aggregation == "per-row":
        moved = (mine != own[1]).any(1)
        expected = np.where(moved[:, None], expected, server.items)
        assert 0 < moved.sum() < 14
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_a_fixed_denominator_has_to_be_said_where_the_server_joins_the_sum() -> None:
    with pytest.raises(TacitaError, match=r"needs train\.denominator"):
        fed_with({"name": "server-client"}, aggregation="fixed")


def test_layers_change_what_the_server_learns() -> None:
    before, _ = states(many_edges(5, 14))
    assert not np.array_equal(alone(server_part(layers=1), before), alone(server_part(layers=3), before))


# mended graphs (C.2)


def test_edges_that_count_less_are_those_of_the_dense_matrix() -> None:
    given, table = given_of([(7, 0), (7, 2), (50, 2), (900, 0)]), table_of(4, 5)
    more = np.array([7, 900, 7], np.uint64), np.array([3, 2, 0], np.int32)
    graph = SharedGraph.of(given, 4, more, layers=2, extra_weight=np.array([0.5, 0.25, 0.1], np.float32))
    a = np.array([[1, 0, 1, 0.5], [0, 0, 1, 0], [1, 0, 0.25, 0]])  # what is in the record counts 1
    degrees = [np.where(d > 0, np.where(d > 0, d, 1) ** -0.5, 0) for d in (a.sum(1), a.sum(0))]
    whole = np.zeros((7, 7))
    whole[:3, 3:] = degrees[0][:, None] * a * degrees[1][None]
    whole += whole.T
    start = np.concatenate([a / a.sum(1, keepdims=True) @ table, table])
    expected = (start + whole @ start + whole @ whole @ start) / 3
    np.testing.assert_allclose(np.concatenate(graph.smooth(table)), expected, rtol=1e-5, atol=1e-6)


def test_the_scorer_steps_down_the_cross_entropy() -> None:
    """Adam's first step is the sign of the slope times the rate."""
    rng = np.random.default_rng(2)
    scorer = Scorer(3, Effort(hidden=5, lr=0.01), np.uint64(4))
    users, items = (Unit.of(rng.normal(size=(9, 3)).astype(np.float32)).rows for _ in range(2))
    label = (rng.random(9) < 0.5).astype(np.float32)
    tensors = [torch.tensor(one.table, requires_grad=True) for one in scorer.layers]
    met = torch.from_numpy(scorer.met(users, items))
    logits = torch.relu(met @ tensors[0] + tensors[1]) @ tensors[2][0] + tensors[3][0, 0]
    torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(label)).backward()
    before = [one.table.copy() for one in scorer.layers]
    scorer.step(met.numpy(), label)
    for one, was, tensor in zip(scorer.layers, before, tensors, strict=True):
        assert tensor.grad is not None
        slope = tensor.grad.numpy()
        some = np.abs(slope) > 1e-6
        np.testing.assert_allclose((one.table - was)[some], -0.01 * np.sign(slope)[some], rtol=1e-2)


def clubs(n_users: int = 60, n_items: int = 40) -> list[list[int]]:
    """Even people like most even items, odd people odd ones: of 20 each, 17."""
    rng = np.random.default_rng(0)
    return [rng.choice(np.arange(u % 2, n_items, 2), 17, replace=False).tolist() for u in range(n_users)]


def test_a_mender_finds_links_and_never_one_that_is_there_or_denied() -> None:
    given, effort = given_of([(u, i) for u, mine in enumerate(clubs()) for i in mine]), Effort(epochs=60)
    graph = SharedGraph.of(given, 40)
    table, whom = table_of(40, 8), np.arange(0, 60, 1)
    free = mend(graph, table, whom, np.zeros(0, np.uint64), effort, np.uint64(3))
    assert free is not None
    assert len(free.user) > 50
    right = free.user % 2 == free.item % 2
    assert right.mean() > 0.9  # by chance: 3 of 23
    assert (free.weight > 0.5).all()
    assert np.bincount(free.user).max() <= 8  # half of what one shared
    there = {*zip(given.sender.tolist(), given.item.tolist())}
    proposed = [*zip(graph.users[free.user].tolist(), free.item.tolist())]
    assert not there & {*proposed}
    denied = fingerprints(DENIED, graph.users[free.user[::2]], free.item[::2])
    again = mend(graph, table, whom, denied, effort, np.uint64(3))
    assert again is not None
    found = {*zip(graph.users[again.user].tolist(), again.item.tolist())}
    assert {*proposed[1::2]} <= found
    assert not {*proposed[::2]} & found


def test_a_mender_that_has_nothing_to_hide_proposes_nothing() -> None:
    graph = SharedGraph.of(given_of([(1, 0), (2, 1)]), 5)
    assert mend(graph, table_of(5, 4), np.arange(2), np.zeros(0, np.uint64), Effort(), np.uint64(1)) is None


def test_people_are_drawn_to_what_their_devices_say_by_the_right_slope() -> None:
    graph, table = SharedGraph.of(many_edges(6, 14), 14), table_of(14, 5)
    told = Told(np.array([0, 2, 5]), Unit.of(table_of(3, 5, seed=8)).rows)
    nothing = np.zeros(0, np.int64)
    batch, along = Batch(nothing, nothing, nothing, nothing), table_of(14, 5, seed=4)
    with ThreadPoolExecutor(1) as cores:
        descent = Descent(graph, Aims(lam1=0.7, lam=0.0), cores, told=told)
        slope = descent.slopes(table, batch).table
        up, down = (descent.slopes(table + np.float32(h) * along, batch).cl for h in (1e-2, -1e-2))
    assert (slope * along).sum() == pytest.approx(0.7 * (up - down) / 2e-2, rel=2e-2)


MENDING = {"name": "graph-mending", "mend_every": 2, "mender_epochs": 40, "kappa": 1.0}


def test_who_keeps_something_to_themselves_says_so_when_they_share() -> None:
    fed = fed_with({"name": "sharing", "groups": [3, 4, 3]}, MENDING)
    progress = started(fed)
    group = progress.clients.parts["sharing"]["group"]
    keys = fed.stream.user_keys[: progress.clients.n_users]
    assert set(progress.server.parts["graph-mending"]["partial"]) == set(keys[group == SOME])


def pairs_of(server: ServerState) -> set[tuple[int, int]]:
    kept = server.parts["graph-mending"]
    return {*zip(kept["mended_sender"].tolist(), kept["mended_item"].tolist())} if "mended_sender" in kept else set()


def test_a_run_mends_and_what_is_withdrawn_is_never_mended_again() -> None:
    fed = fed_with(
        {"name": "sharing", "groups": [0, 1, 0], "partial": 0.9},
        MENDING,
        stream=make_stream(make_block(0, 40, clubs())),
    )
    progress = started(fed)
    mended = pairs_of(play(fed, progress, 2))
    assert mended
    server = progress.server
    assert {sender for sender, _ in mended} <= set(server.parts["graph-mending"]["partial"].tolist())
    given = server.given
    assert not mended & {*zip(given.sender.tolist(), given.item.tolist())}
    senders = np.unique(given.sender)
    lists = given.of(senders)
    some = lists.where(np.arange(len(lists.ids)) % 9 == 0)
    said = handle(fed, progress, Requests("unshare", senders, Ragged(some.ptr, some.ids)))["graph-mending"]
    assert said["purged"] == ["mended_edges"]
    assert not pairs_of(progress.server)
    gone = {*zip(senders[some.rows()].tolist(), some.ids.tolist())}
    seen = set()
    for _ in range(4):
        seen |= pairs_of(play(fed, progress, 2))
    assert seen
    assert not seen & gone
    assert not seen & {*zip(progress.server.given.sender.tolist(), progress.server.given.item.tolist())}


def test_only_sharing_devices_upload_a_vector_and_only_where_the_run_says_so() -> None:
    share, plain = {"name": "sharing", "groups": [1, 1, 1]}, fed_with({"name": "sharing"}, MENDING)
    progress = started(plain)
    assert [one.name for one in plain.fields(progress.server, "round")] == ["rows"]
    fed = fed_with(share, {**MENDING, "contrast_users": True})
    progress = started(fed)
    assert [(one.name, one.seen) for one in fed.fields(progress.server, "round")][1:] == [
        ("graph-mending.vector", "each")
    ]
    total = progress.devices.exchange(fed, progress.server, to_serve(fed, progress.server), "round").total
    each = total.each["graph-mending.vector"]
    group = progress.clients.parts["sharing"]["group"]
    keys = fed.stream.user_keys[: progress.clients.n_users]
    sent = each.sender[np.abs(each.value.value).max(1) > 0]
    assert set(sent) == set(keys[group == SOME])  # who shares all does not train
    part = fed.parts[1]
    assert isinstance(part, GraphMending)
    stepped = part.server_step(progress.server, progress.server, total)
    without = part.server_step(progress.server, progress.server, replace(total, each={}))
    assert not np.array_equal(stepped.items, without.items)
