"""Budget tiers: the noise, clip and weight of users who chose the same epsilon, and how lab users choose."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tacita.core.types import Doubles, Floats, Longs
from tacita.methods.personal.dpps_config import DPPSConfig
from tacita.privacy.ledger import Ledger

_NO_LIMIT = 999_999.0  # the budget of a tier whose noise is the paper's: releases are counted, none is refused


def compute_noise_multipliers(config: DPPSConfig) -> Doubles:
    """The noise of each tier, as a multiple of its sensitivity."""
    n_tiers = len(config.tiers)
    if config.noise is not None:
        return np.full(n_tiers, config.noise)
    if config.calibration == "paper":
        return 1 / np.array(config.tiers)
    count_epsilon = 0.0
    if config.policy == "activity":
        count_epsilon = config.activity_epsilon
    tiers = tuple(config.tiers)
    multipliers = _fit_noise_multipliers(tiers, count_epsilon, config.delta, config.releases)
    return np.array(multipliers)


@lru_cache(maxsize=1024)
def _fit_noise_multipliers(
    tiers: tuple[float, ...], count_epsilon: float, delta: float, releases: int
) -> tuple[float, ...]:
    """The noise with which each tier lasts for so many releases; every cohort of a round needs it."""
    ledger = Ledger((), delta)
    multipliers = []
    for tier in tiers:
        sigma = ledger.compute_sigma_to_fit(tier - count_epsilon, releases)
        multipliers.append(sigma)
    return tuple(multipliers)


def compute_tier_clips(config: DPPSConfig) -> Doubles:
    """The clip of each tier. Local: the same for all.

    Else clips are as far apart as budgets are, and `clip` on average: a sum is as long as if all had one budget, and
    its noise is that of a budget between the least and the largest.
    """
    multipliers = compute_noise_multipliers(config)
    if not config.has_shared_noise:
        return np.full(len(multipliers), config.clip)
    shares = normalise_tier_shares(config)
    mean_inverse = float(shares @ (1 / multipliers))
    relative = config.clip / multipliers
    return np.asarray(relative / mean_inverse)


def normalise_tier_shares(config: DPPSConfig) -> Doubles:
    """The share of users in each tier; they sum to 1."""
    total = sum(config.shares)
    return np.array(config.shares) / total


def cap_weights(weights: Doubles, shares: Doubles, cap: float) -> Doubles:
    """Tier weights of which none is more than `cap` times the mean, if users chose tiers by their shares."""
    while True:
        most = cap * float(shares @ weights)
        tolerance = 1 + 1e-9
        is_above_cap = weights.max() > most * tolerance
        if not is_above_cap or most <= 0:
            return weights
        weights = np.minimum(weights, most)


def list_tier_limits(config: DPPSConfig) -> Doubles:
    """The epsilon at which users of each tier stop."""
    if config.calibration == "analytic":
        return np.array(config.tiers)
    return np.full(len(config.tiers), _NO_LIMIT)


def choose_tiers_by_share(config: DPPSConfig, uniforms: Floats) -> Longs:
    """The tiers of lab users, chosen by their shares from uniform draws."""
    cumulative = np.cumsum(config.shares)
    inner_edges = cumulative[:-1]
    edges = inner_edges / sum(config.shares)
    return np.searchsorted(edges, uniforms, side="right")


def find_tiers_by_budget(config: DPPSConfig, epsilon: Doubles) -> Longs:
    """The largest tier that a budget pays for; where there is none, the smallest."""
    tiers = np.array(config.tiers)
    n_affordable = np.searchsorted(tiers, epsilon, side="right")
    return np.maximum(0, n_affordable - 1)


def find_tiers_by_count(config: DPPSConfig, counts: Doubles) -> Longs:
    """The tiers that noisy counts of interactions stand for."""
    cuts = np.array(config.activity_cuts)
    return np.searchsorted(cuts, counts, side="right")
