"""What charts show: series of numbers, curves in segments, means with intervals, and how series look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tacita.report.drawing import LIGHT, SERIES

GREY = SERIES - 1
DASHES: tuple[Any, ...] = ("-", (0, (3.2, 1.8)), (0, (1, 1.4)), (0, (4, 1.4, 1, 1.4)), (0, (5.5, 1.8)))
SHAPES = "os^Do"  # the last one is hollow


@dataclass(frozen=True)
class SeriesStyle:
    """How a series can be told apart, by colour or without."""

    colour: int
    dash: int = 0
    shape: int = 0

    @property
    def hex(self) -> str:
        return LIGHT[f"s{self.colour}"]

    @property
    def is_hollow(self) -> bool:
        return self.shape == len(SHAPES) - 1

    @staticmethod
    def nth(n: int) -> SeriesStyle:
        """The n-th of many: colours first, then dashes."""
        dash = n // GREY % len(DASHES)
        return SeriesStyle(n % GREY, dash, n % len(SHAPES))


@dataclass(frozen=True)
class Series:
    name: str
    values: list[float]  # one per block
    style: SeriesStyle


@dataclass(frozen=True)
class Segment:
    """The validation curve of one block, in rounds counted over the whole run."""

    name: str
    start: int
    end: int
    points: list[tuple[int, float]]
    best: tuple[int, float] | None

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


@dataclass(frozen=True)
class Dot:
    """A mean with its interval, and what was published."""

    name: str
    mean: float
    half: float  # NaN where there is no interval
    published: float | None
