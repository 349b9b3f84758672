"""Bars: one for each series, lying, or groups of standing ones over blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tacita.report.charts.frame import (
    BOTTOM_MARGIN,
    HIGH,
    LEFT_MARGIN,
    RIGHT_MARGIN,
    SMALL,
    TOP_MARGIN,
    WIDE,
    draw_frame,
    draw_legend,
    fit_axis_to_series,
    fit_columns,
    format_short,
    name_blocks,
    select_finite,
    shorten_text,
)
from tacita.report.charts.series import Series
from tacita.report.drawing import LIGHT, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAME_LETTERS = 18  # of names in front of bars
WIDEST_BAR = 46  # pixels
ROOM_FOR_NUMBER = 28  # pixels
ROOM_FOR_DASH = 8  # pixels


def draw_level_bars(series: Sequence[Series], metric: str, alt: str) -> str:
    """One lying bar each, its number at its end, its name in front, or above where names are long."""
    firsts = [bar.values[0] for bar in series]
    longest = max([*select_finite(firsts), 1e-12])
    is_name_above = any(len(bar.name) > MOST_NAME_LETTERS for bar in series)
    start = 4.0 if is_name_above else 134.0
    row_height = 44.0 if is_name_above else 34.0
    room = WIDE - start - 52
    high = 28 + row_height * len(series)
    with open_sheet(WIDE, high) as page:
        axes = page.canvas()
        axes.text(2, 13, metric, color=LIGHT["soft"])
        for number, bar in enumerate(series):
            y = 26 + row_height * number
            if is_name_above:
                name = shorten_text(bar.name, 54)
                axes.text(start, y + 8, name)
                y += 13
            else:
                axes.text(start - 8, y + 15, bar.name, ha="right")
            value = bar.values[0]
            width = 1.0
            if math.isfinite(value):
                width = max(1.0, room * value / longest)
            axes.barh(y, width, 20, start, align="edge", color=bar.style.hex)
            after_bar = start + 6 + width
            axes.text(after_bar, y + 15, format_short(value))
        page.fit_canvas(axes)
        return page.to_svg(alt)


def draw_bar_chart(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Groups of standing bars, one group a block; a missing value leaves a dash at its place."""
    columns, legend_height = fit_columns(series)
    group_width = (WIDE - LEFT_MARGIN - RIGHT_MARGIN) / len(names)
    width = min(WIDEST_BAR / group_width, 0.8 / len(series))
    with open_sheet(WIDE, HIGH + legend_height) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN + legend_height, RIGHT_MARGIN, BOTTOM_MARGIN)
        handles = []
        for number, bars in enumerate(series):
            from_middle = number + 0.5 - len(series) / 2
            offset = width * from_middle
            handle = _draw_bars(page, axes, bars, names, offset, width)
            _write_numbers(axes, bars, offset, width * group_width)
            handles.append(handle)
        name_blocks(axes, names)
        fit_axis_to_series(axes, series)
        draw_frame(axes, metric, "block")
        draw_legend(page, series, handles, columns)
        return page.to_svg(alt)


def _draw_bars(page: Sheet, axes: Axes, bars: Series, names: Sequence[str], offset: float, width: float) -> Any:
    """One bar for every block, each with its tip."""
    places = [block + offset for block in range(len(names))]
    heights = [_zero_if_not_finite(value) for value in bars.values]
    handle = axes.bar(places, heights, width * 0.95, color=bars.style.hex)
    for value, patch, name in zip(bars.values, handle, names, strict=True):
        tip = f"{bars.name}, block {name}: {format_short(value)}"
        page.add_tips(patch, [tip])
    return handle


def _write_numbers(axes: Axes, bars: Series, offset: float, pixels: float) -> None:
    """The number over each bar, where bars of so many pixels have room for it; a dash needs less."""
    for block, value in enumerate(bars.values):
        needed = ROOM_FOR_NUMBER if math.isfinite(value) else ROOM_FOR_DASH
        if pixels >= needed:
            top = (block + offset, _zero_if_not_finite(value))
            axes.annotate(format_short(value), top, (0, 3), "data", "offset points", ha="center", size=SMALL)


def _zero_if_not_finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
