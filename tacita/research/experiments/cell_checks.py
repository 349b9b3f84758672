"""Run finished cells once more and compare: what is stored has to come out of this code, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tacita.core.errors import TacitaError
from tacita.kernels.processor import name_processor
from tacita.research.experiments.cells import CellFile, CellJob, run_job
from tacita.research.experiments.experiment_cell import Cells, ExperimentCell
from tacita.research.experiments.experiment_spec import list_experiments
from tacita.research.experiments.reproduction import plan_table
from tacita.research.experiments.schedules import with_upload_sizes
from tacita.research.experiments.single_block import CellLines, Line

_NOT_COMPARED = {
    "key",
    "variant",
    "tacita",
    "processor",
    "seconds",
    "lr",
    "parts",
}  # of a line: what it is, and how long it took
_TEXTS = {"words", "notes"}  # sentences, which may be put otherwise
_TIMES = ("seconds", "of retraining")  # in names of values that vary with the machine


@dataclass(frozen=True)
class StoredCell:
    """A finished cell of a paper."""

    paper: str
    cell: ExperimentCell
    line: Line

    @property
    def name(self) -> str:
        cell = self.cell
        return f"{self.paper}, {cell.dataset}, {cell.backbone}, {cell.variant}, seed {cell.seed}"


@dataclass(frozen=True)
class CellCheck:
    """What came out of a cell that was run once more."""

    stored: StoredCell
    differences: list[str]  # names of the values that differ
    refusal: str = ""  # why it could not run: its data is not there

    @property
    def is_identical(self) -> bool:
        return not self.differences and not self.refusal

    @property
    def verdict(self) -> str:
        if self.refusal:
            return f"could not run: {self.refusal}"
        if not self.differences:
            return "the same bits"
        return f"other: {', '.join(self.differences)}{self._describe_processors()}"

    def _describe_processors(self) -> str:
        """Where last digits may differ though the code is the same."""
        own = name_processor()
        writer = self.stored.line.get("processor")
        if writer == own:
            return ""
        if writer is None:
            return f" (its processor is not known; this one is {own})"
        return f" (run on {writer}; this processor is {own})"


def list_stored_cells(out: Path, only: list[str], table: str | None, most_seconds: float | None) -> list[StoredCell]:
    """Finished cells of a table, or of all tables; those that name all of the words, and took no longer than that."""
    stored: dict[tuple[str, str], StoredCell] = {}
    for name in [table] if table else list_experiments():
        wanted = plan_table(name, [], None, False, out)
        lines = CellFile(out / "cells", wanted.paper).read(wanted.cells)
        for cell in _iterate_finished(wanted.cells, lines):
            line = lines[cell.key]
            words = {cell.dataset, cell.backbone, cell.variant, wanted.paper}
            is_cheap = most_seconds is None or line["seconds"] <= most_seconds
            if words.issuperset(only) and is_cheap:
                stored[(wanted.paper, cell.key)] = StoredCell(wanted.paper, cell, line)
    return list(stored.values())


def _iterate_finished(cells: Cells, lines: CellLines) -> Iterator[ExperimentCell]:
    for cell in cells:
        if cell.follows is not None:
            if "values" not in lines.get(cell.follows.key, {}):
                continue
            (cell,) = with_upload_sizes([cell], lines)
        if cell.key in lines:
            yield cell


def draw_cells(stored: list[StoredCell], n_cells: int, seed: int) -> list[StoredCell]:
    """Some cells at random, in turn from every paper, as long as it has any."""
    if not stored:
        raise TacitaError("no finished cell is like that; leave out --only, or allow more --seconds.")
    random = Random(seed)
    by_paper: dict[str, list[StoredCell]] = {}
    for entry in stored:
        by_paper.setdefault(entry.paper, []).append(entry)
    for entries in by_paper.values():
        random.shuffle(entries)
    drawn: list[StoredCell] = []
    while len(drawn) < n_cells and any(by_paper.values()):
        for entries in by_paper.values():
            if entries and len(drawn) < n_cells:
                drawn.append(entries.pop())
    return drawn


def check_cell(stored: StoredCell, data_dir: Path | None) -> CellCheck:
    try:
        (line,) = run_job(CellJob((stored.cell,), data_dir))
    except TacitaError as error:
        return CellCheck(stored, [], str(error))
    return CellCheck(stored, list_differences(stored.line, line))


def list_differences(stored: Line, line: Line) -> list[str]:
    """The names of what two lines say otherwise, times aside."""
    names = []
    for name in sorted(stored.keys() | line.keys()):
        if name in _NOT_COMPARED or name in _TEXTS:
            continue
        has_both = name in stored and name in line
        if name == "failed" and has_both:  # the reason may be put otherwise
            continue
        if name == "values":
            names += _list_changed_values(stored.get(name, {}), line.get(name, {}))
        elif stored.get(name) != line.get(name):
            names.append(name)
    return names


def _list_changed_values(stored: dict[str, Any], values: dict[str, Any]) -> list[str]:
    names = []
    for name in sorted(stored.keys() | values.keys()):
        is_time = any(word in name for word in _TIMES)
        if not is_time and stored.get(name) != values.get(name):
            names.append(name)
    return names
