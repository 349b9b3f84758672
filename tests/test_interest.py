"""LIPM and what it is compared with: states, weights, gates, fine-tuning, silos, virtual ratings and the protocol."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.oracle import (
    averaged,
    cohort,
    federate,
    make_backbone,
    make_block,
    make_stream,
    members,
    slow_round,
    started,
    train_once,
)
from helpers.trainer_streams import random_stream, uneven_stream
from tacita.core.config import RunConfig, SplitConfig, TrainConfig, validate_model
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Floats, LocalModels, Ragged, RoundReplay
from tacita.data.silos import (
    SiloAssignment,
    assign_silos,
    assign_users_to_silos,
    collect_first_items,
    draw_label_shares,
    label_by_cluster,
    measure_label_divergence,
)
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.federation.evaluation import draw_ranking_candidates
from tacita.federation.rounds import Progress, run_round
from tacita.federation.scoring import DeviceScorer
from tacita.kernels import interest, interest_states, interest_tower
from tacita.kernels.sampling import draw_folds
from tacita.learn.training.local_models import build_local_models
from tacita.learn.training.recurrent_stepper import RecurrentStepper
from tacita.methods import RunContext, build_parts, list_preset_parts, resolve_config
from tacita.methods.personal.fedrec import VirtualRatings
from tacita.methods.personal.finetuning import FineTuning
from tacita.methods.personal.gates import compute_gate_factors
from tacita.methods.personal.interest import (
    InterestWeights,
    average_by_client,
    compute_bounded_exp,
    compute_client_losses,
    normalise_vectors,
)
from tacita.metrics import EvaluationRules, evaluate_ranking
from tacita.models.interest import GAP, RATING, STATE_PIECES, InterestModel, select_recent_events
from tacita.models.personal_scoring import score_personal
from tacita.models.scorer import Context, broadcast_heads
from tacita.models.scoring import score_catalogue, score_samples
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation

PEOPLE: dict[str, Any] = {"batches": "people", "optimiser": "lazy-adam"}


def with_part(stream: BlockStream, backbone: str, *specs: dict[str, Any], **train: Any) -> Federation:
    fed = federate(stream, make_backbone(backbone), **{"batch_size": 8, **train})
    parts = build_parts(list(specs), RunContext(fed.backbone, fed.draws, fed.config.train))
    for part in parts:
        part.check(stream.n_items)
    return replace(fed, parts=parts)


def play(fed: Federation, rounds: int) -> Progress:
    progress = started(fed)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, progress.devices)
    return progress


# the state (H.E.4)


def states(train: list[list[int]], n_items: int = 12, **values: Any) -> Floats:
    fed = federate(make_stream(make_block(0, n_items, train)), make_backbone("interest"))
    progress = started(fed)
    view = cohort(fed, progress)
    return fed.backbone.compute_interest(replace(view, train=replace(view.train, values=values)))


def test_state_is_independent_of_the_cohort() -> None:
    alone = states([[3, 1]])
    among = states([[3, 1], [2, 4, 5, 6, 7], [1]])
    assert np.array_equal(alone[0], among[0])


def test_a_state_depends_on_the_order_and_begins_with_the_last_events() -> None:
    first, other = states([[3, 1, 2]]), states([[2, 1, 3]])
    assert np.abs(first - other).max() > 1e-3
    assert np.array_equal(states([[9, 8, 1, 2, 3, 4]]), states([[1, 2, 3, 4]]))  # `last` is 4


def test_state_reads_ratings_and_times_and_no_held_out_items() -> None:
    plain = states([[3, 1]])
    rated = states([[3, 1]], rating=np.array([1.0, 5.0], np.float32))
    timed = states([[3, 1]], time=np.array([0.0, 5000.0]))
    assert np.abs(rated - plain).max() > 1e-4
    assert np.abs(timed - plain).max() > 1e-4
    block = make_block(0, 12, [[3, 1]], valid=[[5]], test=[[6]])
    fed = federate(make_stream(block), make_backbone("interest"))
    assert np.array_equal(fed.backbone.compute_interest(cohort(fed, started(fed))), plain)


def test_events_are_the_last_ones_with_ratings_up_to_1_and_doublings_of_seconds() -> None:
    columns = {"rating": np.array([5, 1, 9, 4, 2], np.float32), "time": np.array([10.0, 10, 13, 7, 1e12])}
    recent_events = select_recent_events(Ragged(np.array([0, 3, 5]), np.arange(5, dtype=np.int32), columns), 2, 5.0)
    assert recent_events.ids.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(recent_events.values[RATING], [0.2, 1.0, 0.8, 0.4])
    assert recent_events.values[GAP].tolist() == [1, 3, 0, 23]


# batches of whole people, and the compiled step


def laid_out(fed: Federation, **changes: Any) -> LocalModels:
    return build_local_models(replace(cohort(fed, started(fed)), **changes), {}, fed.config.train, fed.draws)


@pytest.mark.parametrize("objective", ["bce", "bpr"])
@pytest.mark.parametrize("silos", [0, 4])
def test_batches_hold_whole_people_and_everybody_is_in_one_of_them(objective: str, silos: int) -> None:
    how = {**PEOPLE, "objective": objective, "silos": silos, "local_epochs": 2, "redraw": "epoch"}
    local = laid_out(federate(random_stream(20, 30, 10), make_backbone("interest"), batch_size=40, **how))
    assert local.batch_ptr is not None
    assert local.batch_start is not None
    for epoch in range(2):
        observations: list[int] = []
        for begin, end in zip(local.batch_start[epoch, :-1], local.batch_start[epoch, 1:], strict=True):
            people = local.owner[local.order[epoch, begin:end]]
            assert len(people)
            observations += np.unique(people).tolist()
        assert sorted(observations) == list(range(20))
    mean = np.diff(local.turn_ptr) / local.steps_per_epoch
    assert silos == 0 or (np.abs(mean - 40) < 30).all()
    assert local.n_steps.tolist() == (2 * local.steps_per_epoch).tolist()


def test_a_share_of_a_round_is_a_share_of_its_batches() -> None:
    fed = federate(random_stream(20, 30, 10), make_backbone("interest"), batch_size=20, silos=3, **PEOPLE)
    whole, half = laid_out(fed), laid_out(fed, replay=RoundReplay(0, 0.5))
    assert half.steps_per_epoch.tolist() == np.ceil(0.5 * whole.steps_per_epoch).astype(int).tolist()
    for step in range(int(half.n_steps.max())):
        for entry, other in zip(half.find_step_batches(step)[2:], whole.find_step_batches(step)[2:], strict=True):
            assert len(entry) <= len(other)
        active, _, start, size = half.find_step_batches(step)
        same = whole.find_step_batches(step)
        for k, client in enumerate(active):
            at = np.flatnonzero(same[0] == client)[0]
            own_values = half.order[0, start[k] : start[k] + size[k]]
            assert np.array_equal(own_values, whole.order[0, same[2][at] : same[2][at] + same[3][at]])


@pytest.mark.parametrize("state", [2, 3, 1000])
def test_held_batches_share_their_people_and_deal_out_all_samples(state: int) -> None:
    how = {**PEOPLE, "silos": 4, "local_epochs": 2, "held_steps": state}
    local = laid_out(federate(random_stream(20, 30, 10), make_backbone("interest"), batch_size=20, **how))
    assert local.batch_ptr is not None
    assert local.batch_start is not None
    assert local.batches_per_group is not None
    assert (np.diff(local.batch_ptr) % local.batches_per_group == 0).all()
    assert local.batches_per_group.max() > 1
    for epoch in range(2):
        assert sorted(local.order[epoch].tolist()) == list(range(len(local.item)))
        for client in range(4):
            observations: list[int] = []
            for begin in range(
                local.batch_ptr[client], local.batch_ptr[client + 1], int(local.batches_per_group[client])
            ):
                cuts = local.batch_start[epoch, begin : begin + local.batches_per_group[client] + 1]
                parts = [local.order[epoch, a:b] for a, b in pairwise(cuts)]
                sizes = [len(part) for part in parts]
                assert max(sizes) - min(sizes) <= 1
                assert min(sizes) > 0
                shares = [np.bincount(local.owner[part], minlength=20) for part in parts]
                assert np.ptp(shares, axis=0).max() <= 1  # everybody is dealt out evenly
                observations += np.flatnonzero(np.sum(shares, axis=0)).tolist()
            assert len(observations) == len(set(observations))  # nobody is in two groups
    if state == 1000:
        assert (
            np.diff(local.batch_ptr) == local.batches_per_group
        ).all()  # one state a person and epoch, whatever the batches


def test_a_held_state_moves_once_for_all_its_batches() -> None:
    """By a rate so low that nothing else moves, held steps are one step by the mean of their slopes."""
    result = {}
    for state in (1, 1000):
        backbone = make_backbone("interest", lr=1e-6, mu=0.5)
        fed = federate(
            uneven_stream(), backbone, batch_size=10**6 if state == 1 else 8, silos=1, held_steps=state, **PEOPLE
        )
        result[state] = train_once(fed, started(fed))
    assert result[1000].local.batches_per_group is not None
    assert result[1000].local.batches_per_group.min() > 1
    for name in ("gru_state", "gru_in", "event_layer"):
        first, other = (
            result[stored_state].upload.values[f"heads/{name}"].value.reshape(-1) for stored_state in (1, 1000)
        )
        assert np.abs(first).max() < 1.2e-6  # a single step of Adam
        assert np.abs(other).max() < 1.2e-6
        assert (np.sign(first) == np.sign(other)).mean() > 0.8  # parts have not quite the same people
    tower = result[1000].upload.values["heads/item_layer"].value
    assert np.abs(tower).max() > 5e-6  # has had several


@pytest.mark.parametrize("silos", [0, 3])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_the_compiled_step_is_that_of_autograd(silos: int, mu: float) -> None:
    result = {}
    for stepper in ("fused", "autograd"):
        backbone = make_backbone("interest", lr=0.02, mu=mu)
        fed = federate(uneven_stream(), backbone, batch_size=8, silos=silos, stepper=stepper, local_epochs=2, **PEOPLE)
        view = cohort(fed, started(fed))
        counts = view.train.counts()
        columns = {"rating": 1 + np.arange(counts.sum()) % 5, "time": 7.0 ** (np.arange(counts.sum()) % 9)}
        fed = replace(fed, stream=rated(fed.stream, columns))
        result[stepper] = train_once(fed, started(fed))
    entry, other = result["fused"], result["autograd"]
    np.testing.assert_allclose(entry.local.private, other.local.private, atol=2e-4)
    for name, value in entry.upload.values.items():
        np.testing.assert_allclose(value.value, other.upload.values[name].value, atol=2e-4, err_msg=name)
        assert np.abs(value.value).max() > 1e-3, name


@pytest.mark.parametrize("silos", [0, 3])
def test_personal_models_lean_alike_compiled_and_by_autograd(silos: int) -> None:
    result = {}
    for stepper in ("fused", "autograd"):
        how = {**PEOPLE, "optimiser": "pfedme", "silos": silos, "local_epochs": 2, "stepper": stepper}
        fed = federate(uneven_stream(), make_backbone("interest", mu=0.5), batch_size=8, **how)
        fast = {"inner_steps": 3, "inner_lr": 0.05, "lam": 2.0, "eta": 0.1}
        pfedme = fed.config.train.pfedme.model_copy(update=fast)
        train = fed.config.train.model_copy(update={"pfedme": pfedme})
        result[stepper] = train_once(replace(fed, config=fed.config.model_copy(update={"train": train})), started(fed))
    entry, other = result["fused"], result["autograd"]
    assert entry.local.personal.keys() == other.local.personal.keys()
    for name, value in entry.local.personal.items():
        np.testing.assert_allclose(value, other.local.personal[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for name, sent in entry.upload.values.items():
        np.testing.assert_allclose(sent.value, other.upload.values[name].value, rtol=1e-3, atol=1e-6, err_msg=name)
        assert np.abs(sent.value).max() > 1e-4, name


@pytest.mark.parametrize(("folds", "centred"), [(2, False), (3, False), (1, True), (2, True)])
@pytest.mark.parametrize("silos", [0, 3])
def test_folds_and_centres_are_those_of_the_slow_oracle(silos: int, folds: int, centred: bool) -> None:
    backbone = make_backbone("interest", lr=0.02, mu=0.5, folds=folds, centred=centred)
    fed = federate(uneven_stream(), backbone, batch_size=8, silos=silos, **PEOPLE)
    progress = started(fed)
    if centred:
        heads = {**progress.server.heads, "state_centre": np.linspace(-0.3, 0.4, 6, dtype=np.float32)}
        progress.server = replace(progress.server, heads=heads)
    trained = train_once(fed, progress)
    slow = slow_round(cohort(fed, progress), fed.backbone, fed.config.train, fed.draws)
    np.testing.assert_allclose(trained.local.private, slow.private, atol=1e-5)
    after = averaged(fed, progress.server, trained)
    np.testing.assert_allclose(after.items, slow.items, atol=1e-5)
    for name, head in slow.heads.items():
        if name not in ("gru_state", "state_centre"):  # Adam turns the rounding of a slope of 0 into a step
            np.testing.assert_allclose(after.heads[name], head, atol=1e-5, err_msg=name)
    plain = replace(fed, backbone=make_backbone("interest", lr=0.02, mu=0.5))
    other = slow_round(cohort(plain, progress), plain.backbone, plain.config.train, plain.draws)
    assert np.abs(other.items - slow.items).max() > 1e-2  # a state of all is another model


@pytest.mark.parametrize("silos", [0, 4])
def test_the_centre_becomes_the_mean_of_all_states_and_is_taken_from_them(silos: int) -> None:
    how = {**PEOPLE, "silos": silos, "held_steps": 1000}
    fed = federate(uneven_stream(), make_backbone("interest", centred=True), batch_size=8, **how)
    progress = started(fed)
    view = cohort(fed, progress)
    states = fed.backbone.compute_interest(view)
    sent = train_once(fed, progress).upload.values["heads/state_centre"]
    np.testing.assert_allclose(sent.value, average_by_client(view, states), atol=1e-6)
    centre = np.linspace(-0.3, 0.4, 6, dtype=np.float32)
    context = Context.from_lists(fed.backbone.list_context_items(view), view.items)
    heads = broadcast_heads({**view.heads, "state_centre": centre}, len(states))
    served = fed.backbone.represent_users(fed.backbone.split_private(view.private), heads, context)
    np.testing.assert_allclose(served["h"], states - centre, atol=1e-6)


def test_a_fold_holds_an_item_wherever_it_is_listed() -> None:
    keys = derive_keys(["a", "b"])
    owner = np.array([0, 0, 1, 0], np.int32)
    item = np.array([5, 7, 5, 5], np.int32)
    folds = np.array([draw_folds(np.uint64(seed), keys, owner, item, 3) for seed in range(300)])
    assert np.array_equal(folds[:, 0], folds[:, 3])
    for other in (1, 2):  # another item, another person: drawn apart
        assert 60 < (folds[:, 0] == folds[:, other]).sum() < 140
    assert np.bincount(folds[:, 0], minlength=3).min() > 60


@pytest.mark.parametrize("change", [{"stepper": "autograd"}, {"objective": "bpr"}, {"batches": "samples"}])
@pytest.mark.parametrize(("name", "value", "plain"), [("folds", 2, "1"), ("centred", True, "False")])
def test_steps_that_know_no_folds_and_centres_refuse_them(
    change: dict[str, Any], name: str, value: Any, plain: str
) -> None:
    fed = federate(uneven_stream(), make_backbone("interest", **{name: value}), batch_size=8, **{**PEOPLE, **change})
    with pytest.raises(TacitaError, match=rf"set backbone\.{name} to {plain}"):
        train_once(fed, started(fed))


def test_states_learn_at_a_rate_of_their_own() -> None:
    result = {}
    for share in (1.0, 0.1):
        fed = federate(
            uneven_stream(), make_backbone("interest", lr=1e-4, state_rate=share), batch_size=10**6, **PEOPLE
        )
        upload = train_once(fed, started(fed)).upload
        result[share] = {name: np.abs(value.value).max() for name, value in upload.values.items()}
    for name, moved in result[1.0].items():
        is_slow = name.removeprefix("heads/") in STATE_PIECES
        assert result[0.1][name] == pytest.approx((0.1 if is_slow else 1.0) * moved, rel=5e-3), name


def test_compiled_states_are_those_of_numpy() -> None:
    """What weights are made of is compiled; what people are served with is numpy."""
    fed = federate(uneven_stream(), make_backbone("interest"))
    view = cohort(fed, started(fed))
    counts = view.train.counts()
    columns = {"rating": 1.0 + np.arange(counts.sum()) % 5, "time": 7.0 ** (np.arange(counts.sum()) % 9)}
    view = replace(view, train=replace(view.train, values=columns))
    backbone = fed.backbone
    assert isinstance(backbone, InterestModel)
    context = Context.from_lists(backbone.list_context_items(view), view.items)
    served = backbone.represent_users(
        backbone.split_private(view.private), broadcast_heads(view.heads, len(counts)), context
    )
    np.testing.assert_allclose(backbone.compute_interest(view), served["h"], atol=2e-6)
    wide = np.full(7, 30.0, np.float32) * np.arange(-3, 4, dtype=np.float32)
    powers = wide.copy()
    interest_states._exponentiate(powers, np.empty(7, np.int32))
    np.testing.assert_allclose(powers, np.exp(np.clip(wide, -87, 87)), rtol=2e-7)


def rated(stream: BlockStream, columns: dict[str, Any]) -> BlockStream:
    block = stream.blocks[0]
    train = replace(block.train, values={k: np.asarray(v, np.float32) for k, v in columns.items()})
    return replace(stream, blocks=(replace(block, train=train),))


def test_the_compiled_step_is_used_where_it_fits_alone() -> None:
    backbone = make_backbone("interest")
    assert RecurrentStepper.supports(backbone, TrainConfig(**PEOPLE))
    for other in ({"objective": "bpr"}, {"optimiser": "adam"}, {"batches": "samples"}, {"l2": 0.1}):
        assert not RecurrentStepper.supports(backbone, TrainConfig(**{**PEOPLE, **other}))


# weights (H.E.1)


@given(g=st.lists(st.floats(-3, 3), min_size=1, max_size=8), shift=st.floats(-2, 2))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_travelling_weights_are_a_softmax(g: list[float], shift: float) -> None:
    sent = compute_bounded_exp(np.array(g), 5.0)
    assert ((sent > 0) & (sent <= 1)).all()
    share = sent / sent.sum()
    wanted = np.exp(np.array(g) - max(g))
    np.testing.assert_allclose(share, wanted / wanted.sum(), rtol=1e-9)
    moved = compute_bounded_exp(np.array(g) + shift, 5.0)
    np.testing.assert_allclose(moved / moved.sum(), share, rtol=1e-9)


def test_weights_of_any_size_are_numbers() -> None:
    assert np.isfinite(compute_bounded_exp(np.array([1e4, -1e4, 0.0]), 10.0)).all()
    assert compute_bounded_exp(np.zeros(4), 2.0).tolist() == [np.exp(-2.0)] * 4


def test_kappa_0_is_fedavg_by_data() -> None:
    plain = play(with_part(uneven_stream(), "mf", aggregation="weighted"), 3)
    weighed = play(with_part(uneven_stream(), "mf", {"name": "interest", "kappa": 0.0}, aggregation="weighted"), 3)
    np.testing.assert_allclose(weighed.server.items, plain.server.items, rtol=1e-6, atol=1e-7)


def test_clients_count_by_how_close_they_are_to_the_round_before() -> None:
    fed = with_part(uneven_stream(), "mf", {"name": "interest", "kappa": 2.0}, aggregation="weighted")
    progress = play(fed, 2)
    server, view = progress.server, cohort(fed, progress)
    trained = train_once(fed, progress)
    u = normalise_vectors(fed.backbone.compute_interest(view))
    cos = u @ normalise_vectors(server.parts["interest"]["centre"][None])[0]
    part = fed.parts[0]
    assert isinstance(part, InterestWeights)
    np.testing.assert_allclose(part.weigh(view, trained.upload), np.exp(2 * cos - 2), rtol=1e-4)
    after, _ = run_round(fed, server, progress.devices)
    share = np.exp(2 * cos) * view.train.counts()
    share = share / share.sum()
    table = server.items.astype(np.float64)
    rows = trained.upload.values["rows"]
    np.add.at(table, rows.item, share[rows.client][:, None] * rows.value)
    np.testing.assert_allclose(after.items, table, atol=1e-5)
    np.testing.assert_allclose(after.parts["interest"]["centre"], 0.1 * share @ u, atol=1e-6)
    assert np.abs(share - view.train.counts() / view.train.counts().sum()).max() > 1e-3


def test_the_first_round_knows_no_mean_and_weighs_all_alike() -> None:
    fed = with_part(uneven_stream(), "mf", {"name": "interest", "kappa": 5.0})
    trained = train_once(fed, progress := started(fed))
    weight = fed.parts[0].weigh(cohort(fed, progress), trained.upload)
    assert weight is not None
    assert np.ptp(weight) == 0


def test_centred_interests_are_what_average_items_do_not_give() -> None:
    """Far states that share a long common part weigh alike; without that part they do not."""
    result = {}
    for centred in (False, True):
        part = {"name": "interest", "kappa": 2.0, "centred": centred}
        fed = with_part(uneven_stream(), "interest", part, silos=5, **PEOPLE)
        progress = play(fed, 3)
        view = cohort(fed, progress)
        sent = train_once(fed, progress)
        result[centred] = sent.local.notes["weight_ratio"]
        assert np.ptp(result[centred]) == 0
        weights = fed.parts[0].weigh(view, sent.upload)
        assert weights is not None
        np.testing.assert_allclose(result[centred], weights.max() / weights.min(), rtol=1e-5)
        mean = average_by_client(view, fed.backbone.compute_interest(view))
        if centred:
            last = fed.backbone.config.last
            average = replace(view.train, ptr=np.arange(len(view.user) + 1) * last)
            average = replace(average, ids=np.zeros(len(view.user) * last, np.int32), values={})
            table = np.repeat(view.items.mean(axis=0, keepdims=True), len(view.items), axis=0)
            mean = mean - fed.backbone.compute_interest(replace(view, train=average, items=table))[0]
        directions = 0.1 * normalise_vectors(mean)
        np.testing.assert_allclose(sent.upload.values["interest.vector"].value, directions, atol=1e-5)
    assert result[True][0] > 1.01 * result[False][0]


def test_a_silo_has_the_mean_interest_of_its_people() -> None:
    fed = with_part(uneven_stream(), "interest", {"name": "interest"}, silos=2, **PEOPLE)
    progress = started(fed)
    view, sent = cohort(fed, progress), train_once(fed, progress).upload.values["interest.vector"]
    each = fed.backbone.compute_interest(view)
    for client in range(2):
        mean = each[view.user_ptr[client] : view.user_ptr[client + 1]].mean(0)
        np.testing.assert_allclose(sent.value[client], 0.1 * mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-6)


def test_learned_weights_turn_away_from_interests_with_a_high_loss() -> None:
    fed = with_part(uneven_stream(), "mf", {"name": "interest", "weights": "learned", "rate": 1.0})
    progress = play(fed, 3)
    state = progress.server.parts["interest"]
    assert np.abs(state["out"]).max() > 0
    view = cohort(fed, progress)
    loss = compute_client_losses(fed.backbone, view, laid_out_now(fed, progress))
    u = normalise_vectors(fed.backbone.compute_interest(view))
    slope = np.tanh(u @ state["hidden"].T)
    step = -((loss - loss.mean())[:, None] * slope).mean(0)  # where one step on the losses would go from here
    assert step @ (slope.T @ (loss - loss.mean())) < 0
    assert state["loss"][0] == pytest.approx(loss.mean(), rel=0.5)


def laid_out_now(fed: Federation, progress: Progress) -> LocalModels:
    return build_local_models(cohort(fed, progress), {}, fed.config.train, fed.draws)


def test_a_loss_is_that_of_the_model_as_it_was_received() -> None:
    fed = federate(uneven_stream(), make_backbone("interest"), batch_size=8)
    progress = started(fed)
    view, local = cohort(fed, progress), laid_out_now(fed, progress)
    whole = score_catalogue(fed.backbone, view.private, view.heads, view.items, fed.backbone.list_context_items(view))
    some = score_samples(fed.backbone, view, local.owner, local.item)
    np.testing.assert_allclose(some, whole[local.owner, local.item], rtol=1e-5, atol=1e-6)
    chance = 1 / (1 + np.exp(-some.astype(np.float64)))
    each = -np.log(np.where(local.label > 0, chance, 1 - chance))
    wanted = [each[a:b].mean() for a, b in zip(local.ptr[:-1], local.ptr[1:], strict=True)]
    np.testing.assert_allclose(compute_client_losses(fed.backbone, view, local), wanted, rtol=1e-6)


# gates (H.E.2)


def test_a_gate_that_has_learned_nothing_lets_everything_through() -> None:
    assert (compute_gate_factors(np.ones((3, 4)), np.zeros((2, 4), np.float32)) == 1).all()
    gated = with_part(uneven_stream(), "interest", {"name": "interest", "fusion": "gate"}, **PEOPLE)
    plain = with_part(uneven_stream(), "interest", {"name": "interest"}, **PEOPLE)
    assert np.array_equal(play(gated, 1).server.items, play(plain, 1).server.items)
    later = play(gated, 4).server.parts["interest"]
    assert np.abs(later["gates"]).max() > 0
    assert (np.abs(later["agreed"]) <= 1).all()


# fine-tuning (H.E.3)


def compute_own_loss(fed: Federation, progress: Progress, **options: Any) -> tuple[float, float]:
    """Everybody's mean loss before and after steps on their own samples."""
    part = FineTuning(FineTuning.Config(**options), RunContext(fed.backbone, fed.draws, fed.config.train))
    view, local = cohort(fed, progress), laid_out_now(fed, progress)
    private, heads, own = part.fine_tune_models(view)
    context = fed.backbone.list_context_items(view)
    tuned = score_personal(fed.backbone, private, heads, view.items, own, context)

    def mean(logits: Floats) -> float:
        return float((np.logaddexp(0, logits) - local.label * logits).mean())

    before = score_samples(fed.backbone, view, local.owner, local.item)
    return mean(before), mean(tuned[local.owner, local.item])


