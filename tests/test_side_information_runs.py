"""Item rows from side information in a run, for all methods alike; and the model trained on pooled data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, list_newer_settings_at_default, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.data.features import load_stream_features
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.live.settings import check_live_settings
from tacita.methods import resolve_config
from tacita.models.side import build_side_rows
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.central_training import evaluate_scorer, train_centrally
from tacita.runs.controls import make_popular_scorer

HERE = Machine(threads=1)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A small dataset whose items have titles and genres."""
    draws = np.random.default_rng(0)
    lines = [f"u{u},i{i},{t}" for u in range(30) for t, i in enumerate(draws.permutation(36)[:12])]
    (tmp_path / "interactions.csv").write_text("\n".join(["user,item,timestamp", *lines]) + "\n")
    kinds = ["war", "love", "space"]
    items = [f"i{k},{kinds[k % 3]} story {k},{kinds[k % 3]}" for k in range(36)]
    (tmp_path / "items.csv").write_text("\n".join(["item,title,genres", *items]) + "\n")
    return tmp_path / "interactions.csv"


def settings(data: object, **more: Any) -> RunConfig:
    base: dict[str, Any] = {"data": str(data), "item_rows": "side", "train": {"rounds": 2}}
    return resolve_config({**base, "split": {"kind": "leave-one-out"}, **more}, "the test")


@pytest.mark.parametrize("method", ["fedavg", "fedkdrec", "ptf-fedrec", "fedmf-kd", "fedncf-kd", "fedpergnn"])
def test_every_method_starts_from_the_same_codes(told: Path, method: str) -> None:
    fed = assemble_federation(
        settings(told, method=method, backbone={"dim": 8}, evaluate={"k": [5], "select_by": "ndcg@5"}), HERE
    )
    codes = build_side_rows(load_stream_features(fed.stream), fed.stream.item_ids, 8, Draws(1), sentences=False)
    progress = make_initial_progress(fed)
    begin_block(fed, progress, 0)
    items = progress.server.items
    assert items.shape == (36, fed.backbone.item_width)
    for at in range(0, items.shape[1], 8):  # NeuMF has them twice
        np.testing.assert_array_equal(items[:, at : at + 8], codes)
    assert fed.stream.notes[-1] == "item rows start from genres, TF-IDF: known of 36 of 36 items."


def test_new_items_of_a_later_block_get_their_own_codes(told: Path) -> None:
    fed = assemble_federation(
        settings(told, split={"kind": "blocks", "n_blocks": 2}, evaluate={"k": [5], "select_by": "ndcg@5"}), HERE
    )
    progress = make_initial_progress(fed)
    for block in fed.stream.blocks:
        begin_block(fed, progress, block.index)
    assert fed.rows is not None
    np.testing.assert_array_equal(progress.server.items, fed.rows[: fed.stream.n_items])


def test_without_features_rows_or_a_lab_it_is_refused_in_a_sentence(told: Path) -> None:
    with pytest.raises(TacitaError, match="says nothing of its items; "):
        assemble_federation(settings("synthetic:users=30,items=30,per_user=8"), HERE)
    with pytest.raises(TacitaError, match="backbone 'tally' trains no item rows"):
        assemble_federation(
            settings(told, backbone={"name": "tally"}, evaluate={"k": [5], "select_by": "ndcg@5"}), HERE
        )
    with pytest.raises(TacitaError, match="item_rows = 'side' is for the lab"):
        check_live_settings(settings(told))
    with pytest.raises(TacitaError, match="'item_rows' in x must be one of"):
        validate_model(RunConfig, {"item_rows": "text"}, "x")


def test_the_setting_changes_no_earlier_hash() -> None:
    assert list_newer_settings_at_default(RunConfig())["item_rows"]
    assert "item_rows" not in list_newer_settings_at_default(RunConfig(item_rows="side"))


# The model trained centrally

GROUPS = "synthetic:users=80,items=80,per_user=16,groups=4"


def pooled(backbone: str, **train: Any) -> RunConfig:
    return validate_model(
        RunConfig,
        {
            "data": GROUPS,
            "backbone": {"name": backbone, "dim": 8, "lr": 0.01} | ({"item_lr_scale": 1.0} if backbone == "mf" else {}),
            "split": {"kind": "leave-one-out"},
            "train": {"rounds": 40, "patience": 10, **train},
            "evaluate": {"k": [10], "metrics": ["ndcg", "hr"], "select_by": "ndcg@10", "every": 2, "ties": "against"},
        },
        "the test",
    )


@pytest.mark.parametrize("backbone", ["neumf", "neuncf", "lightgcn", "mf"])
def test_a_central_model_beats_most_popular(backbone: str) -> None:
    fed = assemble_federation(pooled(backbone), HERE)
    block = fed.stream.blocks[0]
    centrally = train_centrally(fed, block)
    ours, plain = (
        evaluate_scorer(fed, block, entry).compute_means()["ndcg@10"]
        for entry in (centrally.scorer(), make_popular_scorer(fed, block))
    )
    assert ours > 1.3 * plain
    assert 1 <= centrally.best_epoch <= centrally.epochs <= 40


def test_it_stops_when_validation_stops_and_keeps_the_best_epoch() -> None:
    fed = assemble_federation(pooled("neuncf", rounds=60, patience=4), HERE)
    block = fed.stream.blocks[0]
    centrally = train_centrally(fed, block)
    assert centrally.epochs == centrally.best_epoch + 4 or centrally.epochs == 60
    repeat = evaluate_scorer(fed, block, centrally.scorer(), "valid").compute_means()["ndcg@10"]
    assert repeat == pytest.approx(centrally.valid)


def test_a_model_without_a_central_form_is_refused() -> None:
    config = pooled("mf").model_copy(update={"backbone": {"name": "ego", "dim": 8}})
    fed = assemble_federation(config, HERE)
    with pytest.raises(TacitaError, match="has no central model"):
        train_centrally(fed, fed.stream.blocks[0])
