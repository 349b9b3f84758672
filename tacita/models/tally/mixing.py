"""Mixtures of scores: how devices standardise and add them, and which mixtures validation tries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tacita.core.types import AnyArray, Floats, Ragged
from tacita.models.tally.model import RECENCIES


class Mixture(NamedTuple):
    """How a device scores: the e-fold of its latest items, and what each of the three scores weighs."""

    recency: float
    whole: float
    recent: float
    order: float


_MIX_WEIGHTS = ((0.0, 0.5, 0.5), (0.2, 0.3, 0.5), (0.5, 0.2, 0.3), (0.3, 0.4, 0.3), (0.0, 0.3, 0.7))


def _list_mixtures() -> tuple[Mixture, ...]:
    mixtures = []
    for recency in (40.0, 10.0):
        for weights in _MIX_WEIGHTS:
            mixtures.append(Mixture(recency, *weights))
    mixtures.append(Mixture(40.0, 0.0, 0.0, 1.0))
    for recency in RECENCIES:
        mixtures.append(Mixture(recency, 0.0, 1.0, 0.0))
    return tuple(mixtures)


MIXTURES = _list_mixtures()
"""What mix = "learn" tries; the last one, which knows no order, stays where nobody validates."""


def mix_fits(mix: AnyArray) -> bool:
    """Whether a received mixture is three weights from 0 to 1."""
    if mix.shape != (3,):
        return False
    is_weight = (mix >= 0) & (mix <= 1)
    return bool(is_weight.all())


class MixedScores:
    """A weighted sum of scores, each standardised over the items."""

    def __init__(self, scores: Floats) -> None:
        self.scores = scores
        self.spread: Floats | None = None  # deviations of the first of them

    def add(self, weight: float, scores: Floats) -> None:
        deviation = standardise_in_place(scores)
        if self.spread is None:
            self.spread = deviation
        self.scores += np.float32(weight) * scores

    def add_order(self, weight: float, scores: Floats) -> None:
        """Add scores by order, whose deviations say nothing of what a bonus weighs."""
        standardise_in_place(scores)
        self.scores += np.float32(weight) * scores

    def add_repeat_bonus(self, repeat: float, history: Ragged) -> None:
        """Add the bonus or penalty of items of earlier blocks, in the terms of the first scores."""
        if self.spread is None:
            return
        users = history.rows()
        self.scores[users, history.ids] += np.float32(repeat) / self.spread[users]


def standardise_in_place(scores: Floats) -> Floats:
    """Take every row's mean out and divide it by its deviation, in place; the deviations, 1 where there is none."""
    wide = scores.astype(np.float64)  # a row adds up alike in any cohort
    mean = wide.mean(axis=1)
    wide -= mean[:, None]
    np.square(wide, out=wide)
    deviation = np.sqrt(wide.mean(axis=1))
    deviation[deviation < 1e-12] = 1.0
    scores -= mean.astype(np.float32)[:, None]
    scores /= deviation.astype(np.float32)[:, None]
    return np.asarray(deviation, np.float32)
