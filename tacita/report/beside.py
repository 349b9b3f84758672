"""One picture of several runs on the same blocks: quality of each block beside what a person's device sent and got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tacita.report.charts import BOTTOM, Look, Series, cut, draw_lines
from tacita.report.data import RunData, human_bytes, nice
from tacita.report.drawing import LIGHT, sheet
from tacita.report.one_run import LOOKS, UNKNOWN

SHOWN = ("popular", "linear")  # controls, where a run has them


@dataclass(frozen=True)
class Beside:
    """A run under a name of its own, and the bytes of an average person over all of it."""

    name: str
    run: RunData
    up: float
    down: float


def draw_beside(found: Sequence[Beside], title: str, kind: str) -> bytes:
    """A "png" or "svg" file."""
    looks = [Look(n, 0, n % 4) for n in (0, 4, 5, 6, 7)]
    metric, names = found[0].run.main, found[0].run.names
    with sheet(760, 320) as page:
        page.figure.patch.set_visible(True)
        page.text(380, 22, cut(title, 100), ha="center", weight="bold", size=13)
        left, right = page.axes(58, 66, 330, BOTTOM), page.axes(480, 66, 72, BOTTOM)
        series = [
            Series(one.name, [b.scores[metric] for b in one.run.blocks], look)
            for one, look in zip(found, looks, strict=False)
        ]
        controls = next((one.run.controls for one in found if one.run.controls), [])
        for control in controls:
            if control.key in SHOWN:
                values = [b[metric] for b in control.blocks]
                series.append(Series(control.name, values, LOOKS.get(control.key, UNKNOWN)))
        draw_lines(page, left, series, names)
        left.grid(axis="y", lw=1)
        left.set_xlabel("block")
        left.set_ylabel(nice(metric))
        left.set_title("Test quality per block", size=12, pad=14)
        left.legend(fontsize=10)
        for n, one in enumerate(found):
            right.barh(n, one.up + one.down, 0.42, color=looks[n % len(looks)].hex)
            right.text(0, n - 0.26, cut(one.name, 36))
            right.text(0, n + 0.38, f"{human_bytes(one.up)} up, {human_bytes(one.down)} down", color=LIGHT["soft"])
        right.set(ylim=(len(found) - 0.4, -0.6), yticks=[], xticks=[])
        right.spines[["left", "bottom"]].set_visible(False)
        right.set_title("What a person's device sent and got, in all", size=12, pad=14)
        return page.save(kind)
