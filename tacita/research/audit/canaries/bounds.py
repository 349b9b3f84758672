"""What guesses about canaries prove of epsilon: at least so much, in 95 of 100 audits or more.

A coin of its own decides whether a canary was inside of a release (where data is replaced: which of two values it had).
There are two bounds. `one_run` counts right guesses and assumes nothing of the mechanism (Steinke, Nasr, Jagielski
2023). `within_law` also believes that noise has the law that is claimed. It asks how much noise there can be at most,
by how often a threshold was wrong (Clopper and Pearson 1934). It sees that a few per cent of noise are missing where
the first sees a half. What to guess and where the threshold lies follows the claim, never the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import betaincinv, expit, ndtr, ndtri

from tacita.core.types import Bools, Doubles
from tacita.privacy.accounting import Event, compute_epsilon
from tacita.privacy.calibration import compute_epsilon_of_mu

DOUBT = 0.05  # how often a bound may be wrong
MAX_EPSILON = 30.0  # no audit of this size shows a larger epsilon
GUESSED_SHARES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
_TINY = 1e-15


@dataclass(frozen=True)
class Trials:
    """How much each canary looked as if it was inside, and whether it was."""

    score: Doubles
    inside: Bools
    ledger_epsilon: float | None = None  # the epsilon on their own ledgers, where they have some

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True)
class Claim:
    """What is promised, and how scores are spread if it is true.

    gaussian: deviation 1 around 0 outside, around mu inside; a canary takes part with a chance of `rate`. pure: no
    canary is more than e^epsilon times as likely to score `threshold` inside as outside.
    """

    epsilon: float
    delta: float = 0.0
    law: Literal["gaussian", "pure"] = "gaussian"
    mu: float = 0.0
    rate: float = 1.0
    releases: int = 1  # like the one that a score is about; epsilon is of all of them together
    threshold: float = 0.0

    @property
    def is_pure(self) -> bool:
        return self.law == "pure"

    def compute_chance_inside(self, chance_outside: Doubles, chance_present: Doubles) -> Doubles:
        """A chance for those inside, who take part at `rate` and else look like those outside."""
        absent_part = (1 - self.rate) * chance_outside
        present_part = self.rate * chance_present
        return absent_part + present_part


def bound_within_law(trials: Trials, claim: Claim) -> float:
    """The least epsilon with which a threshold is wrong as seldom as it was, if noise has the law of the claim."""
    if claim.is_pure:
        threshold = claim.threshold
    else:
        threshold = choose_threshold(claim, len(trials) // 2)
    false_rate, true_rate = _bound_rates(trials, threshold)
    if not claim.is_pure:
        mu = infer_mu(false_rate, true_rate, claim.rate)
        return convert_mu_to_epsilon(mu, claim)
    passed_ratio = true_rate / false_rate
    missed_ratio = (1 - false_rate) / (1 - true_rate)
    largest_ratio = max(passed_ratio, missed_ratio, _TINY)
    epsilon = math.log(largest_ratio)
    return max(0.0, min(MAX_EPSILON, epsilon))


def infer_mu(false_rate: float, true_rate: float, rate: float) -> float:
    """mu of the noise that a threshold with these chances belongs to; sampled canaries take part more seldom."""
    passed_absent = (1 - rate) * false_rate
    present_rate = (true_rate - passed_absent) / rate
    present_quantile = ndtri(np.clip(present_rate, _TINY, 1 - _TINY))
    absent_quantile = ndtri(np.clip(false_rate, _TINY, 1 - _TINY))
    distance = float(present_quantile - absent_quantile)
    return max(0.0, distance)


def convert_mu_to_epsilon(mu: float, claim: Claim) -> float:
    """What all releases of the claim cost together if each loses mu."""
    if mu <= 0:
        return 0.0
    if claim.rate == 1:
        total_mu = mu * math.sqrt(claim.releases)
        epsilons = compute_epsilon_of_mu(np.array([total_mu]), claim.delta)
        return float(epsilons[0])
    event = Event("canary", "gaussian", mu, 1.0, "person", "central", claim.rate, "poisson")
    return compute_epsilon([(event, claim.releases)], claim.delta)


def choose_threshold(claim: Claim, each: int) -> float:
    """Where, with so many canaries inside and outside, the claim itself would be bounded best."""
    highest = claim.mu + 3.0
    thresholds = np.linspace(-1.0, highest, 81)
    false_rates = ndtr(-thresholds)
    present_rates = ndtr(claim.mu - thresholds)
    true_rates = claim.compute_chance_inside(false_rates, present_rates)
    bounds = []
    for false_rate, true_rate in zip(false_rates, true_rates):
        most_false = compute_upper_bound(false_rate * each, each)
        n_missed = (1 - true_rate) * each
        least_true = 1 - compute_upper_bound(n_missed, each)
        mu = infer_mu(most_false, least_true, claim.rate)
        bounds.append(mu)
    best = int(np.argmax(bounds))
    return float(thresholds[best])


def bound_one_run(trials: Trials, claim: Claim) -> float:
    """The least epsilon with which so many guesses come right by chance; the surest at both ends are guessed."""
    n_guesses, n_right = _count_right_guesses(trials, claim)

    def is_too_unlikely(epsilon: float) -> bool:
        chance = bound_guess_chance(len(trials), n_guesses, n_right, epsilon, claim.delta)
        return chance <= DOUBT

    if not is_too_unlikely(0.0):
        return 0.0
    low = 0.0
    high = MAX_EPSILON
    for _ in range(40):
        middle = (low + high) / 2
        if is_too_unlikely(middle):
            low = middle
        else:
            high = middle
    return low


def _count_right_guesses(trials: Trials, claim: Claim) -> tuple[int, int]:
    """How many canaries are guessed, and how many of these guesses are right."""
    if claim.is_pure:
        is_guessed = trials.score >= claim.threshold
        is_right = is_guessed & trials.inside
        n_guessed = int(is_guessed.sum())
        n_right = int(is_right.sum())
        return n_guessed, n_right
    n_trials = len(trials)
    share = choose_guess_share(claim, n_trials)
    half = max(1, int(share * n_trials / 2))
    order = np.argsort(trials.score, kind="stable")
    highest = order[-half:]
    lowest = order[:half]
    right_inside = trials.inside[highest].sum()
    right_outside = (~trials.inside[lowest]).sum()
    return 2 * half, int(right_inside + right_outside)


def bound_guess_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, where the release is (epsilon, delta)-private."""
    if guesses == 0:
        return 1.0
    law = stats.binom(guesses, expit(epsilon))
    pure_chance = float(law.sf(right - 1))
    if delta == 0 or right == 0:
        return pure_chance
    fewer_right = np.arange(right - 1, -1, -1)
    below = np.cumsum(law.pmf(fewer_right))  # the chance of up to so many right guesses less
    n_fewer = np.arange(1, right + 1)
    shares = below / n_fewer
    largest = float(shares.max())
    extra_chance = 2 * canaries * delta * largest
    return min(1.0, pure_chance + extra_chance)


