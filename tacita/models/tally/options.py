"""How a sum of tally is solved: settings of their own, beside those of the plain form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tacita.models.base import BackboneConfig


class FilterOptions(BackboneConfig):
    solve: Literal["ridge", "filter", "mixture"] = Field(
        "ridge",
        description="what is made of the sum: ridge regression with zero diagonal; filter: a graph filter, which large "
        "catalogues can carry; mixture: both, each block's validation weighs them",
    )
    axes: int = Field(256, ge=1, le=4096, description="leading axes of the filter, of which its second part is made")
    alpha: Annotated[float, Field(ge=0, le=100)] | Literal["learn"] = Field(
        "learn", description="weight of the filter's leading axes; learn: each block's validation chooses"
    )
    lift: Annotated[float, Field(ge=0, le=1)] | Literal["learn"] = Field(
        "learn",
        description="the filter's first part is scaled by how many people have an item, to this power; learn: each "
        "block's validation chooses",
    )
    blend: Annotated[float, Field(ge=0, le=1)] | Literal["learn"] = Field(
        "learn", description="what ridge weighs in a mixture, the filter has the rest; learn: validation chooses"
    )
