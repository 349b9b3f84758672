"""The picture of a run as a file of its own: quality per block, and the validation curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tacita.report.charts.curve import draw_curve
from tacita.report.charts.frame import BOTTOM_MARGIN, draw_frame, shorten_text
from tacita.report.charts.lines import plot_series
from tacita.report.charts.series import Segment, Series
from tacita.report.drawing import open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Picture:
    """What the picture of a run shows: quality per block, and the validation curve at its side."""

    title: str
    metric: str
    valid_metric: str
    names: list[str]  # of the blocks
    series: list[Series]
    segments: list[Segment]
    tries: bool = False  # what is validated are settings that are tried, not rounds that teach the model


def draw_picture(shown: Picture, kind: str) -> bytes:
    """A "png" or "svg" file."""
    with open_sheet(760, 300) as page:
        page.figure.patch.set_visible(True)
        page.text(380, 22, shorten_text(shown.title, 100), ha="center", weight="bold", size=13)
        quality_axes = page.axes(58, 70, 412, BOTTOM_MARGIN)
        curve_axes = page.axes(432, 70, 16, BOTTOM_MARGIN)
        plot_series(page, quality_axes, shown.series, shown.names)
        draw_curve(page, curve_axes, shown.segments, 312)
        draw_frame(quality_axes, "", "block")
        _caption_panel(quality_axes, "Test quality per block", shown.metric)
        step = "setting" if shown.tries else "round"
        draw_frame(curve_axes, "", f"{step}, counted over all blocks")
        caption = "Validation of each setting tried" if shown.tries else "Validation quality over rounds"
        _caption_panel(curve_axes, caption, shown.valid_metric)
        return page.save(kind)


def _caption_panel(axes: Axes, caption: str, metric: str) -> None:
    axes.set_ylabel(metric)
    axes.set_title(caption, size=12, pad=18)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(fontsize=10)
