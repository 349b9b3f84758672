"""What a table shows of accuracy against epsilon: a point for every budget, a line for what promises none."""

from __future__ import annotations

import statistics

from tacita.report.accuracy import AccuracyPoint
from tacita.research.experiments.experiment_cell import Cells
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.single_block import CellLines

EPSILON = "epsilon"
SeedValues = dict[str, list[float]]
"""Metric -> its values in a cell."""

VariantSeeds = dict[str, list[SeedValues]]
"""Variant -> the values of each seed."""


def collect_points(experiment: Experiment, cells: Cells, lines: CellLines) -> list[AccuracyPoint]:
    """The variants that belong to a curve, by the table's first metric: mean and standard deviation over seeds.

    The epsilon is the one that the run itself promised, never the one that its settings asked for.
    """
    datasets: dict[str, VariantSeeds] = {}
    for dataset in experiment.datasets:
        datasets[dataset] = {}
    for cell in cells:
        line = lines.get(cell.key, {})
        variant = experiment.variants[cell.variant]
        if variant.curve and "values" in line:
            seeds = datasets[cell.dataset].setdefault(cell.variant, [])
            seeds.append(line["values"])
    points = []
    for dataset, variants in datasets.items():
        for name, seeds in variants.items():
            points.append(_build_point(experiment, dataset, name, seeds))
    return points


def _find_promise(values: SeedValues) -> float | None:
    return values[EPSILON][0] if EPSILON in values else None


def _build_point(experiment: Experiment, dataset: str, name: str, seeds: list[SeedValues]) -> AccuracyPoint:
    metric = experiment.metrics[0]
    scores = [values[metric][0] for values in seeds]
    budgets = {_find_promise(values) for values in seeds}
    assert len(budgets) == 1, f"seeds of {name} promise different budgets"
    mean = statistics.fmean(scores)
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    curve = experiment.variants[name].curve
    return AccuracyPoint(dataset, curve, budgets.pop(), mean, spread)
