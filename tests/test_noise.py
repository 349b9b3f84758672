"""Calibration against dp-accounting, noise against exact laws; every such test fails with a fudge factor."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from helpers import noise_laws
from helpers.noise_laws import SURE
from tacita.core.config import RunConfig, validate_model
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import ServerState
from tacita.kernels import threads
from tacita.messages import Total
from tacita.privacy.calibration import (
    compute_epsilon_of_mu,
    compute_gaussian_delta,
    compute_gaussian_epsilon,
    compute_gaussian_sigma,
    compute_max_mu,
)
from tacita.privacy.noise import NoiseStream
from tacita.runs.assembly import build_plan

SOURCES = {"lab": Draws(1), "device": Draws(1, "a secret that stays here")}


def test_calibration_equals_known_values() -> None:
    assert compute_gaussian_sigma(1, 1e-5) == pytest.approx(3.7306, abs=1e-4)
    assert compute_gaussian_sigma(0.5, 1e-5) == pytest.approx(7.032, abs=1e-3)
    assert compute_gaussian_sigma(5, 1e-5) == pytest.approx(0.892, abs=1e-3)
    assert math.sqrt(50) * compute_gaussian_sigma(5, 1e-5) == pytest.approx(6.31, abs=0.01)
    assert compute_gaussian_epsilon(1 / math.sqrt(50), 1e-5) == pytest.approx(54.38, abs=0.01)
    assert compute_gaussian_delta(1.0, 1.0) == pytest.approx(
        0.127, abs=1e-3
    )  # what the rule sensitivity / epsilon achieves
    assert compute_gaussian_delta(0.2, 5.0) == pytest.approx(0.899, abs=1e-3)
    assert compute_gaussian_epsilon(0.0, 1e-5) == math.inf
    assert compute_epsilon_of_mu(np.array([0.0, np.inf]), 1e-5).tolist() == [0.0, math.inf]


def test_calibration_is_that_of_dp_accounting() -> None:
    rng = np.random.default_rng(3)
    for epsilon, delta in zip(np.exp(rng.uniform(-4, 4, 100)), 10 ** rng.uniform(-9, -2, 100)):
        sigma = compute_gaussian_sigma(epsilon, delta)
        assert sigma == pytest.approx(dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6)
        assert compute_gaussian_epsilon(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
        assert compute_gaussian_delta(sigma, epsilon) <= delta  # never a little more than was promised
        assert compute_max_mu(epsilon, delta) == pytest.approx(1 / sigma, rel=1e-12)


def test_invalid_budgets_are_refused() -> None:
    for epsilon, delta in ((0.0, 1e-5), (-1.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1.0), (math.nan, 1e-5)):
        with pytest.raises(TacitaError):
            compute_gaussian_sigma(epsilon, delta)
    with pytest.raises(TacitaError):
        compute_epsilon_of_mu(np.array([np.nan]), 1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_normals_and_laplaces_have_their_distribution(source: str) -> None:
    n = 400_000
    for name, law in (("normals", noise_laws.normal), ("laplaces", noise_laws.laplace)):
        drawn = getattr(NoiseStream(SOURCES[source], name), f"draw_{name}")(n)
        assert law(drawn) > SURE
        assert law(0.99 * drawn) < SURE  # one per cent too little is found
        assert law(drawn + 0.02) < SURE
    pairs = NoiseStream(SOURCES[source], "pairs").draw_normals(2, n // 2)
    assert abs(np.corrcoef(pairs)[0, 1]) < 5 / math.sqrt(n // 2)


@pytest.mark.parametrize("n", [1, 2, 40])
def test_gammas_have_their_distribution(n: int) -> None:
    drawn = NoiseStream(SOURCES["device"], "gammas", n).draw_gammas(n, 100, 500)
    assert drawn.shape == (100, 500)
    assert stats.kstest(drawn.ravel(), stats.gamma(n).cdf).pvalue > 1e-3
    assert stats.kstest(1.03 * drawn.ravel(), stats.gamma(n).cdf).pvalue < 1e-3  # three per cent too much is found


def test_laplace_noise_of_a_device_comes_from_its_sealed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is not cryptographic, under a key of 64 bits, gives the rest away to who reads some of it."""
    values = {"data": "synthetic:users=9,items=6", "backbone": {"name": "mf", "dim": 2}, "method": "fedavg"}
    values |= {"parts": [{"name": "laplace-noise", "mode": "ldp"}]}
    config = validate_model(RunConfig, values, "the test")
    server = ServerState(np.zeros((500, 20), np.float32), {})
    total = Total({"rows": np.zeros((500, 20))}, 3.0, 3, nonce=5)
    monkeypatch.setattr(np.random, "Philox", None)
    part = build_plan(config, "a secret of a device").parts[0].privacy
    assert part is not None
    drawn = part.noise_sum(server, total)["rows"]
    assert drawn.var() == pytest.approx(3 * 2 * part.noise_scale**2, rel=0.1)  # type: ignore[attr-defined]
    assert np.array_equal(part.noise_sum(server, total)["rows"], drawn)
    assert not (part.noise_sum(server, replace(total, nonce=6))["rows"] == drawn).any()
    with pytest.raises(TypeError):  # the lab's is fast
        build_plan(config).implementing("noise_sum")[0].noise_sum(server, total)  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.7])