@pytest.mark.parametrize("name", ["mf", "interest", "neumf", "lightgcn"])
def test_a_step_down_lowers_the_loss_and_the_printed_sign_raises_it(name: str) -> None:
    fed = federate(uneven_stream(), make_backbone(name, **({"mu": 0.0} if name == "interest" else {})), batch_size=8)
    progress = play(fed, 1)
    before, down = compute_own_loss(fed, progress, rate=1e-2)
    _, up = compute_own_loss(fed, progress, rate=1e-2, sign="printed")
    assert down < before < up
    _, further = compute_own_loss(fed, progress, rate=1e-2, steps=5)
    assert further < down
    _, state = compute_own_loss(fed, progress, rate=1e-2, steps=5, pull=50.0)
    assert further < state < before


def test_fine_tuning_serves_and_nothing_of_it_is_kept_or_validated() -> None:
    fed = with_part(uneven_stream(), "interest", {"name": "fine-tuning", "rate": 0.5}, **PEOPLE)
    bare = with_part(uneven_stream(), "interest", **PEOPLE)
    first, other = play(fed, 2), play(bare, 2)
    assert np.array_equal(first.server.items, other.server.items)

    def scores(of: Federation, progress: Progress, purpose: Any) -> Floats:
        keys, down = of.stream.user_keys, of.broadcast_serving(progress.server)
        scorer = DeviceScorer(of, progress.server, progress.clients, of.stream.blocks[0], keys, down, purpose)
        return scorer(np.arange(7, dtype=np.int32))

    assert np.array_equal(scores(fed, first, "valid"), scores(bare, other, "valid"))
    tuned, plain = scores(fed, first, "test"), scores(bare, other, "test")
    assert np.abs(tuned - plain).max() > 1e-3
    np.testing.assert_allclose(tuned[3], plain[3], rtol=1e-5, atol=1e-6)  # who has nothing to learn from


