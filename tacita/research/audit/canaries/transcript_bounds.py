"""The least epsilon that plays of two neighbouring worlds allow: by a statistic that half of the plays choose.

A quarter of the plays fits statistics, another chooses one of them and a threshold, and the rest counts how often it is
passed in either world. Clopper and Pearson bound both chances, so a bound is wrong in at most 5 of 100 audits,
whatever was chosen. A reader that knows the mechanism may bring its own statistic (an entry `reader/...`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Bools, Doubles
from tacita.research.audit.canaries.bounds import MAX_EPSILON, compute_upper_bound
from tacita.research.audit.canaries.transcripts import READER, FeatureTable, Plays, tabulate_features

MAX_FEATURES = 600  # of which a linear statistic is made; a table with more is read by its squares alone
SHRINKAGE = 0.2  # of covariances towards their diagonal
N_THRESHOLDS = 60
N_GAPS = 10  # between scores, the widest, that are thresholds as well
CLIP = 8.0  # deviations beyond which a number counts no further


@dataclass(frozen=True)
class EpsilonBound:
    """What some plays prove."""

    epsilon: float
    statistic: str
    mu: float  # how many deviations of the statistic the two worlds are apart


Statistic = Callable[[Doubles], Doubles]


def bound_epsilon(without: Plays, with_person: Plays, delta: float, public: Collection[str] = ()) -> EpsilonBound:
    """A lower bound on epsilon at this delta; 0 where nothing varies."""
    table = tabulate_features(without, with_person, public)
    if not table.groups:
        return EpsilonBound(0.0, "nothing varies", 0.0)
    fitting, choosing, testing = _split_plays(table)
    chosen_name = ""
    chosen_test = None
    best_bound = -1.0
    for name, statistic in _list_statistics(fitting):
        test = _choose_test(statistic, choosing, delta)
        bound = _apply_test(test, choosing, delta)
        if bound > best_bound:
            chosen_name, chosen_test, best_bound = name, test, bound
    assert chosen_test is not None
    epsilon = _apply_test(chosen_test, testing, delta)
    mu = _measure_mu(chosen_test.statistic, testing)
    return EpsilonBound(epsilon, chosen_name, mu)


def _split_plays(table: FeatureTable) -> tuple[FeatureTable, FeatureTable, FeatureTable]:
    """A quarter of the plays fits statistics, a quarter chooses one, and half of them test it."""
    n_plays = min(len(table.without), len(table.with_person))
    quarter = n_plays // 4
    fitting = _take_rows(table, slice(0, quarter))
    choosing = _take_rows(table, slice(quarter, 2 * quarter))
    testing = _take_rows(table, slice(2 * quarter, n_plays))
    return fitting, choosing, testing


def _take_rows(table: FeatureTable, rows: slice) -> FeatureTable:
    return FeatureTable(table.without[rows], table.with_person[rows], table.groups)


def measure_reader(without: Plays, with_person: Plays, name: str) -> float:
    """mu of the score that a reader put into transcripts: how many deviations both worlds are apart."""
    scores_without = np.array([float(play.entries[name]) for play in without])
    scores_with = np.array([float(play.entries[name]) for play in with_person])
    return _measure_gap(scores_without, scores_with)


def _measure_gap(without: Doubles, with_person: Doubles) -> float:
    gap = float(with_person.mean() - without.mean())
    variance = (without.var() + with_person.var()) / 2
    return abs(gap) / max(math.sqrt(variance), 1e-12)


def _measure_mu(statistic: Statistic, table: FeatureTable) -> float:
    return _measure_gap(statistic(table.without), statistic(table.with_person))


# Statistics


def _list_statistics(table: FeatureTable) -> list[tuple[str, Statistic]]:
    """Candidates: what the reader brings, a linear one, and the size of each entry's noise."""
    statistics: list[tuple[str, Statistic]] = []
    for name, columns in table.groups:
        if name.startswith(READER):
            statistics.append((name.removeprefix(READER), _make_column_statistic(columns.start)))
    n_features = table.without.shape[1]
    if n_features <= MAX_FEATURES:
        statistics.append(("a linear reader", _fit_linear_statistic(table.without, table.with_person)))
    centre = np.concatenate([table.without, table.with_person]).mean(axis=0)
    for name, columns in table.groups:
        if columns.stop - columns.start > 1:
            statistics.append((f"the size of {name}", _make_square_statistic(columns, centre[columns])))
    return statistics


