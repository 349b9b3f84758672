"""One picture of several runs on the same blocks: quality of each block, and what a person's device sent and got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tacita.report.charts import BOTTOM_MARGIN, Series, SeriesStyle, plot_series, shorten_text
from tacita.report.drawing import LIGHT, open_sheet
from tacita.report.formats import format_bytes, format_metric
from tacita.report.one_run import CONTROL_STYLES, UNKNOWN_STYLE
from tacita.report.run_data import RunData

SHOWN_CONTROLS = ("popular", "linear")  # controls, where a run has them


RUN_STYLES = [SeriesStyle(colour, 0, colour % 4) for colour in (0, 4, 5, 6, 7)]


@dataclass(frozen=True)
class ComparedRun:
    """A run under a name of its own, and the bytes of an average person over all of it."""

    name: str
    run: RunData
    up: float
    down: float


def draw_comparison(runs: Sequence[ComparedRun], title: str, kind: str) -> bytes:
    """A "png" or "svg" file."""
    first = runs[0].run
    metric = first.main_metric
    with open_sheet(760, 320) as page:
        page.figure.patch.set_visible(True)
        heading = shorten_text(title, 100)
        page.text(380, 22, heading, ha="center", weight="bold", size=13)
        quality_axes = page.axes(58, 66, 330, BOTTOM_MARGIN)
        bytes_axes = page.axes(480, 66, 72, BOTTOM_MARGIN)
        series = _list_run_series(runs, metric)
        series += _list_control_series(runs, metric)
        plot_series(page, quality_axes, series, first.block_names)
        quality_axes.grid(axis="y", lw=1)
        quality_axes.set_xlabel("block")
        quality_axes.set_ylabel(format_metric(metric))
        quality_axes.set_title("Test quality per block", size=12, pad=14)
        quality_axes.legend(fontsize=10)
        _draw_bytes(bytes_axes, runs)
        return page.save(kind)


def _list_run_series(runs: Sequence[ComparedRun], metric: str) -> list[Series]:
    series = []
    for compared, style in zip(runs, RUN_STYLES, strict=False):
        values = [block.scores[metric] for block in compared.run.blocks]
        series.append(Series(compared.name, values, style))
    return series


def _list_control_series(runs: Sequence[ComparedRun], metric: str) -> list[Series]:
    """The controls of the first run that has any."""
    controls = []
    for compared in runs:
        controls = compared.run.controls
        if controls:
            break
    series = []
    for control in controls:
        if control.key in SHOWN_CONTROLS:
            values = [scores[metric] for scores in control.blocks]
            style = CONTROL_STYLES.get(control.key, UNKNOWN_STYLE)
            series.append(Series(control.name, values, style))
    return series


def _draw_bytes(axes: Any, runs: Sequence[ComparedRun]) -> None:
    for place, compared in enumerate(runs):
        style = RUN_STYLES[place % len(RUN_STYLES)]
        total = compared.up + compared.down
        name = shorten_text(compared.name, 36)
        up = format_bytes(compared.up)
        down = format_bytes(compared.down)
        axes.barh(place, total, 0.42, color=style.hex)
        axes.text(0, place - 0.26, name)
        axes.text(0, place + 0.38, f"{up} up, {down} down", color=LIGHT["soft"])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set(yticks=[], xticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title("What a person's device sent and got, in all", size=12, pad=14)