@pytest.mark.parametrize("purpose", ["valid", "test"])
@pytest.mark.parametrize("name", ["interest", "neumf", "mf"])
def test_some_items_are_scored_as_the_catalogue_is(name: str, purpose: Any) -> None:
    fed = with_part(uneven_stream(), name, {"name": "fine-tuning", "rate": 0.5})
    progress = play(fed, 1)
    keys, down = fed.stream.user_keys, fed.broadcast_serving(progress.server)
    scorer = DeviceScorer(fed, progress.server, progress.clients, fed.stream.blocks[0], keys, down, purpose)
    users, only = np.array([2, 0, 3], np.int32), Ragged.from_lists([[3, 9, 0], [], [5, 1]])
    items = scorer.score_listed_items(users, only)
    if name == "mf" and purpose == "valid":
        assert items is None  # its catalogue costs nothing
    else:
        assert items is not None
        np.testing.assert_allclose(items, scorer(users)[only.rows(), only.ids], rtol=1e-5, atol=1e-6)


# silos (H.E.5)


@given(alpha=st.sampled_from([10.0, 1.0, 0.1]), silos=st.integers(2, 12), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_every_user_is_in_one_silo_of_even_size(alpha: float, silos: int, seed: int) -> None:
    label = np.arange(90) % 7 % 4
    home = assign_users_to_silos(label, silos, alpha, derive_keys(f"u{k}" for k in range(90)), Draws(seed))
    sizes = np.bincount(home, minlength=silos)
    assert sizes.sum() == 90
    assert np.ptp(sizes) <= 1


def test_silos_differ_more_from_low_to_high_and_not_at_all_in_the_end() -> None:
    label, keys = np.arange(2000) % 5 % 4, derive_keys(f"u{k}" for k in range(2000))
    divergences = [
        measure_label_divergence(label, assign_users_to_silos(label, 20, alpha, keys, Draws(1)))
        for alpha in (1e6, 10, 1, 0.1)
    ]
    assert divergences == sorted(divergences)
    assert divergences[0] < 0.02
    assert divergences[-1] > 0.2


def test_shares_are_those_of_a_dirichlet_distribution() -> None:
    shares = draw_label_shares(4000, 5, 1.0, Draws(2))
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(shares.mean(0), 0.2, atol=0.01)
    np.testing.assert_allclose(shares.var(0), 0.2 * 0.8 / 6, rtol=0.1)


def test_divergence_is_0_for_equal_silos_and_known_for_two_that_share_nothing() -> None:
    assert measure_label_divergence(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])) == pytest.approx(0)
    half = 1.5 - 0.25 * np.log2(3) * 3  # of (1, 0) from (1/2, 1/2)
    assert measure_label_divergence(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])) == pytest.approx(half)


