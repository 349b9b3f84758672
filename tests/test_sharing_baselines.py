"""What FedShare is compared with: a server that is a client, mended graphs, perturbed data (spec C.1-3, H.C)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.contracts import assert_same_numbers, run_blocks, write_and_read
from helpers.loopback_site import close_nodes, home_node, make_site, rows_of_blocks, site_config
from helpers.oracle import federate, make_backbone, make_block, make_stream, no_total, started, train_once
from helpers.shared_records import random_record, random_table, record_of_edges
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, CohortView, Floats, Ragged, ServerState, SharedRecord
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks, run_round
from tacita.kernels.cosine import write_pair_features
from tacita.methods import Part, RunContext, build_parts
from tacita.methods.sharing import link_prediction
from tacita.methods.sharing.contribution import Contribution
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_mending import GraphMending
from tacita.methods.sharing.graph_training import Batch, DeviceVectors, GraphLoss, GraphObjective, UnitRows
from tacita.methods.sharing.item_perturbation import Mechanism, compute_probabilities, perturb_items
from tacita.methods.sharing.link_prediction import LinkPredictionOptions, LinkScorer, propose_links
from tacita.methods.sharing.server_client import ServerClient
from tacita.methods.sharing.sharing import SHARE_SOME, Sharing
from tacita.round import registry
from tacita.round.broadcast import Audience
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.round.request import RequestBatch
from tacita.round.task import LocalTask
from tacita.runs.assembly import Machine, assemble_federation


def people(n: int = 40, n_items: int = 30) -> BlockStream:
    rng = np.random.default_rng(5)
    own_values = [rng.permutation(n_items)[: rng.integers(4, 12)].tolist() for _ in range(n)]
    return make_stream(
        make_block(
            0, n_items, [m[:-2] for m in own_values], [m[-2:-1] for m in own_values], [m[-1:] for m in own_values]
        )
    )


def fed_with(*specs: dict[str, Any], stream: BlockStream | None = None, **train: Any) -> Federation:
    settings = {"objective": "bpr", "negatives": 1, "aggregation": "weighted", "optimiser": "lazy-adam"} | train
    fed = federate(stream or people(), make_backbone("ego", lr=0.05, item_lr_scale=1.0), **settings)
    parts = build_parts(list(specs), RunContext(fed.backbone, fed.draws, fed.config.train))
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


def states(given: SharedRecord) -> tuple[ServerState, ServerState]:
    """What a round began with, and what clients of weight 12 made of it."""
    before = ServerState(random_table(14, 6), {}, shared=given)
    return before, before.with_items(before.items + random_table(14, 6, seed=9) / 10)


def alone(part: ServerClient, before: ServerState) -> Floats:
    """The table where the server is the only client."""
    return part.server_step(before, before, replace(no_total(before), weight=0.0, n_clients=0)).items


def test_the_server_enters_the_mean_by_the_number_of_its_edges() -> None:
    before, server = states(random_record(5, 14))
    part, edges = server_part(), len(before.shared)
    total = replace(no_total(before, 3), weight=12.0)
    own_values = alone(part, before)
    assert np.abs(own_values - before.items).max() > 1e-3
    expected = (12 * server.items + edges * own_values) / (12 + edges)
    result = part.server_step(before, server, total)
    np.testing.assert_allclose(result.items, expected, atol=1e-6)
    assert part.metrics(result)["server_share"] == pytest.approx(edges / (12 + edges))


def test_its_share_of_the_mean_can_be_capped() -> None:
    before, server = states(random_record(5, 14))
    total = replace(no_total(before, 3), weight=12.0)
    result = server_part(weight_cap=0.25).server_step(before, server, total)
    np.testing.assert_allclose(result.items, 0.75 * server.items + 0.25 * alone(server_part(), before), atol=1e-6)
    nothing_else = server_part(weight_cap=0.25).server_step(before, before, no_total(before))
    np.testing.assert_array_equal(nothing_else.items, before.items)


@pytest.mark.parametrize("aggregation", ["mean", "fixed", "per-row"])
def test_it_joins_every_kind_of_mean(aggregation: str) -> None:
    before, server = states(record_of_edges([(1, 0), (1, 2), (2, 2), (2, 5)]))
    touched = np.zeros(14)
    touched[:4] = 3.0
    total = replace(no_total(before, 3), sums={"rows": np.zeros((14, 6)), "rows.touched": touched})
    own_values, own = alone(server_part(), before), (server.items, before.items)
    part = server_part(aggregation, layers=3)
    result = part.server_step(before, server, total).items
    others = {"mean": 3.0, "fixed": 10.0, "per-row": touched[:, None]}[aggregation]
    expected = (others * own[0] + own_values) / (others + 1.0)
    if aggregation == "per-row":
        moved = (own_values != own[1]).any(1)
        expected = np.where(moved[:, None], expected, server.items)
        assert 0 < moved.sum() < 14
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_fixed_denominator_has_to_be_said_where_the_server_joins_the_sum() -> None:
    with pytest.raises(TacitaError, match=r"needs train\.denominator"):
        fed_with({"name": "server-client"}, aggregation="fixed")


def test_layers_change_what_the_server_learns() -> None:
    before, _ = states(random_record(5, 14))
    assert not np.array_equal(alone(server_part(layers=1), before), alone(server_part(layers=3), before))


# mended graphs (C.2)


def test_edges_that_count_less_are_those_of_the_dense_matrix() -> None:
    record, table = record_of_edges([(7, 0), (7, 2), (50, 2), (900, 0)]), random_table(4, 5)
    more = np.array([7, 900, 7], np.uint64), np.array([3, 2, 0], np.int32)
    graph = SharedGraph.from_record(record, 4, more, layers=2, extra_weight=np.array([0.5, 0.25, 0.1], np.float32))
    a = np.array([[1, 0, 1, 0.5], [0, 0, 1, 0], [1, 0, 0.25, 0]])  # what is in the record counts 1
    degrees = [np.where(d > 0, np.where(d > 0, d, 1) ** -0.5, 0) for d in (a.sum(1), a.sum(0))]
    whole = np.zeros((7, 7))
    whole[:3, 3:] = degrees[0][:, None] * a * degrees[1][None]
    whole += whole.T
    start = np.concatenate([a / a.sum(1, keepdims=True) @ table, table])
    expected = (start + whole @ start + whole @ whole @ start) / 3
    np.testing.assert_allclose(np.concatenate(graph.propagate_and_average(table)), expected, rtol=1e-5, atol=1e-6)


def test_the_scorer_steps_down_the_cross_entropy() -> None:
    """Adam's first step is the sign of the slope times the rate."""
    rng = np.random.default_rng(2)
    scorer = LinkScorer(3, LinkPredictionOptions(hidden=5, lr=0.01), np.uint64(4))
    users, items = (UnitRows.normalise(rng.normal(size=(9, 3)).astype(np.float32)).rows for _ in range(2))
    label = (rng.random(9) < 0.5).astype(np.float32)
    tensors = [torch.tensor(entry.table, requires_grad=True) for entry in scorer.layers]
    met = torch.from_numpy(scorer.build_features(users, items))
    logits = torch.relu(met @ tensors[0] + tensors[1]) @ tensors[2][0] + tensors[3][0, 0]
    torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(label)).backward()
    before = [entry.table.copy() for entry in scorer.layers]
    scorer.train_step(met.numpy(), label)
    for layer, was, tensor in zip(scorer.layers, before, tensors, strict=True):
        assert tensor.grad is not None
        slope = tensor.grad.numpy()
        some = np.abs(slope) > 1e-6
        np.testing.assert_allclose((layer.table - was)[some], -0.01 * np.sign(slope)[some], rtol=1e-2)


