"""One picture of several runs on the same blocks: quality of each block beside what a person's device sent and got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.report.charts import BOTTOM_MARGIN, Series, SeriesStyle, draw_lines, shorten_text
from tacita.report.data import RunData, format_bytes, format_metric
from tacita.report.drawing import LIGHT, open_sheet
from tacita.report.one_run import CONTROL_STYLES, UNKNOWN_STYLE

SHOWN_CONTROLS = ("popular", "linear")  # controls, where a run has them


@dataclass(frozen=True)
class ComparedRun:
    """A run under a name of its own, and the bytes of an average person over all of it."""

    name: str
    run: RunData
    up: float
    down: float


def draw_comparison(runs: Sequence[ComparedRun], title: str, kind: str) -> bytes:
    """A "png" or "svg" file."""
    looks = [SeriesStyle(n, 0, n % 4) for n in (0, 4, 5, 6, 7)]
    metric, names = runs[0].run.main_metric, runs[0].run.block_names
    with open_sheet(760, 320) as page:
        page.figure.patch.set_visible(True)
        page.text(380, 22, shorten_text(title, 100), ha="center", weight="bold", size=13)
        left, right = page.axes(58, 66, 330, BOTTOM_MARGIN), page.axes(480, 66, 72, BOTTOM_MARGIN)
        series = [
            Series(one.name, [b.scores[metric] for b in one.run.blocks], look)
            for one, look in zip(runs, looks, strict=False)
        ]
        controls = next((one.run.controls for one in runs if one.run.controls), [])
        for control in controls:
            if control.key in SHOWN_CONTROLS:
                values = [b[metric] for b in control.blocks]
                series.append(Series(control.name, values, CONTROL_STYLES.get(control.key, UNKNOWN_STYLE)))
        draw_lines(page, left, series, names)
        left.grid(axis="y", lw=1)
        left.set_xlabel("block")
        left.set_ylabel(format_metric(metric))
        left.set_title("Test quality per block", size=12, pad=14)
        left.legend(fontsize=10)
        for n, one in enumerate(runs):
            right.barh(n, one.up + one.down, 0.42, color=looks[n % len(looks)].hex)
            right.text(0, n - 0.26, shorten_text(one.name, 36))
            right.text(0, n + 0.38, f"{format_bytes(one.up)} up, {format_bytes(one.down)} down", color=LIGHT["soft"])
        right.set(ylim=(len(runs) - 0.4, -0.6), yticks=[], xticks=[])
        right.spines[["left", "bottom"]].set_visible(False)
        right.set_title("What a person's device sent and got, in all", size=12, pad=14)
        return page.save(kind)