def test_users_cluster_by_choices_without_genres() -> None:
    rng = np.random.default_rng(0)
    lists = [(40 * (u % 3) + rng.choice(40, 20, replace=False)).tolist() for u in range(60)]
    label = label_by_cluster(Ragged.from_lists(lists), 120, Draws(1))
    assert not {*label[0::3]} & {*label[1::3]} and not {*label[1::3]} & {*label[2::3]}  # noqa: PT018


def test_silos_of_taste_are_where_people_train() -> None:
    stream = random_stream(30, 40, 12)
    homes = assign_silos(stream, 5, "high", Draws(3))
    assert homes.by == "clusters"
    fed = replace(federate(stream, make_backbone("mf"), silos=5), homes=homes)
    result = members(fed)
    lived = {int(u): c for c in range(5) for u in result.users.row(c)}
    assert lived == {u: int(homes.silo[u]) for u in range(30)}
    view = cohort(fed, started(fed))
    assert sorted(view.user.tolist()) == list(range(30))
    with pytest.raises(TacitaError, match=r"set train\.silos"):
        assign_silos(stream, 0, "low", Draws(3))


def test_a_run_says_how_much_its_silos_differ() -> None:
    values = {"data": "synthetic:users=60,items=40", "train": {"silos": 5, "skew": "high"}}
    fed = assemble_federation(validate_model(RunConfig, values, "the test"), Machine())
    assert isinstance(fed.homes, SiloAssignment)
    assert f"{fed.homes.divergence:.3f} bits" in fed.stream.notes[-1]
    label = label_by_cluster(collect_first_items(fed.stream), fed.stream.n_items, fed.draws)
    assert np.array_equal(label, fed.homes.label)