def clubs(n_users: int = 60, n_items: int = 40) -> list[list[int]]:
    """Even people like most even items, odd people odd ones: of 20 each, 17."""
    rng = np.random.default_rng(0)
    return [rng.choice(np.arange(u % 2, n_items, 2), 17, replace=False).tolist() for u in range(n_users)]


def test_graph_repair_proposes_links_and_never_existing_ones() -> None:
    record, effort = (
        record_of_edges([(u, i) for u, club in enumerate(clubs()) for i in club]),
        LinkPredictionOptions(epochs=60),
    )
    graph = SharedGraph.from_record(record, 40)
    table, whom = random_table(40, 8), np.arange(0, 60, 1)
    free = propose_links(graph, table, whom, effort, np.uint64(3))
    assert free is not None
    assert len(free.user) > 50
    right = free.user % 2 == free.item % 2
    assert right.mean() > 0.9  # by chance: 3 of 23
    assert (free.weight > 0.5).all()
    assert np.bincount(free.user).max() <= 8  # half of what one shared
    counterpart = {*zip(record.sender.tolist(), record.item.tolist())}
    proposed = [*zip(graph.users[free.user].tolist(), free.item.tolist())]
    assert not counterpart & {*proposed}


def test_all_pairs_meet_as_single_ones_do() -> None:
    rng = np.random.default_rng(2)
    users, items = (rng.normal(size=(n, 8)).astype(np.float32) for n in (3, 7))
    out = np.empty((21, 16), np.float32)
    write_pair_features(users, items, out)
    scorer = link_prediction.LinkScorer(8, link_prediction.LinkPredictionOptions(), np.uint64(1))
    assert np.array_equal(out, scorer.build_features(users[:, None, :], items[None, :, :]).reshape(21, -1))


