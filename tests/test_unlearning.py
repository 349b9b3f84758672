"""Contrastive unlearning: what is withdrawn leaves the graph, the table and all that was kept (spec H.B 1-8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.oracle import federate, make_backbone, make_block, make_stream, no_total, started
from helpers.shared_records import random_record, random_table, record_of_edges
from tacita.core.errors import TacitaError
from tacita.core.types import Doubles, Floats, Keys, Longs, Ragged, RoundReplay, ServerState, SharedRecord
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, run_round
from tacita.methods import RunContext, build_parts
from tacita.methods.sharing.contrastive_loss import ContrastiveLoss, ForgottenViews, Loss, estimate_background
from tacita.methods.sharing.contrastive_unlearning import ContrastiveDescent, ContrastiveUnlearning, StoppingRule
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import UnitRows
from tacita.methods.sharing.snapshots import count_snapshot_bytes
from tacita.methods.sharing.withdrawn_pairs import WithdrawnPairs
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import PartReports, UnlearningReport

N_ITEMS = 30
PARTS = ("sharing", "shared-graph", "contrastive-unlearning")


def people(n: int = 24) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.choice(N_ITEMS, 10, replace=False).tolist() for _ in range(n)]


def federation(*options: dict[str, Any], parts: tuple[str, ...] = PARTS, **train: Any) -> Federation:
    own = people()
    block = make_block(0, N_ITEMS, [o[:7] for o in own], [o[7:8] for o in own], [o[8:] for o in own])
    plain = {"objective": "bpr", "negatives": 1, "rounds": 40, **train}
    fed = federate(make_stream(block), make_backbone("ego"), **plain)
    message = {"sharing": {"groups": [1, 2, 1]}} | {option.pop("name"): option for option in options}
    specs = [{"name": name, **message.get(name, {})} for name in parts]
    return replace(fed, parts=build_parts(specs, RunContext(fed.backbone, fed.draws, fed.config.train)))


def unlearning(**options: Any) -> dict[str, Any]:
    return {"name": "contrastive-unlearning", "rounds": 3, "steps": 5, **options}


def learned(fed: Federation, rounds: int = 4) -> Progress:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress


def sharers(progress: Progress) -> Keys:
    return np.unique(progress.server.shared.sender)


def request(progress: Progress, some: int, kind: Any = "unshare") -> RequestBatch:
    """The first few sharers withdraw everything."""
    asking = sharers(progress)[:some]
    return RequestBatch(kind, asking, progress.server.shared.take_sender_lists(asking), number=1)


def told(reports: PartReports) -> UnlearningReport:
    return reports["contrastive-unlearning"]


# requests


def test_an_empty_request_changes_no_bit_and_plays_no_round() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    before, devices = progress.server, progress.clients.private.copy()
    for empty in (request(progress, 0), RequestBatch("unshare", sharers(progress)[:1], Ragged.empty(1))):
        message = told(handle_requests(fed, progress, empty))
        assert (message.details["edges"], message.details["stopped"]) == (0, "nothing to forget")
        assert progress.server.items is before.items
        assert progress.server.round == before.round
        assert progress.server.parts["shared-graph"] is before.parts["shared-graph"]
    np.testing.assert_array_equal(progress.clients.private, devices)


def test_withdrawn_edges_leave_the_graph_and_a_second_request_changes_nothing() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    question = request(progress, 3)
    message = told(handle_requests(fed, progress, question))
    assert message.details["edges"] == len(question.items.ids) > 0
    assert not np.isin(progress.server.shared.sender, question.senders).any()
    graph = SharedGraph.from_record(progress.server.shared, N_ITEMS)
    recount = np.bincount(progress.server.shared.item, minlength=N_ITEMS)
    np.testing.assert_array_equal(graph.people.counts(), recount)
    before = progress.server
    repeat = told(handle_requests(fed, progress, question))
    assert repeat.details["edges"] == 0
    assert progress.server.items is before.items


def test_some_items_of_one_person_can_be_withdrawn() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    (key,) = asking = sharers(progress)[:1]
    own_values = progress.server.shared.take_sender_lists(asking).ids
    message = told(
        handle_requests(fed, progress, RequestBatch("unshare", asking, Ragged.from_lists([own_values[:1].tolist()])))
    )
    assert (message.details["edges"], message.details["items"]) == (1, 1)
    assert sorted(progress.server.shared.take_sender_lists(asking).ids.tolist()) == sorted(own_values[1:].tolist())
    assert key in progress.server.shared.sender


def test_leave_withdraws_every_shared_item() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    asking = sharers(progress)[:2]
    n = len(progress.server.shared.take_sender_lists(asking).ids)
    message = told(handle_requests(fed, progress, RequestBatch("leave", asking, Ragged.empty(2))))
    assert message.details["edges"] == n
    assert not np.isin(progress.server.shared.sender, asking).any()


def test_what_was_shared_and_withdrawn_before_any_round_left_no_trace() -> None:
    fed = federation(unlearning())
    progress = started(fed)
    message = told(handle_requests(fed, progress, request(progress, 2)))
    assert message.details["stopped"] == "nothing to forget"
    assert progress.played == 0


def test_share_requests_are_ignored() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    key = np.setdiff1d(fed.stream.user_keys, sharers(progress))[:1]
    assert "contrastive-unlearning" not in handle_requests(
        fed, progress, RequestBatch("share", key, Ragged.from_lists([[1]]))
    )


def test_everything_can_be_withdrawn() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    message = told(handle_requests(fed, progress, request(progress, 1000)))
    assert message.details["turns"] > 0
    assert len(progress.server.shared) == 0
    assert np.isfinite(progress.server.items).all()
    step = fed.parts[1].server_step  # from here on it is plain federation on what stayed local
    assert step(progress.server, progress.server, no_total(progress.server)) is progress.server


# forgotten views


def test_forgotten_views_have_degrees_of_their_own_and_stay_as_they_are() -> None:
    tables = np.stack([random_table(14, seed=s) for s in range(3)])
    gone = record_of_edges([(1, 2), (1, 3), (5, 2)])
    result = ForgottenViews.compute(SharedGraph.from_record(gone, 14), tables)
    assert result.items.tolist() == [2, 3]
    expected = UnitRows.normalise(
        np.ascontiguousarray(SharedGraph.from_record(gone, 14).propagate_and_average(tables[1])[1][[2, 3]])
    ).rows
    np.testing.assert_array_equal(result.views[1], expected)
    rows = ForgottenViews.compute(SharedGraph.from_record(gone, 14), tables, through_graph=False)
    np.testing.assert_allclose(rows.views[2], UnitRows.normalise(tables[2]).rows[[2, 3]], rtol=1e-6)


def test_rounds_do_not_touch_the_views() -> None:
    fed = federation(unlearning())
    progress = learned(fed)
    part = fed.parts[2]
    assert isinstance(part, ContrastiveUnlearning)
    gone = progress.server.shared
    forgotten = ForgottenViews.compute(SharedGraph.from_record(gone, N_ITEMS), progress.server.items[None])
    before = forgotten.views.copy()
    part.run_forget_steps(progress.server, forgotten, np.uint64(3))
    np.testing.assert_array_equal(forgotten.views, before)


# losses


def contrast(
    loss: Loss, items: Longs, forgotten: ForgottenViews, cores: ThreadPoolExecutor, **options: Any
) -> ContrastiveLoss:
    where = np.searchsorted(items, forgotten.items)
    return ContrastiveLoss(loss, options.get("tau", 0.2), 1.0, items, forgotten, where, options.get("reference"), cores)


def unit(n: int, dim: int = 6, seed: int = 0) -> Floats:
    return UnitRows.normalise(random_table(n, dim, seed)).rows


def by_hand(loss: Loss, own: Doubles, made: Doubles, views: Doubles, where: Longs, tau: float) -> float:
    """The formulas of the spec, an item at a time."""
    total = 0.0
    place = {int(w): k for k, w in enumerate(where)}
    others = [i for i in range(len(own)) if i not in place]
    for i in range(len(own)):
        p = own[i] @ made[i]
        n = [view[place[i]] @ own[i] for view in views] if i in place else []
        if loss == "printed":
            total += -p / tau + (np.log(np.sum(np.exp(np.array(n) / tau))) if n else 0.0)
        elif loss == "ref_hinge":
            c = [view[place[i]] @ made[i] for view in views] if i in place else []
            over = [max(0.0, a - b - 1e-6) for a, b in zip(n, c, strict=True)]
            total += (1 - p + sum(over) / max(1, len(views))) / tau
        elif n:
            total += np.log1p(np.sum(np.exp((np.array(n) - p) / tau)))
        else:
            total += np.log(np.sum([np.exp(own[i] @ made[j] / tau) for j in others])) - p / tau
    return float(total / len(own))


@pytest.mark.parametrize("loss", ["ref_hinge", "infonce_pos", "printed"])
def test_losses_are_the_formulas_and_slopes_their_differences(loss: Loss) -> None:
    own, result, items = unit(9), unit(9, seed=1), np.arange(9)
    forgotten = ForgottenViews(np.array([1, 4, 8]), np.stack([unit(3, seed=s) for s in (5, 6)]))
    with ThreadPoolExecutor(1) as cores:
        pull = contrast(loss, items, forgotten, cores).compute_gradients(own, result, np.uint64(1))

    def value(a: Floats, b: Floats) -> float:
        wide = (a.astype(float), b.astype(float), forgotten.views.astype(float))
        return by_hand(loss, *wide, forgotten.items, 0.2)

    assert pull.loss == pytest.approx(value(own, result), rel=1e-5)
    moved = np.random.default_rng(0).normal(size=own.shape)
    for slope, shift in ((pull.row_gradient, (moved, 0 * moved)), (pull.view_gradient, (0 * moved, moved))):
        if loss == "ref_hinge" and shift[1].any():
            continue  # the remaining view stands still in the hinge, so its difference is another
        ends = [value(own + s * 1e-5 * shift[0], result + s * 1e-5 * shift[1]) for s in (1, -1)]
        assert (slope * moved).sum() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=2e-3)


def test_the_printed_loss_is_bounded_and_copies_of_a_view_add_the_logarithm_of_their_number() -> None:
    own, result = unit(5), unit(5, seed=1)
    view = unit(5, seed=2)
    losses = []
    with ThreadPoolExecutor(1) as cores:
        for copies in (1, 5):
            forgotten = ForgottenViews(np.arange(5), np.stack([view] * copies))
            entry = contrast("printed", np.arange(5), forgotten, cores, tau=0.05)
            losses.append(entry.compute_gradients(own, result, np.uint64(0)).loss)
            assert -2 / 0.05 + np.log(copies) <= losses[-1] <= 2 / 0.05 + np.log(copies)
        nothing = ForgottenViews(np.zeros(0, np.int64), np.zeros((1, 0, 6), np.float32))
        assert np.isfinite(
            contrast("printed", np.arange(5), nothing, cores).compute_gradients(own, result, np.uint64(0)).loss
        )
    assert losses[1] - losses[0] == pytest.approx(np.log(5), rel=1e-6)


@pytest.mark.parametrize("loss", ["printed", "infonce_pos"])
def test_published_losses_have_their_fixed_points(loss: Loss) -> None:
    """One item, one view, the remaining view fixed: the row ends with cosine sqrt((1 - c) / 2) to it."""
    values, view = np.array([[1.0, 0.0]], np.float32), np.array([[[0.83, np.sqrt(1 - 0.83**2)]]], np.float32)
    row = torch.tensor([[0.9, 0.4]], dtype=torch.float32)
    with ThreadPoolExecutor(1) as cores:
        entry = contrast(loss, np.zeros(1, np.int64), ForgottenViews(np.zeros(1, np.int64), view), cores, tau=1.0)
        for _ in range(4000):
            length = row.norm()
            own = (row / length).numpy()
            slope = torch.from_numpy(entry.compute_gradients(own, values, np.uint64(0)).row_gradient)
            row = row - 0.05 * (slope - (slope * row / length).sum() * row / length) / length
    assert float(row[0, 0] / row.norm()) == pytest.approx(np.sqrt((1 - 0.83) / 2), abs=1e-3)


def test_the_hinge_rests_where_a_row_agrees_with_what_remains_and_nowhere_else() -> None:
    result = unit(4)
    forgotten = ForgottenViews(np.array([1, 2]), np.stack([unit(2, seed=3), unit(2, seed=4)]))
    with ThreadPoolExecutor(1) as cores:
        entry = contrast("ref_hinge", np.arange(4), forgotten, cores)
        rest = entry.compute_gradients(result, result, np.uint64(0))
        assert rest.loss == pytest.approx(0, abs=1e-6)
        along = (
            rest.row_gradient - (rest.row_gradient * result).sum(1, keepdims=True) * result
        )  # what moves a direction
        np.testing.assert_allclose(along, 0, atol=1e-6)
        assert entry.compute_gradients(unit(4, seed=9), result, np.uint64(0)).loss > 0.1


def test_an_item_that_is_shared_no_more_is_compared_with_the_background() -> None:
    table = random_table(200, 6)
    forgotten = ForgottenViews(np.array([3, 5]), np.stack([unit(2, seed=3)]))
    background = estimate_background(table, forgotten, np.array([False, True]), np.uint64(1))
    assert np.isnan(background[0, 0])
    similar = UnitRows.normalise(table).rows[np.setdiff1d(np.arange(200), [3, 5])] @ forgotten.views[0, 1]
    assert background[0, 1] == pytest.approx(similar.mean(), abs=0.1)


def test_slopes_in_the_table_take_the_way_through_the_graph() -> None:
    inputs, table = random_record(6, 14), random_table(14, 6)
    graph = SharedGraph.from_record(inputs, 14)
    forgotten = ForgottenViews(np.array([1, 2]), np.stack([unit(2, seed=3)]))
    items = np.union1d(graph.shared_items, forgotten.items).astype(np.int64)
    lonely = ~np.isin(items, graph.shared_items)
    with ThreadPoolExecutor(1) as cores:
        entry = contrast("printed", items, forgotten, cores)
        walk = ContrastiveDescent(graph, None, entry, lonely, UnitRows.normalise(table).rows[items[lonely]], True)

        def value(now: Floats) -> float:
            result = UnitRows.normalise(graph.propagate_and_average(now)[1]).rows[items]
            result[lonely] = walk.anchor
            return entry.compute_gradients(UnitRows.normalise(now).rows[items], result, np.uint64(0)).loss

        slope, moved = walk.compute_gradient(table, np.uint64(0)), random_table(14, 6, seed=8)
        ends = [value((table + s * 1e-2 * moved).astype(np.float32)) for s in (1, -1)]
        assert (slope * moved).sum() == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=2e-2)


# what a round does


@pytest.mark.parametrize("options", [{}, {"loss": "printed"}, {"loss": "infonce_pos"}], ids=str)
def test_items_that_are_neither_shared_nor_forgotten_move_by_devices_alone(options: dict[str, Any]) -> None:
    fed = federation(unlearning(**options))
    progress = learned(fed)
    inputs = progress.server.shared
    state = inputs.item < N_ITEMS - 5
    server = replace(progress.server, shared=type(inputs)(inputs.sender[state], inputs.item[state], inputs.time[state]))
    part = fed.parts[2]
    assert isinstance(part, ContrastiveUnlearning)
    asking = np.unique(server.shared.sender)[:3]
    gone = server.shared.take_sender_lists(asking)
    edges = type(inputs)(np.repeat(asking, gone.counts()), gone.ids, np.zeros(len(gone.ids)))
    forgotten = ForgottenViews.compute(SharedGraph.from_record(edges, N_ITEMS), server.items[None])
    after = part.run_forget_steps(server, forgotten, np.uint64(5))
    outside = np.setdiff1d(np.arange(N_ITEMS), np.union1d(server.shared.item, forgotten.items))
    assert len(outside) >= 5
    np.testing.assert_array_equal(after[outside], server.items[outside])
    assert np.abs(after - server.items)[forgotten.items].max() > 1e-5


def test_without_remaining_rounds_no_device_is_asked() -> None:
    fed = federation(unlearning(remaining_rounds=False))
    progress = learned(fed)
    round, private = progress.server.round, progress.clients.private.copy()
    before = progress.server.items
    message = told(handle_requests(fed, progress, request(progress, 3)))
    assert message.details["turns"] == 3
    assert (progress.played, progress.server.round) == (0, round)
    np.testing.assert_array_equal(progress.clients.private, private)
    assert np.abs(progress.server.items - before).max() > 1e-4


def test_other_server_steps_pause_during_unlearning() -> None:
    fed = federation(unlearning(rounds=2, steps=0))
    progress = learned(fed)
    plain, alone = federation(parts=("sharing",)), learned(fed)
    handle_requests(fed, progress, request(progress, 3))
    assert progress.played == 2
    start = replace(alone.server, shared=progress.server.shared)
    handle_requests(plain, alone, request(alone, 3))
    for _ in range(2):
        start, _ = run_round(plain, start, alone.devices)
    np.testing.assert_array_equal(progress.server.items, start.items)
    before = progress.server
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    assert len(progress.server.parts["shared-graph"]["snapshots"]) == 1
    assert progress.server.round == before.round + 1


def test_storage_is_reported_and_purged() -> None:
    fed = federation({"name": "shared-graph", "snapshots": 3}, unlearning())
    progress = learned(fed, 5)
    message = told(handle_requests(fed, progress, request(progress, 3)))
    assert message.storage_server == 3 * N_ITEMS * 6 * 4
    assert message.details["tables"] == 3
    assert message.purged == ("snapshots",)
    assert count_snapshot_bytes(progress.server.parts["shared-graph"]) == 0
    assert "paused" not in progress.server.parts["shared-graph"]
    assert progress.best_server is progress.server


@pytest.mark.parametrize(
    "options",
    [{"keep_bpr": True}, {"glob_grad": True}, {"forgotten": "rows"}, {"mu": 0.0}, {"loss": "infonce_pos"}],
    ids=str,
)
def test_every_option_changes_what_is_learned(options: dict[str, Any]) -> None:
    tables = []
    for entry in ({}, options):
        fed = federation(unlearning(**entry))
        progress = learned(fed)
        handle_requests(fed, progress, request(progress, 6))
        tables.append(progress.server.items)
        assert np.isfinite(tables[-1]).all()
    assert np.abs(tables[0] - tables[1]).max() > 1e-6


def test_forgetting_brings_rows_nearer_to_what_remains() -> None:
    """Against rounds on the remaining data alone: the mean cosine with the remaining graph's view is higher."""
    near = []
    for steps in (0, 20):
        fed = federation(unlearning(steps=steps, lr=0.01))
        progress = learned(fed)
        handle_requests(fed, progress, request(progress, 6))
        server: ServerState = progress.server
        graph = SharedGraph.from_record(server.shared, N_ITEMS)
        result = UnitRows.normalise(graph.propagate_and_average(server.items)[1]).rows
        near.append((result * UnitRows.normalise(server.items).rows).sum(1)[graph.shared_items].mean())
    assert near[1] > near[0] + 0.01


