"""The cost model of rounds: fits find what points were made of, and counts grow with what they count."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacita.research.bench import cost_model
from tacita.research.bench.cost_model import (
    CostFit,
    EvaluationSize,
    PlannedRun,
    RoundSize,
    count_exchange_bytes,
    count_exchange_terms,
    count_round_terms,
    fit_costs,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-9, 1e-3), min_size=3, max_size=3), st.integers(0, 99))
def test_a_fit_finds_the_seconds_that_points_were_made_of(seconds: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ("a", "b", "c")
    points = [dict(zip(names, rng.uniform(1, 1000, 3).tolist())) for _ in range(12)]
    truth = CostFit(dict(zip(names, seconds)))
    fit = fit_costs(points, [truth.predict(point) for point in points])
    for point in points:
        assert fit.predict(point) == pytest.approx(truth.predict(point), rel=1e-4)


def test_no_term_takes_negative_seconds() -> None:
    points = [{"useful": float(n), "harmful": float(n * n)} for n in range(1, 8)]
    falling = [10.0 * n - 0.5 * n * n for n in range(1, 8)]
    fit = fit_costs(points, falling)
    assert fit.seconds["harmful"] == 0
    assert fit.seconds["useful"] > 0


def test_rows_of_large_tables_come_from_further_away() -> None:
    small = count_round_terms(RoundSize(1_000, 1_000, 10))
    large = count_round_terms(RoundSize(1_000, 10_000_000, 10))
    name = "a number of a sample past the cache"
    assert small[name] == 0
    assert large[name] == pytest.approx(large["a number of a sample"], rel=0.01)


def test_counts_follow_what_a_round_touches() -> None:
    small = RoundSize(1_000, 500, 10)
    assert small.samples == 10 * 20 * 5
    assert 0 < small.rows_touched < 500
    assert RoundSize(1_000, 500, 1_000).rows_touched == pytest.approx(500)
    many = RoundSize(10_000_000, 500, 10)
    differing = {name for name, count in count_round_terms(many).items() if count != count_round_terms(small)[name]}
    assert differing == {"a person"}


def test_few_moved_rows_travel_alone() -> None:
    all_rows = 100_000 * 32
    assert count_exchange_bytes(RoundSize(10, 100_000, 100_000)) == all_rows * (4 + 8)
    assert count_exchange_bytes(RoundSize(10, 100_000, 10)) < all_rows * 4 * 1.1


def test_twice_as_many_ranks_take_one_step_more() -> None:
    size = RoundSize(1_000, 500, 10)
    steps = [count_exchange_terms(size, ranks)["a step between ranks"] for ranks in (2, 3, 4, 64)]
    assert steps == [1, 2, 2, 6]
    assert size.share(64) == RoundSize(16, 500, 1)


def test_a_slow_network_makes_exchange_slower_and_a_fast_one_nothing_faster() -> None:
    rounds = CostFit({name: 0.0 for name in count_round_terms(RoundSize(1, 1, 1))})
    evaluations = CostFit({name: 0.0 for name in cost_model.count_evaluation_terms(EvaluationSize(1, 1))})
    exchange = CostFit({"a step between ranks": 0.0, "a byte of a step": 1e-9})
    size = RoundSize(1_000, 100_000, 100_000)
    seconds = []
    for network in (0.0, 1e8, 1e12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cost_model, "PLANNED_RUNS", (PlannedRun(size, 2, network),))
            (row,) = cost_model.predict_runs(rounds, evaluations, exchange)
        seconds.append(row["exchange_s"])
    assert seconds[1] == pytest.approx(10 * seconds[0], rel=0.02)
    assert seconds[2] == seconds[0]


def test_the_report_tries_the_model_on_points_that_it_was_not_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = (RoundSize(300, 200, 50), RoundSize(300, 400, 100))
    monkeypatch.setattr(cost_model, "FITTED_ROUNDS", rounds)
    monkeypatch.setattr(cost_model, "TRIED_ROUNDS", (RoundSize(400, 300, 60),))
    monkeypatch.setattr(cost_model, "FITTED_EVALUATIONS", (EvaluationSize(50, 100), EvaluationSize(90, 200)))
    monkeypatch.setattr(cost_model, "TRIED_EVALUATIONS", (EvaluationSize(70, 150),))
    exchanges = [(RoundSize(300, 100 * n, 50), 0.01 * n) for n in range(1, 4)]
    points = []
    report = cost_model.bench_costs(exchanges, 1, lambda done, total: points.append((done, total)))
    assert points == [(n, 6) for n in range(1, 7)]
    tried = [(row["work"], row["size"]) for row in report["rows"] if row["kind"] == "tried"]
    assert [work for work, _ in tried] == ["round", "evaluation", "exchange"]
    fitted = {row["size"] for row in report["rows"] if row["kind"] == "fitted"}
    assert not fitted & {size for _, size in tried}
    assert len(report["predictions"]) == len(cost_model.PLANNED_RUNS)
    assert json.loads(json.dumps(report)) == report
