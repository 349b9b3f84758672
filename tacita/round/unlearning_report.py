"""What a part reports of the requests that it carried out; lab and live make their certificates of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Cost = Literal[
    "rounds", "clients_asked", "bytes_up", "bytes_down", "seconds_client", "seconds_server",
    "storage_server", "storage_client",
]  # fmt: skip
"""The fields of a report that add up over parts."""


class CalibratedPath(BaseModel):
    """The damping that a retraction was carried with, what it leaves, and the path that was taken for that."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    alpha: float
    ratio: float | None
    reason: str | None = None


class UnlearningReport(BaseModel):
    """What one part did about a request. A field that is not set says nothing, and stands in no certificate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str | None = None  # the name under which it certifies; None: it only keeps records up to date
    exact: bool | None = None  # the model has the bits of one that never had the data
    mode: str | None = None  # how it was done, in words
    waits: bool = False  # for others, whose withdrawals leave in one sum
    waits_for: int = 0  # so many others, before anything is taken back
    subjects: tuple[int, ...] = ()  # keys of all whose data was taken back together, or who wait
    rounds: int | None = None
    clients_asked: int | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    seconds_client: float | None = None
    seconds_server: float | None = None
    storage_server: int | float | None = None
    storage_client: int | float | None = None
    guarantee: Literal["bounded"] | None = None
    epsilon: float | None = None
    delta: float | None = None
    psi_bound: float | None = None
    assumptions: tuple[str, ...] = ()
    residual_risk: str = ""
    purged: tuple[str, ...] = ()  # what the server no longer holds
    calibration: CalibratedPath | None = None
    details: Mapping[str, Any] = {}  # figures of the method's own

    @property
    def is_certified(self) -> bool:
        """The part names a method, and so certifies what it did, at what price."""
        return self.method is not None

    @property
    def is_waiting(self) -> bool:
        return self.waits or self.waits_for > 0

    def with_defaults(self, defaults: UnlearningReport) -> UnlearningReport:
        """The same report; what it does not say is taken from another."""
        values = {name: getattr(defaults, name) for name in defaults.model_fields_set}
        values |= {name: getattr(self, name) for name in self.model_fields_set}
        return UnlearningReport(**values)

    def to_json(self) -> dict[str, Any]:
        """What it says, as events hold it: figures beside each other, and nobody's key."""
        content = self.model_dump(exclude_unset=True, exclude={"subjects", "calibration", "details"})
        if self.calibration is not None:
            content |= self.calibration.model_dump(exclude_unset=True)
        return content | dict(self.details)


PartReports = dict[str, UnlearningReport]
"""By part."""


def sum_cost(reports: Iterable[UnlearningReport], cost: Cost) -> float:
    return float(sum(getattr(report, cost) or 0.0 for report in reports))


def are_exact(reports: Iterable[UnlearningReport]) -> bool:
    """Whether something was done exactly, and nothing only approximately."""
    claims = [report.exact for report in reports if report.exact is not None]
    return bool(claims) and all(claims)


def list_purged(reports: Iterable[UnlearningReport]) -> list[str]:
    lines: list[str] = []
    for report in reports:
        lines += report.purged
    return lines
