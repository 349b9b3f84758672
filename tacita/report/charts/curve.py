"""The validation score over rounds, block after block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tacita.report.charts.frame import (
    BOTTOM_MARGIN,
    HIGH,
    LEFT_MARGIN,
    LETTER,
    RIGHT_MARGIN,
    ROUND_STEPS,
    SMALL,
    TOP_MARGIN,
    WIDE,
    draw_frame,
    fit_axis_to_values,
    format_short,
)
from tacita.report.charts.series import Segment
from tacita.report.drawing import LIGHT, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1500  # of a curve
MOST_LARGE_RINGS = 20


def draw_curve(page: Sheet, axes: Axes, segments: Sequence[Segment], wide: float) -> None:
    """The validation score over all rounds; every other block is shaded, best rounds are ringed."""
    last = max([1, *(segment.end for segment in segments)])
    pixel = wide / last
    label_end = -math.inf
    for number, segment in enumerate(segments):
        if number % 2:
            axes.axvspan(segment.start, segment.end, color=LIGHT["band"], lw=0, zorder=0)
        label_end = _name_segment(axes, segment, pixel, label_end)
        _draw_segment(axes, segment)
    ringed = [segment for segment in segments if segment.best]
    if ringed:
        size = 9.0 if len(segments) <= MOST_LARGE_RINGS else 4.5
        _ring_best(page, axes, ringed, size)
    fit_axis_to_values(axes, _list_scores(segments))
    axes.set_xlim(0, last)
    axes.locator_params(axis="x", nbins=6, steps=ROUND_STEPS, integer=True)


def _name_segment(axes: Axes, segment: Segment, pixel: float, label_end: float) -> float:
    """Write a block's name above it unless it would touch the one before; where the last name ends, in pixels."""
    middle = pixel * (segment.start + segment.end) / 2
    room = pixel * (segment.end - segment.start)
    words = segment.name
    if room <= LETTER * len(words):
        words = words.removeprefix("block ")
    half = LETTER * len(words) / 2
    if middle - half <= label_end + 4:
        return label_end
    place = (segment.middle, 1.0)
    axes.annotate(words, place, (0, 4), ("data", "axes fraction"), "offset points", ha="center", size=SMALL)
    return middle + half


def _draw_segment(axes: Axes, segment: Segment) -> None:
    every = len(segment.points) // MOST_POINTS + 1
    points = segment.points[::every]
    rounds = [round_number for round_number, _ in points]
    scores = [score for _, score in points]
    axes.plot(rounds, scores, color=LIGHT["s0"], lw=2, clip_on=False)


def _ring_best(page: Sheet, axes: Axes, segments: Sequence[Segment], size: float) -> None:
    """Ring the best round of each segment, which all have one."""
    rounds = []
    scores = []
    tips = []
    for segment in segments:
        assert segment.best
        best_round, score = segment.best
        rounds.append(best_round)
        scores.append(score)
        in_block = best_round - segment.start
        tips.append(f"{segment.name}: best after round {in_block}, {format_short(score)}")
    (rings,) = axes.plot(
        rounds,
        scores,
        "o",
        ms=size,
        label="best round of a block",
        mfc=LIGHT["card"],
        mec=LIGHT["s1"],
        mew=2,
        clip_on=False,
        zorder=5,
    )
    page.add_tips(rings, tips)


def _list_scores(segments: Sequence[Segment]) -> list[float]:
    """Every score of the curve, and those of best rounds."""
    scores = []
    for segment in segments:
        scores += [score for _, score in segment.points]
        if segment.best:
            scores.append(segment.best[1])
    return scores


def draw_curve_chart(segments: Sequence[Segment], alt: str) -> str:
    """The validation score over all rounds."""
    with open_sheet(WIDE, HIGH) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN, RIGHT_MARGIN, BOTTOM_MARGIN)
        draw_curve(page, axes, segments, WIDE - LEFT_MARGIN - RIGHT_MARGIN)
        draw_frame(axes, "", "round, counted over all blocks")
        return page.to_svg(alt)
