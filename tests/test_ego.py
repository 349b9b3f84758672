"""The user's own star (ego), and what holds for any model that reads a context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.oracle import catalogue, cohort, federate, make_backbone, make_block, make_stream, started, train_once
from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws, derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Floats, Ragged
from tacita.federation.rounds import run_round
from tacita.learn.training.ego_stepper import EgoStepper
from tacita.models import Backbone, Context
from tacita.models import scoring as catalogue_scores
from tacita.models.ego import EgoModel
from tacita.models.scoring import score_catalogue, score_with_own_rows
from tacita.runs import serving, training

LISTS = Ragged.from_lists([[0, 10], [3], [], [0, 1, 2], [4], [5, 6, 7, 8], [9]])


def some_users(**options: Any) -> tuple[Backbone, Floats, Floats]:
    backbone = make_backbone("ego", **options)
    rng = np.random.default_rng(1)
    return backbone, rng.normal(size=(7, 6)).astype("f4"), rng.normal(size=(11, 6)).astype("f4")


def represented(backbone: Backbone, p: Floats, rows: Floats) -> dict[str, Any]:
    """One user whose items have these rows."""
    lists = Ragged.from_lists([list(range(len(rows)))])
    return backbone.represent_users({"p": p[None].astype("f4")}, {}, Context.from_lists(lists, rows.astype("f4")))


# closed forms


def test_a_user_without_a_vector_is_half_the_sum_of_its_rows_over_root_n() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 6))
    result = represented(make_backbone("ego"), np.zeros(6), rows)
    np.testing.assert_allclose(result["u"][0], rows.sum(0) / (2 * np.sqrt(5)), rtol=1e-5)
    assert not result["passed"].any()  # so an item ends as half its row


def test_four_items_that_are_one_direction_make_the_user_that_direction() -> None:
    rows = np.tile(np.eye(6)[0], (4, 1))
    np.testing.assert_allclose(represented(make_backbone("ego"), np.zeros(6), rows)["u"][0], np.eye(6)[0], atol=1e-7)


def test_an_item_of_the_user_takes_in_its_vector_and_another_does_not() -> None:
    """n = 4: v = q / 2 + p / (2 sqrt 4), against u = p / 2 + sum q / 4; other items stay where they are."""
    rng = np.random.default_rng(2)
    p, rows = rng.normal(size=6).astype("f4"), rng.normal(size=(4, 6)).astype("f4")
    backbone = make_backbone("ego")
    rep = represented(backbone, p, rows)
    both = {k: np.repeat(v, 2, axis=0) for k, v in rep.items()}
    result = backbone.compute_logits(both, {}, rows[[1, 1]], np.array([1, 0], np.float32))
    u = p / 2 + rows.sum(0) / 4
    for v, score in zip((rows[1] / 2 + p / 4, rows[1]), result, strict=True):
        assert score == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), abs=1e-6)
    alike = make_backbone("ego", item_propagation=False)
    both = {k: np.repeat(v, 2, axis=0) for k, v in represented(alike, p, rows).items()}
    same = alike.compute_logits(both, {}, rows[[1, 1]], np.array([1, 0], np.float32))
    assert same[0] == same[1] == pytest.approx(result[1], abs=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
def test_scores_do_not_change_when_rows_and_vectors_grow_alike(factor: float) -> None:
    backbone, private, items = some_users()
    entry = score_catalogue(backbone, private, {}, items, LISTS)
    other = score_catalogue(backbone, np.float32(factor) * private, {}, np.float32(factor) * items, LISTS)
    np.testing.assert_allclose(other, entry, atol=1e-5)
    assert np.abs(entry).max() <= 1 + 1e-6


def test_it_starts_as_xavier_does() -> None:
    backbone = make_backbone("ego", dim=32)
    keys = derive_keys(f"one{k}" for k in range(400))
    for result in (backbone.init_items(Draws(5), keys), backbone.init_private(Draws(5), keys)):
        bound = np.sqrt(6 / 33)
        assert 0.98 * bound < np.abs(result).max() <= bound
        assert result.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)
        assert abs(result.mean()) < 0.01


# training


def test_a_row_turns_but_does_not_grow_where_the_user_reads_nothing_of_it() -> None:
    """A cosine's slope is at a right angle to the row: it changes by its square, which is of second order.

    Negatives are outside the star, so this holds with propagation; the step is small, and the row longer by
    no more than half its square over the length."""
    backbone = make_backbone("ego", lr=1e-3, item_lr_scale=1.0)
    fed = federate(make_stream(make_block(0, 9, [[0, 1, 2]])), backbone, objective="bpr", negatives=2)
    progress = started(fed)
    trained = train_once(fed, progress)
    outside = ~np.isin(trained.upload.values["rows"].item, [0, 1, 2])
    rows, moved = progress.server.items[trained.upload.values["rows"].item], trained.upload.values["rows"].value
    along = (rows * moved).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(moved, axis=1)
    assert outside.sum() >= 2
    assert np.abs(along[outside]).max() < 1e-3
    assert np.abs(along[~outside]).max() > 0.01  # these also move as a part of the user


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "lazy-adam"])
def test_rows_that_are_neither_sampled_nor_read_stay_bit_for_bit(optimiser: str) -> None:
    """Five local epochs on the whole batch; what was not touched is not even in the upload."""
    stream = make_stream(make_block(0, 200, [[0, 1, 2], [5, 6]]))
    fed = federate(stream, make_backbone("ego"), objective="bpr", negatives=1, local_epochs=5, optimiser=optimiser)
    progress = started(fed)
    before = progress.server.items.copy()
    touched = set(train_once(fed, progress).upload.values["rows"].item.tolist())
    progress.server, _ = run_round(fed, progress.server, progress.devices)
    still = np.setdiff1d(np.arange(200), list(touched))
    assert len(still) > 150
    assert np.array_equal(progress.server.items[still], before[still])
    assert (progress.server.items[sorted(touched)] != before[sorted(touched)]).any(1).all()


class Wide(EgoModel):
    """Reads, besides the training items, one item that is nobody's sample."""

    name = "wide"

    def list_context_items(self, view: CohortView) -> Ragged:
        lists = [[*view.train.row(u).tolist(), view.n_items - 1 - u] for u in range(len(view.user))]
        result = Ragged.from_lists(lists)
        return replace(result, values={"gap": np.arange(len(result.ids), dtype=np.float32)})