# virtual ratings


def ratings_of(fed: Federation, progress: Progress, round: int = 0, **options: Any) -> tuple[LocalModels, Floats]:
    part = VirtualRatings(VirtualRatings.Config(**options), RunContext(fed.backbone, fed.draws, fed.config.train))
    view = replace(cohort(fed, progress), round=round)
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    label_samples = part.prepare(view).labels
    assert label_samples is not None
    labels = label_samples(view, Ragged(local.user_ptr, local.item, {"label": local.label}))
    assert labels is not None
    return local, labels


def test_virtual_ratings_are_the_mean_at_first_and_predictions_later() -> None:
    stream = rated(make_stream(make_block(0, 9, [[0, 1, 2], [4]])), {"rating": [5, 3, 1, 4]})
    fed = federate(stream, make_backbone("mf"), objective="squared", negatives=2)
    progress = started(fed)
    _, report = ratings_of(fed, progress)
    assert report.tolist() == [5, 3, 1, *[3] * 6, 4, 4, 4]
    _, report = ratings_of(fed, progress, implicit=True)
    np.testing.assert_allclose(report, [1, 1, 1, *[1 / 3] * 6, 1, 1 / 3, 1 / 3], rtol=1e-6)
    local, report = ratings_of(fed, progress, round=10, local_steps=0)
    view = cohort(fed, progress)
    predicted = (view.private[local.owner] * view.items[local.item]).sum(1)
    np.testing.assert_allclose(report[3:9], predicted[3:9], rtol=1e-5)
    local, report = ratings_of(fed, progress, round=10, local_steps=3000)
    rows, wanted = view.items[[0, 1, 2]].astype(np.float64), np.array([5.0, 3, 1])
    exact = view.private[0] + np.linalg.pinv(rows) @ (wanted - rows @ view.private[0])
    np.testing.assert_allclose(report[3:9], view.items[local.item[3:9]] @ exact, rtol=0.02, atol=0.02)


