"""Several runs as one table, a row each, or a row for each recipe with intervals over its seeds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import parse_folder
from tacita.data.frames import Frame, make_frame, number_column
from tacita.report.data import RunData, read_run
from tacita.report.seeds import CONTINUAL, group_seeds, make_rows
from tacita.runs.serving import Run


def compare(runs: Iterable[Run | str | Path], over: str | None = None) -> Frame:
    """Runs beside each other; over = "seeds": those that differ in nothing but seeds (`seed`, `split.seed`)."""
    if not isinstance(runs, Iterable) or isinstance(runs, Run | str | Path):
        runs = [runs]
    found = [read_run(one.folder if isinstance(one, Run) else parse_folder(one)) for one in runs]
    if not found:
        raise TacitaError("no run to compare; give one or more.")
    if over not in (None, "seeds"):
        raise TacitaError(f"over = {over!r} is unknown; runs can be taken together over 'seeds'.")
    rows = make_rows(group_seeds(found)) if over else _build_rows(found)
    kinds = ("name", "method", "backbone", "data", "run", "read", "seed", "seeds", "splits", "runs", "protocol", "note")
    plain = {name: [row[name] for row in rows] for name in rows[0]}
    return make_frame({name: values if name in kinds else number_column(values) for name, values in plain.items()})


def _build_rows(runs: list[RunData]) -> list[dict[str, Any]]:
    metrics = list(dict.fromkeys(metric for one in runs for metric in one.metrics))
    protocols = list(dict.fromkeys(one.protocol for one in runs))
    out = []
    for one in runs:
        row: dict[str, Any] = {"run": one.folder, "method": one.method, "backbone": one.backbone, "data": one.data}
        row |= {"read": one.read or "", "seed": one.seed}
        told = {metric: one.mean[metric] for metric in metrics} | {name: one.continual[name] for name in CONTINUAL}
        told |= {"bytes up": one.up, "bytes down": one.down}
        row |= {name: value if value == value else None for name, value in told.items()}
        out.append(row | {"epsilon": one.epsilon, "protocol": protocols.index(one.protocol)})
    return out
