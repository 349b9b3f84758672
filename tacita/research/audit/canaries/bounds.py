"""What guesses about canaries prove of epsilon: at least so much, in 95 of 100 audits or more.

A canary was inside of what was released or not (where data is replaced: had one of two values), by a coin of its own.
Two bounds. `one_run` counts right guesses and assumes nothing of the mechanism (Steinke, Nasr, Jagielski 2023).
`within_law` also believes that noise has the law that is claimed, and asks how much of it there can be at most, given
how often a threshold was wrong (Clopper and Pearson 1934): it sees a few per cent of noise that are missing where the
first sees a half. What to guess and where the threshold lies follows the claim, never the scores.
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
from tacita.privacy.calibration import epsilon_of_mu

DOUBT = 0.05  # how often a bound may be wrong
MAX_EPSILON = 30.0  # no audit of this size shows a larger epsilon
_TINY = 1e-15


@dataclass(frozen=True)
class Trials:
    """How much each canary looked as if it was inside, and whether it was."""

    score: Doubles
    inside: Bools
    ledger_epsilon: float | None = None  # the epsilon on their own ledgers, where they keep some

    def __len__(self) -> int:
        return len(self.score)


@dataclass(frozen=True)
class Claim:
    """What is promised, and how scores are spread if it is true.

    gaussian: deviation 1 around 0 outside, around mu inside, there with a chance of `rate`. pure: no canary is more
    than e^epsilon times as likely to score `threshold` inside as outside.
    """

    epsilon: float
    delta: float = 0.0
    law: Literal["gaussian", "pure"] = "gaussian"
    mu: float = 0.0
    rate: float = 1.0
    releases: int = 1  # like the one that a score is about; epsilon is of all of them together
    threshold: float = 0.0


def bound_within_law(trials: Trials, claim: Claim) -> float:
    """The least epsilon with which a threshold is wrong as seldom as it was, if noise has the law of the claim."""
    threshold = claim.threshold if claim.law == "pure" else choose_threshold(claim, len(trials) // 2)
    false, true = _bound_rates(trials, threshold)
    if claim.law == "pure":
        either = (true / false, (1 - false) / (1 - true))
        return max(0.0, min(MAX_EPSILON, math.log(max(*either, _TINY))))
    return epsilon_from_mu(infer_mu(false, true, claim.rate), claim)


def infer_mu(false: float, true: float, rate: float) -> float:
    """mu of the noise that a threshold with these chances belongs to; who is there by chance is there more seldom."""
    there = np.clip((true - (1 - rate) * false) / rate, _TINY, 1 - _TINY)
    return max(0.0, float(ndtri(there) - ndtri(np.clip(false, _TINY, 1 - _TINY))))


def epsilon_from_mu(mu: float, claim: Claim) -> float:
    """What all releases of the claim cost together if each loses mu."""
    if mu <= 0:
        return 0.0
    if claim.rate == 1:
        return float(epsilon_of_mu(np.array([mu * math.sqrt(claim.releases)]), claim.delta)[0])
    event = Event("canary", "gaussian", mu, 1.0, "person", "central", claim.rate, "poisson")
    return compute_epsilon([(event, claim.releases)], claim.delta)


def choose_threshold(claim: Claim, each: int) -> float:
    """Where, with so many canaries inside and outside, the claim itself would be bounded best."""
    tried = np.linspace(-1.0, claim.mu + 3.0, 81)
    false = ndtr(-tried)
    true = (1 - claim.rate) * false + claim.rate * ndtr(claim.mu - tried)
    found = [
        infer_mu(_upper_bound(a * each, each), 1 - _upper_bound((1 - b) * each, each), claim.rate)
        for a, b in zip(false, true)
    ]
    return float(tried[int(np.argmax(found))])


def bound_one_run(trials: Trials, claim: Claim) -> float:
    """The least epsilon with which so many guesses come right by chance; the surest at both ends are guessed."""
    order = np.argsort(trials.score, kind="stable")
    if claim.law == "pure":
        guessed = trials.score >= claim.threshold
        n, right = int(guessed.sum()), int((guessed & trials.inside).sum())
    else:
        half = max(1, int(choose_share(claim, len(trials)) * len(trials) / 2))
        n, right = 2 * half, int(trials.inside[order[-half:]].sum() + (~trials.inside[order[:half]]).sum())
    if bound_guess_chance(len(trials), n, right, 0.0, claim.delta) > DOUBT:
        return 0.0
    low, high = 0.0, MAX_EPSILON
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if bound_guess_chance(len(trials), n, right, middle, claim.delta) > DOUBT else (middle, high)
        )
    return low


def bound_guess_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, where the release is (epsilon, delta)-private."""
    if guesses == 0:
        return 1.0
    law = stats.binom(guesses, expit(epsilon))
    whole = float(law.sf(right - 1))
    if delta == 0 or right == 0:
        return whole
    below = np.cumsum(law.pmf(np.arange(right - 1, -1, -1)))  # of up to so many right guesses less
    return min(1.0, whole + 2 * canaries * delta * float((below / np.arange(1, right + 1)).max()))


def choose_share(claim: Claim, canaries: int) -> float:
    """The share of the canaries to guess at which the claim itself would be bounded best."""
    shares = np.array([1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02])
    grid = np.linspace(-8.0, claim.mu + 8.0, 4001)
    outside = ndtr(grid)
    inside = (1 - claim.rate) * outside + claim.rate * ndtr(grid - claim.mu)
    both, best = (inside + outside) / 2, (0.0, 1.0)
    for share in shares:
        high, low = np.searchsorted(both, 1 - share / 2), np.searchsorted(both, share / 2)
        right = ((1 - inside[high]) / 2 + outside[low] / 2) / share
        n = max(2, int(share * canaries))
        least = _bound_right_share(n, right)
        best = max(best, (math.log(least / (1 - least)) if least > 0.5 else 0.0, share))
    return best[1]


def _bound_right_share(n: int, right: float) -> float:
    return 1 - _upper_bound((1 - right) * n, n)


def _bound_rates(trials: Trials, threshold: float) -> tuple[float, float]:
    """How often the threshold is passed: outside at most, inside at least."""
    passed = trials.score >= threshold
    inside, outside = int(trials.inside.sum()), int((~trials.inside).sum())
    return (
        _upper_bound(float(passed[~trials.inside].sum()), outside),
        1 - _upper_bound(float((~passed[trials.inside]).sum()), inside),
    )


def _upper_bound(seen: float, of: int) -> float:
    """The largest chance that shows so seldom; half of the doubt is for each of two such bounds."""
    if seen >= of:
        return 1.0
    return float(betaincinv(seen + 1, of - seen, 1 - DOUBT / 2))
