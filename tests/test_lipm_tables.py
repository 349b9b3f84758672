"""The tables of LIPM + DPPS: budgets that can be compared, one search for every method, rows that share cells."""

from __future__ import annotations

from typing import Any

import pytest

from tacita.research.experiments import experiment_spec, learning_rates
from tacita.research.experiments.experiment_cell import ExperimentCell
from tacita.runs.assembly import build_components

SOURCES = {
    "fedrec", "fedmf-he", "fedneumf", "dp-fedavg", "pfedme", "lipm", "lipm-dpps", "fedavg", "dpps", "dpps-people",
    "lipm-dpps-people",
}  # fmt: skip


def cells(table: str) -> dict[str, ExperimentCell]:
    experiment, settings = experiment_spec.load_experiment(f"lipm-dpps/{table}")
    result = experiment_spec.list_cells(experiment, settings, ["ml-100k"], experiment.backbones, 1)
    return {entry.variant: entry for entry in result}


def budget(cell: ExperimentCell) -> dict[str, Any]:
    """The options of the part that noises."""
    _, parts, _ = build_components(cell.config)
    [part] = [entry for entry in parts if entry.name in ("dpps", "dp-fedavg")]
    return part.config.model_dump()


def test_every_method_has_the_same_budget_of_trials_whatever_it_has_to_choose() -> None:
    experiment = experiment_spec.load_main_table("lipm-dpps")
    assert experiment.tune
    assert experiment.tune.seed not in range(experiment.seeds + 1)
    entries = learning_rates.list_tuning_entries(experiment, ["ml-100k"], 6)
    assert {entry.source for entry in entries} == SOURCES
    clips = {element.source: [t.options for t in element.trials] for element in entries}
    assert [dpp["dpps"]["clip"] for dpp in clips["dpps"]] == [0.1, 1.0, 10.0]
    assert clips["lipm"] == [{}]
    turns = learning_rates.interleave_cells(entries)
    assert len(turns) == sum(len(entry.cells) for entry in entries)
    assert [turn.variant for turn in turns[: len(entries)]] == [entry.variant for entry in entries]
    lines = {cell.key: {"valid": 0.1} for cell in turns}
    wider = learning_rates.add_second_step(experiment, entries, lines, 6)
    assert {len(entry.cells) for entry in wider} == {6}
    [private] = [entry for entry in wider if entry.source == "dpps-people"]
    assert {t.options["dpps"]["clip"] for t in private.trials[3:]} == {0.1}
    assert len({t.lr for t in private.trials[3:]}) == 3


def test_pfedme_is_searched_over_the_steps_that_it_takes() -> None:
    experiment = experiment_spec.load_main_table("lipm-dpps")
    [entry] = learning_rates.list_tuning_entries(experiment, ["ml-100k", "pfedme"], 6)
    [wider] = learning_rates.add_second_step(experiment, [entry], {cell.key: {"valid": 0.1} for cell in entry.cells}, 6)
    assert {t.lr for t in wider.trials} == {None}  # it never reads the model's rate
    took = [cell.config.train.pfedme for cell in wider.cells]
    assert len({element.inner_lr for element in took}) == 6
    assert len({element.eta for element in took}) == 6
    assert {element.lam for element in took} == {1.0}  # what is searched does not take the rest of the preset away
    assert all(element.inner_lr * element.lam < 2 and element.eta * element.lam <= 1.01 for element in took)


@pytest.mark.parametrize("table", ["table2", "table3", "figure4", "figure5", "figure6", "figure7"])
def test_row_settings_come_from_tuning(table: str) -> None:
    experiment, _ = experiment_spec.load_experiment(f"lipm-dpps/{table}")
    for name, variant in experiment.variants.items():
        assert variant.source in SOURCES | {"popular"}, name


def test_rows_are_compared_at_equal_budgets() -> None:
    result = cells("table3")
    for name in ("base", "lipm", "dpps", "both"):
        for row, unit in ((name, "silo"), (f"{name}_people", "person")):
            message = budget(result[row])
            assert (message["unit"], message["delta"], message["releases"], message["calibration"]) == (
                unit,
                1e-5,
                50,
                "analytic",
            )
            assert message["tiers"] == ([0.5] if name in ("base", "lipm") else [0.5, 1.0, 5.0])
    private = [result[name].config.privacy for name in ("tally_careful", "tally_private")]
    assert [(entry.epsilon, entry.delta) for entry in private] == [(0.5, 1e-5), (5.0, 1e-5)]
    assert result["tally"].config.privacy.epsilon is None
    assert budget(cells("table2")["dp_fedavg"])["epsilon"] == 5.0


def test_tables_share_their_cells() -> None:
    two, three = cells("table2"), cells("table3")
    same = {"clean": "clean", "dpps": "dpps", "lipm_dpps": "both", "dpps_people": "dpps_people", "tally": "tally"}
    for first, other in same.items():
        assert two[first].key == three[other].key


def test_rows_of_people_differ_by_the_parts_alone() -> None:
    three = cells("table3")
    rows = [three[f"{name}_people"] for name in ("base", "lipm", "dpps", "both")]
    assert len({(budget(row)["clip"], row.config.backbone["lr"]) for row in rows}) == 1


def test_figures_share_the_cells_of_table_2() -> None:
    two, rounds = cells("table2"), cells("figure5")
    assert two["lipm_dpps"].key == rounds["private_50"].key
    assert two["lipm_plain"].key == rounds["rounds_50"].key  # the figures have LIPM as it was before folds


def test_lipm_stands_beside_itself_without_folds_and_beside_a_baseline_of_as_many_epochs() -> None:
    for table, name in (("table2", "lipm"), ("table3", "lipm_clean")):
        result = cells(table)
        row, plain = result[name].config, result[f"{name}_plain"].config
        assert (row.backbone["folds"], row.train.local_epochs, row.train.held_steps) == (2, 1, 8)
        assert "folds" not in plain.backbone
        assert (plain.train.local_epochs, plain.train.held_steps) == (1, 1000)
        for lipm, baseline, epochs in ((row, "clean", 1), (result[f"{name}_five"].config, "clean_5", 5)):
            other = result[baseline].config.train
            assert (other.local_epochs, other.rounds) == (lipm.train.local_epochs, lipm.train.rounds)
            assert lipm.train.local_epochs == epochs


def test_noise_of_figure_6_is_on_updates_of_length_1() -> None:
    for name, deviation in {"noise_01": 0.01, "noise_05": 0.05, "noise_1": 0.1, "noise_2": 0.2, "noise_5": 0.5}.items():
        message = budget(cells("figure6")[name])
        assert message["clip"] == 1
        assert 2 * message["clip"] / message["tiers"][0] == pytest.approx(deviation)
