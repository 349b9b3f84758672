"""The server's graph of what people shared: dense oracles, slopes against autograd, closed forms (spec H.A 6-8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from helpers.oracle import federate, make_backbone, make_block, make_stream, no_total, started
from helpers.shared_records import DIM, N_ITEMS, random_record, random_table, record_of_edges
from tacita.core.codec import pack
from tacita.core.types import Arrays, Doubles, Floats, Keys, ServerState, SharedRecord
from tacita.federation.rounds import run_round
from tacita.methods import RunContext, build_parts
from tacita.methods.sharing import graph as graph_module
from tacita.methods.sharing.graph import SharedGraph, UserStart
from tacita.methods.sharing.graph_training import (
    Batch,
    BatchSizes,
    GraphLoss,
    GraphObjective,
    UnitRows,
    compute_infonce_with_gradients,
    draw_batches,
    draw_negatives,
    refine_table,
)
from tacita.methods.sharing.shared_graph_part import (
    SharedGraphPart,
    purge_learned_state,
    rebuild_learned_graph,
    with_paused_learning,
)
from tacita.methods.sharing.snapshots import count_snapshot_bytes
from tacita.round.broadcast import Audience

EDGES = [(50, 0), (50, 2), (7, 2), (7, 1), (7, 0), (900, 0)]  # sender, item; item 3 is nobody's


def dense(given: SharedRecord, n_items: int, start: UserStart, layers: int) -> tuple[Doubles, Doubles]:
    """What smoothing multiplies learned first rows of users and the table by, from the whole adjacency matrix."""
    users = sorted(set(given.sender.tolist()))
    a = np.zeros((len(users), n_items))
    for sender, item in zip(given.sender.tolist(), given.item.tolist(), strict=True):
        a[users.index(sender), item] = 1
    scale = [np.where(d > 0, np.maximum(d, 1) ** -0.5, 0) for d in (a.sum(1), a.sum(0))]
    hat = scale[0][:, None] * a * scale[1][None]
    n = len(users) + n_items
    whole = np.zeros((n, n))
    whole[: len(users), len(users) :], whole[len(users) :, : len(users)] = hat, hat.T
    mean = np.mean([np.linalg.matrix_power(whole, k) for k in range(layers + 1)], axis=0)
    first = {"mean": a / a.sum(1, keepdims=True), "zero": 0 * a, "learned": 0 * a}[start]
    return mean[:, : len(users)], mean @ np.concatenate([first, np.eye(n_items)])


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("start", ["mean", "zero", "learned"])
def test_smoothing_is_the_dense_matrix(start: UserStart, layers: int) -> None:
    record, table, people = record_of_edges(EDGES), random_table(), random_table(3, seed=2)
    graph = SharedGraph.from_record(record, N_ITEMS, layers=layers, start=start)
    assert graph.users.tolist() == [7, 50, 900]
    by_people, by_table = dense(record, N_ITEMS, start, layers)
    expected = by_table @ table + (by_people @ people if start == "learned" else 0)
    users, items = graph.propagate_and_average(table, people if start == "learned" else None)
    np.testing.assert_allclose(np.concatenate([users, items]), expected, rtol=1e-5, atol=1e-6)
    slope = random_table(3 + N_ITEMS, seed=3)
    first, back = graph.backpropagate(slope[:3], slope[3:])
    np.testing.assert_allclose(back, by_table.T @ slope, rtol=1e-5, atol=1e-6)
    if start == "learned":
        np.testing.assert_allclose(first, by_people.T @ slope, rtol=1e-5, atol=1e-6)


def test_an_item_that_nobody_shared_keeps_its_direction_and_its_slope() -> None:
    graph, table = SharedGraph.from_record(record_of_edges(EDGES), N_ITEMS), random_table()
    np.testing.assert_array_equal(graph.propagate_and_average(table)[1][3], table[3] / np.float32(4))
    slope = np.zeros((N_ITEMS, DIM), np.float32)
    slope[3] = 1
    back = graph.backpropagate_table(np.zeros((3, DIM), np.float32), slope)
    np.testing.assert_array_equal(back, slope / 4)
    assert graph.shared_items.tolist() == [0, 1, 2]


def test_degrees_count_what_is_in_the_record_and_nothing_else() -> None:
    graph = SharedGraph.from_record(record_of_edges(EDGES), N_ITEMS)
    assert graph.lists.counts().tolist() == [3, 2, 1]
    assert graph.people.counts().tolist() == [3, 1, 2, 0]
    twice = SharedGraph.from_record(record_of_edges(EDGES + EDGES[:2]), N_ITEMS)
    np.testing.assert_array_equal(twice.graph.weight, graph.graph.weight)
    extra = (np.array([900, 1], np.uint64), np.array([3, 3], np.int32))
    more = SharedGraph.from_record(record_of_edges(EDGES), N_ITEMS, extra)
    assert more.users.tolist() == [1, 7, 50, 900]
    assert more.people.counts().tolist() == [3, 1, 2, 2]


def test_the_order_of_the_record_changes_no_bit() -> None:
    table = random_table()
    first, other = (
        SharedGraph.from_record(record_of_edges(edges), N_ITEMS).propagate_and_average(table)
        for edges in (EDGES, EDGES[::-1])
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# slopes


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1) / (a.norm(dim=-1).clamp(min=1e-8) * b.norm(dim=-1).clamp(min=1e-8))


def by_torch(
    given: SharedRecord,
    table: Floats,
    batch: Batch,
    aims: GraphObjective,
    start: UserStart,
    people: Floats,
    anchor: Floats | None,
) -> tuple[Doubles, Doubles]:
    """The slopes of the loss as it is written in the spec."""
    by_people, by_table = (torch.from_numpy(entry) for entry in dense(given, len(table), start, 3))
    rows = torch.from_numpy(table.astype(np.float64)).requires_grad_()
    own_values = torch.from_numpy(people.astype(np.float64)).requires_grad_()
    both = by_table @ rows + (by_people @ own_values if start == "learned" else 0)
    users, items = both[: len(people)], both[len(people) :]
    loss = torch.zeros((), dtype=torch.float64)
    if aims.bpr:
        u = users[batch.user]
        loss = (
            loss
            - functional.logsigmoid(
                aims.scale * (cosines(u, items[batch.liked]) - cosines(u, items[batch.other]))
            ).mean()
        )
    if aims.lam1:
        loc = rows if anchor is None else torch.from_numpy(anchor.astype(np.float64))
        a, b = loc[batch.items], items[batch.items]
        logits = cosines(a[:, None], b[None]) / aims.tau
        loss = loss + aims.lam1 * functional.cross_entropy(logits, torch.arange(len(a)))
    used = set(batch.items.tolist()) if aims.lam1 else set()
    used |= {*batch.liked.tolist(), *batch.other.tolist()} if aims.bpr else set()
    size = len(batch.user) if aims.bpr else len(batch.items)
    loss = loss + aims.lam * (rows[sorted(used)] ** 2).sum() / size
    if start == "learned" and aims.bpr:
        loss = loss + aims.lam * (own_values[sorted(set(batch.user.tolist()))] ** 2).sum() / size
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    first = np.zeros_like(people) if own_values.grad is None else own_values.grad.numpy()
    return rows.grad.numpy(), first


KINDS = [{}, {"bpr": False}, {"lam1": 0.0}, {"cl_grad": "anchor"}, {"scale": 5.0, "lam": 0.1, "tau": 0.05}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("start", ["mean", "zero", "learned"])
def test_slopes_are_those_of_autograd(start: UserStart, kind: dict[str, Any]) -> None:
    inputs, table, aims = random_record(9, 14), random_table(14, seed=4), GraphObjective(**kind)
    graph = SharedGraph.from_record(inputs, 14, start=start)
    batch = next(draw_batches(graph, BatchSizes(20, 8), np.arange(3, dtype=np.uint64)))
    people, anchor = random_table(9, seed=5), random_table(14, seed=6) if aims.cl_grad == "anchor" else None
    rows, first = by_torch(inputs, table, batch, aims, start, people, anchor)
    with ThreadPoolExecutor(2) as cores:
        descent = GraphLoss(graph, aims, cores, None if anchor is None else UnitRows.normalise(anchor))
        gradients = descent.compute_gradients(table, batch, people if start == "learned" else None)
    np.testing.assert_allclose(gradients.table, rows, rtol=2e-4, atol=2e-6)
    if start == "learned":
        np.testing.assert_allclose(gradients.people, first, rtol=2e-4, atol=2e-6)
    assert np.abs(rows).max() > 1e-3


def test_all_steps_of_a_round_are_those_of_torch_with_adam() -> None:
    inputs, table, aims = random_record(9, 14), random_table(14, seed=4), GraphObjective(lr=0.01)
    graph = SharedGraph.from_record(inputs, 14)
    batches = list(draw_batches(graph, BatchSizes(12, 8), np.arange(3, dtype=np.uint64)))
    assert len(batches) == -(-len(inputs) // 12)
    rows = torch.from_numpy(table.astype(np.float64)).requires_grad_()
    adam = torch.optim.Adam([rows], lr=0.01)
    for batch in batches:
        now = rows.detach().numpy().copy()
        rows.grad = torch.from_numpy(by_torch(inputs, now, batch, aims, "mean", random_table(9), None)[0])
        adam.step()
    np.testing.assert_allclose(refine_table(graph, table, batches, aims).table, rows.detach().numpy(), atol=2e-5)


def test_a_row_of_zeros_has_finite_slopes() -> None:
    inputs, table = random_record(5, 8), random_table(8)
    table[:3] = 0
    graph = SharedGraph.from_record(inputs, 8)
    refined = refine_table(
        graph, table, draw_batches(graph, BatchSizes(), np.arange(3, dtype=np.uint64)), GraphObjective()
    )
    assert np.isfinite(refined.table).all()


# batches


def test_a_pass_takes_every_edge_once_with_a_negative_that_its_user_did_not_share() -> None:
    inputs = random_record(30, 40)
    graph = SharedGraph.from_record(inputs, 40)
    batches = list(draw_batches(graph, BatchSizes(64, 16), np.arange(3, dtype=np.uint64)))
    observations = [(u, i) for b in batches for u, i in zip(b.user.tolist(), b.liked.tolist(), strict=True)]
    expected = zip(graph.lists.rows().tolist(), graph.lists.ids.tolist(), strict=True)
    assert sorted(observations) == sorted(expected)
    assert observations != sorted(observations)
    for b in batches:
        assert not graph.lists.holds(b.user, b.other).any()
        assert len(set(b.items.tolist())) == 16
        assert set(b.items.tolist()) <= set(graph.shared_items.tolist())


def test_more_steps_than_a_pass_draw_anew() -> None:
    graph = SharedGraph.from_record(random_record(30, 40), 40)
    a_pass = -(-len(graph) // 64)
    batches = list(draw_batches(graph, BatchSizes(64, 16, 2 * a_pass), np.arange(3, dtype=np.uint64)))
    assert len(batches) == 2 * a_pass
    assert not np.array_equal(batches[0].user, batches[a_pass].user)
    assert sum(len(b.user) for b in batches) == 2 * len(graph)


def test_user_who_shared_everything_is_left_out_of_the_loss() -> None:
    record = record_of_edges([(1, i) for i in range(4)] + [(2, 0)])
    graph = SharedGraph.from_record(record, 4)
    batches = list(draw_batches(graph, BatchSizes(), np.arange(3, dtype=np.uint64)))
    assert [b.user.tolist() for b in batches] == [[1]]
    assert len(draw_negatives(graph, np.uint64(0))) == 5


# InfoNCE, closed form


@pytest.mark.parametrize("tau", [0.05, 0.2, 1.0])
def test_identical_views_of_orthonormal_items(tau: float) -> None:
    """Of B of them: -log(e^(1/tau) / (e^(1/tau) + B - 1))."""
    views = np.eye(200, dtype=np.float32)
    with ThreadPoolExecutor(2) as cores:
        loss, remainder, right = compute_infonce_with_gradients(views, views, tau, 1.0, cores)
    assert loss == pytest.approx(np.log1p(199 * np.exp(-1 / tau)), rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(remainder, right.T, atol=1e-7)


def test_the_agreement_stays_between_its_bounds() -> None:
    with ThreadPoolExecutor(2) as cores:
        for sign in (1, -1):
            view = UnitRows.normalise(random_table(64, 3)).rows
            loss, *_ = compute_infonce_with_gradients(view, sign * view, 0.1, 1.0, cores)
            assert 0 <= loss <= 2 / 0.1 + np.log(64)


# the part


def part_of(**options: Any) -> SharedGraphPart:
    fed = federate(make_stream(make_block(0, 14, [[0, 1]])), make_backbone("ego"))
    world = RunContext(fed.backbone, fed.draws, fed.config.train)
    (part,) = build_parts([{"name": "shared-graph", **options}], world)
    assert isinstance(part, SharedGraphPart)
    return part


def state(given: SharedRecord | None = None, n_items: int = 14, parts: dict[str, Arrays] | None = None) -> ServerState:
    return ServerState(
        random_table(n_items, 6), {}, parts=parts or {}, shared=random_record(9, 14) if given is None else given
    )


def stepped(part: SharedGraphPart, server: ServerState) -> ServerState:
    return part.server_step(server, server, no_total(server))


@pytest.mark.parametrize("options", [{"lam1": 0.0, "bpr": False}, {"steps": 0}], ids=str)
def test_without_losses_or_steps_the_table_is_that_of_the_devices(options: dict[str, Any]) -> None:
    server = state()
    assert stepped(part_of(**options), server).items is server.items


def test_without_sharers_nothing_changes() -> None:
    server = state(SharedRecord())
    assert stepped(part_of(), server) is server


def test_fedshare_without_sharers_is_fedavg() -> None:
    stream = make_stream(make_block(0, 14, [[0, 1, 2], [3, 4], [5, 6, 7]]))
    tables = []
    for parts in ((), (SharedGraphPart,)):
        fed = federate(stream, make_backbone("ego"), *parts, objective="bpr", negatives=1)
        progress = started(fed)
        for _ in range(3):
            progress.server, _ = run_round(fed, progress.server, progress.devices)
        tables.append(progress.server.items)
    np.testing.assert_array_equal(*tables)


def test_a_step_is_drawn_by_its_round_alone() -> None:
    part = part_of(edge_batch=8)
    entry, repeat = stepped(part, state()), stepped(part, state())
    np.testing.assert_array_equal(entry.items, repeat.items)
    assert np.abs(entry.items - state().items).max() > 1e-4
    later = stepped(part, ServerState(state().items, {}, round=1, shared=random_record(9, 14)))
    assert not np.array_equal(entry.items, later.items)


def test_steps_lower_the_loss_and_metrics_report_it() -> None:
    part, server, report = part_of(lr=0.02), state(), []
    for _ in range(30):
        server = stepped(part, server)
        report.append(part.metrics(server))
    assert report[-1]["shared_bpr"] < report[0]["shared_bpr"]
    assert report[-1]["shared_cl"] < report[0]["shared_cl"]


def test_learned_rows_follow_their_people() -> None:
    part = part_of(user_start="learned", lr=0.05)
    server = stepped(part, state())
    retained_state = server.parts["shared-graph"]
    assert retained_state["sender"].tolist() == sorted(set(server.shared.sender.tolist()))
    keys: Keys = np.array([4, 5, 1], np.uint64)
    rows = part.training.load_user_rows(server, keys)
    np.testing.assert_array_equal(rows[0], retained_state["people"][1])
    np.testing.assert_array_equal(rows[2], retained_state["people"][0])
    np.testing.assert_array_equal(rows[1], part.training.load_user_rows(state(), keys)[1])
    cleaned, message = purge_learned_state(server, keys[:1])
    assert message == ["snapshots", "learned_rows"]
    assert 4 not in cleaned.parts["shared-graph"]["sender"].tolist()


# snapshots


def test_the_last_tables_are_kept_newest_last() -> None:
    part, server, observations = part_of(snapshots=3), state(), []
    for round in range(5):
        server = stepped(part, replace(server, round=round))
        observations.append(server.items)
        retained_state = server.parts["shared-graph"]
        np.testing.assert_array_equal(retained_state["snapshots"], np.stack(observations[-3:]))
    assert retained_state["snapshots_taken"].tolist() == [[0, 3], [0, 4], [0, 5]]


def test_spaced_snapshots_spread_over_a_block() -> None:
    part, server = part_of(snapshots=5, snapshot_every=0), state()
    assert part.context.train.rounds == 100
    for round in range(100):
        server = part.server_step(server, replace(server, round=round, shared=random_record(2, 14)), no_total(server))
    assert server.parts["shared-graph"]["snapshots_taken"][:, 1].tolist() == [20, 40, 60, 80, 100]


def test_snapshot_storage_is_reported_and_purged() -> None:
    part, server = part_of(snapshots=2), state()
    for round in range(3):
        server = stepped(part, replace(server, round=round))
    retained_state = server.parts["shared-graph"]
    written = len(pack({"snapshots": retained_state["snapshots"]})) - len(
        pack({"snapshots": retained_state["snapshots"][:0]})
    )
    assert (
        count_snapshot_bytes(retained_state) == 2 * 14 * 6 * 4 == pytest.approx(written, abs=8)
    )  # a header in front, padded
    cleaned, message = purge_learned_state(server, np.zeros(0, np.uint64))
    assert message == ["snapshots"]
    assert count_snapshot_bytes(cleaned.parts["shared-graph"]) == 0
    assert not any("snapshots" in name for name in cleaned.parts["shared-graph"])


def test_a_table_from_before_an_item_has_its_first_row() -> None:
    part = part_of()
    server = stepped(part, state())
    grown = replace(server, items=np.concatenate([server.items, random_table(3, 6, seed=9)]), block=1)
    grown = grown.with_part("shared-graph", part.server_block_start(grown))
    tables = grown.parts["shared-graph"]["snapshots"]
    np.testing.assert_array_equal(tables[0, :14], server.items)
    np.testing.assert_array_equal(tables[0, 14:], grown.items[14:])
    repeat = stepped(part, grown).parts["shared-graph"]
    assert repeat["snapshots"].shape == (2, 17, 6)


def test_no_snapshot_is_kept_where_none_is_wanted() -> None:
    assert "snapshots" not in stepped(part_of(snapshots=0), state()).parts["shared-graph"]


def test_a_paused_server_leaves_the_table_alone_until_it_is_purged() -> None:
    part, server = part_of(), stepped(part_of(), state())
    still = stepped(part, with_paused_learning(server))
    assert still.items is server.items
    assert count_snapshot_bytes(still.parts["shared-graph"]) == count_snapshot_bytes(server.parts["shared-graph"])
    assert stepped(part, purge_learned_state(still, np.zeros(0, np.uint64))[0]).items is not server.items


def test_rebuilt_graph_equals_the_trained_one() -> None:
    assert rebuild_learned_graph(state(), record_of_edges([(4, 1)])) is None
    server = stepped(part_of(user_start="learned", layers=2), state())
    result = rebuild_learned_graph(server, record_of_edges([(4, 1), (5, 2)]))
    assert result is not None
    assert (result[0].layers, result[0].start) == (2, "learned")
    assert result[1] is not None
    np.testing.assert_array_equal(result[1][0], server.parts["shared-graph"]["people"][1])


def test_devices_score_with_the_smoothed_table_if_configured() -> None:
    part, server = part_of(serve="glob"), state()
    audience = Audience("serving")
    sent = part.broadcast(server, audience).common
    np.testing.assert_array_equal(
        sent["table"], SharedGraph.from_record(server.shared, 14).propagate_and_average(server.items)[1]
    )
    assert part_of().broadcast(server, audience).common == {}
    assert part.fields(14).accepts_common({"table": server.items})


def test_a_graph_is_made_once_for_a_record_and_ends_with_it() -> None:
    shared_record = SharedRecord(np.array([5, 5, 9], np.uint64), np.array([0, 2, 1], np.int32), np.zeros(3))
    first = SharedGraph.from_record(shared_record, 4)
    assert SharedGraph.from_record(shared_record, 4) is first
    assert SharedGraph.from_record(shared_record, 5) is not first
    assert SharedGraph.from_record(shared_record, 5, layers=1) is not SharedGraph.from_record(shared_record, 5)
    other = SharedGraph.from_record(shared_record.without_items(5, np.array([2])), 4)
    assert len(other) == 2
    more = SharedGraph.from_record(shared_record, 4, (np.array([9], np.uint64), np.array([3], np.int32)))
    assert len(more) == 4
    assert len(SharedGraph.from_record(shared_record, 4)) == 3
    del shared_record
    assert graph_module._GRAPH_CACHE == []  # what was withdrawn is not kept by being remembered
