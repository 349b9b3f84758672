"""Objectives and solvers of local training against clients trained one by one, and what is drawn for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from helpers.oracle import (
    SMALL,
    averaged,
    cohort,
    federate,
    make_backbone,
    make_block,
    make_stream,
    slow_round,
    started,
    train_once,
)
from tacita.core.config import RunConfig, TrainConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, CohortView, ExtraSamples, Floats, LocalModels, Ragged
from tacita.federation.rounds import run_block, run_round
from tacita.federation.scoring import take_user_lists
from tacita.learn.training import TrainedCohort, check_training
from tacita.learn.training.autograd_stepper import AutogradStepper
from tacita.learn.training.local_models import build_local_models
from tacita.learn.training.objectives import compute_bpr_loss
from tacita.learn.training.stepper import FusedStepper, StepExtras
from tacita.methods import Part
from tacita.round.plan import Federation
from tacita.round.task import LocalTask
from tacita.runs import assembly

N_ITEMS = 12
UNEVEN = [[0, 3], [1, 2, 4, 7, 9], [5], [], [0, 1, 2, 3, 4, 5, 6], [11, 2, 6], [8]]
SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimiser": "adam"},
    "lazy-adam": {"optimiser": "lazy-adam"},
    "lazy-adam with decay": {"optimiser": "lazy-adam", "weight_decay": 0.2},
    "pfedme": {"optimiser": "pfedme", "pfedme": {"lam": 2.0, "inner_steps": 3, "inner_lr": 0.2, "eta": 0.2}},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "bce": {},
    "squared": {"objective": "squared"},
    "bpr": {"objective": "bpr", "negatives": 2, "bpr_scale": 3.0, "l2": 0.05},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mf": ("mf", {"item_lr_scale": 0.5}),
    "ego": ("ego", {"lr": 0.1, "item_lr_scale": 0.5}),
    "ncf-shared": ("ncf", {"share_mlp": True, "item_lr_scale": 3.0}),
}
every_solver = pytest.mark.parametrize("solver", SOLVERS)
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def rated() -> BlockStream:
    block = make_block(0, N_ITEMS, UNEVEN)
    rating = (1 + np.arange(len(block.train.ids)) % 5).astype(np.float32) / 5
    return make_stream(replace(block, train=replace(block.train, values={"rating": rating})))


def federation(model: str, *parts: type[Part], **train: Any) -> Federation:
    name, options = MODELS[model]
    small = {"batch_size": 6, "local_epochs": 2} | train
    config = validate_model(TrainConfig, small, "a test")
    return federate(rated(), make_backbone(name, **options), *parts, **{k: getattr(config, k) for k in small})


def assert_matches_slow(fed: Federation) -> TrainedCohort:
    progress = started(fed)
    view = cohort(fed, progress)
    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws)
    trained = train_once(fed, progress)
    after = averaged(fed, progress.server, trained)
    np.testing.assert_allclose(after.items, slow.items, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=2e-5, atol=2e-5)
    for name, head in after.heads.items():
        np.testing.assert_allclose(head, slow.heads[name], rtol=2e-5, atol=2e-5)
        assert np.abs(head - view.heads[name]).max() > 1e-3
    assert np.abs(after.items - view.items).max() > 3e-3
    assert np.abs(trained.local.private - view.private).max() > 3e-3
    return trained


# the same answer as one by one


CASES = [("mf", one) for one in OBJECTIVES] + [("ego", "bce"), ("ego", "bpr"), ("ncf-shared", "bce")]


@every_solver
@pytest.mark.parametrize(("model", "objective"), CASES)
def test_a_cohort_learns_what_its_clients_learn_one_by_one(model: str, objective: str, solver: str) -> None:
    fed = federation(model, **OBJECTIVES[objective], **SOLVERS[solver])
    local = assert_matches_slow(fed).local
    assert local.n_steps.min() < local.n_steps.max()  # some have finished while others go on


@every_solver
@pytest.mark.parametrize("objective", ["bce", "bpr"])
def test_a_silo_learns_what_its_users_learn_one_by_one(objective: str, solver: str) -> None:
    assert_matches_slow(federation("ego", silos=3, **OBJECTIVES[objective], **SOLVERS[solver]))


@every_objective
@pytest.mark.parametrize("model", ["mf", "ego"])
def test_a_cohort_learns_what_its_clients_learn_with_redrawn_negatives(model: str, objective: str) -> None:
    assert_matches_slow(federation(model, redraw="epoch", **OBJECTIVES[objective]))


@pytest.mark.parametrize("model", ["mf", "ego"])
def test_l2_pulls_at_what_a_batch_uses(model: str) -> None:
    heavy = assert_matches_slow(federation(model, l2=0.5))
    light = train_once(fed := federation(model), started(fed))
    assert np.abs(heavy.local.private - light.local.private).max() > 1e-3


class Hints(Part):
    """One more sample per user and step."""

    name = "hints"
    fills = frozenset({"rows_needed", "step_samples"})

    def prepare(self, view: CohortView) -> LocalTask:
        items = Ragged.from_lists([[int(u) % 7, 11] for u in view.user])
        return LocalTask(rows_needed=items, step_samples=self.sample_step)

    def sample_step(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples:
        lists, _ = local.rows_needed[self.name]
        n = len(view.user)
        return ExtraSamples(view.user_ptr, lists.ptr[:-1] + step % 2, np.full(n, 0.7, "f4"), np.full(n, 0.4, "f4"))


@every_solver
@pytest.mark.parametrize("model", ["mf", "ego"])
def test_a_parts_samples_join_pairs_with_a_loss_of_their_own(model: str, solver: str) -> None:
    fed = federation(model, Hints, **OBJECTIVES["bpr"], **SOLVERS[solver])
    progress = started(fed)
    view = cohort(fed, progress)

    def more(user: int, step: int, phase: int) -> list[tuple[int, float, float]]:
        return [([int(view.user[user]) % 7, 11][step % 2], 0.7, 0.4)]

    slow = slow_round(view, fed.backbone, fed.config.train, fed.draws, more)
    trained = train_once(fed, progress)
    np.testing.assert_allclose(averaged(fed, progress.server, trained).items, slow.items, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(trained.local.private, slow.private, rtol=2e-5, atol=2e-5)


def test_pfedme_sends_the_local_model_and_keeps_the_personal_one() -> None:
    fed = federation("ncf-shared", **SOLVERS["pfedme"])
    progress = started(fed)
    slow = slow_round(cohort(fed, progress), fed.backbone, fed.config.train, fed.draws)
    trained = train_once(fed, progress)
    local, sent = trained.local, trained.upload.values["rows"]
    np.testing.assert_allclose(
        local.personal["private"], np.concatenate([entry[1] for entry in slow.personal]), atol=2e-5
    )
    for client, (table, _) in enumerate(slow.personal):
        own = slice(local.row_start[client], local.row_start[client + 1])
        item = local.row_item[own]
        np.testing.assert_allclose(local.personal["rows"][own], table[item], atol=2e-5)
        moved = sent.value[sent.client == client]
        np.testing.assert_allclose(moved + progress.server.items[item], slow.tables[client][item], atol=2e-5)
        assert np.abs(table[item] - slow.tables[client][item]).max() > 1e-3
    assert local.personal["heads.w"].shape == local.heads["w"].shape
    plain = federation("mf")
    assert train_once(plain, started(plain)).local.personal == {}


@pytest.mark.parametrize("eta", [0.05, 1.0])
def test_a_pfedme_step_by_hand(eta: float) -> None:
    """MF of one number, p = 1, q = 0.5, y = 1, lam 2, one inner step of 0.1: s = 0.5, residual -0.377541.
    The personal model is where the local one is, so only the loss moves it: p = 1 + 0.1 * 0.377541 * 0.5 and
    q = 0.5 + 0.1 * 0.377541. The local model goes eta * 2 of that way: to 0.1 of it, or to twice of it."""
    fed = federate(
        make_stream(make_block(0, 1, [[0]])), make_backbone("mf", dim=1), negatives=0, optimiser="pfedme",
        pfedme={"lam": 2.0, "inner_steps": 1, "inner_lr": 0.1, "eta": eta},
    )  # fmt: skip
    progress = started(fed)
    progress.server.items[:], progress.clients.private[:] = 0.5, 1.0
    trained = train_once(fed, progress)
    assert trained.local.personal["private"][0, 0] == pytest.approx(1.01887703, abs=1e-6)
    assert trained.local.personal["rows"][0, 0] == pytest.approx(0.5377541, abs=1e-6)
    assert trained.local.private[0, 0] == pytest.approx(1 + 2 * eta * 0.01887703, abs=1e-6)
    assert trained.upload.values["rows"].value[0, 0] == pytest.approx(2 * eta * 0.0377541, abs=1e-6)


def test_a_bpr_step_by_hand() -> None:
    """MF of one number, p = 1, rows 0.5 (liked) and 0.2, scale 2: d = 0.6, slope -2 sigma(-0.6) = -0.708687.
    p moves by 0.1 * 0.708687 * 0.3, the rows by 0.1 * 2 items * 0.708687, up and down."""
    backbone = make_backbone("mf", dim=1, lr=0.1)
    fed = federate(make_stream(make_block(0, 2, [[0]])), backbone, negatives=1, objective="bpr", bpr_scale=2.0)
    progress = started(fed)
    progress.server.items[:, 0], progress.clients.private[:] = [0.5, 0.2], 1.0
    trained = train_once(fed, progress)
    assert trained.local.private[0, 0] == pytest.approx(1 + 0.1 * 0.708687 * 0.3, abs=1e-6)
    assert trained.upload.values["rows"].item.tolist() == [0, 1]
    np.testing.assert_allclose(trained.upload.values["rows"].value[:, 0], [0.1417374, -0.1417374], atol=1e-6)


def test_a_squared_step_by_hand() -> None:
    """p = 1, q = 0.5, rating 4: slope 2 (0.5 - 4) = -7, so p = 1 + 0.01 * 7 * 0.5 and q = 0.5 + 0.01 * 7."""
    block = make_block(0, 1, [[0]])
    block = replace(block, train=replace(block.train, values={"rating": np.array([4.0], np.float32)}))
    fed = federate(make_stream(block), make_backbone("mf", dim=1, lr=0.01), negatives=0, objective="squared")
    progress = started(fed)
    progress.server.items[:], progress.clients.private[:] = 0.5, 1.0
    trained = train_once(fed, progress)
    assert trained.local.private[0, 0] == pytest.approx(1.035, abs=1e-6)
    assert trained.upload.values["rows"].value[0, 0] == pytest.approx(0.07, abs=1e-6)


# what must not matter


@every_solver
@pytest.mark.parametrize(("model", "objective"), [("mf", "bce"), ("mf", "squared"), ("ego", "bpr")])
def test_a_client_stands_still_once_its_steps_are_done(model: str, objective: str, solver: str) -> None:
    fed = federation(model, **OBJECTIVES[objective], **SOLVERS[solver])
    together = train_once(fed, progress := started(fed)).local
    assert together.n_steps.min() < together.n_steps.max()
    for short in np.flatnonzero(together.n_steps == together.n_steps.min()):
        alone = train_once(fed, progress, np.array([short])).local
        np.testing.assert_array_equal(together.private[short], alone.private[0])
        own = slice(together.row_start[short], together.row_start[short + 1])
        np.testing.assert_array_equal(together.rows[own], alone.rows)


@every_solver
@pytest.mark.parametrize(("model", "objective"), [("mf", "squared"), ("ego", "bpr"), ("ncf-shared", "bce")])
def test_chunking_changes_no_bit(model: str, objective: str, solver: str) -> None:
    fed = federation(model, redraw="epoch", **OBJECTIVES[objective], **SOLVERS[solver])
    observations = []
    for chunk in (64, 1, 3):
        progress = started(entry := replace(fed, chunk=chunk))
        for _ in range(2):
            progress.server, _ = run_round(entry, progress.server, progress.devices)
        observations.append((progress.server.items, progress.clients.private))
    for items, private in observations[1:]:
        assert np.array_equal(items, observations[0][0])
        assert np.array_equal(private, observations[0][1])


# rows outside a batch


def steps_of(fed: Federation) -> list[tuple[set[int], Floats]]:
    """After every step: the rows its batch holds, and all rows as they stand."""
    view = cohort(fed, started(fed))
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    stepper = AutogradStepper(fed.backbone, fed.config.train, local)
    observations: list[tuple[set[int], Floats]] = [(set(), local.rows.copy())]
    for step in range(int(local.n_steps.max())):
        state: set[int] = set()
        for client in np.flatnonzero(step < local.n_steps):
            at = local.turn_ptr[client] + step % local.steps_per_epoch[client] * local.batch
            end = min(at + local.batch, local.turn_ptr[client + 1])
            sample = local.order[step // local.steps_per_epoch[client], at:end]
            both = sample if local.partner is None else np.append(sample, local.partner[sample])
            state |= set((local.row_start[client] + local.row_of[both]).tolist())
        stepper.run_steps(step, step + 1, None, StepExtras.empty(view.n_clients))
        observations.append((state, local.rows.copy()))
    return observations


@pytest.mark.parametrize("solver", ["sgd", "lazy-adam", "lazy-adam with decay", "adam"])
@pytest.mark.parametrize("objective", ["bce", "bpr"])
def test_only_dense_adam_moves_a_row_in_a_step_that_does_not_hold_it(objective: str, solver: str) -> None:
    steps = steps_of(federation("mf", **OBJECTIVES[objective], **SOLVERS[solver]))
    drifted = 0
    for (_, before), (state, after) in pairwise(steps):
        moved = set(np.flatnonzero((before != after).any(1)).tolist())
        assert state <= moved
        assert len(state) < len(after)
        drifted += len(moved - state)
    assert (drifted > 0) == (solver == "adam")


# what is drawn


def drawn(**train: Any) -> LocalModels:
    fed = federation("mf", **train)
    return build_local_models(cohort(fed, started(fed)), {}, fed.config.train, fed.draws)


def test_every_positive_is_paired_with_as_many_negatives_as_are_drawn_for_it() -> None:
    local = drawn(objective="bpr", negatives=3)
    assert local.partner is not None
    owner = local.owner
    for epoch in range(2):
        turns = local.order[epoch]
        assert (local.label[turns] == 0).all()
        assert (owner[turns] == owner[local.partner[turns]]).all()
        pairs = np.bincount(local.partner[turns], minlength=len(local.label))
        assert np.array_equal(pairs, np.where(local.label == 1, 3, 0))
    assert np.array_equal(np.diff(local.turn_ptr), 3 * np.array([len(entry) for entry in UNEVEN if entry]))


def test_a_batch_holds_pairs() -> None:
    local = drawn(objective="bpr", negatives=3, batch_size=4)
    want = [2 * -(-3 * len(entry) // 4) for entry in UNEVEN if entry]
    assert local.n_steps.tolist() == want


def test_user_who_likes_everything_has_no_pairs_and_does_not_move() -> None:
    stream = make_stream(make_block(0, 3, [[0, 1, 2], [0]]))
    fed = federate(stream, make_backbone("mf"), objective="bpr", negatives=1)
    progress = started(fed)
    trained = train_once(fed, progress)
    assert trained.local.n_steps.tolist() == [0, 1]
    assert np.array_equal(trained.local.private[0], progress.clients.private[0])
    assert not trained.upload.values["rows"].value[trained.upload.values["rows"].client == 0].any()


@pytest.mark.parametrize("objective", ["bce", "bpr"])
def test_redrawn_negatives_are_others_in_every_epoch(objective: str) -> None:
    once, retrained = (drawn(objective=objective, redraw=how, local_epochs=3) for how in ("round", "epoch"))
    assert np.array_equal(once.turn_ptr, retrained.turn_ptr)
    for client in range(len(once.ptr) - 1):
        own = slice(once.turn_ptr[client], once.turn_ptr[client + 1])
        observations = [sorted(retrained.item[retrained.order[epoch, own]].tolist()) for epoch in range(3)]
        assert observations[0] == sorted(once.item[once.order[0, own]].tolist())
        assert observations[1] != observations[0]
        assert observations[2] != observations[1]
        for epoch in range(3):
            turns = retrained.order[epoch, own]
            assert len(set(turns.tolist())) == len(turns)
            likes = retrained.item[turns][retrained.label[turns] == 1].tolist()
            assert sorted(likes) == (sorted(retrained.view.train.row(client).tolist()) if objective == "bce" else [])
            assert not set(retrained.item[turns][retrained.label[turns] == 0].tolist()) & set(
                retrained.view.train.row(client)
            )


def test_with_one_epoch_it_does_not_matter_how_often_negatives_are_drawn() -> None:
    first, other = (drawn(redraw=how, local_epochs=1) for how in ("round", "epoch"))
    for name in ("item", "label", "order", "ptr", "turn_ptr"):
        assert np.array_equal(getattr(first, name), getattr(other, name)), name


def test_the_fused_step_redraws_as_well() -> None:
    observations = []
    for stepper in ("fused", "autograd"):
        fed = federation("mf", redraw="epoch", stepper=stepper, local_epochs=3)
        observations.append(train_once(fed, started(fed)).local)
    np.testing.assert_allclose(observations[0].rows, observations[1].rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(observations[0].private, observations[1].private, rtol=1e-5, atol=1e-5)
    round_only = train_once(fed := federation("mf", local_epochs=3), started(fed)).local
    assert np.abs(round_only.private - observations[0].private).max() > 1e-3


# ratings


def test_squared_error_is_taken_of_ratings_where_there_are_any() -> None:
    view = cohort(fed := federation("mf", objective="squared"), started(fed))
    local = build_local_models(view, {}, fed.config.train, fed.draws)
    want = [
        value
        for user in range(len(view.user))
        for value in [
            *view.train.values["rating"][view.train.ptr[user] : view.train.ptr[user + 1]],
            *[0.0] * (4 * len(view.train.row(user))),
        ]
    ]
    assert local.label.tolist() == want
    plain = build_local_models(replace(view, train=replace(view.train, values={})), {}, fed.config.train, fed.draws)
    assert set(plain.label.tolist()) == {0.0, 1.0}
    assert set(drawn(objective="bce").label.tolist()) == {0.0, 1.0}


def test_mf_fits_ratings() -> None:
    """Twelve users rate ten of sixteen items by a rule of rank two; what a user has not rated is foreseen."""
    rng = np.random.default_rng(0)
    truth = 3 + np.outer(rng.normal(size=12), rng.normal(size=16))
    lists = [rng.choice(16, 11, replace=False) for _ in range(12)]
    block = make_block(0, 16, [element.tolist() for element in lists])
    rating = np.concatenate([truth[u, element] for u, element in enumerate(lists)]).astype(np.float32)
    stream = make_stream(replace(block, train=replace(block.train, values={"rating": rating})))
    backbone = make_backbone("mf", dim=4, lr=0.05, init_std=0.5)
    fed = federate(stream, backbone, objective="squared", negatives=0, rounds=400, patience=400)
    progress = started(fed)
    run_block(fed, progress, lambda report, now: None)
    result = progress.clients.private @ progress.server.items.T
    rated_ = np.zeros((12, 16), bool)
    for u, entry in enumerate(lists):
        rated_[u, entry] = True
    error = (result - truth) ** 2
    assert error[rated_].mean() < 0.02
    assert error[~rated_].mean() < 0.3 * truth.var()


# lists with columns


def with_columns() -> Ragged:
    rows, ids = np.array([1, 0, 1, 3]), np.array([5, 6, 7, 8])
    return Ragged.from_pairs(rows, ids, 4, {"rating": np.array([1.0, 2.0, 3.0, 4.0]), "time": np.array([9, 8, 7, 6])})


def test_columns_follow_their_entries() -> None:
    lists = with_columns()
    assert (lists.ids.tolist(), lists.values["rating"].tolist()) == ([6, 5, 7, 8], [2, 1, 3, 4])
    some = lists.take(np.array([3, 1]))
    assert (some.ids.tolist(), some.values["time"].tolist()) == ([8, 5, 7], [6, 9, 7])
    both = some.join_rows(lists.take(np.array([0, 3])))
    assert (both.ids.tolist(), both.values["rating"].tolist()) == ([8, 6, 5, 7, 8], [4, 2, 1, 3, 4])
    assert take_user_lists(lists, np.array([3, 9], np.int32)).values["rating"].tolist() == [4.0]
    fewer = lists.filter_entries(lists.ids != 5)
    assert (fewer.ids.tolist(), fewer.values["rating"].tolist()) == ([6, 7, 8], [2, 3, 4])


def test_a_column_stays_if_all_entries_have_it() -> None:
    lists = with_columns()
    assert lists.join_rows(Ragged.empty(6)).values.keys() == {"rating", "time"}
    assert Ragged.empty(0).join_rows(lists).values["rating"].tolist() == [2, 1, 3, 4]
    assert lists.join_rows(replace(lists, values={"time": lists.values["time"]})).values.keys() == {"time"}
    assert lists.join_rows(Ragged.from_lists([[1]])).values == {}
    assert Ragged.from_lists([[1, 2], []]).take(np.array([0])).values == {}


def test_ragged_membership_matches_its_rows() -> None:
    lists = Ragged.from_lists([[3, 1], [], [2]])
    rows, ids = np.array([0, 0, 1, 2, 2, 0]), np.array([1, 2, 3, 2, 9, 3])
    assert lists.holds(rows, ids).tolist() == [True, False, False, True, False, True]


# settings


@pytest.mark.parametrize(
    ("backbone", "train", "message"),
    [
        ("mf", {"objective": "bpr", "negatives": 0}, "set train.negatives"),
        ("mf", {"weight_decay": 0.1}, "lazy-adam"),
        ("mf", {"weight_decay": 0.1, "optimiser": "adam"}, "lazy-adam"),
        ("pfedrec", {"optimiser": "pfedme"}, "2 phases"),
        ("mf", {"stepper": "fused", "objective": "bpr"}, "no fused step"),
        ("mf", {"stepper": "fused", "objective": "squared"}, "no fused step"),
        ("mf", {"stepper": "fused", "optimiser": "lazy-adam"}, "no fused step"),
        ("mf", {"stepper": "fused", "l2": 0.1}, "no fused step"),
        ("ego", {"stepper": "fused"}, "no fused step"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(
    backbone: str, train: dict[str, Any], message: str
) -> None:
    values = {"data": "no such file", "backbone": {"name": backbone}, "train": train}
    with pytest.raises(TacitaError, match=message) as refused:
        assembly.build_components(validate_model(RunConfig, values, "a test"))
    assert str(refused.value).endswith(".")


class Pulls(Part):
    name = "pulls"
    fills = frozenset({"pull"})


@pytest.mark.parametrize(
    ("part", "train", "message"),
    [(Pulls, {"optimiser": "pfedme"}, "'pulls' pulls"), (Hints, {"objective": "squared"}, "'hints' deals in")],
)
def test_parts_that_cannot_work_with_them_are_refused(part: type[Part], train: dict[str, Any], message: str) -> None:
    fed = federation("mf", part, **train)
    with pytest.raises(TacitaError, match=message):
        check_training(fed.backbone, fed.parts, fed.config.train)


@pytest.mark.parametrize("method", ["kd", "spp", "rlp2"])
def test_a_part_that_scores_private_vectors_is_refused_with_a_model_that_reads_more(method: str) -> None:
    with pytest.raises(TacitaError, match="reads the user's own items"):
        assembly.build_components(RunConfig(backbone={"name": "ego"}, method=method))


def test_the_fused_step_is_chosen_for_what_it_can_do() -> None:
    mf = make_backbone("mf")
    for train in ({}, {"redraw": "epoch"}, {"local_epochs": 3}):
        assert FusedStepper.supports(mf, TrainConfig(**train))  # type: ignore[arg-type]
    for train in (*SOLVERS.values(), *OBJECTIVES.values()):
        assert FusedStepper.supports(mf, validate_model(TrainConfig, train, "a test")) == (train == {})
    assert set(SMALL) >= {"mf", "ego"}


# losses


def test_cosine_bpr_stays_between_its_bounds_and_is_ln_2_for_equals() -> None:
    first, other = torch.tensor([1.0, -1.0, 0.3, 0.0]), torch.tensor([-1.0, 1.0, 0.3, 0.0])
    loss = compute_bpr_loss(first, other, 1.0)
    np.testing.assert_allclose(loss, [0.126928, 2.126928, np.log(2), np.log(2)], atol=1e-6)
