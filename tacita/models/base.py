"""Backbone: what every model says about itself, and the registry of models.

A model is of one of two kinds. A `Scorer` (scorer.py) trains item rows on devices; a `StatisticModel`
(statistic_model.py) learns from a sum over users. Private parameters of a user are one flat vector with named slices,
so stores, snapshots and files need to know nothing else about a model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tacita.core.config import PrivacyConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError, unknown_extension_error
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Keys, ServerState

Shapes = dict[str, tuple[int, ...]]
"""Shapes of arrays, by name."""


class BackboneConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TrainedConfig(BackboneConfig):
    """Settings of models that learn by local steps on item rows."""

    dim: int = Field(32, ge=1, le=4096, description="width of an item row")
    lr: float = Field(1.0, gt=0, description="base learning rate")
    item_lr_scale: Literal["items"] | float = Field(
        "items", description="item-table rate = lr * this: 'items' (number of items, F3CRec) or a number"
    )


class Backbone(ABC):
    """What scorers and statistic models have in common: their parameters, how these start, how items compare."""

    name: ClassVar[str]
    Config: ClassVar[type[BackboneConfig]] = BackboneConfig
    learner: ClassVar[str]
    """What travels where no part says otherwise: `rows` (a Scorer) or `statistic` (a StatisticModel)."""

    reads_history: ClassVar[bool] = False
    """Its views hold what a user did in earlier blocks (`history`), to train with or to score with."""

    reads_order: ClassVar[bool] = False
    """It scores by what came last, too, so it is served with all that a device knows, oldest first."""

    reads_context: ClassVar[bool] = False
    """It scores with rows of more items of a user (`Scorer.list_context_items`), not with the private vector alone."""

    brings: ClassVar[dict[str, Any]] = {}
    """Settings that hold with this model unless the user sets them."""

    def __init__(self, config: BackboneConfig) -> None:
        self.config = config

    @property
    def form(self) -> str:
        """Which of several classes its settings ask for (`register_form`); empty: there is only one."""
        return ""

    @property
    @abstractmethod
    def item_width(self) -> int:
        """Numbers in an item's row of the shared table."""

    @property
    @abstractmethod
    def private_layout(self) -> dict[str, int]:
        """Private parameters of one user: name -> width."""

    @property
    def private_width(self) -> int:
        return sum(self.private_layout.values())

    def split_private(self, private: Any) -> dict[str, Any]:
        """The flat private vectors (users, width) as named slices."""
        slices = {}
        start = 0
        for name, width in self.private_layout.items():
            slices[name] = private[:, start : start + width]
            start += width
        return slices

    def list_head_shapes(self) -> Shapes:
        """Shared parameters that are not item rows: name -> shape."""
        return {}

    def check(self, first_items: int, all_items: int) -> None:  # noqa: B027  (most models carry any)
        """Refuse a catalogue, of the first block and in the end, that the model cannot carry."""

    @abstractmethod
    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        """The initial item rows, a function of the item's key alone."""

    @abstractmethod
    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        """The initial private vectors, a function of the user's key alone."""

    def init_heads(self, draws: Draws) -> Arrays:
        """The initial shared parameters."""
        return {}

    def has_valid_heads(self, heads: Arrays, n_items: int) -> bool:
        """Whether shared parameters that came from elsewhere are safe to compute with."""
        own = self.init_heads(Draws(0))
        if not has_expected_heads(heads, own):
            return False
        return all(heads[name].shape == value.shape for name, value in own.items())

    def read_popularity(self, server: ServerState) -> Floats:
        """How many users each item has, where the server learns that; else zeros."""
        return np.zeros(len(server.items), np.float32)

    @abstractmethod
    def measure_similarity_to_item(self, server: ServerState, items: Floats, item: int) -> Floats:
        """How much every item is like one of them, in the model's own terms."""


def has_expected_heads(heads: Arrays, expected: Arrays) -> bool:
    """Whether shared parameters have the expected names and types."""
    if heads.keys() != expected.keys():
        return False
    return all(heads[name].dtype == value.dtype for name, value in expected.items())


def read_scalar(arrays: Mapping[str, AnyArray], name: str) -> float:
    """A shared parameter, or a sum, that is one number."""
    return float(arrays[name][0])


def make_scalar(value: float) -> Floats:
    """One number as a shared parameter."""
    return np.array([value], np.float32)


def make_zero_scores(view: CohortView) -> Floats:
    """(users, items) scores that a model adds to."""
    shape = (len(view.user), view.n_items)
    return np.zeros(shape, np.float32)


_REGISTRY: dict[str, type[Backbone]] = {}
_PRIVATE: dict[str, type[Backbone]] = {}
_FORMS: dict[str, type[Backbone]] = {}


def register(cls: type[Backbone]) -> type[Backbone]:
    _REGISTRY[cls.name] = cls
    return cls


def register_private(cls: type[Backbone]) -> type[Backbone]:
    """Register the form of the backbone of the same name under a budget, built from a config and the budget."""
    _PRIVATE[cls.name] = cls
    return cls


def register_form(form: str) -> Callable[[type[Backbone]], type[Backbone]]:
    """Register the class that a backbone becomes when its settings ask for this `form`."""

    def register_class(cls: type[Backbone]) -> type[Backbone]:
        _FORMS[f"{cls.name} {form}"] = cls
        return cls

    return register_class


def with_chosen_form(backbone: Backbone) -> Backbone:
    """The backbone in the form that its own settings ask for."""
    cls = _FORMS.get(f"{backbone.name} {backbone.form}", type(backbone))
    if cls is type(backbone):
        return backbone
    return cls(backbone.config)


def apply_budget(backbone: Backbone, privacy: PrivacyConfig) -> Backbone:
    """The backbone in the form that the settings of `privacy` ask for."""
    if privacy.epsilon is None:
        if privacy != PrivacyConfig(reproducible_noise=privacy.reproducible_noise):
            raise TacitaError("privacy.delta, blocks and features are for a budget; set privacy.epsilon, too.")
        return backbone
    if backbone.name not in _PRIVATE:
        able = ", ".join(f"'{name}'" for name in sorted(_PRIVATE))
        raise TacitaError(
            f"privacy.epsilon is a budget for sums of statistics whose length is bounded, and backbone "
            f"'{backbone.name}' has no such form; use backbone {able}, or leave privacy.epsilon out."
        )
    return _PRIVATE[backbone.name](backbone.config, privacy)  # type: ignore[call-arg]


def list_backbones() -> list[str]:
    return sorted(_REGISTRY)


def find_backbone_class(name: str) -> type[Backbone]:
    if name not in _REGISTRY:
        raise unknown_extension_error("backbone", name, _REGISTRY)
    return _REGISTRY[name]


def repeat_start(value: Floats, count: int) -> Floats:
    """The same start for `count` users."""
    return np.repeat(value.reshape(1, -1), count, axis=0)


def compute_linear_bound(fan_in: int) -> float:
    """Half-width of the usual uniform start of a linear layer."""
    return 1.0 / math.sqrt(fan_in)
