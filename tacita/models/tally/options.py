"""How a sum of tally is solved: settings of their own, beside those of the plain form."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.models.base import BackboneConfig

SOLVER_SETTINGS = {"axes": "filter", "alpha": "filter", "lift": "filter", "blend": "mixture"}
"""Settings that nothing but this way of solving has a use for; a mixture has a filter in it."""


class FilterOptions(BackboneConfig):
    solve: Literal["ridge", "filter", "mixture"] = Field(
        "ridge",
        description="what is made of the sum: ridge regression with zero diagonal; filter: a graph filter, which large "
        "catalogues can carry; mixture: both, each block's validation weighs them",
    )
    axes: int = Field(256, ge=1, le=4096, description="leading axes of the filter, of which its second part is made")
    alpha: Annotated[float, Field(ge=0, le=100)] | Literal["learn"] = Field(
        "learn",
        description="weight of the filter's leading axes; learn: each block's validation chooses (in a mixture: 0.15)",
    )
    lift: Annotated[float, Field(ge=0, le=1)] | Literal["learn"] = Field(
        "learn",
        description="the filter's first part is scaled by how many people have an item, to this power; learn: each "
        "block's validation chooses among 0, 0.1 and 0.2 (in a mixture: 0)",
    )
    blend: Annotated[float, Field(ge=0, le=1)] | Literal["learn"] = Field(
        "learn", description="what ridge weighs in a mixture, the filter has the rest; learn: validation chooses"
    )

    def model_post_init(self, context: Any) -> None:
        """Nobody may think that a setting does something where it does nothing."""
        for name, way in SOLVER_SETTINGS.items():
            if self.solve not in (way, "mixture") and getattr(self, name) != type(self).model_fields[name].default:
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = '{self.solve}'; leave it out, or use tally "
                    f"with backbone.solve = '{way}'."
                )