# options of ours


def test_rollback_plays_the_rounds_since_the_oldest_table_again() -> None:
    """With their own draws, on what remains; with no steps of contrast that is all it does."""
    graph = {"name": "shared-graph", "snapshots": 3}
    fed = federation(dict(graph), unlearning(rounds=None, steps=0, rollback=True, learns_on=True))
    progress, alone = learned(fed, 6), learned(fed, 6)
    message = told(handle_requests(fed, progress, request(progress, 3)))
    assert message.details["turns"] == 2
    plain = federation(graph, parts=("sharing", "shared-graph"))
    oldest = alone.server.parts["shared-graph"]["snapshots"][0]
    handle_requests(plain, alone, request(alone, 3))
    server = alone.server.with_items(oldest)
    for number in (4, 5):
        server, _ = run_round(plain, server, alone.devices, None, RoundReplay(number))
    np.testing.assert_array_equal(progress.server.items, server.items)


def test_reset_takes_a_row_that_only_leavers_shared_to_where_rows_without_edges_are() -> None:
    fed = federation({"name": "sharing", "groups": [1, 1, 6]}, unlearning(reset=2.0))
    progress = started(fed)
    first = progress.server.items.copy()
    progress = learned(fed, 5)
    server = progress.server
    leaver = sharers(progress)[:1]
    own = server.shared.take_sender_lists(leaver).ids
    counts = np.bincount(server.shared.item, minlength=N_ITEMS)
    lonely, common = own[counts[own] == 1], own[counts[own] > 1]
    assert len(lonely)
    assert len(common)
    assert (counts == 0).any()
    drift = (server.items - first)[counts == 0].mean(axis=0)
    withdrawn = record_of_edges([(int(leaver[0]), int(item)) for item in own])
    stays = server.shared.sender != leaver[0]
    remaining = SharedRecord(server.shared.sender[stays], server.shared.item[stays], server.shared.time[stays])
    part = fed.parts[2]
    assert isinstance(part, ContrastiveUnlearning)
    items = part._reset_rows(replace(server, shared=remaining), withdrawn)
    np.testing.assert_allclose(items[lonely], first[lonely] + drift, atol=1e-6)
    weight = (1 / counts[common]) ** 2
    expected = server.items[common] + weight[:, None] * (first[common] + drift - server.items[common])
    np.testing.assert_allclose(items[common], expected, atol=1e-6)
    others = np.setdiff1d(np.arange(N_ITEMS), own)
    np.testing.assert_array_equal(items[others], server.items[others])


