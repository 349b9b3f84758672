"""What a report needs of a run: its settings, its scores, its controls, its curves and what it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tacita.models import find_backbone_class, list_backbones

CONTROLS = {
    "popular": ("most popular", "showing everybody the same popular items"),
    "alone": ("no federation", "every client training alone"),
    "linear": ("centralised linear", "a linear model on everybody's data in one place"),
    "random": ("random", "a random order"),
}


class Scores(dict[str, float]):
    """Metric -> value; what was not measured is NaN."""

    def __missing__(self, metric: str) -> float:
        return math.nan


Curve = dict[tuple[int, int], float]
"""(block, round) -> value"""


def name_control(key: str) -> str:
    unknown = (key, key)
    name, _ = CONTROLS.get(key, unknown)
    return name


def exchanges_once(backbone: str) -> bool:
    """Whether a model sends once a block: the rounds after that only try ways of scoring on validation."""
    if backbone not in list_backbones():
        return False
    return find_backbone_class(backbone).learner == "statistic"


def other_mask(mask: str) -> str:
    return "history" if mask == "block" else "block"


@dataclass(frozen=True)
class ControlResult:
    """A scorer that the method is compared with: its name, what it does, and its numbers."""

    key: str
    blocks: list[Scores]
    mean: Scores

    @property
    def name(self) -> str:
        return name_control(self.key)

    @property
    def description(self) -> str:
        unknown = (self.key, self.key)
        _, description = CONTROLS.get(self.key, unknown)
        return description


@dataclass(frozen=True)
class BlockData:
    scores: Scores
    other_mask_scores: Scores  # under the other mask
    groups: dict[str, tuple[int, Scores]]  # new, returning -> users, scores
    users: int
    rounds: int
    best_round: int
    valid: float
    up: float
    down: float
    on_blocks: list[float]


@dataclass(frozen=True)
class RunData:
    """What a report needs of a run folder, checked."""

    folder: str
    method: str
    backbone: str
    seed: int
    split_seed: int
    data: str
    fingerprint: str
    users: int
    items: int
    removed: str  # what filtering took, in words
    version: str
    settings: str  # config.toml as it stands
    select_by: str
    mask: str
    read: str | None  # what of a block devices read when they are tested; None: nothing
    ranking: str
    protocol: tuple[Any, ...]  # two runs can be compared if these are equal
    recipe: str  # all settings but seeds and controls, and the data: where these are equal, only chance differs
    blocks: list[BlockData]
    mean: Scores
    continual: Scores  # la, ra, hm
    controls: list[ControlResult]
    skipped: dict[str, str]  # control -> why
    up: float
    down: float
    valid: Curve  # validation score
    notes: dict[str, Curve]  # what the method's parts noted in each round
    privacy: list[str]  # what is promised, in words; nothing: the run is older than these sentences
    epsilon: float | None  # that a person is promised, or has spent where that is more; None: there is none

    @property
    def numbers(self) -> tuple[float, ...]:
        """Everything that was measured: runs with the same numbers drew nothing apart."""
        measured = [self.mean, self.continual]
        measured += [block.scores for block in self.blocks]
        measured += [block.other_mask_scores for block in self.blocks]
        values: list[float] = []
        for scores in measured:
            values += scores.values()
        return tuple(-1.0 if math.isnan(value) else value for value in values)

    @property
    def exchange_unit(self) -> str:
        """What a client sends its bytes in: a round, or a block where there is one exchange in each."""
        return "block" if exchanges_once(self.backbone) else "round"

    @property
    def main_metric(self) -> str:
        """The selecting metric, or the first one where that is not reported."""
        if self.select_by in self.mean:
            return self.select_by
        return next(iter(self.mean), self.select_by)

    @property
    def score(self) -> float:
        return self.mean[self.main_metric]

    @property
    def metrics(self) -> list[str]:
        """All of them, the main one first."""
        return sorted(self.mean, key=lambda metric: metric != self.main_metric)

    @property
    def popular(self) -> ControlResult | None:
        for control in self.controls:
            if control.key == "popular":
                return control
        return None

    @property
    def better_controls(self) -> list[ControlResult]:
        """Controls that beat the method on the mean."""
        better = []
        for control in self.controls:
            if self.score < control.mean[self.main_metric]:
                better.append(control)
        return better

    @property
    def other_mask(self) -> str:
        return other_mask(self.mask)

    @property
    def block_names(self) -> list[str]:
        return [str(number) for number in range(len(self.blocks))]

    @property
    def mean_label(self) -> str:
        """Which blocks the mean is over."""
        last = len(self.blocks) - 1
        if last < 2:
            return f"block {last}"
        label = f"mean of blocks 1–{last}"
        untested = []
        for number, block in enumerate(self.blocks):
            if number and not block.users:
                untested.append(str(number))
        if untested:
            label += f" without {', '.join(untested)}"
        return label
