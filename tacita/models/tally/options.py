"""The settings of tally, and the names of its questions and arrays."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.models.base import BackboneConfig

STATE = "tally"  # the name of its server-side arrays
SURVEY, STATISTIC = "survey", "statistic"  # its questions

SOLVER_SETTINGS = {"axes": "filter", "alpha": "filter", "lift": "filter", "blend": "mixture"}
"""Settings that nothing but this way of solving has a use for; a mixture has a filter in it."""


def is_set(config: BackboneConfig, name: str) -> bool:
    """Whether a setting differs from its default."""
    field = type(config).model_fields[name]
    return bool(getattr(config, name) != field.default)


class FilterOptions(BackboneConfig):
    """How the sum is solved."""

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
        """Refuse a setting that does nothing with this way of solving."""
        for name, way in SOLVER_SETTINGS.items():
            is_used = self.solve in (way, "mixture")
            if not is_used and is_set(self, name):
                raise TacitaError(
                    f"backbone.{name} has no meaning with backbone.solve = '{self.solve}'; leave it out, or use tally "
                    f"with backbone.solve = '{way}'."
                )


class TallyConfig(FilterOptions):
    ridge: float = Field(500.0, gt=0, description="ridge of the linear problem")
    ridge_popularity: float = Field(0.0, ge=0, le=2, description="an item's ridge grows with its count to this power")
    decay: float = Field(0.7, gt=0, le=1, description="what earlier blocks keep of their weight in each new block")
    length_power: float = Field(0.0, ge=0, le=2, description="a user with n items weighs n to minus this power")
    most_items: int = Field(0, ge=0, description="only a user's latest items of the block count; 0: all")
    recency: Annotated[float, Field(ge=0)] | Literal["learn"] = Field(
        "learn",
        description="e-fold, in items, of the weight of older items in scoring; 0: alike; learn: each block's "
        "validation chooses",
    )
    repeat: float | Literal["learn"] = Field(
        "learn",
        description="added to the score of items of the user's earlier blocks; negative: avoid; learn: whether people "
        "come back to items more often than chance decides",
    )
    min_item: int = Field(
        5, ge=0, description="an item's increments wait for this many contributors; 0: no wait; a mitigation"
    )
    min_pair: int = Field(0, ge=0, description="a pair's increments wait for this many contributors; 0: no wait")
    keep: int = Field(
        200,
        ge=0,
        description="entries of B kept per column on the way down; 0: all; saves bytes, a mitigation",
    )
    hold_retractions: int = Field(0, ge=0, description="a retraction waits until this many users asked; 0: no wait")
    most_inputs: int = Field(10_000, ge=2, description="larger catalogues are read through this many popular items")


class OrderConfig(TallyConfig):
    order_ridge: float = Field(200.0, gt=0, description="ridge of the problem that learns order")
    order_fold: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto", description="e-fold, in items, of the weight of what came earlier; auto: 8, under privacy.epsilon 2"
    )
    order_window: int = Field(40, ge=1, le=1000, description="how many items before a place count")
    order_back: bool = Field(
        True,
        description="what is told of order looks back into earlier blocks; false, and always under privacy.epsilon: at "
        "the block's own items alone",
    )
    order_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="under privacy.epsilon: what of a person's length, squared, goes to what follows what; 0: nothing "
        "is told of order, and nothing is spent on it",
    )
    mix: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=3, max_length=3)] | Literal["learn"] = (
        Field(
            "learn",
            description="weights of the whole history, the latest items and order, e.g. [0.2, 0.3, 0.5]; learn: each "
            "block's validation chooses them, with the recency",
        )
    )
