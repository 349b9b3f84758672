"""The certificate that people on nodes get: what a server did about their request, as facts of an outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class RequestCertificate(BaseModel):
    """What was done and what was not. It names nobody and no item; what is not set is no fact of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    n_items: int | None = Field(None, alias="shared items")
    request: str = ""
    method: str = ""
    mode: str = ""
    exact: bool = False
    model_before: str = Field("", alias="model before")
    model_after: str = Field("", alias="model after")
    clients_asked: float = Field(0.0, alias="clients asked")
    rounds: float = 0.0
    bytes_up: float = Field(0.0, alias="bytes up")
    bytes_down: float = Field(0.0, alias="bytes down")
    seconds_server: float = Field(0.0, alias="seconds server")
    removal: str = Field("", alias="taken")
    effective_block: int | None = Field(None, alias="effective block")
    effective_round: int | None = Field(None, alias="effective after round")
    effective_at: float | None = Field(None, alias="effective at")
    verified: str | None = None
    purged: str = ""
    residual_risk: str = Field("", alias="residual risk")
    verdict: str = ""

    @property
    def is_effective(self) -> bool:
        """The request was carried out; else it waits for others."""
        return self.effective_at is not None

    def to_facts(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True)

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> RequestCertificate:
        """What a server says; without content where it is no certificate of ours."""
        try:
            return RequestCertificate.model_validate(dict(facts))
        except ValidationError:
            return RequestCertificate()
