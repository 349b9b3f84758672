"""What a round costs: seconds of computing, exchange and evaluation, fitted on measured points and tried on others.

Each kind of work is a sum of terms, and each term a number of things times seconds a thing. Fits have no negative
seconds, and weigh relative errors, so that small rounds count as much as large ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from tacita.core.types import Ragged
from tacita.federation.evaluation import TrainedState, build_evaluation_rules, evaluate_devices
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.research.bench.harness import make_scale_federation
from tacita.research.bench.round_runner import RoundRunner
from tacita.research.bench.timing import Report, describe_machine
from tacita.round.plan import Federation

Terms = Mapping[str, float]
"""Name of a term -> how many of its things a piece of work has."""

BYTES_OF_WEIGHT = 4  # float32, sent to every rank
BYTES_OF_SUM = 8  # float64, added up over ranks
CACHE_BYTES = 2**22  # that one rank has for itself, about; rows of larger tables come from further away


@dataclass(frozen=True)
class RoundSize:
    """What decides how long a round takes."""

    people: int
    items: int
    participants: int
    dim: int = 32
    per_person: int = 20
    negatives: int = 4

    @property
    def samples(self) -> int:
        return self.participants * self.per_person * (1 + self.negatives)

    @property
    def rows_touched(self) -> float:
        """Item rows that the participants move, if all items were drawn alike."""
        return self.items * -math.expm1(-self.samples / self.items)

    def share(self, ranks: int) -> RoundSize:
        """The part of one of several ranks."""
        return replace(self, people=math.ceil(self.people / ranks), participants=math.ceil(self.participants / ranks))


@dataclass(frozen=True)
class EvaluationSize:
    """What decides how long it takes to rank all items for some people."""

    people: int
    items: int
    dim: int = 32


def count_round_terms(size: RoundSize) -> Terms:
    return {
        "a round": 1.0,
        "a person": size.people,
        "a number of the item table": size.items * size.dim,
        "a number of a moved row": size.rows_touched * size.dim,
        "a participant": size.participants,
        "a sample": size.samples,
        "a number of a sample": size.samples * size.dim,
        "a number of a sample past the cache": size.samples * size.dim * _find_share_past_cache(size, BYTES_OF_SUM),
    }


def _find_share_past_cache(size: RoundSize | EvaluationSize, bytes_of_number: int) -> float:
    """How much of an item table does not fit into the processor's cache."""
    return max(0.0, 1 - CACHE_BYTES / (size.items * size.dim * bytes_of_number))


def count_evaluation_terms(size: EvaluationSize) -> Terms:
    scores = size.people * size.items
    products = scores * size.dim
    return {
        "an evaluation": 1.0,
        "a person": size.people,
        "a score": scores,
        "a product of a score": products,
        "a product past the cache": products * _find_share_past_cache(size, BYTES_OF_WEIGHT),
    }


def count_exchange_bytes(size: RoundSize) -> float:
    """Bytes between two ranks in a round: the item table down, the sums of touched rows up, or all rows if most are."""
    down = size.items * size.dim * BYTES_OF_WEIGHT
    rows_up = size.rows_touched if 2 * size.rows_touched < size.items else size.items
    return down + rows_up * size.dim * BYTES_OF_SUM


def count_exchange_terms(size: RoundSize, ranks: int) -> Terms:
    """Ranks send along a tree, so twice as many ranks take one step more."""
    steps = math.ceil(math.log2(ranks))
    return {"a step between ranks": steps, "a byte of a step": steps * count_exchange_bytes(size)}


@dataclass(frozen=True)
class CostFit:
    """Seconds a thing of each term."""

    seconds: Terms

    def predict(self, terms: Terms) -> float:
        return sum(self.seconds[name] * count for name, count in terms.items())


def fit_costs(terms: Sequence[Terms], seconds: Sequence[float]) -> CostFit:
    """The fit with the least squares of relative errors, none of its seconds negative."""
    names = list(terms[0])
    measured = np.array(seconds)
    counts = np.array([[point[name] for name in names] for point in terms])
    relative = counts / measured[:, None]
    sizes = np.maximum(np.abs(relative).max(axis=0), np.finfo(np.float64).tiny)
    solution, _ = nnls(relative / sizes, np.ones(len(measured)))
    return CostFit(dict(zip(names, (solution / sizes).tolist())))


# measuring


