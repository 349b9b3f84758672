"""The charts of result pages: each takes plain numbers and names, and shows NaN as "nothing there"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from tacita.report.drawing import LIGHT, SERIES, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

WIDE, HIGH = 400.0, 250.0
LEFT_MARGIN, TOP_MARGIN, RIGHT_MARGIN, BOTTOM_MARGIN = 44.0, 26.0, 12.0, 42.0
LETTER = 7.2  # pixels that a letter takes at most, on average
SMALL = 10.5
MOST_CELLS = 40  # blocks shown in a heat map
MOST_POINTS = 1500  # of a curve
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

    @staticmethod
    def nth(n: int) -> SeriesStyle:
        """The n-th of many: colours first, then dashes."""
        return SeriesStyle(n % GREY, n // GREY % len(DASHES), n % len(SHAPES))


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


@dataclass(frozen=True)
class Dot:
    """A mean with its interval beside what was published."""

    name: str
    mean: float
    half: float  # NaN where there is no interval
    published: float | None


def format_short(value: float) -> str:
    """A number for the face of a chart."""
    return f"{value:.3f}" if math.isfinite(value) else "–"


def shorten_text(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def _set_scale(axes: Axes, values: Sequence[float], which: str = "y", nbins: int = 5) -> None:
    """Round numbers from 0, or the lowest below it, to just past the highest."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axes.locator_params(axis="y" if which == "y" else "x", nbins=nbins, steps=[1, 2, 2.5, 5, 10])
    told = [v for v in values if math.isfinite(v)]
    low, high = min([0.0, *told]), max([0.0, *told])
    high = high if high - low > 1e-9 else 1.0
    marks = [float(m) for m in axis.get_major_locator().tick_values(low, high)]
    step = marks[1] - marks[0]
    marks = [m for m in marks if low - 0.99 * step <= m <= high + 0.99 * step]
    digits = max(len(f"{m:.8f}".rstrip("0").partition(".")[2]) for m in marks)
    axis.set_ticks(marks, labels=[f"{m:.{digits}f}" if abs(m) > 1e-12 else "0" for m in marks])
    axes.set(**{f"{which}lim": (marks[0], marks[-1])})


def _draw_frame(axes: Axes, metric: str, x_title: str) -> None:
    """Lines across, names below, the metric above the scale."""
    axes.grid(axis="y", lw=1)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, bottom=False, pad=5)
    axes.tick_params(axis="y", labelcolor=LIGHT["soft"])
    axes.set_xlabel(x_title, labelpad=5)
    if metric:
        axes.annotate(metric, (0, 1), (2 - LEFT_MARGIN, 10), "axes fraction", "offset pixels", color=LIGHT["soft"])


def _name_blocks(axes: Axes, names: Sequence[str]) -> None:
    every = math.ceil(len(names) / 12)
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.set_xlim(-0.5, len(names) - 0.5)


