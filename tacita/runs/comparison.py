"""Several runs as one table, a row each, or a row for each recipe with intervals over its seeds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import to_folder_path
from tacita.data.frames import Frame, make_frame, to_number_column
from tacita.report.data import read_run
from tacita.report.run_data import RunData
from tacita.report.seeds import CONTINUAL, group_seeds, make_rows
from tacita.runs.serving import Run

SingleRun = Run | str | Path
"""A run, or its folder."""

TEXT_COLUMNS = frozenset(
    ("name", "method", "backbone", "data", "run", "read", "seed", "seeds", "splits", "runs", "protocol", "note")
)
"""Columns that are passed on as they are; all others hold numbers."""

Row = dict[str, Any]
"""A row of the table, by column."""


def compare(runs: Iterable[SingleRun], over: str | None = None) -> Frame:
    """Runs beside each other; over = "seeds": those that differ in nothing but seeds (`seed`, `split.seed`)."""
    if not isinstance(runs, Iterable) or isinstance(runs, SingleRun):
        runs = [runs]
    read_runs = [read_run(_find_folder(run)) for run in runs]
    if not read_runs:
        raise TacitaError("no run to compare; give one or more.")
    if over not in (None, "seeds"):
        raise TacitaError(f"over = {over!r} is unknown; runs can be taken together over 'seeds'.")
    rows = make_rows(group_seeds(read_runs)) if over else _build_rows(read_runs)
    columns: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        columns[name] = values if name in TEXT_COLUMNS else to_number_column(values)
    return make_frame(columns)


def _find_folder(run: SingleRun) -> Path:
    return run.folder if isinstance(run, Run) else to_folder_path(run)


def _build_rows(runs: list[RunData]) -> list[Row]:
    metrics: dict[str, None] = {}  # in the order in which runs name them
    for run in runs:
        metrics |= dict.fromkeys(run.metrics)
    protocols = list(dict.fromkeys(run.protocol for run in runs))
    rows = []
    for run in runs:
        row = _describe_run(run)
        row |= _list_numbers(run, list(metrics))
        row["epsilon"] = run.epsilon
        row["protocol"] = protocols.index(run.protocol)
        rows.append(row)
    return rows


def _describe_run(run: RunData) -> Row:
    return {
        "run": run.folder,
        "method": run.method,
        "backbone": run.backbone,
        "data": run.data,
        "read": run.read or "",
        "seed": run.seed,
    }


def _list_numbers(run: RunData, metrics: list[str]) -> Row:
    """Quality and traffic of a run; None: it is not a number."""
    numbers = {metric: run.mean[metric] for metric in metrics}
    numbers |= {name: run.continual[name] for name in CONTINUAL}
    numbers["bytes up"] = run.up
    numbers["bytes down"] = run.down
    row: Row = {}
    for name, value in numbers.items():
        is_number = value == value
        row[name] = value if is_number else None
    return row
