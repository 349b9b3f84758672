"""Quality on every block after every block, as a map of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tacita.report.charts.frame import MOST_BLOCK_NAMES, SMALL, WIDE, format_short, select_finite
from tacita.report.drawing import LIGHT, Sheet, open_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 40  # blocks shown in a heat map
CELLS_START = 64  # where cells begin, in pixels
CELLS_TOP = 42
HEAD = 34  # where the names of columns stand

Matrix = Sequence[Sequence[float]]


@dataclass(frozen=True)
class HeatCell:
    """A cell: which block was learned last, which one tested, and the place of its box."""

    learned: int
    tested: int
    x: float
    y: float
    wide: float
    tall: float

    @property
    def is_new(self) -> bool:
        """Whether the tested block was just learned."""
        return self.learned == self.tested

    def read(self, matrix: Matrix) -> float:
        return matrix[self.learned][self.tested]

    @property
    def centre(self) -> tuple[float, float]:
        x = self.x + self.wide / 2
        y = self.y + self.tall / 2
        return x, y


def draw_heat_map(matrix: Matrix, alt: str) -> str:
    """a_{t,s} as cells: number, and below the diagonal the change since the block was learned."""
    shown = _choose_blocks(len(matrix))
    n_shown = len(shown)
    wide = (WIDE - CELLS_START - 6) / n_shown
    tall = min(46.0, max(wide, 8.0), 300 / n_shown)
    every = math.ceil(n_shown / MOST_BLOCK_NAMES)
    with open_sheet(WIDE, 50 + tall * n_shown) as page:
        axes = page.canvas()
        axes.text(CELLS_START, 13, "tested on block", color=LIGHT["soft"])
        axes.text(2, HEAD, "after", color=LIGHT["soft"])
        for row, learned in enumerate(shown):
            y = CELLS_TOP + tall * row
            if row % every == 0:
                middle = CELLS_START + wide * (row + 0.5)
                axes.text(middle, HEAD, str(learned), ha="center")
                axes.text(56, y + tall / 2 + 4, f"block {learned}", ha="right")
            for column, tested in enumerate(shown[: row + 1]):
                x = CELLS_START + wide * column
                cell = HeatCell(learned, tested, x, y, wide, tall)
                _draw_cell(page, axes, cell, matrix)
        page.fit_canvas(axes)
        return page.to_svg(alt)


def _choose_blocks(n_blocks: int) -> list[int]:
    """All blocks, or so many of them, spread evenly."""
    if n_blocks <= MOST_CELLS:
        return list(range(n_blocks))
    last = n_blocks - 1
    chosen = {round(n * last / (MOST_CELLS - 1)) for n in range(MOST_CELLS)}
    return sorted(chosen)


def _draw_cell(page: Sheet, axes: Axes, cell: HeatCell, matrix: Matrix) -> None:
    value = format_short(cell.read(matrix))
    change = _format_change(matrix, cell)
    share = _share_of_best(matrix, cell)
    opacity = round(0.05 + 0.65 * share, 2)
    gap = min(2, cell.wide / 4)
    (box,) = axes.barh(
        cell.y + 1,
        cell.wide - gap,
        cell.tall - 2,
        cell.x,
        align="edge",
        color=[(LIGHT["heat"], opacity)],
    )
    tip = f"after block {cell.learned}, tested on block {cell.tested}: {value} {change}"
    page.add_tips(box, [tip.rstrip()])
    _write_cell(axes, cell, value, change)


def _format_change(matrix: Matrix, cell: HeatCell) -> str:
    """The change since the tested block was new; nothing where there is none."""
    first = matrix[cell.tested][cell.tested]
    if cell.is_new or not first > 0:
        return ""
    change = cell.read(matrix) / first - 1
    if not math.isfinite(change):
        return ""
    rounded = round(change, 2) + 0.0  # no -0
    return f"{rounded:+.0%}".replace("-", "−")


def _share_of_best(matrix: Matrix, cell: HeatCell) -> float:
    """A value as a share of the best that was ever reached on the tested block."""
    value = cell.read(matrix)
    later_rows = matrix[cell.tested :]
    column = [row[cell.tested] for row in later_rows]
    best = max(select_finite(column), default=0.0)
    if not best > 0 or not math.isfinite(value):
        return 0.0
    return max(0.0, value) / best


def _write_cell(axes: Axes, cell: HeatCell, value: str, change: str) -> None:
    """What fits into a cell of a heat map."""
    x, y = cell.centre
    has_room_for_both = cell.wide >= 36 and cell.tall >= 34
    if has_room_for_both:
        weight = "bold" if cell.is_new else "normal"
        lift = 0 if change else 5
        axes.text(x, y - 2 + lift, value, ha="center", weight=weight)
        if change:
            axes.text(x, y + 13, change, ha="center", size=SMALL)
    elif cell.wide >= 30:
        axes.text(x, y + 4, value, ha="center", size=SMALL)