def _draw_legend(page: Sheet, names: Sequence[str], handles: Sequence[Any], columns: int) -> None:
    page.figure.legend(
        handles,
        [shorten_text(name, 56) for name in names],
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


def _fit_columns(names: Sequence[str]) -> tuple[int, float]:
    """How many columns of names a legend has room for, and how high it is; matplotlib fills the first ones most."""
    wide = [LETTER * len(shorten_text(name, 56)) + 46 for name in names]
    for columns in range(len(names), 0, -1):
        more = [len(names) // columns + (k < len(names) % columns) for k in range(columns)]
        ends = list(accumulate(more))
        if sum(max(wide[end - n : end]) for n, end in zip(more, ends)) <= WIDE:
            break
    return columns, 18.0 * more[0]


def draw_lines(page: Sheet, axes: Axes, series: Sequence[Series], names: Sequence[str]) -> list[Line2D]:
    """One line a series with a mark a block, the first series on top."""
    out = []
    for n, one in enumerate(series):
        ring = one.style.shape == len(SHAPES) - 1
        shape = SHAPES[one.style.shape] if len(names) <= 40 else ""
        (drawn,) = axes.plot(
            range(len(one.values)),
            one.values,
            color=one.style.hex,
            linestyle=DASHES[one.style.dash],
            lw=2,
            marker=shape,
            ms=8 if shape != "D" else 7,
            mfc=LIGHT["card"] if ring else one.style.hex,
            mec=one.style.hex if ring else LIGHT["card"],
            mew=1.8 if ring else 1,
            label=one.name,
            zorder=len(series) + 2 - n,
            clip_on=False,
        )
        told = [
            f"{one.name}, block {names[k]}: {format_short(v)}" for k, v in enumerate(one.values) if math.isfinite(v)
        ]
        if shape and told:
            page.add_tips(drawn, told)
        out.append(drawn)
    _name_blocks(axes, names)
    _set_scale(axes, [v for s in series for v in s.values])
    return out


def draw_line_chart(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Quality per block, one line each."""
    columns, above = _fit_columns([s.name for s in series])
    with open_sheet(WIDE, HIGH + above) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN + above, RIGHT_MARGIN, BOTTOM_MARGIN)
        handles = draw_lines(page, axes, series, names)
        _draw_frame(axes, metric, "block")
        _draw_legend(page, [s.name for s in series], handles, columns)
        return page.to_svg(alt)


def draw_level_bars(series: Sequence[Series], metric: str, alt: str) -> str:
    """One lying bar each, number beside it, name in front, or above where names are long."""
    top = max([s.values[0] for s in series if math.isfinite(s.values[0])] + [1e-12])
    above = any(len(s.name) > 18 for s in series)
    left, row = (4.0, 44.0) if above else (134.0, 34.0)
    room = WIDE - left - 52
    with open_sheet(WIDE, 28 + row * len(series)) as page:
        axes = page.canvas()
        axes.text(2, 13, metric, color=LIGHT["soft"])
        for n, one in enumerate(series):
            y = 26 + row * n
            if above:
                axes.text(left, y + 8, shorten_text(one.name, 54))
                y += 13
            else:
                axes.text(left - 8, y + 15, one.name, ha="right")
            wide = max(1.0, room * one.values[0] / top) if math.isfinite(one.values[0]) else 1.0
            axes.barh(y, wide, 20, left, align="edge", color=one.style.hex)
            axes.text(left + 6 + wide, y + 15, format_short(one.values[0]))
        axes.set(xlim=(0, page.wide), ylim=(page.high, 0))
        return page.to_svg(alt)


def draw_bar_chart(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Groups of standing bars, one group a block; a missing value leaves a dash at its place."""
    columns, above = _fit_columns([s.name for s in series])
    step = (WIDE - LEFT_MARGIN - RIGHT_MARGIN) / len(names)
    wide = min(46 / step, 0.8 / len(series))
    with open_sheet(WIDE, HIGH + above) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN + above, RIGHT_MARGIN, BOTTOM_MARGIN)
        handles = []
        for k, one in enumerate(series):
            at = [n + wide * (k + 0.5 - len(series) / 2) for n in range(len(names))]
            told = [v if math.isfinite(v) else 0.0 for v in one.values]
            drawn = axes.bar(at, told, wide * 0.95, color=one.style.hex)
            for x, value, patch, name in zip(at, one.values, drawn, names, strict=True):
                page.add_tips(patch, [f"{one.name}, block {name}: {format_short(value)}"])
                if wide * step >= 28 or (wide * step >= 8 and not math.isfinite(value)):
                    y = value if math.isfinite(value) else 0.0
                    axes.annotate(format_short(value), (x, y), (0, 3), "data", "offset pixels", ha="center", size=SMALL)
            handles.append(drawn)
        _name_blocks(axes, names)
        _set_scale(axes, [v for s in series for v in s.values])
        _draw_frame(axes, metric, "block")
        _draw_legend(page, [s.name for s in series], handles, columns)
        return page.to_svg(alt)


def draw_curve(page: Sheet, axes: Axes, segments: Sequence[Segment], wide: float) -> None:
    """The validation score over all rounds; every other block is shaded, best rounds are ringed."""
    last = max([s.end for s in segments] + [1])
    pixel, label_end = wide / last, -math.inf
    for n, one in enumerate(segments):
        if n % 2:
            axes.axvspan(one.start, one.end, color=LIGHT["band"], lw=0, zorder=0)
        middle, room = pixel * (one.start + one.end) / 2, pixel * (one.end - one.start)
        words = one.name if room > LETTER * len(one.name) else one.name.removeprefix("block ")
        half = LETTER * len(words) / 2
        if middle - half > label_end + 4:
            at = ((one.start + one.end) / 2, 1.0)
            axes.annotate(words, at, (0, 4), ("data", "axes fraction"), "offset pixels", ha="center", size=SMALL)
            label_end = middle + half
        thin = one.points[:: len(one.points) // MOST_POINTS + 1]
        axes.plot([r for r, _ in thin], [v for _, v in thin], color=LIGHT["s0"], lw=2, clip_on=False)
    found = [(one, *one.best) for one in segments if one.best]
    if found:
        look: dict[str, Any] = {"mfc": LIGHT["card"], "mec": LIGHT["s1"], "mew": 2, "clip_on": False, "zorder": 5}
        size = 9.0 if len(segments) <= 20 else 4.5
        spots = [at for _, at, _ in found], [score for *_, score in found]
        (drawn,) = axes.plot(*spots, "o", ms=size, label="best round of a block", **look)
        page.add_tips(
            drawn, [f"{s.name}: best after round {at - s.start}, {format_short(score)}" for s, at, score in found]
        )
    _set_scale(axes, [*(v for s in segments for _, v in s.points), *(score for *_, score in found)])
    axes.set_xlim(0, last)
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 2.5, 5, 10], integer=True)


def draw_curve_chart(segments: Sequence[Segment], alt: str) -> str:
    """The validation score over all rounds."""
    with open_sheet(WIDE, HIGH) as page:
        axes = page.axes(LEFT_MARGIN, TOP_MARGIN, RIGHT_MARGIN, BOTTOM_MARGIN)
        draw_curve(page, axes, segments, WIDE - LEFT_MARGIN - RIGHT_MARGIN)
        _draw_frame(axes, "", "round, counted over all blocks")
        return page.to_svg(alt)


def draw_heat_map(matrix: Sequence[Sequence[float]], alt: str) -> str:
    """a_{t,s} as cells: number, and below the diagonal the change since the block was learned."""
    shown = list(range(len(matrix)))
    if len(shown) > MOST_CELLS:
        shown = sorted({round(n * (len(matrix) - 1) / (MOST_CELLS - 1)) for n in range(MOST_CELLS)})
    wide = (WIDE - 64 - 6) / len(shown)
    tall = min(46.0, max(wide, 8.0), 300 / len(shown))
    tops = {s: max((row[s] for row in matrix[s:] if math.isfinite(row[s])), default=0.0) for s in shown}
    every = math.ceil(len(shown) / 12)
    with open_sheet(WIDE, 50 + tall * len(shown)) as page:
        axes = page.canvas()
        axes.text(64, 13, "tested on block", color=LIGHT["soft"])
        axes.text(2, 34, "after", color=LIGHT["soft"])
        for k, t in enumerate(shown):
            y = 42 + tall * k
            if k % every == 0:
                axes.text(64 + wide * (k + 0.5), 34, str(t), ha="center")
                axes.text(56, y + tall / 2 + 4, f"block {t}", ha="right")
            for j, s in enumerate(shown[: k + 1]):
                change = matrix[t][s] / matrix[s][s] - 1 if t > s and matrix[s][s] > 0 else math.nan
                words = f"{round(change, 2) + 0.0:+.0%}".replace("-", "−") if math.isfinite(change) else ""
                share = max(0.0, matrix[t][s]) / tops[s] if tops[s] > 0 and math.isfinite(matrix[t][s]) else 0.0
                colour = (LIGHT["heat"], round(0.05 + 0.65 * share, 2))
                box = (64 + wide * j, y, wide, tall)
                (drawn,) = axes.barh(y + 1, box[2] - min(2, wide / 4), tall - 2, box[0], align="edge", color=[colour])
                said = f"after block {t}, tested on block {s}: {format_short(matrix[t][s])} {words}"
                page.add_tips(drawn, [said.rstrip()])
                _draw_cell_number(axes, box, format_short(matrix[t][s]), words, t == s)
        axes.set(xlim=(0, page.wide), ylim=(page.high, 0))
        return page.to_svg(alt)


def _draw_cell_number(
    axes: Axes, box: tuple[float, float, float, float], value: str, change: str, is_new: bool
) -> None:
    """What fits into a cell of a heat map."""
    x, y, wide, tall = box
    if wide >= 36 and tall >= 34:
        weight = "bold" if is_new else "normal"
        lift = 0 if change else 5
        axes.text(x + wide / 2, y + tall / 2 - 2 + lift, value, ha="center", weight=weight)
        if change:
            axes.text(x + wide / 2, y + tall / 2 + 13, change, ha="center", size=SMALL)
    elif wide >= 30:
        axes.text(x + wide / 2, y + tall / 2 + 4, value, ha="center", size=SMALL)


def draw_dot_chart(rows: Sequence[Dot], alt: str) -> str:
    """Means with their intervals, diamonds for what was published, the mean in figures at the right."""
    names, left, high = _wrap_dot_names(rows)
    with open_sheet(WIDE, high) as page:
        _draw_dots(page, page.axes(left, 4, 56, 28), rows, names)
        return page.to_svg(alt)


def draw_dot_picture(rows: Sequence[Dot], title: str, kind: str) -> bytes:
    """The same as a "png" or "svg" file under a title."""
    names, left, high = _wrap_dot_names(rows)
    with open_sheet(WIDE + 160, high + 34) as page:
        page.figure.patch.set_visible(True)
        page.text((WIDE + 160) / 2, 20, shorten_text(title, 76), ha="center", weight="bold", size=13)
        _draw_dots(page, page.axes(left, 38, 62, 28), rows, names)
        return page.save(kind)


def _wrap_dot_names(rows: Sequence[Dot]) -> tuple[list[list[str]], float, float]:
    """The names in lines, the room they take at the left, and how high all rows are."""
    names = [wrap(shorten_text(one.name, 44), 22) for one in rows]
    left = LETTER * max(len(line) for name in names for line in name) + 10
    tall = 27.0 if max(map(len, names)) == 1 else 34.0
    return names, left, 34 + tall * len(rows)


def _draw_dots(page: Sheet, axes: Axes, rows: Sequence[Dot], names: Sequence[Sequence[str]]) -> None:
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    at, (low, high) = range(len(rows)), _interval_ends(rows)
    axes.hlines(at, low, high, color=LIGHT["s0"], lw=2)
    (ours,) = axes.plot([one.mean for one in rows], at, "o", color=LIGHT["s0"], ms=8, mec=LIGHT["card"])
    page.add_tips(ours, [f"{one.name}: {one.mean:.4f}" for one in rows])
    told = [(one.published, n) for n, one in enumerate(rows) if one.published is not None]
    if told:
        (theirs,) = axes.plot(*zip(*told, strict=True), "D", color=LIGHT["s4"], ms=7, mec=LIGHT["card"])
        page.add_tips(theirs, [f"{rows[n].name}, published: {value}" for value, n in told])
    _set_scale(axes, [*low, *high, *(value for value, _ in told)], "x", nbins=4)
    axes.set_yticks(at, ["\n".join(name) for name in names])
    axes.grid(axis="x", lw=1)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, pad=5)
    axes.tick_params(axis="x", labelcolor=LIGHT["soft"], labelsize=SMALL)
    for n, one in enumerate(rows):
        words = f"{one.mean:.4f}"
        axes.annotate(words, (1, n), (52, -4), ("axes fraction", "data"), "offset pixels", ha="right")


