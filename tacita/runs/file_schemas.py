"""What ids.json and result.json of a run folder must look like, so that damaged or forged files are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

Number = StrictInt | StrictFloat | None
Count = Annotated[int, Field(strict=True, ge=0)]
Promise = dict[str, StrictBool | StrictInt | StrictFloat | StrictStr]

RunResult = dict[str, Any]
"""What result.json holds."""

ScoreRow = dict[str, Any]
"""Metrics of a scorer in a block, or their means, by name."""

RunIds = dict[str, Any]
"""What ids.json holds."""


class _LenientModel(BaseModel):
    """Known fields are of their kind; others may be there."""

    model_config = ConfigDict(extra="allow")


class _DataSchema(_LenientModel):
    name: StrictStr
    fingerprint: StrictStr
    users: Count
    items: Count


class _BlockSchema(_LenientModel):
    users: Count
    rounds: Count
    best_round: Count
    on_blocks: list[Number]
    promises: dict[str, Promise] = {}


class _PrivacySchema(_LenientModel):
    epsilon: dict[str, Number]


class _ResultSchema(_LenientModel):
    data: _DataSchema
    blocks: list[_BlockSchema] = Field(min_length=1)
    mean: dict[str, Number]
    continual: dict[str, Number] = {}
    controls: dict[str, dict[str, Any]]
    bytes: dict[str, Number]
    privacy: _PrivacySchema = _PrivacySchema(epsilon={})
    requests: Count = 0


class _IdsSchema(_LenientModel):
    fingerprint: StrictStr
    users: list[StrictStr] = Field(min_length=1)
    items: list[StrictStr] = Field(min_length=1)
    titles: dict[str, StrictStr]


def is_result(value: Any) -> bool:
    """Whether it is the result of a run, with every metric a number in every block."""
    if not _fits(_ResultSchema, value):
        return False
    metrics = list(value["mean"])
    n_blocks = len(value["blocks"])
    if not _has_metrics(value, metrics, n_blocks):
        return False
    for control in value["controls"].values():
        was_skipped = "skipped" in control
        if not was_skipped and not _has_metrics(control, metrics, n_blocks):
            return False
    return True


def _has_metrics(scored: ScoreRow, metrics: list[str], n_blocks: int) -> bool:
    """Whether a run or control has every metric in its mean and in each of so many blocks."""
    blocks = scored.get("blocks")
    mean = scored.get("mean")
    if not isinstance(mean, dict) or not isinstance(blocks, list):
        return False
    if len(blocks) != n_blocks:
        return False
    for row in (mean, *blocks):
        if not isinstance(row, dict):
            return False
        if not all(_is_number(row.get(metric)) for metric in metrics):
            return False
    return True


def are_ids(value: Any) -> bool:
    """Whether it is a table of ids, each once."""
    if not _fits(_IdsSchema, value):
        return False
    return _are_distinct(value["users"]) and _are_distinct(value["items"])


def _are_distinct(ids: list[str]) -> bool:
    return len(set(ids)) == len(ids)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value is None or isinstance(value, int | float)


def _fits(model: type[BaseModel], value: Any) -> bool:
    try:
        model.model_validate(value)
    except ValidationError:
        return False
    return True