FITTED_ROUNDS = (
    RoundSize(20_000, 10_000, 1_000),
    RoundSize(20_000, 10_000, 10_000),
    RoundSize(20_000, 100_000, 1_000),
    RoundSize(20_000, 100_000, 10_000),
    RoundSize(200_000, 10_000, 1_000),
    RoundSize(200_000, 100_000, 10_000),
    RoundSize(200_000, 100_000, 1_000, dim=64),
    RoundSize(200_000, 300_000, 3_000),
    RoundSize(20_000, 30_000, 5_000, dim=64),
    RoundSize(20_000, 30_000, 5_000, per_person=60),
    RoundSize(800_000, 30_000, 1_000),
    RoundSize(20_000, 3_000, 200),
)
TRIED_ROUNDS = (
    RoundSize(50_000, 50_000, 5_000),
    RoundSize(100_000, 20_000, 20_000),
    RoundSize(400_000, 200_000, 5_000),
    RoundSize(50_000, 50_000, 2_000, dim=64),
    RoundSize(1_000_000, 100_000, 10_000),
    RoundSize(1_500_000, 500_000, 30_000),
)
FITTED_EVALUATIONS = (
    EvaluationSize(500, 3_000),
    EvaluationSize(5_000, 3_000),
    EvaluationSize(500, 30_000),
    EvaluationSize(2_000, 30_000),
    EvaluationSize(500, 30_000, dim=64),
    EvaluationSize(300, 100_000),
)
TRIED_EVALUATIONS = (
    EvaluationSize(3_000, 10_000),
    EvaluationSize(1_000, 50_000, dim=64),
    EvaluationSize(6_000, 20_000),
)

Tell = Callable[[int, int], object]
"""What hears how many points of all are measured."""


def measure_round(size: RoundSize, repeats: int) -> float:
    federation = _make_federation(size)
    runner = RoundRunner(federation)
    return measure_processor_seconds(runner.play_round, repeats)


def measure_evaluation(size: EvaluationSize, repeats: int) -> float:
    """Ranking all items for one wanted item of each person."""
    federation = _make_federation(RoundSize(size.people, size.items, 1, size.dim))
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    block = federation.stream.blocks[0]
    numbers = np.arange(size.people, dtype=np.int64)
    wanted = Ragged(np.arange(size.people + 1, dtype=np.int64), (numbers % size.items).astype(np.int32))
    state = TrainedState(progress.server, progress.clients)
    rules = build_evaluation_rules(federation, block, ["ndcg"], [10])

    def evaluate() -> None:
        evaluate_devices(federation, state, block, "test", block.train, rules, wanted)

    return measure_processor_seconds(evaluate, repeats)


def measure_processor_seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of several calls after one to warm up; of the processor, which other work disturbs less."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def _make_federation(size: RoundSize) -> Federation:
    return make_scale_federation(size.people, size.items, size.per_person, size.participants, size.dim)


def bench_costs(exchanges: Sequence[tuple[RoundSize, float]], repeats: int, on_point: Tell) -> Report:
    """The model, its errors on points it was fitted on and on others, and what it says of larger runs.

    `exchanges`: seconds in which two ranks exchanged what a round of this size needs; every third one is tried.
    """
    began = time.perf_counter()
    fitted_exchanges = [point for number, point in enumerate(exchanges) if number % 3 != 2]
    tried_exchanges = [point for number, point in enumerate(exchanges) if number % 3 == 2]
    n_points = len(FITTED_ROUNDS) + len(TRIED_ROUNDS) + len(FITTED_EVALUATIONS) + len(TRIED_EVALUATIONS)
    n_done = 0

    def measure(sizes: Sequence[Any], take: Callable[[Any, int], float]) -> list[tuple[Any, float]]:
        nonlocal n_done
        points = []
        for size in sizes:
            points.append((size, take(size, repeats)))
            n_done += 1
            on_point(n_done, n_points)
        return points

    rounds = _fit_work(measure(FITTED_ROUNDS, measure_round), measure(TRIED_ROUNDS, measure_round), count_round_terms)
    evaluations = _fit_work(
        measure(FITTED_EVALUATIONS, measure_evaluation),
        measure(TRIED_EVALUATIONS, measure_evaluation),
        count_evaluation_terms,
    )
    exchange_work = _fit_work(fitted_exchanges, tried_exchanges, lambda size: count_exchange_terms(size, 2))
    works = {"round": rounds, "evaluation": evaluations, "exchange": exchange_work}
    rows = []
    for name, work in works.items():
        rows += [{"work": name, **row} for row in work.rows]
    return {
        "bench": "cost",
        "seconds_a_thing": {name: dict(work.fit.seconds) for name, work in works.items()},
        "largest_error_fitted": {name: work.find_largest_error("fitted") for name, work in works.items()},
        "largest_error_tried": {name: work.find_largest_error("tried") for name, work in works.items()},
        "rows": rows,
        "predictions": predict_runs(rounds.fit, evaluations.fit, exchange_work.fit),
        "seconds": round(time.perf_counter() - began, 1),
        "machine": describe_machine(),
    }


