"""What a table shows of accuracy against epsilon: a point for every budget, a line for what promises none."""

from __future__ import annotations

import statistics
from collections import defaultdict

from tacita.report.accuracy import AccuracyPoint
from tacita.research.experiments.experiment_spec import Experiment, ExperimentCell
from tacita.research.experiments.single_block import CellLines

EPSILON = "epsilon"
SeedValues = dict[str, list[float]]
"""Metric -> its values in a cell."""


def collect_points(experiment: Experiment, cells: list[ExperimentCell], lines: CellLines) -> list[AccuracyPoint]:
    """The variants that belong to a curve, by the table's first metric: mean and standard deviation over seeds.

    The epsilon is the one that the run itself promised, never the one that its settings asked for.
    """
    groups: dict[tuple[str, str], list[SeedValues]] = defaultdict(list)
    for cell in cells:
        line = lines.get(cell.key, {})
        is_on_curve = experiment.variants[cell.variant].curve != ""
        if is_on_curve and "values" in line:
            groups[cell.dataset, cell.variant].append(line["values"])
    points = []
    for dataset in experiment.datasets:
        for (place, name), seeds in groups.items():
            if place == dataset:
                points.append(_build_point(experiment, dataset, name, seeds))
    return points


def _build_point(experiment: Experiment, dataset: str, name: str, seeds: list[SeedValues]) -> AccuracyPoint:
    metric = experiment.metrics[0]
    scores = [values[metric][0] for values in seeds]
    budgets = {values[EPSILON][0] if EPSILON in values else None for values in seeds}
    assert len(budgets) == 1, f"seeds of {name} promise different budgets"
    mean = statistics.fmean(scores)
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    curve = experiment.variants[name].curve
    return AccuracyPoint(dataset, curve, budgets.pop(), mean, spread)