class Timed(Wide):
    """Weights what it reads by a column of its lists."""

    name = "timed"

    def represent_users(
        self, private: dict[str, Any], heads: dict[str, Any], context: Context | None
    ) -> dict[str, Any]:
        assert context is not None
        weighted = replace(context, rows=context.rows / (1 + context.values["gap"])[:, None])
        return super().represent_users(private, heads, weighted)


def model(cls: type[EgoModel]) -> EgoModel:
    return cls(cls.Config(dim=6, lr=0.5, item_lr_scale=3.0))


@pytest.mark.parametrize("silos", [0, 1])
@pytest.mark.parametrize("cls", [Wide, Timed])
def test_rows_that_are_only_read_learn_and_are_sent(cls: type[EgoModel], silos: int) -> None:
    stream = make_stream(make_block(0, 40, [[0, 1], [2], [3, 4, 5]]))
    fed = federate(stream, model(cls), negatives=0, silos=silos)
    trained = train_once(fed, started(fed))
    assert {39, 38, 37} <= set(trained.upload.values["rows"].item.tolist())
    read = np.isin(trained.upload.values["rows"].item, [39, 38, 37])
    assert (np.abs(trained.upload.values["rows"].value[read]).max(1) > 1e-4).all()
    if silos == 0:
        assert trained.upload.values["rows"].client[trained.upload.values["rows"].item == 38].tolist() == [1]


