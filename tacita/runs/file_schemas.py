"""What ids.json and result.json of a run folder must look like: what is damaged or forged is refused, not half used."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

Number = StrictInt | StrictFloat | None
Count = Annotated[int, Field(strict=True, ge=0)]


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
    promises: dict[str, dict[str, StrictInt | StrictFloat | StrictStr]] = {}


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
    scored = [value, *(one for one in value["controls"].values() if "skipped" not in one)]
    for one in scored:
        blocks, mean = one.get("blocks"), one.get("mean")
        if not isinstance(mean, dict) or not isinstance(blocks, list) or len(blocks) != len(value["blocks"]):
            return False
        rows = [mean, *blocks]
        if not all(isinstance(row, dict) and _is_number(row.get(metric)) for row in rows for metric in value["mean"]):
            return False
    return True


def are_ids(value: Any) -> bool:
    return _fits(_IdsSchema, value) and all(len(set(value[name])) == len(value[name]) for name in ("users", "items"))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _fits(model: type[BaseModel], found: Any) -> bool:
    try:
        model.model_validate(found)
    except ValidationError:
        return False
    return True