def test_the_first_table_is_counted_and_stays() -> None:
    fed = federation({"name": "shared-graph", "snapshots": 2}, unlearning(reset=2.0))
    progress = learned(fed)
    message = told(handle_requests(fed, progress, request(progress, 3)))
    assert message.storage_server == 3 * N_ITEMS * 6 * 4


def test_ranking_beside_contrast_has_the_scale_of_learning() -> None:
    part = federation({"name": "shared-graph", "bpr_scale": 7.0, "edge_batch": 33, "lam1": 0.5}, unlearning()).parts[2]
    assert isinstance(part, ContrastiveUnlearning)
    objective = part._build_ranking_objective()
    assert (objective.scale, objective.lam1, objective.bpr) == (7.0, 0.0, True)
    tables = []
    for scale in (1.0, 7.0):
        fed = federation({"name": "shared-graph", "bpr_scale": 7.0}, unlearning(keep_bpr=True))
        progress = learned(fed)
        other = federation({"name": "shared-graph", "bpr_scale": scale}, unlearning(keep_bpr=True))
        handle_requests(other, progress, request(progress, 6))
        tables.append(progress.server.items)
    assert np.abs(tables[0] - tables[1]).max() > 1e-6


def test_a_temperature_that_does_nothing_is_refused() -> None:
    for options in ({"keep_bpr": True}, {"loss": "printed"}):
        federation(unlearning(tau=0.5, **options)).parts[2].check(N_ITEMS)
    with pytest.raises(TacitaError, match="'tau' changes nothing under loss = 'ref_hinge'"):
        federation(unlearning(tau=0.5)).parts[2].check(N_ITEMS)