@pytest.mark.parametrize("k", [0, 1, 4, 12])
def test_the_likeliest_are_those_of_a_stable_order(k: int) -> None:
    """Ties go to the smaller item; what is no likelier than not is left out."""
    chance = np.random.default_rng(3).choice(np.array([-1, 0.2, 0.5, 0.6, 0.9, 1], np.float32), (20, 12))
    row, item = link_prediction._select_likeliest(chance, k)
    order = np.argsort(-chance, axis=1, kind="stable")[:, :k]
    wanted = [(r, i) for r in range(20) for i in order[r] if chance[r, i] > 0.5]
    assert list(zip(row.tolist(), item.tolist(), strict=True)) == wanted


def test_graph_repair_without_hidden_edges_proposes_nothing() -> None:
    graph = SharedGraph.from_record(record_of_edges([(1, 0), (2, 1)]), 5)
    assert propose_links(graph, random_table(5, 4), np.arange(2), LinkPredictionOptions(), np.uint64(1)) is None


def test_user_rows_follow_the_gradient_towards_device_vectors() -> None:
    graph, table = SharedGraph.from_record(random_record(6, 14), 14), random_table(14, 5)
    report = DeviceVectors(np.array([0, 2, 5]), UnitRows.normalise(random_table(3, 5, seed=8)).rows)
    nothing = np.zeros(0, np.int64)
    batch, along = Batch(nothing, nothing, nothing, nothing), random_table(14, 5, seed=4)
    with ThreadPoolExecutor(1) as cores:
        descent = GraphLoss(graph, GraphObjective(lam1=0.7, lam=0.0), cores, device_vectors=report)
        slope = descent.compute_gradients(table, batch).table
        up, down = (descent.compute_gradients(table + np.float32(h) * along, batch).cl for h in (1e-2, -1e-2))
    assert (slope * along).sum() == pytest.approx(0.7 * (up - down) / 2e-2, rel=2e-2)


MENDING = {"name": "graph-mending", "mend_every": 2, "mender_epochs": 40, "kappa": 1.0}


def test_partial_sharers_are_known_to_the_server() -> None:
    fed = fed_with({"name": "sharing", "groups": [3, 4, 3]}, MENDING)
    progress = started(fed)
    group = progress.clients.parts["sharing"]["group"]
    keys = fed.stream.user_keys[: progress.clients.n_users]
    assert set(progress.server.parts["graph-mending"]["partial"]) == set(keys[group == SHARE_SOME])


class RenamedSharing(Sharing):
    name = "renamed-sharing"


def test_mending_finds_what_users_share_whichever_part_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PARTS, RenamedSharing.name, RenamedSharing)
    mending = {**MENDING, "contrast_users": True}
    fed = fed_with({"name": RenamedSharing.name, "groups": [3, 4, 3]}, mending)
    usual = fed_with({"name": "sharing", "groups": [3, 4, 3]}, mending)
    progress, usual_progress = started(fed), started(usual)
    partial = progress.server.parts["graph-mending"]["partial"]
    assert set(partial) == set(usual_progress.server.parts["graph-mending"]["partial"])
    server, usual_server = play(fed, progress, 2), play(usual, usual_progress, 2)
    np.testing.assert_array_equal(server.items, usual_server.items)


def pairs_of(server: ServerState) -> set[tuple[int, int]]:
    state = server.parts["graph-mending"]
    return {*zip(state["mended_sender"].tolist(), state["mended_item"].tolist())} if "mended_sender" in state else set()


