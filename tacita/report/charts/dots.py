"""Means with intervals, a row each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from tacita.report.charts.frame import LETTER, SMALL, WIDE, fit_axis_to_values, shorten_text
from tacita.report.charts.series import Dot
from tacita.report.drawing import LIGHT, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_WIDE = WIDE + 160


@dataclass(frozen=True)
class DotLayout:
    """The names in lines, the room they take at the left, and how high all rows are."""

    names: list[list[str]]
    room: float
    high: float


def draw_dot_chart(rows: Sequence[Dot], alt: str) -> str:
    """Means with their intervals, diamonds for what was published, the mean in figures at the right."""
    layout = _wrap_names(rows)
    with open_sheet(WIDE, layout.high) as page:
        axes = page.axes(layout.room, 4, 56, 28)
        _draw_dots(page, axes, rows, layout)
        return page.to_svg(alt)


def draw_dot_picture(rows: Sequence[Dot], title: str, kind: str) -> bytes:
    """The same as a "png" or "svg" file under a title."""
    layout = _wrap_names(rows)
    with open_sheet(PICTURE_WIDE, layout.high + 34) as page:
        page.figure.patch.set_visible(True)
        heading = shorten_text(title, 76)
        page.text(PICTURE_WIDE / 2, 20, heading, ha="center", weight="bold", size=13)
        axes = page.axes(layout.room, 38, 62, 28)
        _draw_dots(page, axes, rows, layout)
        return page.save(kind)


def _wrap_names(rows: Sequence[Dot]) -> DotLayout:
    names = []
    longest = 0
    for dot in rows:
        lines = wrap(shorten_text(dot.name, 44), 22)
        names.append(lines)
        longest = max([longest, *map(len, lines)])
    most_lines = max(len(lines) for lines in names)
    row_height = 27.0 if most_lines == 1 else 34.0
    room = LETTER * longest + 10
    high = 34 + row_height * len(rows)
    return DotLayout(names, room, high)


def _draw_dots(page: Sheet, axes: Axes, rows: Sequence[Dot], layout: DotLayout) -> None:
    places = range(len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    lows = [dot.mean - _measure_half_width(dot) for dot in rows]
    highs = [dot.mean + _measure_half_width(dot) for dot in rows]
    axes.hlines(places, lows, highs, color=LIGHT["s0"], lw=2)
    means = [dot.mean for dot in rows]
    (mean_dots,) = axes.plot(means, places, "o", color=LIGHT["s0"], ms=8, mec=LIGHT["card"])
    tips = [f"{dot.name}: {dot.mean:.4f}" for dot in rows]
    page.add_tips(mean_dots, tips)
    published = _draw_published(page, axes, rows)
    values = [*lows, *highs, *published]
    fit_axis_to_values(axes, values, "x", nbins=4)
    names = ["\n".join(lines) for lines in layout.names]
    axes.set_yticks(places, names)
    axes.grid(axis="x", lw=1)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, pad=5)
    axes.tick_params(axis="x", labelcolor=LIGHT["soft"], labelsize=SMALL)
    for place, dot in enumerate(rows):
        words = f"{dot.mean:.4f}"
        at_edge = ("axes fraction", "data")
        axes.annotate(words, (1, place), (52, -4), at_edge, "offset points", ha="right")


def _draw_published(page: Sheet, axes: Axes, rows: Sequence[Dot]) -> list[float]:
    """Diamonds for what was published; the numbers."""
    values = []
    places = []
    tips = []
    for place, dot in enumerate(rows):
        if dot.published is not None:
            values.append(dot.published)
            places.append(place)
            tips.append(f"{dot.name}, published: {dot.published}")
    if values:
        (diamonds,) = axes.plot(values, places, "D", color=LIGHT["s4"], ms=7, mec=LIGHT["card"])
        page.add_tips(diamonds, tips)
    return values


def _measure_half_width(dot: Dot) -> float:
    return dot.half if math.isfinite(dot.half) else 0.0