def _make_column_statistic(column: int) -> Statistic:
    def statistic(values: Doubles) -> Doubles:
        return values[:, column]

    return statistic


def _make_square_statistic(columns: slice, centre: Doubles) -> Statistic:
    def statistic(values: Doubles) -> Doubles:
        deviations = values[:, columns] - centre
        return np.asarray((deviations**2).mean(axis=1))

    return statistic


def _fit_linear_statistic(without: Doubles, with_person: Doubles) -> Statistic:
    """The direction that separates two normal laws best, with covariances drawn towards their diagonal."""
    centre = (without.mean(axis=0) + with_person.mean(axis=0)) / 2
    pooled = np.concatenate([without - without.mean(axis=0), with_person - with_person.mean(axis=0)])
    deviation = np.maximum(pooled.std(axis=0), 1e-9)
    gap = (with_person.mean(axis=0) - without.mean(axis=0)) / deviation
    scaled = np.clip(pooled / deviation, -CLIP, CLIP)
    covariance = scaled.T @ scaled / len(scaled)
    diagonal = np.diag(np.diag(covariance) + 1e-6)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * diagonal
    direction = np.linalg.solve(shrunk, gap)

    def statistic(values: Doubles) -> Doubles:
        standardised = np.clip((values - centre) / deviation, -CLIP, CLIP)
        return np.asarray(standardised @ direction)

    return statistic


# Tests


@dataclass(frozen=True)
class ThresholdTest:
    """Guesses a world by a threshold on a statistic."""

    statistic: Statistic
    threshold: float
    from_above: bool  # passed where the statistic is at least the threshold; else where it is below
    names_person: bool  # passing says that the person is there; else that they are not

    def passes(self, values: Doubles) -> Bools:
        is_above = self.statistic(values) >= self.threshold
        return is_above if self.from_above else ~is_above


def _choose_test(statistic: Statistic, table: FeatureTable, delta: float) -> ThresholdTest:
    """The threshold and direction that bound epsilon best on the plays that choose."""
    scores = np.concatenate([statistic(table.without), statistic(table.with_person)])
    thresholds = _list_thresholds(scores)
    best_test = ThresholdTest(statistic, float(thresholds[0]), True, True)
    best_bound = -1.0
    for threshold in thresholds:
        for from_above in (True, False):
            for names_person in (True, False):
                test = ThresholdTest(statistic, float(threshold), from_above, names_person)
                bound = _apply_test(test, table, delta)
                if bound > best_bound:
                    best_test, best_bound = test, bound
    return best_test


def _list_thresholds(scores: Doubles) -> Doubles:
    """Between neighbouring scores, the widest gaps first: of thresholds that do as well the first is chosen."""
    ordered = np.unique(scores)
    if len(ordered) == 1:
        return ordered
    middles = (ordered[1:] + ordered[:-1]) / 2
    widest = np.argsort(-np.diff(ordered), kind="stable")[:N_GAPS]
    evenly = np.linspace(0, len(middles) - 1, N_THRESHOLDS).round().astype(np.int64)
    return np.asarray(middles[np.concatenate([widest, evenly])])


def _apply_test(test: ThresholdTest, table: FeatureTable, delta: float) -> float:
    passes_without = test.passes(table.without)
    passes_with = test.passes(table.with_person)
    if test.names_person:
        return bound_ratio(passes_with, passes_without, delta)
    return bound_ratio(passes_without, passes_with, delta)


def bound_ratio(likely: Bools, unlikely: Bools, delta: float) -> float:
    """The epsilon that an event must have at least which is so much more frequent in one world than in the other."""
    n_likely, n_unlikely = len(likely), len(unlikely)
    n_missed = float(n_likely - likely.sum())
    least_likely = 1 - compute_upper_bound(n_missed, n_likely)
    most_unlikely = compute_upper_bound(float(unlikely.sum()), n_unlikely)
    if least_likely <= delta:
        return 0.0
    epsilon = math.log((least_likely - delta) / most_unlikely)
    return max(0.0, min(MAX_EPSILON, epsilon))