def test_withdrawn_links_are_never_proposed_again() -> None:
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
    inputs = server.shared
    assert not mended & {*zip(inputs.sender.tolist(), inputs.item.tolist())}
    senders = np.unique(inputs.sender)[::2]
    lists = inputs.take_sender_lists(senders)
    some = lists.filter_entries(np.arange(len(lists.ids)) % 9 == 0)
    message = handle_requests(fed, progress, RequestBatch("unshare", senders, Ragged(some.ptr, some.ids)))[
        "graph-mending"
    ]
    assert message.purged == ("mended_edges",)
    assert not pairs_of(progress.server)
    gone = {*zip(senders[some.rows()].tolist(), some.ids.tolist())}
    observations = set()
    for _ in range(4):
        observations |= pairs_of(play(fed, progress, 2))
    assert observations
    assert not {sender for sender, _ in observations} & {sender for sender, _ in gone}  # who withdrew is mended no more
    assert not observations & {*zip(progress.server.shared.sender.tolist(), progress.server.shared.item.tolist())}


def test_only_sharing_devices_upload_a_vector_and_only_where_the_run_says_so() -> None:
    share, plain = {"name": "sharing", "groups": [1, 1, 1]}, fed_with({"name": "sharing"}, MENDING)
    progress = started(plain)
    assert [field.name for field in plain.fields(progress.server, Question("round"))] == ["rows"]
    fed = fed_with(share, {**MENDING, "contrast_users": True})
    progress = started(fed)
    assert [(field.name, field.seen) for field in fed.fields(progress.server, Question("round"))][1:] == [
        ("graph-mending.vector", "each")
    ]
    total = progress.devices.exchange(
        fed, progress.server, fed.broadcast_serving(progress.server), Question("round")
    ).total
    each = total.each["graph-mending.vector"]
    group = progress.clients.parts["sharing"]["group"]
    keys = fed.stream.user_keys[: progress.clients.n_users]
    sent = each.sender[np.abs(each.value.value).max(1) > 0]
    assert set(sent) == set(keys[group == SHARE_SOME])  # who shares all does not train
    part = fed.parts[1]
    assert isinstance(part, GraphMending)
    stepped = part.server_step(progress.server, progress.server, total)
    without = part.server_step(progress.server, progress.server, replace(total, each={}))
    assert not np.array_equal(stepped.items, without.items)


# perturbed contributions (C.3)


def log_ratio(chance: Any) -> float:
    """The most that any output says for one input against another."""
    return float(np.max(np.log(chance[:, None, :]) - np.log(chance[None, :, :])))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 16.0])
def test_no_output_is_much_likelier_for_one_item_than_for_another(epsilon: float) -> None:
    everything = np.arange(5)
    for seed in range(5):
        chance = compute_probabilities("exponential", epsilon, random_table(5, 3, seed), everything)
        np.testing.assert_allclose(chance.sum(1), 1)
        assert 0 < log_ratio(chance) <= epsilon
        assert (chance.argmax(1) == everything).all()
    probabilities = compute_probabilities("krr", epsilon, random_table(5, 3), everything)
    assert log_ratio(probabilities) == pytest.approx(epsilon)
    np.testing.assert_allclose(np.diag(probabilities), np.exp(epsilon) / (np.exp(epsilon) + 4))


@pytest.mark.parametrize("mechanism", ["exponential", "krr"])
def test_epsilon_0_reveals_nothing(mechanism: Mechanism) -> None:
    np.testing.assert_allclose(compute_probabilities(mechanism, 0.0, random_table(5, 3), np.arange(5)), 1 / 5)


@pytest.mark.parametrize(("epsilon", "truth"), [(1.0, 0.0004), (8.0, 0.0145), (16.0, 0.446)])
def test_truth_probability_over_3706_dissimilar_items(epsilon: float, truth: float) -> None:
    table = np.full((3706, 1), -1.0, np.float32)
    table[7] = 1.0
    assert compute_probabilities("exponential", epsilon, table, np.array([7]))[0, 7] == pytest.approx(truth, rel=0.12)
    assert compute_probabilities("krr", 8.0, table, np.array([7]))[0, 7] == pytest.approx(0.446, rel=0.01)


