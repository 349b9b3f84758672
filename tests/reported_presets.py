"""Is a preset what the tables report? `python tests/reported_presets.py` compares each with its row.

A preset is trained with its row's `split` and `evaluate` alone; all else it has to bring along. Where its settings are
the row's, so are its numbers. `--train METHOD` trains it with the row's first seed, and prints both figures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig
from tacita.methods import list_preset_names, resolve_config
from tacita.research.experiments.cells import CellFile, CellJob, run_job
from tacita.research.experiments.experiment_cell import Cells, ExperimentCell
from tacita.research.experiments.experiment_spec import list_cells, load_experiment
from tacita.research.experiments.single_block import Line
from tacita.round.registry import find_preset

CELLS = Path(__file__).parent.parent / "docs" / "reproduction" / "cells"
TOLERANCE = 0.05


@dataclass(frozen=True)
class ReportedPreset:
    """A preset with a model, and its cell of the tables."""

    method: str
    table: str
    cell: ExperimentCell

    @property
    def name(self) -> str:
        return f"{self.method} ({self.cell.backbone})"

    @property
    def config(self) -> RunConfig:
        """What `tacita train --method` makes of the row's split and evaluation."""
        row = self.cell.config
        values: dict[str, Any] = {
            "data": row.data,
            "method": self.method,
            "seed": row.seed,
            "split": row.split.model_dump(),
            "evaluate": row.evaluate.model_dump(),
        }
        own_backbone = find_preset(self.method).settings.get("backbone", {}).get("name", RunConfig().backbone["name"])
        if row.backbone["name"] != own_backbone:
            values["backbone"] = {"name": row.backbone["name"]}
        return resolve_config(values, self.method)

    @property
    def own_cell(self) -> ExperimentCell:
        return replace(self.cell, config=self.config)


def list_reported_presets() -> list[ReportedPreset]:
    """Every preset that was tuned, with each model that it was tuned for."""
    reported = []
    for method in list_preset_names():
        tuned = find_preset(method).tuned
        if tuned is None:
            continue
        table, _, variant = tuned.row.partition(":")
        experiment, settings = load_experiment(table)
        for cell in list_cells(experiment, settings, [tuned.on], experiment.backbones, 1, [variant]):
            if cell.config.backbone["name"] in tuned.by_backbone:
                reported.append(ReportedPreset(method, table, cell))
    return reported


def list_differences(preset: ReportedPreset) -> list[str]:
    """Settings of a preset that are not its row's."""
    ours = _flatten(preset.config)
    row = _flatten(preset.cell.config)
    differences = []
    for key in sorted(ours.keys() | row.keys()):
        if ours.get(key) != row.get(key):
            differences.append(f"{key}: {ours.get(key)} (row: {row.get(key)})")
    return differences


def _flatten(config: RunConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude={"method", "item_rows"})  # not every source says what items are
    parts = values["parts"] or find_preset(config.method).parts
    values["parts"] = {part["name"]: part for part in parts}
    flat: dict[str, Any] = {}
    _add_flat(flat, values, "")
    return flat


def _add_flat(flat: dict[str, Any], values: dict[str, Any], prefix: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _add_flat(flat, value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value


def find_row_line(preset: ReportedPreset) -> Line:
    """The row's finished cell, or nothing."""
    paper, _, _ = preset.table.partition("/")
    return CellFile(CELLS, paper).read([preset.cell]).get(preset.cell.key, {})


def train_preset(preset: ReportedPreset) -> Line:
    """The preset, trained and measured as its row is."""
    cells: Cells = [preset.own_cell]
    (line,) = run_job(CellJob(tuple(cells), None))
    return line


def read_score(line: Line) -> float:
    """The first metric of a line, its mean where there are blocks."""
    values = line["values"]
    scores = values[next(iter(values))]
    return float(scores[-1])


def is_near(ours: float, row: float) -> bool:
    return abs(ours - row) <= TOLERANCE * abs(row)


def main() -> int:
    parser = argparse.ArgumentParser(description="Presets beside the rows of the tables that report them.")
    parser.add_argument("--train", action="append", default=[], metavar="METHOD", help="train it and compare figures")
    options = parser.parse_args()
    n_others = 0
    for preset in list_reported_presets():
        differences = list_differences(preset)
        line = find_row_line(preset)
        row_score = f"{read_score(line):.4f}" if "values" in line else "not run"
        verdict = "; ".join(differences) or "the row's settings"
        n_others += bool(differences)
        print(f"{preset.name}, {preset.table}, seed 1 {row_score}: {verdict}")
        if preset.method in options.train:
            score = read_score(train_preset(preset))
            print(f"    trained: {score:.4f}")
    untuned = [name for name in list_preset_names() if find_preset(name).tuned is None]
    print(f"no row reports settings of their own: {', '.join(untuned)}")
    return 1 if n_others else 0


if __name__ == "__main__":
    sys.exit(main())