def test_the_slope_through_the_context_is_the_slope_of_the_score() -> None:
    """Finite differences of one client's loss in a row that it only reads."""
    stream, rate = make_stream(make_block(0, 6, [[0, 1]])), 1e-3
    backbone = Timed(Timed.Config(dim=6, lr=rate, item_lr_scale=1.0))
    fed = federate(stream, backbone, negatives=0)
    progress = started(fed)
    sent = train_once(fed, progress).upload.values["rows"]
    result = -sent.value[sent.item == 5][0] / rate
    lists = backbone.list_context_items(cohort(fed, progress))

    def loss(items: Floats) -> float:
        context = replace(Context.from_lists(lists, items), values=lists.values)
        rep = backbone.represent_users(backbone.split_private(progress.clients.private), {}, context)
        both = {k: np.repeat(v, 2, axis=0) for k, v in rep.items()}
        logits = backbone.compute_logits(both, {}, items[[0, 1]], np.ones(2, np.float32)).astype(np.float64)
        return float(np.log1p(np.exp(-logits)).mean())

    slopes = []
    for k in range(6):
        up, down = progress.server.items.copy(), progress.server.items.copy()
        up[5, k] += 0.05
        down[5, k] -= 0.05
        slopes.append((loss(up) - loss(down)) / 0.1)
    np.testing.assert_allclose(result, slopes, atol=5e-4)
    assert np.abs(result).max() > 5e-3


# scoring


class Plain(EgoModel):
    """The same model without its short cut over the catalogue."""

    name = "plain"

    def build_affine_scores_outside_context(self, rep: Any, heads: Any, items: Any) -> None:
        return None


@pytest.mark.parametrize("n_items", [11, 700])
@pytest.mark.parametrize("item_propagation", [True, False])
def test_the_short_cut_over_the_catalogue_changes_no_score(n_items: int, item_propagation: bool) -> None:
    backbone, private, _ = some_users(item_propagation=item_propagation)
    items = np.random.default_rng(3).normal(size=(n_items, 6)).astype("f4")
    plain = Plain(backbone.config)
    fast, slow = (score_catalogue(candidate, private, {}, items, LISTS) for candidate in (backbone, plain))
    np.testing.assert_allclose(fast, slow, atol=2e-6)
    for entry, whole in ((backbone, fast), (plain, slow)):  # the company does not matter
        assert np.array_equal(score_catalogue(entry, private[3:5], {}, items, LISTS.take(np.array([3, 4]))), whole[3:5])


def test_more_users_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, private, items = some_users()
    whole = score_catalogue(backbone, private, {}, items, LISTS)
    monkeypatch.setattr(catalogue_scores, "CHUNK", 3)
    assert np.array_equal(score_catalogue(backbone, private, {}, items, LISTS), whole)


def test_a_model_that_reads_a_context_is_not_scored_without() -> None:
    backbone, private, items = some_users()
    with pytest.raises(TacitaError, match="own items"):
        score_catalogue(backbone, private, {}, items)