@pytest.mark.parametrize("mechanism", ["exponential", "krr"])
def test_perturbed_items_have_their_distribution_and_are_independent(mechanism: Mechanism) -> None:
    table, items = random_table(6, 3), np.tile([4, 1], 20_000).astype(np.int32)
    drawn = np.random.default_rng(1).integers(0, 2**63, len(items), np.uint64) * np.uint64(2)
    report = perturb_items(mechanism, 3.0, table, items, drawn)
    chance = compute_probabilities(mechanism, 3.0, table, np.array([4, 1]))
    for k in range(2):
        observations = np.bincount(report[k::2], minlength=6) / 20_000
        np.testing.assert_allclose(observations, chance[k], atol=0.015)
    assert np.array_equal(perturb_items(mechanism, 3.0, table, items[5:9], drawn[5:9]), report[5:9])


def contributing(epsilon: float = 2.0, groups: tuple[int, ...] = (1, 1, 1), **options: Any) -> Federation:
    inputs = {"name": "contribution", "epsilon": epsilon, **options}
    stream = make_stream(make_block(0, 40, clubs(), [[] for _ in range(60)], [[] for _ in range(60)]))
    share = {"name": "sharing", "groups": list(groups), "still_learn": True}
    return fed_with(share, inputs, stream=stream)


def sent_by(progress: Progress, key: int, fed: Federation) -> dict[int, int]:
    """What a device told for what."""
    user = int(np.flatnonzero(fed.stream.user_keys == key)[0])
    sent = progress.clients.read_list("parts/contribution/sent", np.array([user]))
    return dict(zip(sent.ids.tolist(), sent.values["told"].tolist())) if len(sent.ids) else {}


def held_of(progress: Progress, key: int) -> set[int]:
    inputs = progress.server.shared
    return set(inputs.item[inputs.sender == key].tolist())


def test_server_receives_perturbed_items() -> None:
    fed = contributing()
    progress = started(fed)
    keys = np.unique(progress.server.shared.sender)
    assert len(keys) > 30
    same = total = 0
    for key in keys:
        pairs = sent_by(progress, key, fed)
        assert held_of(progress, key) == set(pairs.values())
        same, total = same + sum(a == b for a, b in pairs.items()), total + len(pairs)
    assert same / total < 0.3
    truly = started(contributing(epsilon=60.0, mechanism="krr"))
    users = {int(key): n for n, key in enumerate(fed.stream.user_keys)}
    inputs = truly.server.shared
    assert all(item in clubs()[users[int(key)]] for key, item in zip(inputs.sender, inputs.item))


def test_unshare_removes_the_perturbed_item_unless_another_maps_to_it() -> None:
    fed = contributing(epsilon=0.0)
    progress = started(fed)
    for key in np.unique(progress.server.shared.sender)[:8]:
        pairs = sent_by(progress, key, fed)
        item = sorted(pairs)[0]
        handle_requests(fed, progress, RequestBatch("unshare", np.array([key]), Ragged.from_lists([[item, 39]])))
        rest = {a: b for a, b in pairs.items() if a not in (item, 39)}
        assert sent_by(progress, key, fed) == rest
        assert held_of(progress, key) == set(rest.values())
    handle_requests(fed, progress, RequestBatch("leave", np.array([key]), Ragged.empty(1)))
    assert not held_of(progress, key)
    assert not sent_by(progress, key, fed)


def test_promise_counts_every_perturbed_item() -> None:
    fed = contributing(epsilon=2.0, groups=(0, 1, 0))
    part = fed.parts[1]
    assert isinstance(part, Contribution)
    progress = started(fed)
    assert part.promises(progress.server) == {
        "epsilon_per_item": 2.0,
        "epsilon_per_person_mean": 12.0,  # 30 % of 17 is 6
        "epsilon_per_person_most": 12.0,
        "people": 60.0,
        "items": 360.0,
    }
    key = fed.stream.user_keys[5]
    item = sorted(sent_by(progress, key, fed))[0]
    for kind in ("unshare", "share", "share"):  # what is told already is not told again
        handle_requests(fed, progress, RequestBatch(kind, np.array([key]), Ragged.from_lists([[item]])))
    assert part.promises(progress.server)["epsilon_per_person_most"] == 14.0
    assert progress.clients.parts["contribution"]["releases"].max() == 7
    assert part.metrics(progress.server)["epsilon_per_person_most"] == 14.0