def _interval_ends(rows: Sequence[Dot]) -> tuple[list[float], list[float]]:
    """Where the intervals begin and end."""
    halves = [one.half if math.isfinite(one.half) else 0.0 for one in rows]
    return [r.mean - h for r, h in zip(rows, halves)], [r.mean + h for r, h in zip(rows, halves)]


@dataclass(frozen=True)
class Picture:
    """What the picture of a run shows: quality per block, and the validation curve beside it."""

    title: str
    metric: str
    valid_metric: str
    names: list[str]  # of the blocks
    series: list[Series]
    segments: list[Segment]


def draw_picture(shown: Picture, kind: str) -> bytes:
    """A "png" or "svg" file."""
    with open_sheet(760, 300) as page:
        page.figure.patch.set_visible(True)
        page.text(380, 22, shorten_text(shown.title, 100), ha="center", weight="bold", size=13)
        left, right = page.axes(58, 70, 412, BOTTOM_MARGIN), page.axes(432, 70, 16, BOTTOM_MARGIN)
        draw_lines(page, left, shown.series, shown.names)
        draw_curve(page, right, shown.segments, 312)
        captions = ("Test quality per block", "Validation quality over rounds")
        for axes, caption, metric in zip((left, right), captions, (shown.metric, shown.valid_metric), strict=True):
            _draw_frame(axes, "", "block" if axes is left else "round, counted over all blocks")
            axes.set_ylabel(metric)
            axes.set_title(caption, size=12, pad=18)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=10)
        return page.save(kind)
