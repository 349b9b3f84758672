"""The certificate of a withdrawal (sharing spec D.5), as a run folder holds it.

It names no item, and nobody but by a pseudonym. What was not measured says so.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

NotRun = Literal["not run"]
NOT_RUN: Final = "not run"
ROUNDING: Final = "up to rounding"
Withheld = Literal["withheld"]
WITHHELD: Final = "withheld"
SENT_ALONE = "A retraction sent alone shows its author's items to whoever compares the models before and after it."


class CertificateSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestSection(CertificateSection):
    """What was requested, and by whom."""

    id: int
    received_at: str
    subject_pseudonym: str  # one for all of them
    subjects: list[str]
    sent_with: list[str]  # others whose data was taken back in the same update
    scope: Literal["user", "shared_edges", "items"]
    n_edges: int | Withheld  # interactions that were learned from
    n_items: int | Withheld


class MethodSection(CertificateSection):
    """How it was carried out.

    `exact` is about bits: true only where the model has those of a retrained one, or where the method has them by
    construction and says so. A tally has the bits of its sums, and what it solves from them up to rounding.
    """

    name: str
    mode: str
    why: str
    leaves: str  # what of the request it does not reach
    exact: bool
    calibration: dict[str, Any] | Literal["none"]
    parameters: dict[str, Any]
    code_version: str
    seeds: dict[str, int]


class ModelSection(CertificateSection):
    sha256_before: str
    sha256_after: str
    sha256_data_remaining: str


class ParticipationSection(CertificateSection):
    clients_asked: int
    rounds: int
    bytes_up: float | Withheld
    bytes_down: float


class CostSection(CertificateSection):
    seconds_server: float
    seconds_client_total: float
    seconds_request: float
    seconds_total: float
    seconds_retrain: float | NotRun
    ratio_to_retrain: float | NotRun
    storage_bytes_server: float
    storage_bytes_client_mean: float | Withheld
    bytes_on_devices_mean: float | Withheld


class GuaranteeSection(CertificateSection):
    """What can be said of what is left, and under which assumptions."""

    type: Literal["exact", "up to rounding", "bounded", "empirical", "not run"]
    epsilon: float | None
    delta: float | None
    psi_bound: float | None
    max_score_difference: float | NotRun | None
    people_compared: int | NotRun
    assumptions: list[str]


class PurgeSection(CertificateSection):
    """What was emptied, and where a search of the new folder still finds what was withdrawn."""

    emptied: list[str]
    clean: bool
    pairs: list[str]
    people: list[str]
    rows: list[str]


class Certificate(CertificateSection):
    """What was requested, done and checked, and what was not."""

    request: RequestSection
    method: MethodSection
    model: ModelSection
    participation: ParticipationSection
    cost: CostSection
    guarantee: GuaranteeSection
    audit: dict[str, Any]
    utility: dict[str, Any] | NotRun
    purged: PurgeSection
    residual_risk: str
    verdict: str

    def withhold_exact_figures(self) -> Certificate:
        """A certificate of a run that states an epsilon holds nothing that is not charged to somebody."""
        request = self.request.model_copy(update={"n_edges": WITHHELD, "n_items": WITHHELD})
        model = self.model.model_copy(update={"sha256_data_remaining": WITHHELD})
        participation = self.participation.model_copy(update={"bytes_up": WITHHELD})
        on_devices = {"storage_bytes_client_mean": WITHHELD, "bytes_on_devices_mean": WITHHELD}
        cost = self.cost.model_copy(update=on_devices)
        sections = {"request": request, "model": model, "participation": participation, "cost": cost}
        return self.model_copy(update=sections)

    def to_json(self) -> dict[str, Any]:
        content = self.model_dump()
        return {name: _replace_infinite(value) for name, value in content.items()}


def _replace_infinite(value: Any) -> Any:
    """The same value in numbers that JSON knows."""
    if isinstance(value, dict):
        return {name: _replace_infinite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class PastRequest(BaseModel):
    subjects: list[str]


class PastMethod(BaseModel):
    name: str
    leaves: str | None = None


class PastCertificate(BaseModel):
    """What later requests need of a certificate of any version."""

    request: PastRequest
    method: PastMethod
    verdict: str

    @property
    def is_of_retraining(self) -> bool:
        return self.method.name == "retrain"

    @property
    def has_residue(self) -> bool:
        """Something of the request stayed in the model."""
        return bool(self.method.leaves) or self.verdict.startswith("fail")