def test_discrete_normals_have_their_distribution(source: str, sigma: float) -> None:
    drawn = NoiseStream(SOURCES[source], "whole").draw_discrete_normals(sigma, 200_000)
    assert drawn.dtype == np.int64
    assert noise_laws.whole_normal(drawn, sigma) > SURE
    assert noise_laws.whole_normal(drawn, 1.03 * sigma) < SURE  # three per cent too little is found


def test_wide_discrete_normals_are_nearly_normal() -> None:
    sigma = 3e7
    drawn = NoiseStream(SOURCES["lab"], "whole").draw_discrete_normals(sigma, 400, 500)
    assert drawn.shape == (400, 500)
    assert noise_laws.normal(drawn, sigma) > SURE
    assert noise_laws.normal(0.98 * drawn, sigma) < SURE


@pytest.mark.parametrize("source", SOURCES)
def test_whole_numbers_below_are_equally_likely(source: str) -> None:
    drawn = NoiseStream(SOURCES[source], "below").draw_integers_below(300_000, 7)
    assert stats.chisquare(np.bincount(drawn, minlength=7)).pvalue > SURE
    assert (NoiseStream(SOURCES[source], "below").draw_integers_below(1000, 2**62) >= 0).all()


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_follows_its_name_alone(source: str) -> None:
    draws = SOURCES[source]
    assert (NoiseStream(draws, "a", 1, 2).draw_normals(9) == NoiseStream(draws, "a", 1, 2).draw_normals(9)).all()
    for other in (
        NoiseStream(draws, "a", 1, 3),
        NoiseStream(draws, "b", 1, 2),
        NoiseStream(Draws(2, draws.secret), "a", 1, 2),
    ):
        assert not np.isclose(NoiseStream(draws, "a", 1, 2).draw_normals(9), other.draw_normals(9)).any()
    both = NoiseStream(draws, "a").draw_normals(4), NoiseStream(draws, "a")
    first = both[1].draw_normals(4)
    assert (both[0] == first).all()
    assert not np.isclose(first, both[1].draw_normals(4)).any()  # what follows is new


def test_device_noise_cannot_be_derived_from_the_seed() -> None:
    ours = NoiseStream(Draws(1, "secret"), "noise", 0, 3).draw_normals(1000)
    guessed = [NoiseStream(Draws(1, other), "noise", 0, 3).draw_normals(1000) for other in ("", "Secret")]
    for other in guessed:
        assert abs(np.corrcoef(ours, other)[0, 1]) < 0.2


def test_noise_is_the_same_on_one_core_and_on_more(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for cores in (1, 2, 3):
        monkeypatch.setattr(threads, "threads_in_use", lambda cores=cores: cores)
        drawn.append(NoiseStream(Draws(3), "cores").draw_normals(70_001))
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] == drawn[2]).all()