@pytest.mark.parametrize("chunk", [256, 2])
@pytest.mark.parametrize("cls", [EgoModel, Plain])
def test_own_rows_count_where_they_are_scored_and_where_they_are_read(
    cls: type[EgoModel], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, private, items = some_users()
    backbone = model(cls)
    moved = Ragged.from_lists([[10, 4], [3], [1], [], [5, 4], [0, 6, 5], []])
    change = np.random.default_rng(5).normal(size=(len(moved.ids), 6)).astype("f4")
    monkeypatch.setattr(catalogue_scores, "CHUNK", chunk)
    got = score_with_own_rows(backbone, private, {}, items, replace(moved, values={"moved": change}), LISTS)
    for u in range(7):
        table = items.copy()
        table[moved.row(u)] += change[moved.ptr[u] : moved.ptr[u + 1]]
        want = score_catalogue(backbone, private[u : u + 1], {}, table, LISTS.take(np.array([u])))
        np.testing.assert_allclose(got[u], want[0], atol=1e-6)


def test_a_device_scores_with_the_rows_of_its_training_items() -> None:
    stream = make_stream(make_block(0, 11, [[0, 10], [3], [], [0, 1, 2]]))
    fed = federate(stream, make_backbone("ego"))
    progress = started(fed)
    got = catalogue(fed.backbone, progress, stream.blocks[0])
    table = progress.server.items
    u = progress.clients.private[3] / 2 + table[[0, 1, 2]].sum(0) / (2 * np.sqrt(3))
    want = table @ u / np.linalg.norm(u) / np.linalg.norm(table, axis=1)
    np.testing.assert_allclose(got[3, 3:], want[3:], atol=1e-6)


@pytest.mark.parametrize("personal", [False, True])
def test_a_run_with_pairs_and_controls_beats_chance(personal: bool, tmp_path: Path) -> None:
    values = {
        "data": "synthetic:users=90,items=60,per_user=14,groups=4",
        "split": {"kind": "random"},
        "backbone": {"name": "ego", "dim": 16, "lr": 0.02, "item_lr_scale": 1.0},
        "train": {"rounds": 12, "objective": "bpr", "negatives": 1, "redraw": "epoch", "local_epochs": 5,
                  "optimiser": "lazy-adam", "aggregation": "per-row"},
        "evaluate": {"item_table": "personal" if personal else "global"},
    }  # fmt: skip
    run = training.train(validate_model(RunConfig, values, "a test"), tmp_path / "run")
    chance = run.result["controls"]["random"]["mean"]["ndcg@20"]
    assert run.result["mean"]["ndcg@20"] > 1.2 * chance
    assert serving.recommend(tmp_path / "run", ["u1"], 3).keys() == {"u1"}


# The compiled step


def stars(n: int = 40) -> Any:
    rng = np.random.default_rng(4)
    return make_stream(make_block(0, 60, [rng.permutation(60)[: rng.integers(0, 20)].tolist() for _ in range(n)]))


def pairs(**train: Any) -> dict[str, Any]:
    return {
        "objective": "bpr", "optimiser": "lazy-adam", "local_epochs": 5, "negatives": 1, "redraw": "epoch", "l2": 1e-3,
    } | train  # fmt: skip


@pytest.mark.parametrize("item_propagation", [True, False])
@pytest.mark.parametrize(
    "train",
    [
        {"batch_size": 1000},
        {"batch_size": 3},
        {"bpr_scale": 5.0, "l2": 0.1},
        {"negatives": 3, "batch_size": 7, "redraw": "round"},
        {"weight_decay": 0.01, "l2": 0.0},
    ],
    ids=str,
)
def test_the_compiled_step_is_the_one_of_autograd(train: dict[str, Any], item_propagation: bool) -> None:
    backbone = make_backbone("ego", item_propagation=item_propagation, lr=0.01, item_lr_scale=1.0, dim=32)
    result = []
    for stepper in ("fused", "autograd"):
        fed = federate(stars(), backbone, **pairs(**train, stepper=stepper))
        local = train_once(fed, started(fed)).local
        result.append((local.rows.copy(), local.private.copy()))
    for first, other in zip(*result, strict=True):
        off = np.abs(first - other)
        assert (off < 1e-5).mean() > 0.998  # Adam turns the sign of a slope that is nothing but rounding into a step
        assert off.max() < 5 * 0.01
        assert np.abs(first).max() > 0.01


def test_only_the_star_itself_has_a_compiled_step() -> None:
    """Models that derive from it may read something else."""
    plan = federate(stars(), make_backbone("ego"), **pairs()).config.train
    assert EgoStepper.supports(make_backbone("ego"), plan)
    assert not EgoStepper.supports(Wide(make_backbone("ego").config), plan)
    assert not EgoStepper.supports(make_backbone("mf"), plan)
    for other in ({"silos": 3}, {"optimiser": "sgd"}, {"objective": "bce"}):
        assert not EgoStepper.supports(make_backbone("ego"), plan.model_copy(update=other))


@pytest.mark.parametrize("chunk", [1, 7])
def test_the_compiled_step_does_not_see_how_clients_are_chunked(chunk: int) -> None:
    result = []
    for size in (64, chunk):
        fed = federate(stars(), make_backbone("ego"), chunk=size, **pairs())
        progress = started(fed)
        server, _ = run_round(fed, progress.server, progress.devices)
        result.append((server.items, progress.clients.private.copy()))
    assert np.array_equal(result[0][0], result[1][0])
    assert np.array_equal(result[0][1], result[1][1])
