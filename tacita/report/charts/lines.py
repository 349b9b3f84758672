"""Lines over blocks, one for each series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tacita.report.charts.frame import (
    BOTTOM_MARGIN,
    HIGH,
    LEFT_MARGIN,
    RIGHT_MARGIN,
    TOP_MARGIN,
    WIDE,
    draw_frame,
    draw_legend,
    fit_axis_to_series,
    fit_columns,
    format_short,
    name_blocks,
)
from tacita.report.charts.series import DASHES, SHAPES, Series, SeriesStyle
from tacita.report.drawing import LIGHT, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

MOST_MARKS = 40  # blocks up to which each has a mark


def plot_series(page: Sheet, axes: Axes, series: Sequence[Series], names: Sequence[str]) -> list[Line2D]:
    """One line a series with a mark a block, the first series on top."""
    has_marks = len(names) <= MOST_MARKS
    handles = []
    for number, line in enumerate(series):
        (handle,) = axes.plot(
            range(len(line.values)),
            line.values,
            color=line.style.hex,
            linestyle=DASHES[line.style.dash],
            lw=2,
            label=line.name,
            zorder=len(series) + 2 - number,
            clip_on=False,
            **_mark_style(line.style, has_marks),
        )
        tips = _describe_values(line, names)
        if has_marks and tips:
            page.add_tips(handle, tips)
        handles.append(handle)
    name_blocks(axes, names)
    fit_axis_to_series(axes, series)
    return handles


def _mark_style(style: SeriesStyle, has_marks: bool) -> dict[str, Any]:
    """A filled mark with an edge of the page's colour, or a hollow one."""
    shape = SHAPES[style.shape] if has_marks else ""
    card = LIGHT["card"]
    return {
        "marker": shape,
        "ms": 7 if shape == "D" else 8,
        "mfc": card if style.is_hollow else style.hex,
        "mec": style.hex if style.is_hollow else card,
        "mew": 1.8 if style.is_hollow else 1,
    }


def _describe_values(line: Series, names: Sequence[str]) -> list[str]:
    tips = []
    for block, value in enumerate(line.values):
        if math.isfinite(value):
            tips.append(f"{line.name}, block {names[block]}: {format_short(value)}")
    return tips


def draw_line_chart(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Quality per block, one line each."""
    columns, legend_height = fit_columns(series)
    with open_sheet(WIDE, HIGH + legend_height) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN + legend_height, RIGHT_MARGIN, BOTTOM_MARGIN)
        handles = plot_series(page, axes, series, names)
        draw_frame(axes, metric, "block")
        draw_legend(page, series, handles, columns)
        return page.to_svg(alt)