@dataclass(frozen=True)
class FittedWork:
    """One kind of work: its fit, and how far the fit is off at each point."""

    fit: CostFit
    rows: list[Report]

    def find_largest_error(self, kind: str) -> float:
        return max((abs(row["error"]) for row in self.rows if row["kind"] == kind), default=0.0)


def _fit_work(
    fitted: Sequence[tuple[Any, float]], tried: Sequence[tuple[Any, float]], count_terms: Callable[[Any], Terms]
) -> FittedWork:
    fit = fit_costs([count_terms(size) for size, _ in fitted], [seconds for _, seconds in fitted])
    rows = []
    for kind, points in (("fitted", fitted), ("tried", tried)):
        for size, seconds in points:
            predicted = fit.predict(count_terms(size))
            rows.append(
                {
                    "kind": kind,
                    "size": describe_size(size),
                    "measured_ms": round(1000 * seconds, 2),
                    "model_ms": round(1000 * predicted, 2),
                    "error": round(predicted / seconds - 1, 3),
                }
            )
    return FittedWork(fit, rows)


def describe_size(size: RoundSize | EvaluationSize) -> str:
    text = f"{size.people:,} people, {size.items:,} items, dim {size.dim}"
    if isinstance(size, RoundSize):
        text += f", {size.participants:,} take part with {size.per_person}"
    return text


# larger runs


@dataclass(frozen=True)
class PlannedRun:
    """A run that is larger than what was measured."""

    size: RoundSize
    ranks: int
    network: float = 0.0  # bytes a second between hosts; 0: what loopback had here


TEN_GIGABIT = 1.25e9  # bytes a second, at most
PLANNED_RUNS = (
    PlannedRun(RoundSize(10_000_000, 100_000, 10_000), 1),
    PlannedRun(RoundSize(10_000_000, 1_000_000, 10_000), 1),
    PlannedRun(RoundSize(10_000_000, 1_000_000, 100_000), 64, TEN_GIGABIT),
    PlannedRun(RoundSize(1_000_000_000, 1_000_000, 100_000), 64, TEN_GIGABIT),
    PlannedRun(RoundSize(1_000_000_000, 1_000_000, 10_000_000), 64, TEN_GIGABIT),
)
VALIDATED_PEOPLE = 10_000  # who are ranked for after a round, shared out over ranks


def predict_runs(rounds: CostFit, evaluations: CostFit, exchange: CostFit) -> list[Report]:
    """Seconds of a round, by kind of work; ranks work side by side, exchange comes on top."""
    predictions = []
    for plan in PLANNED_RUNS:
        size = plan.size
        computing = rounds.predict(count_round_terms(size.share(plan.ranks)))
        exchanging = 0.0
        if plan.ranks > 1:
            exchanging = exchange.predict(_limit_network(count_exchange_terms(size, plan.ranks), exchange, plan))
        validators = math.ceil(VALIDATED_PEOPLE / plan.ranks)
        validating = evaluations.predict(count_evaluation_terms(EvaluationSize(validators, size.items, size.dim)))
        predictions.append(
            {
                "size": describe_size(size),
                "ranks": plan.ranks,
                "computing_s": round(computing, 3),
                "exchange_s": round(exchanging, 3),
                "round_s": round(computing + exchanging, 3),
                "validation_s": round(validating, 3),
                "gb_between_two_ranks": round(count_exchange_bytes(size) / 1e9, 3),
            }
        )
    return predictions


def _limit_network(terms: Terms, exchange: CostFit, plan: PlannedRun) -> Terms:
    """The same with as many bytes more as the network is slower than the fit's."""
    per_byte = exchange.seconds["a byte of a step"]
    if plan.network <= 0 or per_byte <= 0:
        return terms
    slowdown = max(1.0, 1 / plan.network / per_byte)
    return {**terms, "a byte of a step": terms["a byte of a step"] * slowdown}
