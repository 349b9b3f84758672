"""What a release is, for those who count, and what releases cost together: dp-accounting behind two functions.

Always under ADD_OR_REMOVE_ONE with the noise put in relation to the true sensitivity (2 C where a person's whole data
may be replaced): under REPLACE_ONE the accountants disagree on what an event means. An event of which no bound is known
is `unknown`: then there is no epsilon, and none is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tacita.core.errors import TacitaError
from tacita.privacy.calibration import mu_of

Law = Literal["gaussian", "pure", "sampled", "unknown"]
_MAX_RELEASES = 2**20  # releases that nobody plans beyond


@dataclass(frozen=True)
class Event:
    """One kind of release: what leaves, whom it protects from whom, and by which noise."""

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
        if self.mechanism != "unknown" and not (self.sensitivity > 0 and self.noise > 0):
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
        return "gaussian" if self.mechanism == "gaussian" else "pure"

    @property
    def loss(self) -> float:
        """mu of a gaussian, epsilon of a pure release; what sampling saves is not in it."""
        return math.inf if self.mechanism == "unknown" else self.sensitivity / self.noise


def compute_epsilon(
    events: Sequence[tuple[Event, int]], delta: float, accountant: Literal["pld", "rdp"] = "pld"
) -> float:
    """What some kinds of events, so many times each, cost together; infinite where one of them is unknown."""
    counted = tuple((event, n) for event, n in events if n > 0)
    if any(event.mechanism == "unknown" for event, _ in counted):
        return math.inf
    return _compose_epsilon(counted, delta, accountant) if counted else 0.0


@lru_cache(maxsize=4096)
def _compose_epsilon(events: tuple[tuple[Event, int], ...], delta: float, accountant: str) -> float:
    counting = _make_accountant(accountant)
    for event, n in events:
        made = _to_dp_event(event)
        if not counting.supports(made):
            raise TacitaError(f"the accountant '{accountant}' cannot count the release '{event.what}'; use 'pld'.")
        counting.compose(made, n)
    return float(counting.get_epsilon(delta))


@lru_cache(maxsize=64)
def calibrate_sampled_noise(
    epsilon: float, delta: float, rate: float, releases: int, accountant: Literal["pld", "rdp"] = "pld"
) -> float:
    """The deviation, for sensitivity 1, of releases that each include everybody with a probability of their own."""
    import dp_accounting

    def event(noise: float) -> Any:
        sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(sampled, releases)

    try:
        found = dp_accounting.calibrate_dp_mechanism(
            lambda: _make_accountant(accountant), event, epsilon, delta, tol=1e-4
        )
    except (ValueError, dp_accounting.mechanism_calibration.NoBracketIntervalFoundError) as error:
        raise TacitaError(f"no noise found for epsilon {epsilon}, delta {delta}: {error}.") from None
    return float(found)


@lru_cache(maxsize=256)
def find_max_releases(event: Event, epsilon: float, delta: float) -> int:
    """How often an event fits a budget; looked for around what the central limit theorem says."""

    def fits(n: int) -> bool:
        return compute_epsilon([(event, n)], delta) <= epsilon

    if event.mechanism == "unknown" or not fits(1):
        return 0
    spread = event.rate * math.sqrt(math.expm1(min(event.loss**2, 500.0)))  # mu of one release, if there are many
    low = max(1, min(_MAX_RELEASES, int((mu_of(epsilon, delta) / spread) ** 2)))
    high = low
    while low > 1 and not fits(low):
        high, low = low, int(low / 1.1)
    while high < _MAX_RELEASES and (high == low or fits(high)):
        low, high = high, int(high * 1.1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _make_accountant(kind: str) -> Any:
    from dp_accounting import NeighboringRelation, pld, rdp

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if kind == "rdp":
        return rdp.RdpAccountant(neighboring_relation=relation)
    return pld.PLDAccountant(neighboring_relation=relation, value_discretization_interval=1e-4)


def _to_dp_event(event: Event) -> Any:
    import dp_accounting

    relative = event.noise / event.sensitivity
    kind = dp_accounting.GaussianDpEvent if event.mechanism == "gaussian" else dp_accounting.LaplaceDpEvent
    return kind(relative) if event.rate == 1 else dp_accounting.PoissonSampledDpEvent(event.rate, kind(relative))
