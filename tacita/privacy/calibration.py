"""How much Gaussian noise a budget needs, and what noise costs: closed forms, exact up to rounding.

A Gaussian release of sensitivity 1 and deviation sigma is mu-GDP with mu = 1 / sigma (Dong, Roth, Su 2022), and
(epsilon, delta)-private exactly where `compute_gaussian_delta` says so (Balle and Wang 2018). Releases without
sampling add up as mu^2, so every function goes through mu. Results err on the safe side: mu and epsilon come from
bisection, which returns that end of the last bracket that promises less.
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


def compute_gaussian_delta(sigma: float, epsilon: float) -> float:
    """The smallest delta at which noise of this deviation, for sensitivity 1, is (epsilon, delta)-private."""
    if not sigma > 0:
        return 1.0
    mu = np.asarray(1.0 / sigma)
    epsilon_array = np.asarray(epsilon, np.float64)
    return float(_compute_delta(mu, epsilon_array))


def compute_gaussian_epsilon(sigma: float, delta: float) -> float:
    """What one release with noise of this deviation, for sensitivity 1, costs; no noise costs everything."""
    _check_delta(delta)
    if not sigma > 0:
        return math.inf
    mu = np.array([1.0 / sigma])
    epsilons = compute_epsilon_of_mu(mu, delta)
    return float(epsilons[0])


def compute_epsilon_of_mu(mu: Doubles, delta: float) -> Doubles:
    """The epsilon of mu-GDP at a delta, for many mu at once; 0 where delta alone covers it."""
    _check_delta(delta)
    mu = np.asarray(mu, np.float64)
    is_valid = mu >= 0  # false where one is no number
    if not is_valid.all():
        raise TacitaError("a privacy loss mu must be a number that is not negative.")
    epsilon = np.full(mu.shape, np.inf)
    epsilon[mu == 0] = 0.0
    is_regular = (mu > 0) & np.isfinite(mu)
    regular_mu = mu[is_regular]
    epsilon[is_regular] = _bisect_epsilon(regular_mu, delta)
    return epsilon


def _bisect_epsilon(mu: Doubles, delta: float) -> Doubles:
    """The upper end of the last bracket, for mu above 0 and finite."""
    low = np.zeros(len(mu))
    log_delta = math.log(1 / delta)
    high = mu**2 / 2 + mu * math.sqrt(2 * log_delta)  # zero-concentrated privacy promises this: never less
    is_covered = _compute_delta(mu, low) <= delta
    high[is_covered] = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_enough = _compute_delta(mu, middle) <= delta
        low = np.where(is_enough, low, middle)
        high = np.where(is_enough, middle, high)
        next_middle = (low + high) / 2
        if (next_middle <= low).all():
            break
    return high


@lru_cache(maxsize=4096)
def compute_max_mu(epsilon: float, delta: float) -> float:
    """The largest mu-GDP loss that (epsilon, delta) allows: what a budget is worth."""
    _check_delta(delta)
    is_valid = 0 < epsilon < math.inf
    if not is_valid:
        raise TacitaError(f"an epsilon must be a number above 0, not {epsilon}.")
    epsilon_array = np.asarray(epsilon, np.float64)

    def is_allowed(mu: float) -> bool:
        smallest_delta = _compute_delta(np.asarray(mu), epsilon_array)
        return float(smallest_delta) <= delta

    low = 0.0
    high = 1.0
    while is_allowed(high):
        low = high
        high = 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if is_allowed(middle):
            low = middle
        else:
            high = middle
    return low * _ROUND_DOWN


def bound_mu_of_pure(epsilon: float) -> float:
    """The mu-GDP loss that a pure epsilon never exceeds (the Gaussian that meets randomised response in its corner)."""
    log_share = -np.logaddexp(0.0, epsilon)  # in logarithms: 1 / (1 + e^-37) is 1
    return float(-2 * ndtri_exp(log_share))


def compute_gaussian_sigma(epsilon: float, delta: float) -> float:
    """The deviation that one release of sensitivity 1 needs (analytic Gaussian mechanism)."""
    return 1.0 / compute_max_mu(epsilon, delta)


def _compute_delta(mu: Doubles, epsilon: Doubles) -> Doubles:
    """Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), in logarithms so that large epsilons do not overflow."""
    ratio = epsilon / mu
    first = log_ndtr(mu / 2 - ratio)
    log_tail = log_ndtr(-mu / 2 - ratio)
    second = epsilon + log_tail
    difference = np.minimum(0.0, second - first)
    share = -np.expm1(difference)
    return np.asarray(np.exp(first) * share)


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise TacitaError(f"a delta lies between 0 and 1, not at {delta}; 1e-5 is usual for thousands of people.")
