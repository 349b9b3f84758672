"""How likely numbers are under the exact law that noise should have: by its CDF, and by its scale, which tells more."""

from __future__ import annotations

import numpy as np
from scipy import stats

SURE = 1e-6  # a test of noise is failed below this p-value


def two_sided(law: stats.rv_frozen, value: float) -> float:
    return float(2 * min(law.cdf(value), law.sf(value)))


def normal(drawn: np.ndarray, sigma: float = 1.0) -> float:
    """Numbers that should be normal: the smaller p-value of Kolmogorov-Smirnov and of the sum of squares."""
    flat = np.ravel(drawn) / sigma
    return min(float(stats.kstest(flat, stats.norm.cdf).pvalue), two_sided(stats.chi2(len(flat)), float(flat @ flat)))


def laplace(drawn: np.ndarray, scale: float = 1.0) -> float:
    flat = np.ravel(drawn) / scale
    by_scale = two_sided(stats.gamma(len(flat)), float(np.abs(flat).sum()))
    return min(float(stats.kstest(flat, stats.laplace.cdf).pvalue), by_scale)


def whole_normal(drawn: np.ndarray, sigma: float) -> float:
    """Whole numbers that should follow the discrete Gaussian: chi-square over single numbers, far ones together."""
    reach = int(np.abs(drawn).max()) + int(10 * sigma) + 1
    law = np.exp(-(np.arange(-reach, reach + 1, dtype=float) ** 2) / (2 * sigma**2))
    law *= drawn.size / law.sum()
    counts = np.bincount(np.ravel(drawn) + reach, minlength=len(law))
    inside = law > 5
    observations, wanted = (np.append(v[inside], v[~inside].sum()) for v in (counts, law))
    return float(stats.chisquare(observations, wanted * observations.sum() / wanted.sum()).pvalue)