def test_the_gradient_of_an_item_is_sent_as_it_is() -> None:
    stream = rated(make_stream(make_block(0, 9, [[0, 1, 2], [4]])), {"rating": [5, 3, 1, 4]})
    spec = {"name": "virtual-ratings"}
    fed = with_part(stream, "mf", spec, objective="squared", negatives=0, batch_size=1000, aggregation="per-row")
    progress = started(fed)
    view, server = cohort(fed, progress), progress.server
    after, _ = run_round(fed, server, progress.devices)
    for user, item, rating in ((0, 0, 5.0), (0, 1, 3.0), (0, 2, 1.0), (1, 4, 4.0)):
        error = rating - view.private[user] @ view.items[item]
        wanted = view.items[item] + 0.3 * 2 * error * view.private[user]  # 0.3 is the rate of people's vectors
        np.testing.assert_allclose(after.items[item], wanted, rtol=1e-4, atol=1e-5)


def test_a_rate_decays_from_round_to_round() -> None:
    ats = [train_at(decay, 3) for decay in (1.0, 0.5)]
    np.testing.assert_allclose(ats[1], ats[0] / 8, rtol=1e-4, atol=1e-6)


def train_at(decay: float, round: int) -> Floats:
    fed = federate(uneven_stream(), make_backbone("mf"), decay=decay, batch_size=1000)
    progress = started(fed)
    progress.server = replace(progress.server, round=round)
    return train_once(fed, progress).local.private - cohort(fed, progress).private