def choose_guess_share(claim: Claim, canaries: int) -> float:
    """The share of the canaries to guess at which the claim itself would be bounded best."""
    highest = claim.mu + 8.0
    grid = np.linspace(-8.0, highest, 4001)
    outside = ndtr(grid)
    present = ndtr(grid - claim.mu)
    inside = claim.compute_chance_inside(outside, present)
    either = (inside + outside) / 2
    best_bound = 0.0
    best_share = 1.0
    for share in GUESSED_SHARES:
        high = np.searchsorted(either, 1 - share / 2)
        low = np.searchsorted(either, share / 2)
        right_inside = (1 - inside[high]) / 2
        right_outside = outside[low] / 2
        right_share = (right_inside + right_outside) / share
        n_guesses = max(2, int(share * canaries))
        least_right = _bound_right_share(n_guesses, right_share)
        bound = _log_odds(least_right)
        if bound > best_bound:
            best_bound = bound
            best_share = share
    return best_share


def _log_odds(share: float) -> float:
    """0 where a share is no better than a coin."""
    if share <= 0.5:
        return 0.0
    return math.log(share / (1 - share))


def _bound_right_share(n: int, right: float) -> float:
    return 1 - compute_upper_bound((1 - right) * n, n)


def _bound_rates(trials: Trials, threshold: float) -> tuple[float, float]:
    """How often the threshold is passed: outside at most, inside at least."""
    is_passed = trials.score >= threshold
    is_outside = ~trials.inside
    false_passes = float(is_passed[is_outside].sum())
    is_missed = ~is_passed[trials.inside]
    false_misses = float(is_missed.sum())
    n_outside = int(is_outside.sum())
    n_inside = int(trials.inside.sum())
    most_false = compute_upper_bound(false_passes, n_outside)
    most_missed = compute_upper_bound(false_misses, n_inside)
    return most_false, 1 - most_missed


def compute_upper_bound(count: float, of: int) -> float:
    """The largest chance that shows so seldom; half of the doubt is for each of two such bounds."""
    if count >= of:
        return 1.0
    confidence = 1 - DOUBT / 2
    bound = betaincinv(count + 1, of - count, confidence)
    return float(bound)