def test_contributions_start_after_some_rounds_and_report_epsilon() -> None:
    spec = [{"name": "sharing", "after": 2, "still_learn": True}, {"name": "contribution"}]
    fed = fed_with(*spec, rounds=4, patience=9)
    observations: list[int] = []
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: observations.append(len(now.server.shared)))
    assert observations[:2] == [0, 0]
    assert observations[2] == observations[3] > 0
    contribution = progress.results[0]["promises"]["contribution"]
    assert contribution["epsilon_per_item"] == 8.0
    assert contribution["epsilon_per_person_most"] >= 16.0
    assert "promises" not in run_blocks(fed_with(rounds=1)).results[0]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_that_goes_on_contributes_once(stop: int, tmp_path: Path) -> None:
    spec = [{"name": "sharing", "after": 2, "still_learn": True}, {"name": "contribution"}]
    fed = fed_with(*spec, rounds=4, patience=9)

    def on_round(report: Any, now: Progress) -> None:
        if report.round == stop:
            raise InterruptedError

    progress = make_initial_progress(fed)
    with pytest.raises(InterruptedError):
        run_remaining_blocks(fed, progress, on_round)
    restored = write_and_read(progress, tmp_path / "now.safetensors")
    run_remaining_blocks(fed, restored, lambda report, now: None)
    assert_same_numbers(restored, run_blocks(fed))


def test_auxiliary_model_recommends_items_of_the_users_group() -> None:
    fed = contributing(epsilon=60.0, mechanism="krr", lr=0.1, k_aug=3)
    progress = started(fed)
    server = play(fed, progress, 30)
    part = fed.parts[1]
    clients = fed.stream.user_keys[:60]
    sent = part.broadcast(server, Audience("round", clients)).per_client
    assert sent is not None
    report = np.isin(clients, server.shared.sender)
    assert np.array_equal(sent.counts(), 3 * report)
    assert not any(set(sent.row(u)) & held_of(progress, clients[u]) for u in range(60))
    whole = progress.clients.parts["sharing"]["group"] != SHARE_SOME  # few items were told of the others
    right = (sent.ids % 2 == sent.rows() % 2)[whole[sent.rows()]]
    assert right.mean() > 0.8


def test_without_agreement_and_likely_items_the_federated_table_is_left_alone() -> None:
    plain = after(fed_with({"name": "sharing", "still_learn": True}))
    quiet = after(fed_with({"name": "sharing", "still_learn": True}, {"name": "contribution", "lam1": 0.0, "k_aug": 0}))
    np.testing.assert_array_equal(plain.items, quiet.items)
    loud = after(fed_with({"name": "sharing", "still_learn": True}, {"name": "contribution", "k_aug": 0}))
    assert not np.array_equal(plain.items, loud.items)