@pytest.mark.parametrize(
    ("train", "words"), [({"objective": "bce"}, "makes up ratings"), ({"local_epochs": 2}, "one gradient a round")]
)
def test_virtual_ratings_refuse_what_they_cannot_do(train: dict[str, Any], words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        with_part(uneven_stream(), "mf", {"name": "virtual-ratings"}, **{"objective": "squared", **train})


# the protocol (E.7, H.E.6)


def test_holdout_takes_items_of_users_with_enough() -> None:
    table = load_interactions("synthetic:users=80,items=60,per_user=15")
    config = SplitConfig(kind="leave-some-out", held_out="random", held_items=4, least_items=10)
    block = split(table, config).blocks[0]
    whole = sum(part.counts() for part in (block.train, block.valid, block.test))
    enough = whole >= 10
    assert enough.any()
    assert (~enough).any()
    assert (block.test.counts()[enough] == 4).all()
    assert (block.valid.counts()[enough] == np.maximum(1, np.rint(0.1 * (whole[enough] - 4)))).all()
    assert (block.train.counts()[~enough] == whole[~enough]).all()
    last = split(table, config.model_copy(update={"held_out": "last"})).blocks[0]
    for user in np.flatnonzero(enough)[:10]:
        largest = max(last.train.values["time"][last.train.ptr[user] : last.train.ptr[user + 1]])
        assert last.test.values["time"][last.test.ptr[user] : last.test.ptr[user + 1]].min() >= largest


def test_disliked_items_are_never_candidates() -> None:
    values = {
        "data": "synthetic:users=60,items=40,per_user=15",
        "split": {"kind": "random", "min_rating": 4.0},
        "evaluate": {"sampled_negatives": 20},
    }
    table = load_interactions(values["data"])
    if table.rating is None:
        rating = (1 + np.arange(len(table.user)) % 5).astype(np.float32)
        table = replace(table, rating=rating)
    stream = split(table, SplitConfig(kind="random", min_rating=4.0))
    assert stream.low_rated is not None
    assert len(stream.low_rated.ids)
    fed = replace(federate(stream, make_backbone("mf")), config=validate_model(RunConfig, values, "the test"))
    candidates = draw_ranking_candidates(fed, stream.blocks[0])
    assert candidates is not None
    assert len(candidates.ids)
    chosen = {(table.user_ids[u], table.item_ids[i]) for u, i in zip(table.user, table.item, strict=True)}
    drawn = {(stream.user_ids[u], stream.item_ids[i]) for u, i in zip(candidates.rows(), candidates.ids, strict=True)}
    assert not drawn & chosen


def measured(scores: Floats, wanted: list[list[int]], metrics: list[str], k: int = 10) -> dict[str, Any]:
    n = len(wanted)
    rules = EvaluationRules(metrics, [k])
    result = evaluate_ranking(
        lambda users: scores[users].copy(), Ragged.from_lists(wanted), Ragged.empty(n), derive_keys(map(str, range(n))),
        Draws(1), rules,
    )  # fmt: skip
    return {name: v.tolist() for name, v in result.values.items()}


def test_hits_recall_precision_and_both_ideals_agree() -> None:
    scores = -np.tile(np.arange(40, dtype=np.float32), (2, 1))
    result = measured(scores, [[0, 3, 12], [9, 20]], ["precision", "recall", "ndcg", "ndcg-k"])
    assert [10 * entry for entry in result["precision@10"]] == pytest.approx([2, 1])
    assert [entry * n for entry, n in zip(result["recall@10"], (3, 2), strict=True)] == pytest.approx([2, 1])
    ideal = 1 / np.log2(np.arange(10) + 2)
    for short, long, n in zip(result["ndcg@10"], result["ndcg-k@10"], (3, 2), strict=True):
        assert long == pytest.approx(short * ideal[:n].sum() / ideal.sum())


@pytest.mark.parametrize("n_wanted", [1, 3])
def test_pairs_of_the_same_score_count_half(n_wanted: int) -> None:
    constant = np.zeros((1, 9), np.float32)
    assert measured(constant, [list(range(n_wanted))], ["auc"])["auc"] == [0.5]
    scores = np.array([[3, 2, 2, 2, 1]], np.float32)
    assert measured(scores, [[1, 4]], ["auc"])["auc"] == pytest.approx([0.5 * 2 / 6])


# by name


def test_presets_bring_the_settings_of_their_papers() -> None:
    results = {
        name: resolve_config({"method": name, "data": "ml-100k"}, name) for name in ("lipm", "pfedme", "fedmf-he")
    }
    assert results["lipm"].backbone["name"] == "interest"
    assert results["lipm"].train.batches == "people"
    assert (results["lipm"].train.silos, results["lipm"].train.aggregation) == (50, "weighted")
    assert results["pfedme"].train.optimiser == "pfedme"
    assert results["fedmf-he"].train.aggregator == "ideal"
    assert [part["name"] for part in list_preset_parts("lipm-dpps")] == ["interest", "fine-tuning", "dpps"]


def test_sums_under_encryption_are_the_plain_ones_up_to_a_quantum() -> None:
    plain = play(federate(uneven_stream(), make_backbone("mf"), batch_size=8), 2)
    exact = play(federate(uneven_stream(), make_backbone("mf"), batch_size=8, aggregator="ideal"), 2)
    np.testing.assert_allclose(exact.server.items, plain.server.items, atol=1e-5)


def test_a_loss_in_the_log_changes_nothing() -> None:
    fed = with_part(uneven_stream(), "interest", {"name": "training-loss"}, **PEOPLE)
    bare = with_part(uneven_stream(), "interest", **PEOPLE)
    progress = started(fed)
    progress.server, report = run_round(fed, progress.server, progress.devices)
    assert report.notes["loss"] == pytest.approx(0.7, abs=0.5)
    assert np.array_equal(progress.server.items, play(bare, 1).server.items)


def test_the_loss_falls_in_silos() -> None:
    fed = with_part(
        random_stream(40, 30, 10), "interest", {"name": "interest"}, {"name": "training-loss"}, silos=4, **PEOPLE
    )
    fed = replace(fed, backbone=make_backbone("interest", lr=0.01, mu=0.1))
    progress, observations = started(fed), []
    for _ in range(8):
        progress.server, report = run_round(fed, progress.server, progress.devices)
        observations.append(report.notes["loss"])
    assert observations[-1] < observations[0] - 0.05
    assert averaged(fed, progress.server, train_once(fed, progress)).items.shape == progress.server.items.shape


def test_no_sum_of_the_compiled_step_may_be_reordered() -> None:
    """Loops that round otherwise with their caller than by themselves made a first run differ from the next."""
    modules = (interest, interest_states, interest_tower)
    compiled = {}
    for module in modules:
        for name, function in vars(module).items():
            if hasattr(function, "targetoptions") and function.__module__ == module.__name__:
                compiled[name] = function
    assert len(compiled) > 10
    assert [name for name, function in compiled.items() if function.targetoptions.get("fastmath")] == []
