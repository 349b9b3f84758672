"""Accuracy against epsilon from finished cells: what is drawn is what runs promised, and rounds go with releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tacita.report import accuracy
from tacita.research.experiments.axes import list_combinations
from tacita.research.experiments.curves import collect_points
from tacita.research.experiments.experiment_spec import Axis, Tuning, list_cells, load_experiment, load_settings
from tacita.research.experiments.learning_rates import list_tuning_entries


def test_points_have_the_epsilon_that_runs_promised_and_lines_none() -> None:
    experiment, settings = load_experiment("budgets/accuracy")
    cells = list_cells(experiment, settings, ["ml-100k"], ["mf"], 3, ["popular", "dp_fedavg_2"])
    lines = {}
    for cell in cells:
        values = {"ndcg@20": [0.1 + 0.01 * cell.seed]}
        lines[cell.key] = {"values": values | ({} if cell.variant == "popular" else {"epsilon": [1.9]})}
    results = {point.model: point for point in collect_points(experiment, cells, lines)}
    assert results["most popular"].epsilon is None
    drawn = results[experiment.variants["dp_fedavg_2"].curve]
    assert (drawn.data, drawn.epsilon) == ("ml-100k", 1.9)  # not the 2 that was asked for
    assert (drawn.mean, drawn.deviation) == (pytest.approx(0.12), pytest.approx(0.01))
    assert collect_points(experiment, cells, {}) == []


def test_points_go_through_a_file(tmp_path: Path) -> None:
    result = [
        accuracy.AccuracyPoint("a", "tally, 1", 2.0, 0.25, 0.01),
        accuracy.AccuracyPoint("a", "popular", None, 0.1, 0.0),
    ]
    (tmp_path / "points.csv").write_text(accuracy.to_csv(result))
    assert accuracy.read_points(tmp_path / "points.csv") == result


def test_noise_is_made_for_as_many_rounds_as_there_are() -> None:
    """Everywhere in the table: in the trials, and in what was chosen from them."""
    experiment, settings = load_experiment("budgets/accuracy")
    tried = [cell for entry in list_tuning_entries(experiment, ["ml-100k", "mf"], 12) for cell in entry.cells]
    cells = list_cells(experiment, settings, experiment.datasets, ["mf"], 1)
    noisy_values = [(candidate.config, part) for candidate in [*tried, *cells] for part in candidate.config.parts or []]
    assert len(noisy_values) > 24
    assert {part["releases"] - config.train.rounds for config, part in noisy_values} == {0}
    assert {part["clip"] for _, part in noisy_values} == {1.0, 4.0, 16.0}


def test_every_private_method_is_searched_alike() -> None:
    experiment, _ = load_experiment("budgets/accuracy")
    counts = {entry.source: len(entry.trials) for entry in list_tuning_entries(experiment, ["ml-100k", "mf"], 12)}
    assert counts.pop("fedavg") == 2  # it has no clip, and no rounds that noise is made for
    assert set(counts.values()) == {12}
    chosen = load_settings("budgets").chosen["ml-100k"]["mf"]
    assert {entry.trials for name, entry in chosen.items() if name != "fedavg"} == {12}


def test_an_axis_may_set_another_name_elsewhere() -> None:
    experiment, settings = load_experiment("budgets/accuracy")
    config = list_cells(experiment, settings, ["ml-100k"], ["mf"], 1, ["dp_fedavg_8"])[0].config
    axis = Axis(option="releases", of=["dp-fedavg", "dpps"], choices=[7], also={"train": "rounds"})
    tuning = Tuning(datasets=["ml-100k"], seed=1, rounds=9, lowest=1, highest=2, first=[axis])
    (result,) = list_combinations(tuning, config)
    assert (result.options, result.train) == ({"dp-fedavg": {"releases": 7}}, {"rounds": 7})
