"""Privacy losses as whole numbers of a unit, and arithmetic on them that never overflows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tacita.core.types import AnyArray, Longs
from tacita.privacy.accounting import Event
from tacita.privacy.calibration import compute_max_mu

UNIT = 1e-12  # of mu^2, and of a pure epsilon
MICRO = 1e-6  # budgets are whole numbers of it
MAX_LOSS = 2**60  # what one release may cost at most, in units: sums of a few never overflow
MICRO_UNITS = round(MICRO / UNIT)  # units in a millionth


def to_millionths(epsilon: float) -> int:
    """A budget as a whole number, rounded down."""
    millionths = epsilon / MICRO * (1 + 1e-15)
    return math.floor(millionths)


def compute_once_each(rows: AnyArray, compute: Callable[[AnyArray], Any], kind: Any) -> AnyArray:
    """A value for each row; equal rows are computed once."""
    distinct, place = np.unique(rows, axis=0, return_inverse=True)
    values = [compute(row) for row in distinct]
    array = np.array(values, kind)
    places = place.ravel()
    return np.asarray(array[places])


def raise_column(table: Longs, column: int, least: Longs) -> None:
    """Raise the values of a column, in place, to at least these."""
    values = table[:, column]
    table[:, column] = np.maximum(values, least)


def to_mu2_units(mu: float) -> int:
    """A gaussian loss in units of mu^2, rounded up, at most `MAX_LOSS`."""
    units = mu**2 / UNIT
    if units >= MAX_LOSS:
        return MAX_LOSS
    return math.ceil(units)


def add_losses(first: Longs, second: Longs) -> Longs:
    """Two losses together; from `MAX_LOSS` on sums stay there, and no budget holds them."""
    bounded_first = np.minimum(first, MAX_LOSS)
    bounded_second = np.minimum(second, MAX_LOSS)
    total = np.asarray(bounded_first + bounded_second)
    return total.clip(max=MAX_LOSS)


def multiply_losses(counts: Longs, price: int) -> Longs:
    """The loss of so many releases at a price, at most `MAX_LOSS`."""
    rounded = counts.astype(np.float64) * price
    is_unbounded = rounded >= MAX_LOSS
    most = MAX_LOSS // price
    bounded_counts = np.minimum(counts, most)
    losses = bounded_counts * price
    losses[is_unbounded] = MAX_LOSS
    return np.asarray(losses)


def sum_losses(spent: Longs) -> Longs:
    """Over kinds of releases, a row per user; never past `MAX_LOSS`, so that whole numbers do not overflow."""
    n_kinds = spent.shape[1]
    if n_kinds == 0:
        return np.zeros(len(spent), np.int64)
    if n_kinds == 1:
        return np.minimum(spent[:, 0], MAX_LOSS)
    rounded = spent.sum(axis=1, dtype=np.float64)
    is_unbounded = rounded >= MAX_LOSS
    total = spent.sum(axis=1)
    total[is_unbounded] = MAX_LOSS
    return np.asarray(total)


def compute_mean_loss(event: Event, spent: int, times: int) -> float:
    """The loss of each of some releases, as if all had cost the same; for gaussians their sum stays exact."""
    if event.law == "gaussian":
        return math.sqrt(spent * UNIT / times)
    if event.law == "pure":
        return spent * UNIT / times
    return event.loss


def compute_budget_limits(micro: Longs, delta: float) -> Longs:
    """What budgets are worth in units of mu^2, rounded down; few different budgets are usual."""
    people = len(micro)
    if people and (micro == micro[0]).all():
        first = int(micro[0])
        limit = compute_budget_limit(first, delta)
        return np.full(people, limit, np.int64)
    distinct, place = np.unique(micro, return_inverse=True)
    limits = np.zeros(len(distinct), np.int64)
    for number, budget in enumerate(distinct):
        limits[number] = compute_budget_limit(int(budget), delta)
    return limits[place]


@lru_cache(maxsize=65536)
def compute_budget_limit(micro: int, delta: float) -> int:
    """Below `MAX_LOSS`, since losses from there on are no longer counted exactly."""
    if micro <= 0:
        return 0
    mu = compute_max_mu(micro * MICRO, delta)
    units = math.floor(mu**2 / UNIT)
    return min(MAX_LOSS - 1, units)
