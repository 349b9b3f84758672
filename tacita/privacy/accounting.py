"""What a release is for accounting, and what releases cost together: dp-accounting behind two functions.

Always under ADD_OR_REMOVE_ONE, with the noise relative to the true sensitivity (2 C where a user's whole data may be
replaced). Under REPLACE_ONE the accountants disagree on what an event means. An event without a known bound is
`unknown`: then there is no epsilon, and none is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tacita.core.errors import TacitaError
from tacita.privacy.calibration import compute_max_mu

Law = Literal["gaussian", "pure", "sampled", "unknown"]
_MAX_RELEASES = 2**20  # no plan has more


@dataclass(frozen=True)
class Event:
    """One kind of release: what leaves, which unit it protects from which threat, and by which noise."""

    what: str
    mechanism: Literal["gaussian", "laplace", "unknown"]
    sensitivity: float = 1.0  # of what is released, as the unit changes: L2 for gaussian noise, L1 for laplace
    noise: float = 1.0  # its deviation (gaussian) or scale (laplace)
    unit: Literal["person", "silo", "interaction"] = "person"
    threat: Literal["local", "silo", "central"] = "local"
    rate: float = 1.0  # probability to be in the release at all, where that counts
    cohort: Literal["asked", "poisson", "fixed"] = "asked"  # how those in it are chosen
    once: bool = False  # it does not come again

    def __post_init__(self) -> None:
        has_noise = self.sensitivity > 0 and self.noise > 0
        if self.mechanism != "unknown" and not has_noise:
            raise TacitaError(
                f"the release '{self.what}' has sensitivity {self.sensitivity} and noise {self.noise}; both must be "
                "above 0, or its mechanism is unknown and it has no epsilon."
            )
        if not 0 < self.rate <= 1:
            raise TacitaError(f"the release '{self.what}' includes people with a probability in (0, 1].")
        if self.rate < 1 and self.threat == "local":
            raise TacitaError(
                f"the release '{self.what}' is seen by itself, so the server knows who is in it and sampling hides "
                "nobody; count it with rate = 1, or use threat = 'central'."
            )
        if self.rate < 1 and self.cohort != "poisson":
            raise TacitaError(
                f"the release '{self.what}' counts on each person being drawn by itself, and its cohort is "
                f"'{self.cohort}'; use train.participation.kind = 'poisson', or count it with rate = 1."
            )

    @property
    def law(self) -> Law:
        """How it is counted: gaussians add up as mu^2, pure ones as epsilon, sampled ones by an accountant."""
        if self.mechanism == "unknown":
            return "unknown"
        if self.rate < 1:
            return "sampled"
        if self.mechanism == "gaussian":
            return "gaussian"
        return "pure"

    @property
    def loss(self) -> float:
        """mu of a gaussian, epsilon of a pure release; what sampling saves is not in it."""
        if self.mechanism == "unknown":
            return math.inf
        return self.sensitivity / self.noise

    def costs_at_most(self, other: Event) -> bool:
        """Whether a sampled release costs no more than another: no less noise, and users no more often."""
        if other.law == "unknown":
            return False
        if self.rate > other.rate:
            return False
        return self.loss <= other.loss


def compute_epsilon(
    events: Sequence[tuple[Event, int]], delta: float, accountant: Literal["pld", "rdp"] = "pld"
) -> float:
    """What some kinds of events, so many times each, cost together; infinite where one of them is unknown."""
    counted = []
    for event, n in events:
        if n <= 0:
            continue
        if event.mechanism == "unknown":
            return math.inf
        counted.append((event, n))
    if not counted:
        return 0.0
    return _compose_epsilon(tuple(counted), delta, accountant)


@lru_cache(maxsize=4096)
def _compose_epsilon(events: tuple[tuple[Event, int], ...], delta: float, accountant: str) -> float:
    dp_accountant = _make_accountant(accountant)
    for event, n in events:
        dp_event = _to_dp_event(event)
        if not dp_accountant.supports(dp_event):
            raise TacitaError(f"the accountant '{accountant}' cannot count the release '{event.what}'; use 'pld'.")
        dp_accountant.compose(dp_event, n)
    return float(dp_accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def calibrate_sampled_noise(
    epsilon: float, delta: float, rate: float, releases: int, accountant: Literal["pld", "rdp"] = "pld"
) -> float:
    """The deviation, for sensitivity 1, of releases that each draw every user independently."""
    import dp_accounting

    def make_event(noise: float) -> Any:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        sampled = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, releases)

    def make_accountant() -> Any:
        return _make_accountant(accountant)

    try:
        noise = dp_accounting.calibrate_dp_mechanism(make_accountant, make_event, epsilon, delta, tol=1e-4)
    except (ValueError, dp_accounting.mechanism_calibration.NoBracketIntervalFoundError) as error:
        raise TacitaError(f"no noise found for epsilon {epsilon}, delta {delta}: {error}.") from None
    return float(noise)


@lru_cache(maxsize=256)
def find_max_releases(event: Event, epsilon: float, delta: float) -> int:
    """How often an event fits a budget; the search starts at the value of the central limit theorem."""

    def fits(n: int) -> bool:
        return compute_epsilon([(event, n)], delta) <= epsilon

    if event.mechanism == "unknown" or not fits(1):
        return 0
    start = _guess_max_releases(event, epsilon, delta)
    low = start
    high = start
    while low > 1 and not fits(low):
        high = low
        low = int(low / 1.1)
    while high < _MAX_RELEASES and (high == low or fits(high)):
        low = high
        high = int(high * 1.1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _guess_max_releases(event: Event, epsilon: float, delta: float) -> int:
    """How often an event fits a budget by the central limit theorem, at least once."""
    squared_loss = min(event.loss**2, 500.0)
    mu = event.rate * math.sqrt(math.expm1(squared_loss))  # of one release, if there are many
    n = int((compute_max_mu(epsilon, delta) / mu) ** 2)
    return max(1, min(_MAX_RELEASES, n))


def _make_accountant(kind: str) -> Any:
    from dp_accounting import NeighboringRelation, pld, rdp

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if kind == "rdp":
        return rdp.RdpAccountant(neighboring_relation=relation)
    return pld.PLDAccountant(neighboring_relation=relation, value_discretization_interval=1e-4)


def _to_dp_event(event: Event) -> Any:
    import dp_accounting

    relative_noise = event.noise / event.sensitivity
    if event.mechanism == "gaussian":
        release = dp_accounting.GaussianDpEvent(relative_noise)
    else:
        release = dp_accounting.LaplaceDpEvent(relative_noise)
    if event.rate == 1:
        return release
    return dp_accounting.PoissonSampledDpEvent(event.rate, release)
