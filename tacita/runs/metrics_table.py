"""The numbers of a result as a table: the run and its controls, block by block."""

from __future__ import annotations

from typing import Any

from tacita.data.frames import Frame, make_frame, to_integer_column, to_number_column
from tacita.report.run_data import name_control
from tacita.runs.file_schemas import RunResult, ScoreRow

Columns = dict[str, Any]


def build_metrics(result: RunResult, method: str) -> Frame:
    """Rows of the method, then of its controls; each block, then the mean."""
    scored = {method: result}
    for name, control in result["controls"].items():
        if "skipped" not in control:
            scored[name_control(name)] = control
    n_tested = [int(block["users"]) for block in result["blocks"]]
    n_counted = sum(n_tested[1:] or n_tested)
    table = _MetricsTable(list(result["mean"]))
    for scorer, scores in scored.items():
        for number, block in enumerate(scores["blocks"]):
            table.add(scorer, number, n_tested[number], block)
        table.add(scorer, None, n_counted, scores["mean"])
    return table.to_frame()


class _MetricsTable:
    """Rows of metrics, gathered by column."""

    def __init__(self, metrics: list[str]) -> None:
        self.scorers: list[str] = []
        self.blocks: list[int | None] = []
        self.users: list[int] = []
        self.values: dict[str, list[Any]] = {}
        for metric in metrics:
            self.values[metric] = []

    def add(self, scorer: str, block: int | None, users: int, scores: ScoreRow) -> None:
        """Add a row; what was measured of nobody is empty."""
        self.scorers.append(scorer)
        self.blocks.append(block)
        self.users.append(users)
        for metric, values in self.values.items():
            value = scores.get(metric) if users else None
            values.append(value)

    def to_frame(self) -> Frame:
        blocks = to_integer_column(self.blocks)
        columns: Columns = {"scorer": self.scorers, "block": blocks, "users": self.users}
        for metric, values in self.values.items():
            columns[metric] = to_number_column(values)
        return make_frame(columns)