def test_perturbed_sharing_works_on_nodes_and_can_be_withdrawn(tmp_path: Path) -> None:
    """One person shares all and keeps it so, another takes everything back; at epsilon 0 any item is as likely."""
    parts = [{"name": "sharing", "groups": [0, 0, 1]}, {"name": "contribution", "epsilon": 0.0}]
    config = validate_model(RunConfig, site_config("fedavg", 3).model_dump(mode="json") | {"parts": parts}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    fed = assemble_federation(config, Machine())
    persons = [raw for raw in fed.stream.user_ids if home_node(raw) == 1][:2]
    block, node = fed.stream.blocks[0], site.transport.members[1]
    own = [block.train.row(fed.stream.user_ids.index(raw)) for raw in persons]
    site.publish(list(fed.stream.item_ids[: block.n_items]))
    site.collect(rows_of_blocks(config)[0])
    for kind, who in (("share", 0), ("share", 1), ("unshare", 1)):
        named = [fed.stream.item_ids[i] for i in own[who]]
        node.store.enqueue_request(kind, "r", named, node.store.find_user(persons[who]))
    site.next_block()
    arrays = site.arrays()
    assert len(np.unique(arrays["now/given/sender"])) == 1
    result = set(arrays["now/given/item"].tolist())
    assert 0 < len(result) <= len(own[0])
    assert result != set(own[0].tolist())
    (report,) = [v for name, v in arrays.items() if name.startswith("now/") and name.endswith("contribution/told")]
    assert sorted(report.tolist()) == sorted(len(entry) for entry in own)  # what was told stays spent
    close_nodes(site)


# likes with weights


class Liked(Part):
    """Everybody is told to like item 11, and those with data also item 10."""

    name = "liked"
    fills = frozenset({"likes"})
    weight_of = 1.0

    def prepare(self, view: CohortView) -> LocalTask:
        return LocalTask(likes=self.choose_likes)

    def choose_likes(self, view: CohortView) -> Ragged:
        ids = np.tile(np.array([10, 11], np.int32), len(view.user))
        weight = np.full(len(ids), self.weight_of, np.float32)
        return Ragged(np.arange(0, len(ids) + 1, 2), ids, {"weight": weight})


class HalfLiked(Liked):
    name = "half-liked"
    weight_of = 0.5


def moved(fed: Federation) -> Any:
    trained = train_once(fed, started(fed)).upload.values["rows"]
    return {(c, i): v for c, i, v in zip(trained.client.tolist(), trained.item.tolist(), trained.value)}


@pytest.mark.parametrize("objective", ["bpr", "bce"])
def test_weighted_like_of_1_equals_an_own_item(objective: str) -> None:
    own_values = [[0, 1, 2], [3, 4], [5]]
    settings = {"objective": objective, "negatives": 2, "local_epochs": 2, "stepper": "autograd"}
    whole = federate(
        make_stream(make_block(0, 14, [[*entry, 10, 11] for entry in own_values])), make_backbone("mf"), **settings
    )
    liked = federate(make_stream(make_block(0, 14, own_values)), make_backbone("mf"), Liked, **settings)
    first, other = moved(whole), moved(liked)
    assert first.keys() == other.keys()
    for at, value in first.items():
        np.testing.assert_allclose(other[at], value, rtol=1e-5, atol=1e-7)
    half = moved(federate(make_stream(make_block(0, 14, own_values)), make_backbone("mf"), HalfLiked, **settings))
    assert any(not np.allclose(half[at], value, rtol=1e-3) for at, value in first.items())


def test_half_a_like_is_half_the_slope() -> None:
    """One step of plain descent on the one pair of a user without items of its own."""
    stream = make_stream(make_block(0, 3, [[0], [1]]))

    class Only(Part):
        name = "only"
        fills = frozenset({"data", "likes"})
        weight_of = 1.0

        def prepare(self, view: CohortView) -> LocalTask:
            nothing = Ragged.empty(len(view.user))
            return LocalTask(view=replace(view, train=nothing, exclude=nothing), likes=self.choose_likes)

        def choose_likes(self, view: CohortView) -> Ragged:
            ptr, weight = np.arange(len(view.user) + 1), np.full(len(view.user), self.weight_of, np.float32)
            return Ragged(ptr, np.full(len(view.user), 2, np.int32), {"weight": weight})

    class Half(Only):
        name = "half"
        weight_of = 0.5

    result = []
    for part in (Only, Half):
        fed = federate(stream, make_backbone("mf"), part, objective="bpr", negatives=1)
        progress = started(fed)
        result.append(after(fed, 1).items - progress.server.items)
    np.testing.assert_allclose(2 * result[1], result[0], rtol=1e-4, atol=1e-7)
    assert np.abs(result[0]).max() > 1e-3


def test_the_compiled_star_weighs_pairs_as_torch_does() -> None:
    own_values = [[0, 1, 2, 3], [3, 4], [5, 6, 7]]
    settings = {"objective": "bpr", "negatives": 1, "local_epochs": 3, "optimiser": "lazy-adam", "l2": 1e-3}
    tables = []
    for stepper in ("fused", "autograd"):
        backbone = make_backbone("ego", lr=0.05, item_lr_scale=1.0)
        fed = federate(make_stream(make_block(0, 14, own_values)), backbone, HalfLiked, **settings, stepper=stepper)
        tables.append(moved(fed))
    assert tables[0].keys() == tables[1].keys()
    for at, value in tables[0].items():
        np.testing.assert_allclose(value, tables[1][at], atol=2e-5)


def test_likes_are_refused_where_ratings_are_learned() -> None:
    fed = federate(make_stream(make_block(0, 14, [[0]])), make_backbone("mf"), Liked, objective="squared")
    with pytest.raises(TacitaError, match="learn as liked"):
        fed.learner.check()
