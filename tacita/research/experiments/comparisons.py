"""Comparisons of a table's variants: paired tests per user, differences seed by seed, and measures of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from tacita.core.types import Doubles
from tacita.metrics import compute_confidence_interval, summarise_continual
from tacita.research.experiments.experiment_cell import Cells
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.single_block import CellLines, Line, unpack_scores
from tacita.research.experiments.tables import Labels, group_lines_by_place

Method = tuple[str, str]
"""Backbone and variant."""

MethodRuns = dict[Method, list[Doubles]]
"""Method -> the users' scores of each seed."""

MethodScores = dict[Method, Doubles]
"""Method -> the users' mean scores."""

Rows = list[list[str]]

SeedScores = dict[str, dict[int, float]]
"""Variant -> seed -> score."""

PlaceScores = dict[tuple[str, str], SeedScores]
"""(dataset, backbone) -> the scores of its variants."""

MEANS = ("mask_history", "new", "returning")  # measures of a block, averaged over later blocks and seeds
CONTINUAL = ("la", "ra", "hm")


@dataclass(frozen=True)
class PairedComparison:
    """A paired test per user of one variant against the best of the others."""

    dataset: str
    backbone: str
    variant: str
    against: str
    gain: float  # relative difference of the means
    p: float
    pairs: int
    its_backbone: str  # of what it is compared with

    def describe_other(self, labels: Labels) -> str:
        """What it is compared with, in words."""
        label = labels[self.against]
        if self.its_backbone == self.backbone:
            return label
        return f"{label} ({self.its_backbone})"


def compare_variants(experiment: Experiment, cells: Cells, lines: CellLines) -> list[PairedComparison]:
    """Pairs are (block, user), each averaged over the seeds first: seeds are not new people.

    Where seeds tested different people, as when hidden items leave somebody nothing to ask for, there are no pairs.
    """
    comparisons = []
    for dataset, runs_of in _collect_user_scores(cells, lines).items():
        means = _average_seeds(runs_of)
        for backbone, variant in means:
            if variant not in experiment.compare:
                continue
            comparison = _compare_with_best(dataset, (backbone, variant), means, experiment.across)
            if comparison:
                comparisons.append(comparison)
    return comparisons


def _collect_user_scores(cells: Cells, lines: CellLines) -> dict[str, MethodRuns]:
    """The users' scores on each dataset."""
    scores: dict[str, MethodRuns] = {}
    for cell in cells:
        line = lines.get(cell.key, {})
        if "users" not in line:
            continue
        methods = scores.setdefault(cell.dataset, {})
        runs = methods.setdefault((cell.backbone, cell.variant), [])
        runs.append(unpack_scores(line["users"]))
    return scores


def _average_seeds(runs_of: MethodRuns) -> MethodScores:
    """The users' mean scores over seeds; nothing where runs tested different people."""
    sizes: set[int] = set()
    for runs in runs_of.values():
        sizes.update(len(run) for run in runs)
    if len(sizes) > 1:
        return {}
    means = {}
    for method, runs in runs_of.items():
        means[method] = np.mean(runs, axis=0)
    return means


def _compare_with_best(dataset: str, method: Method, means: MethodScores, across: bool) -> PairedComparison | None:
    """The test against the best other variant, of the same backbone or, `across`, of the others."""
    backbone, variant = method
    others: MethodScores = {}
    for other, scores in means.items():
        other_backbone, other_variant = other
        if other_variant == variant:
            continue
        is_across = other_backbone != backbone
        if is_across == across:
            others[other] = scores
    if not others:
        return None
    best = max(others, key=lambda other: float(others[other].mean()))
    best_backbone, best_variant = best
    own_scores = means[method]
    best_scores = others[best]
    return PairedComparison(
        dataset=dataset,
        backbone=backbone,
        variant=variant,
        against=best_variant,
        gain=float(own_scores.mean() / best_scores.mean() - 1),
        p=_compute_paired_p(own_scores, best_scores),
        pairs=len(own_scores),
        its_backbone=best_backbone,
    )


def _compute_paired_p(scores: Doubles, others: Doubles) -> float:
    if np.array_equal(scores, others):
        return 1.0
    return float(stats.ttest_rel(scores, others).pvalue)


def summarise_streams(experiment: Experiment, cells: Cells, lines: CellLines) -> Rows:
    """Further measures of a stream as rows: means over blocks 1.. and seeds, and LA, RA, HM over all blocks."""
    rows = []
    for place, finished in group_lines_by_place("blocks", cells, lines).items():
        dataset, backbone, variant = place
        means = _average_later_blocks(finished) + _average_continual(finished)
        row = [dataset, backbone, experiment.variants[variant].label]
        for mean in means:
            row.append(f"{mean:.4f}")
        rows.append(row)
    return rows


def _average_later_blocks(finished: list[Line]) -> list[float]:
    later: list[dict[str, Any]] = []
    for line in finished:
        later += line["blocks"][1:]
    return [_average_field(name, later) for name in MEANS]


def _average_continual(finished: list[Line]) -> list[float]:
    measures = []
    for line in finished:
        blocks = line["blocks"]
        scores = [block["on_blocks"] for block in blocks]
        users = [block["users"] for block in blocks]
        measures.append(summarise_continual(scores, users))
    return [_average_field(name, measures) for name in CONTINUAL]


def _average_field(name: str, records: Sequence[Mapping[str, float]]) -> float:
    values = [record[name] for record in records]
    return float(np.mean(values))


def compare_seeds(experiment: Experiment, cells: Cells, lines: CellLines) -> Rows:
    """The first metric (of a stream: its mean) minus the baseline's of the same seed, as rows: a seed is a split."""
    rows = []
    all_scores = _collect_seed_scores(experiment.metrics[0], cells, lines)
    for (dataset, backbone), scores in all_scores.items():
        baseline = scores.get(experiment.baseline, {})
        for name, variant in experiment.variants.items():
            own = scores.get(name, {})
            seeds = sorted(own.keys() & baseline.keys())
            if name == experiment.baseline or len(seeds) < 2:
                continue
            differences = [own[seed] - baseline[seed] for seed in seeds]
            mean, half = compute_confidence_interval(differences)
            interval = f"{mean:+.4f} ± {half:.4f}"
            verdict = _judge_difference(mean, half)
            rows.append([dataset, backbone, variant.label, interval, verdict])
    return rows


def _collect_seed_scores(metric: str, cells: Cells, lines: CellLines) -> PlaceScores:
    """The last value of a metric in every finished cell."""
    scores: PlaceScores = {}
    for cell in cells:
        values = lines.get(cell.key, {}).get("values", {})
        row = values.get(metric)
        if row:
            own = scores.setdefault((cell.dataset, cell.backbone), {})
            seeds = own.setdefault(cell.variant, {})
            seeds[cell.seed] = row[-1]
    return scores


def _judge_difference(mean: float, half: float) -> str:
    if mean > half:
        return "above"
    return "below" if mean < -half else "no clear difference"
