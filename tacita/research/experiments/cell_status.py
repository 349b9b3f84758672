"""Which cells of a table are finished, which ran before a change of code, and which did not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tacita.research.experiments.experiment_cell import Cells, ExperimentCell, Place
from tacita.research.experiments.single_block import CellLines, Line

EARLIER = "earlier"
"""Field of a line that earlier code made: the changes of code since."""

Status = Literal["finished", "stale", "missing"]


@dataclass(frozen=True)
class CellStatus:
    """A cell, and the changes of code since it ran."""

    cell: ExperimentCell
    status: Status
    changes: tuple[str, ...] = ()


def list_cell_statuses(cells: Cells, lines: CellLines) -> list[CellStatus]:
    """The status of every cell, by the lines of its files."""
    return [_find_status(cell, lines) for cell in cells]


def _find_status(cell: ExperimentCell, lines: CellLines) -> CellStatus:
    if cell.key in lines:
        return CellStatus(cell, "finished")
    for key, changes in cell.earlier_keys.items():
        if key in lines:
            return CellStatus(cell, "stale", tuple(changes))
    return CellStatus(cell, "missing")


def with_earlier_lines(cells: Cells, lines: CellLines) -> CellLines:
    """Lines, and those of earlier code for variants of which no seed has run since; they say so, and never mix."""
    current_places = {_find_place(cell) for cell in cells if cell.key in lines}
    complete = dict(lines)
    for cell in cells:
        if _find_place(cell) not in current_places:
            line = _find_earlier_line(cell, lines)
            if line:
                complete[cell.key] = line
    return complete


def _find_place(cell: ExperimentCell) -> Place:
    return (cell.dataset, cell.backbone, cell.variant)


def _find_earlier_line(cell: ExperimentCell, lines: CellLines) -> Line:
    for key, changes in cell.earlier_keys.items():
        if key in lines:
            return {**lines[key], EARLIER: changes}
    return {}


def list_earlier_rows(cells: Cells, lines: CellLines, labels: dict[str, str]) -> list[str]:
    """A sentence for the rows of each dataset and model that earlier code made."""
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for cell in cells:
        changes = lines.get(cell.key, {}).get(EARLIER)
        if changes:
            place = (cell.dataset, cell.backbone, ", ".join(changes))
            rows.setdefault(place, {})[labels[cell.variant]] = None
    return list(_iterate_sentences(rows))


def _iterate_sentences(rows: dict[tuple[str, str, str], dict[str, None]]) -> Iterator[str]:
    for (dataset, backbone, changes), labels in rows.items():
        names = "; ".join(labels)
        yield f"† Earlier code made these rows of {dataset}, {backbone}, and it changed since ({changes}): {names}."
