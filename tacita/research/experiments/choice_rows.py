"""Rows of the page that helps to choose a method: a method on a dataset over its seeds, and its values as text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.metrics import compute_confidence_interval
from tacita.research.experiments.cell_status import EARLIER
from tacita.research.experiments.experiment_cell import Cells
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.single_block import CellLines, Line

QUALITY, UP, DOWN, PRICE = "ndcg@10", "KB up, a person", "KB down, a person", "forgetting, CPU seconds"
POPULAR = "popular"


@dataclass(frozen=True)
class ChoiceRow:
    """One method on one dataset, over its seeds."""

    name: str
    label: str
    backbone: str
    lines: list[Line]
    same_runs: tuple[str, ...] = ()  # labels of others that are the same run under this protocol

    def compute_mean(self, metric: str) -> float:
        values = self._list_values(metric)
        return float(np.mean(values)) if values else float("nan")

    def format_interval(self, metric: str = QUALITY) -> str:
        values = self._list_values(metric)
        if not values:
            return "–"
        mean, half = compute_confidence_interval(values)
        if np.isnan(half):
            return f"{mean:.4f}"
        return f"{mean:.4f} ± {half:.4f}"

    def format_median(self, metric: str) -> str:
        """Of what varies with the machine, and little else."""
        values = self._list_values(metric)
        return format_short(float(np.median(values))) if values else "–"

    def find_word(self, name: str) -> str:
        """What the first seed that says it says."""
        for line in self.lines:
            text = line.get("words", {}).get(name)
            if text:
                return str(text)
        return ""

    @property
    def is_earlier(self) -> bool:
        """Whether earlier code made it."""
        return any(EARLIER in line for line in self.lines)

    @property
    def is_exact(self) -> bool:
        return self.find_word("forgets").endswith(": exact")

    @property
    def is_retrained(self) -> bool:
        return self.find_word("forgets").startswith(("trains again", "retrain"))

    @property
    def run_identity(self) -> tuple[object, ...]:
        """Rows that agree in this are one run."""
        seeds = []
        for line in self.lines:
            measured = line["values"]
            quality = tuple(measured.get(QUALITY, ()))
            traffic = tuple(measured.get(UP, ()))
            seeds.append((line["seed"], quality, traffic))
        seeds.sort()
        return (*seeds, self.find_word("forgets"), self.find_word("sees"))

    def _list_values(self, metric: str) -> list[float]:
        values = []
        for line in self.lines:
            measured = line["values"]
            if metric in measured:
                values.append(measured[metric][0])
        return values


def build_rows(experiment: Experiment, cells: Cells, lines: CellLines) -> list[ChoiceRow]:
    """Best first; a method that is the same run as another stands with it."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for cell in cells:
        line = lines.get(cell.key, {})
        if "values" in line:
            finished = groups.setdefault((cell.variant, cell.backbone), [])
            finished.append(line)
    rows: dict[tuple[object, ...], ChoiceRow] = {}
    for (name, backbone), finished in groups.items():
        label = experiment.variants[name].label
        row = ChoiceRow(name, label, backbone, finished)
        identity = row.run_identity
        if identity in rows:
            first = rows[identity]
            same_runs = (*first.same_runs, label)
            row = replace(first, same_runs=same_runs)
        rows[identity] = row
    return sorted(rows.values(), key=lambda row: -row.compute_mean(QUALITY))


def format_short(value: float) -> str:
    """Three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_epsilon(row: ChoiceRow) -> str:
    value = row.compute_mean("epsilon")
    if np.isnan(value):
        return "none"
    unit = row.find_word("promise")
    return f"{value:,.4g}, {unit}" if unit else f"{value:,.4g}"


def format_forgetting(row: ChoiceRow) -> str:
    """How one person is forgotten, and the processor's seconds."""
    outcome = row.find_word("forgets")
    if not outcome:
        return "–"
    seconds = row.format_median(PRICE)
    if row.is_retrained:
        return f"train again, exact, {seconds} s"
    route, _, kind = outcome.partition(": ")
    if kind == "exact":
        return f"exact, {seconds} s"
    return f"{kind or route} ({route}), {seconds} s"
