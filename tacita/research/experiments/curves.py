"""What a table shows of accuracy against epsilon: a point for every budget, a line for what promises none."""

from __future__ import annotations

import statistics

from tacita.report.accuracy import AccuracyPoint
from tacita.research.experiments.experiment_spec import Experiment, ExperimentCell
from tacita.research.experiments.single_block import Line

EPSILON = "epsilon"


def collect_points(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> list[AccuracyPoint]:
    """The variants that belong to a curve, by the table's first metric: mean and standard deviation over seeds.

    The epsilon is the one that the run itself promised, never the one that its settings asked for.
    """
    metric, found = experiment.metrics[0], dict[tuple[str, str], list[dict[str, list[float]]]]()
    for cell in cells:
        line = lines.get(cell.key, {})
        if experiment.variants[cell.variant].curve and "values" in line:
            found.setdefault((cell.dataset, cell.variant), []).append(line["values"])
    out = []
    for (dataset, name), seeds in sorted(found.items(), key=lambda one: experiment.datasets.index(one[0][0])):
        values = [one[metric][0] for one in seeds]
        promised = {one[EPSILON][0] if EPSILON in one else None for one in seeds}
        assert len(promised) == 1, f"seeds of {name} promise different budgets"
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        curve = experiment.variants[name].curve
        out.append(AccuracyPoint(dataset, curve, promised.pop(), statistics.fmean(values), spread))
    return out