def test_ordinary_rounds_are_rounds_on_what_remains() -> None:
    control = ("sharing", "shared-graph", "ordinary-rounds")
    fed = federation({"name": "ordinary-rounds", "rounds": 2}, parts=control)
    progress, alone = learned(fed), learned(fed)
    report = handle_requests(fed, progress, request(progress, 3))["ordinary-rounds"]
    assert (report.details["turns"], report.exact) == (2, False)
    plain = federation(parts=("sharing", "shared-graph"))
    handle_requests(plain, alone, request(alone, 3))
    server = alone.server
    for _ in range(2):
        server, _ = run_round(plain, server, alone.devices)
    np.testing.assert_array_equal(progress.server.items, server.items)
    idle = handle_requests(fed, progress, request(progress, 0))["ordinary-rounds"]
    assert idle.details["turns"] == 0


# when it stops


def test_it_stops_when_nothing_is_gained_twice() -> None:
    watched = StoppingRule(100)
    for valid, auc in [(0.10, 0.80), (0.12, 0.75), (0.12, 0.71), (0.12, 0.705)]:
        watched.record_check(valid, auc)
        assert not watched.stopped
    watched.record_check(0.1203, 0.703)
    assert not watched.stopped
    watched.record_check(0.1204, 0.70)
    assert watched.stopped == "settled"


