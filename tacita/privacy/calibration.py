"""How much Gaussian noise a budget asks for, and what given noise costs: closed forms, exact up to rounding.

A Gaussian release of sensitivity 1 and deviation sigma is mu-GDP with mu = 1 / sigma (Dong, Roth, Su 2022), and
(epsilon, delta)-private exactly where `gaussian_delta` says so (Balle and Wang 2018). Releases without sampling add up
as mu^2, so everything here goes through mu. What is returned errs on the safe side: mu and epsilon are found by
bisection, and of the last bracket the end that promises less is taken.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from tacita.core.errors import TacitaError
from tacita.core.types import Doubles

_HALVINGS = 200  # until the ends of a bracket are neighbours in double precision
_ROUND_DOWN = 1 - 1e-12  # what a budget is worth is rounded down, so that rounding elsewhere never exceeds it


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The smallest delta at which noise of this deviation, for sensitivity 1, is (epsilon, delta)-private."""
    if not sigma > 0:
        return 1.0
    return float(_delta(np.asarray(1.0 / sigma), np.asarray(epsilon, np.float64)))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """What one release with noise of this deviation, for sensitivity 1, costs; no noise costs everything."""
    _check_delta(delta)
    if not sigma > 0:
        return math.inf
    return float(epsilon_of_mu(np.array([1.0 / sigma]), delta)[0])


def epsilon_of_mu(mu: Doubles, delta: float) -> Doubles:
    """The epsilon of mu-GDP at a delta, for many mu at once; 0 where delta alone covers it."""
    _check_delta(delta)
    mu = np.asarray(mu, np.float64)
    if np.isnan(mu).any() or (mu < 0).any():
        raise TacitaError("a privacy loss mu must be a number that is not negative.")
    out = np.full(mu.shape, np.inf)
    out[mu == 0] = 0.0
    some = np.flatnonzero((mu > 0) & np.isfinite(mu))
    of = mu[some]
    high = of**2 / 2 + of * math.sqrt(2 * math.log(1 / delta))  # what zero-concentrated privacy promises: never less
    low = np.zeros(len(some))
    high[_delta(of, low) <= delta] = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _delta(of, middle) <= delta
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        if ((low + high) / 2 <= low).all():
            break
    out[some] = high
    return out


@lru_cache(maxsize=4096)
def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu-GDP loss that (epsilon, delta) allows: what a budget is worth."""
    _check_delta(delta)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise TacitaError(f"an epsilon must be a number above 0, not {epsilon}.")
    at, low, high = np.asarray(epsilon, np.float64), 0.0, 1.0
    while float(_delta(np.asarray(high), at)) <= delta:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if float(_delta(np.asarray(middle), at)) <= delta:
            low = middle
        else:
            high = middle
    return low * _ROUND_DOWN


def mu_of_pure(epsilon: float) -> float:
    """The mu-GDP loss that a pure epsilon never exceeds (the Gaussian that meets randomised response in its corner)."""
    return float(-2 * ndtri_exp(-np.logaddexp(0.0, epsilon)))  # in logarithms: 1 / (1 + e^-37) is 1


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The deviation that one release of sensitivity 1 needs (analytic Gaussian mechanism)."""
    return 1.0 / mu_of(epsilon, delta)


def sigma_for_releases(epsilon: float, delta: float, k: int) -> float:
    """The deviation that each of k releases of sensitivity 1 needs, everybody asked every time."""
    if k < 1:
        raise TacitaError(f"a plan has at least one release, not {k}.")
    return math.sqrt(k) * gaussian_sigma(epsilon, delta)


def _delta(mu: Doubles, epsilon: Doubles) -> Doubles:
    """Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), in logarithms so that large epsilons do not overflow."""
    first = log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(0.0, second - first)))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise TacitaError(f"a delta lies between 0 and 1, not at {delta}; 1e-5 is usual for thousands of people.")
