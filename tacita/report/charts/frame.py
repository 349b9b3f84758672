"""The frame that charts share: margins, scales, names of blocks and legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tacita.report.charts.series import Series
from tacita.report.drawing import LIGHT, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE = 400.0
HIGH = 250.0
LEFT_MARGIN = 44.0
TOP_MARGIN = 26.0
RIGHT_MARGIN = 12.0
BOTTOM_MARGIN = 42.0
LETTER = 7.2  # pixels that a letter takes at most, on average
SMALL = 10.5
MOST_BLOCK_NAMES = 12
MOST_LEGEND_LETTERS = 56
LEGEND_LINE = 18.0  # pixels
ROUND_STEPS = [1, 2, 2.5, 5, 10]


def format_short(value: float) -> str:
    """A number for the face of a chart."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3f}"


def shorten_text(words: str, most: int) -> str:
    if len(words) <= most:
        return words
    return words[: most - 1] + "…"


def select_finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def fit_axis_to_series(axes: Axes, series: Sequence[Series]) -> None:
    values = []
    for line in series:
        values += line.values
    fit_axis_to_values(axes, values)


def fit_axis_to_values(axes: Axes, values: Iterable[float], which: str = "y", nbins: int = 5) -> None:
    """Round numbers from 0, or the lowest below it, to just past the highest."""
    axis = axes.xaxis
    if which == "y":
        axis = axes.yaxis  # type: ignore[assignment]
    axes.locator_params(axis="y" if which == "y" else "x", nbins=nbins, steps=ROUND_STEPS)
    finite = select_finite(values)
    low = min([0.0, *finite])
    high = max([0.0, *finite])
    if high - low <= 1e-9:
        high = 1.0
    ticks = [float(tick) for tick in axis.get_major_locator().tick_values(low, high)]
    step = ticks[1] - ticks[0]
    lowest = low - 0.99 * step
    highest = high + 0.99 * step
    ticks = [tick for tick in ticks if lowest <= tick <= highest]
    axis.set_ticks(ticks, labels=_label_ticks(ticks))
    axes.set(**{f"{which}lim": (ticks[0], ticks[-1])})


def _label_ticks(ticks: Sequence[float]) -> list[str]:
    """All with as many digits as the one that needs most; 0 without any."""
    digits = max(_count_decimals(tick) for tick in ticks)
    labels = []
    for tick in ticks:
        is_zero = abs(tick) <= 1e-12
        labels.append("0" if is_zero else f"{tick:.{digits}f}")
    return labels


def _count_decimals(value: float) -> int:
    text = f"{value:.8f}".rstrip("0")
    _, _, decimals = text.partition(".")
    return len(decimals)


def draw_frame(axes: Axes, metric: str, x_title: str) -> None:
    """Lines across, names below, the metric above the scale."""
    axes.grid(axis="y", lw=1)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, bottom=False, pad=5)
    axes.tick_params(axis="y", labelcolor=LIGHT["soft"])
    axes.set_xlabel(x_title, labelpad=5)
    if metric:
        corner = (2 - LEFT_MARGIN, 10)
        axes.annotate(metric, (0, 1), corner, "axes fraction", "offset points", color=LIGHT["soft"])


def name_blocks(axes: Axes, names: Sequence[str]) -> None:
    every = math.ceil(len(names) / MOST_BLOCK_NAMES)
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.set_xlim(-0.5, len(names) - 0.5)


def draw_legend(page: Sheet, series: Sequence[Series], handles: Sequence[Any], columns: int) -> None:
    page.figure.legend(
        handles,
        _list_legend_names(series),
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0,
        borderpad=0,
        handlelength=2.2,
        handletextpad=0.5,
        columnspacing=1.2,
        labelspacing=0.35,
    )


def _list_legend_names(series: Sequence[Series]) -> list[str]:
    return [shorten_text(line.name, MOST_LEGEND_LETTERS) for line in series]


def fit_columns(series: Sequence[Series]) -> tuple[int, float]:
    """How many columns of names a legend has room for, and how high it is."""
    widths = [LETTER * len(name) + 46 for name in _list_legend_names(series)]
    for columns in range(len(widths), 0, -1):
        sizes = _count_names_per_column(len(widths), columns)
        if _measure_legend(widths, sizes) <= WIDE:
            break
    return columns, LEGEND_LINE * sizes[0]


def _count_names_per_column(n_names: int, columns: int) -> list[int]:
    """How many names each column has; matplotlib fills the first ones most."""
    whole, rest = divmod(n_names, columns)
    return [whole + (column < rest) for column in range(columns)]


def _measure_legend(widths: Sequence[float], sizes: Sequence[int]) -> float:
    """The widest name of each column, together."""
    total = 0.0
    for size, end in zip(sizes, accumulate(sizes)):
        column = widths[end - size : end]
        total += max(column)
    return total
