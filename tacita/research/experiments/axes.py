"""Settings of the methods of a paper beside their rates, searched in two steps on one budget for all.

The first step tries every combination of a few choices that decide how fast anything is learned, all else at a method's
defaults. The second takes the best of them and tries points that fill the other ranges evenly. A method has an axis
where it has the setting.
"""

from __future__ import annotations

import copy
import math
from itertools import product
from typing import Any

from pydantic import BaseModel

from tacita.core.config import RunConfig
from tacita.research.experiments.experiment_spec import Axis, TunedChoice, Tuning
from tacita.research.experiments.low_discrepancy import spread_points
from tacita.runs.assembly import build_components

BACKBONE, TRAIN, PFEDME = "backbone", "train", "train.pfedme"
Value = float | str


def restrict_axis(axis: Axis, config: RunConfig) -> Axis:
    """The same axis in the places that a run has, and reads: pFedMe's steps take the place of a model's rate."""
    backbone, parts, _ = build_components(config)
    models: dict[str, type[BaseModel]] = {}
    models[TRAIN] = type(config.train)
    for part in parts:
        models[part.name] = type(part.config)
    if config.train.optimiser == "pfedme":
        models[PFEDME] = type(config.train.pfedme)
    else:
        models[BACKBONE] = type(backbone.config)
    places = []
    for place in axis.of:
        if place not in models:
            continue
        if axis.option in models[place].model_fields:
            places.append(place)
    return axis.model_copy(update={"of": places})


def with_value(chosen: TunedChoice, axis: Axis, value: Value) -> TunedChoice:
    """A choice with one setting more, in all of the axis's places."""
    places = [(place, axis.option) for place in axis.of]
    places += axis.also.items()
    train = dict(chosen.train)
    options = copy.deepcopy(chosen.options)
    update: dict[str, Any] = {"options": options, "train": train}
    for place, option in places:
        if place == BACKBONE:
            update["lr"] = value
        elif place == TRAIN:
            train[option] = value
        elif place == PFEDME:
            train["pfedme"] = {**train.get("pfedme", {}), option: value}
        else:
            options.setdefault(place, {})[option] = value
    return chosen.model_copy(update=update)


def _list_usable_axes(axes: list[Axis], config: RunConfig) -> list[Axis]:
    """Axes that have a place in a run, restricted to such places."""
    restricted = [restrict_axis(axis, config) for axis in axes]
    return [axis for axis in restricted if axis.of]


def list_combinations(tuning: Tuning, config: RunConfig) -> list[TunedChoice]:
    """The first step: the method's defaults, changed by every combination."""
    axes = _list_usable_axes(tuning.first, config)
    choices = []
    for values in product(*(axis.choices for axis in axes)):
        chosen = TunedChoice()
        for axis, value in zip(axes, values, strict=True):
            chosen = with_value(chosen, axis, value)
        choices.append(chosen)
    return choices


def sample_around(tuning: Tuning, config: RunConfig, best: TunedChoice, n: int) -> list[TunedChoice]:
    """The second step: `n` points from the best of the first."""
    axes = _list_usable_axes(tuning.then, config)
    if not axes:
        return []
    choices = []
    for point in spread_points(n, len(axes)):
        chosen = best.model_copy(update={"valid": None, "trials": None})
        for axis, share in zip(axes, point, strict=True):
            chosen = with_value(chosen, axis, _read_value_at(axis, share))
        choices.append(chosen)
    return choices


def _read_value_at(axis: Axis, share: float) -> Value:
    """The value at a share of the way along an axis."""
    if axis.choices:
        last = len(axis.choices) - 1
        number = int(share * len(axis.choices))
        return axis.choices[min(number, last)]
    width = math.log(axis.highest / axis.lowest)
    value = axis.lowest * math.exp(share * width)
    return float(f"{value:.2g}")
