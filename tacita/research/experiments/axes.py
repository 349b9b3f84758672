"""Settings of the methods of a paper beside their rates, searched in two steps on one budget for all.

First every combination of a few choices that decide how fast anything is learned, all else at a method's defaults;
then, with the best of them, points that fill the other ranges evenly. A method has an axis where it has the setting.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from tacita.core.config import RunConfig
from tacita.research.experiments.experiment_spec import Axis, TunedChoice, Tuning
from tacita.research.experiments.low_discrepancy import spread_points
from tacita.runs.assembly import build_components

BACKBONE, TRAIN, PFEDME = "backbone", "train", "train.pfedme"
Value = float | str


def restrict_axis(axis: Axis, config: RunConfig) -> Axis:
    """The same axis in the places that a run has, and reads: pFedMe's steps take the place of a model's rate."""
    backbone, parts, _ = build_components(config)
    places = {TRAIN: type(config.train), **{p.name: type(p.config) for p in parts}}
    if config.train.optimiser == "pfedme":
        places[PFEDME] = type(config.train.pfedme)
    else:
        places[BACKBONE] = type(backbone.config)
    return axis.model_copy(update={"of": [one for one in axis.of if axis.option in _field_names(places.get(one))]})


def _field_names(model: Any) -> set[str]:
    return set(model.model_fields) if model is not None else set()


def with_value(chosen: TunedChoice, axis: Axis, value: Value) -> TunedChoice:
    """A choice with one setting more, in all of the axis's places."""
    update: dict[str, Any] = {"options": {k: dict(v) for k, v in chosen.options.items()}, "train": dict(chosen.train)}
    for place, option in [*((one, axis.option) for one in axis.of), *axis.also.items()]:
        if place == BACKBONE:
            update["lr"] = value
        elif place == TRAIN:
            update["train"][option] = value
        elif place == PFEDME:
            update["train"]["pfedme"] = {**update["train"].get("pfedme", {}), option: value}
        else:
            update["options"].setdefault(place, {})[option] = value
    return chosen.model_copy(update=update)


def list_combinations(tuning: Tuning, config: RunConfig) -> list[TunedChoice]:
    """The first step: the method's defaults, changed by every combination."""
    axes = [one for one in (restrict_axis(axis, config) for axis in tuning.first) if one.of]
    out = []
    for values in product(*(one.choices for one in axes)):
        chosen = TunedChoice()
        for axis, value in zip(axes, values, strict=True):
            chosen = with_value(chosen, axis, value)
        out.append(chosen)
    return out


def sample_around(tuning: Tuning, config: RunConfig, best: TunedChoice, n: int) -> list[TunedChoice]:
    """The second step: `n` points from the best of the first."""
    axes = [one for one in (restrict_axis(axis, config) for axis in tuning.then) if one.of]
    out = []
    for point in spread_points(n, len(axes)) if axes else []:
        chosen = best.model_copy(update={"valid": None, "trials": None})
        for axis, share in zip(axes, point, strict=True):
            chosen = with_value(chosen, axis, _value_at(axis, share))
        out.append(chosen)
    return out


def _value_at(axis: Axis, share: float) -> Value:
    """The value at a share of the way along an axis."""
    if axis.choices:
        return axis.choices[min(int(share * len(axis.choices)), len(axis.choices) - 1)]
    return float(f"{axis.lowest * math.exp(share * math.log(axis.highest / axis.lowest)):.2g}")