def test_it_goes_on_while_validation_gains() -> None:
    watched = StoppingRule(100)
    for k in range(8):
        watched.record_check(0.1 * 1.01**k, 0.7)
    assert not watched.stopped


def test_it_stops_at_once_when_a_round_takes_too_much() -> None:
    fed = federation(unlearning(loss="printed", lr=3.0, steps=20, clip=1e9, rounds=9))
    progress = learned(fed)
    message = told(handle_requests(fed, progress, request(progress, 8)))
    assert message.details["stopped"] == "over-forgetting"
    assert message.details["turns"] < 9


def test_it_takes_a_tenth_of_the_rounds_at_most() -> None:
    """Of those that led to the model: a run that stopped early would take longer to unlearn than to learn."""
    fed = federation(unlearning(rounds=None, check_every=100), rounds=41)
    progress = learned(fed, 12)
    assert told(handle_requests(fed, progress, request(progress, 3))).details["turns"] == 2


def test_outlier_pairs_are_distinguished() -> None:
    gone, state = record_of_edges([(1, i) for i in range(8)] + [(2, i) for i in range(8, 16)]), random_record(10, 60)
    pairs = WithdrawnPairs.from_record(gone, state, 60)
    other = pairs.draw_matched_items(np.uint64(3))
    assert not pairs.lists.holds(pairs.row[other >= 0], other[other >= 0]).any()
    flat = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)
    assert pairs.compute_auc(flat, np.uint64(1)) == pytest.approx(0.5, abs=0.35)
    flat[:8, 0] += 20
    flat[8:16, 1] += 20
    assert pairs.compute_auc(flat, np.uint64(1)) == 1.0
    assert (
        WithdrawnPairs.from_record(record_of_edges([(1, 3)]), record_of_edges([]), 60).compute_auc(flat, np.uint64(1))
        is None
    )
