"""What every tracker writes, and what it never does: no ids, no paths, and no exact figures of a run with a budget."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tacita.core.errors import TacitaError
from tacita.federation.rounds import RoundReport
from tacita.runs.callbacks import Callback, RunStart
from tacita.runs.serving import Run

Figures = dict[str, float]

LOCAL_SETTINGS = ("data", "columns", "date_format", "decimal", "catalogue")
"""Settings that name files and columns of this machine."""
SEEDS = ("seed", "split.seed")


class Tracker(Callback, ABC):
    """Writes settings, rounds, blocks and the end of a run; a tool says how it opens, logs and closes."""

    name = ""

    @abstractmethod
    def open(self, start: RunStart, settings: Mapping[str, str]) -> None:
        """Begin the log of a run, or go on with it."""

    @abstractmethod
    def log(self, figures: Figures, step: int) -> None:
        """Write figures of a step."""

    def summarise(self, figures: Figures, step: int) -> None:
        """Write the figures that a run ends with."""
        self.log(figures, step)

    @abstractmethod
    def close(self, is_finished: bool) -> None:
        """End the log; a run that is not finished may go on with it."""

    # what is called

    def on_start(self, start: RunStart) -> None:
        self._start = start
        self._step = 0
        self.open(start, list_tracked_settings(start))

    def on_round(self, report: RoundReport) -> None:
        self._step = report.block * self._start.rounds + report.round
        figures = describe_round(report, self._start.config.evaluate.select_by)
        self.log(self._admit(figures), self._step)

    def on_block(self, scores: dict[str, Any]) -> None:
        self._step = max(self._step, (int(scores["block"]) + 1) * self._start.rounds)
        self.log(self._admit(describe_block(scores)), self._step)

    def on_end(self, run: Run) -> None:
        self.summarise(self._admit(describe_end(run)), self._step)
        self.close(is_finished=True)

    def stop(self) -> None:
        """The run failed or was stopped."""
        if hasattr(self, "_start"):
            self.close(is_finished=False)

    def _admit(self, figures: Figures) -> Figures:
        if self._start.states_epsilon:
            return withhold_exact_figures(figures)
        return figures


def withhold_exact_figures(figures: Figures) -> Figures:
    """Under a budget only the place in the run is tracked: scores and counts of exact data are not noised."""
    return {name: value for name, value in figures.items() if name in ("block", "round")}


def list_tracked_settings(start: RunStart) -> dict[str, str]:
    """Settings by their dotted names, as text, without seeds that could take noise off."""
    values = start.config.model_dump(mode="json", exclude=set(LOCAL_SETTINGS))
    settings: dict[str, str] = {"data": start.data}
    _flatten(values, "", settings)
    if start.states_epsilon or start.config.privacy.reproducible_noise:
        for seed in SEEDS:
            settings.pop(seed, None)
    return settings


def _flatten(values: Mapping[str, Any], prefix: str, settings: dict[str, str]) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            _flatten(value, f"{name}.", settings)
        else:
            settings[name] = str(value)


def describe_round(report: RoundReport, metric: str) -> Figures:
    """The figures of a round, by the names that trackers show."""
    figures: Figures = {
        "block": report.block,
        "round": report.round,
        "clients": report.clients,
        "bytes_up_per_client": report.bytes_up,
        "bytes_down_per_client": report.bytes_down,
    }
    if report.valid is not None:
        figures[f"valid/{metric}"] = report.valid
    for note, value in report.notes.items():
        figures[f"parts/{note}"] = value
    return _keep_finite(figures)


def describe_block(scores: Mapping[str, Any]) -> Figures:
    """What a block was tested with: means over people, never a row of one of them."""
    figures: Figures = {"block": scores["block"], "best_round": scores["best_round"]}
    if scores["users"]:
        for name, value in _list_metrics(scores).items():
            figures[f"test/{name}"] = value
    return _keep_finite(figures)


def describe_end(run: Run) -> Figures:
    """The means of a run and of its controls."""
    figures = {f"mean/{name}": value for name, value in _list_metrics(run.result["mean"]).items()}
    for control, scores in run.result["controls"].items():
        for name, value in _list_metrics(scores.get("mean", {})).items():
            figures[f"controls/{control}/{name}"] = value
    return _keep_finite(figures)


def _list_metrics(scores: Mapping[str, Any]) -> Figures:
    """Metrics are named as ndcg@20, or auc."""
    metrics: Figures = {}
    for name, value in scores.items():
        is_metric = "@" in name or name == "auc"
        if is_metric and isinstance(value, int | float):
            metrics[name] = float(value)
    return metrics


def _keep_finite(figures: Figures) -> Figures:
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def missing_package_error(tracker: str, package: str) -> TacitaError:
    return TacitaError(
        f"--track {tracker} needs the package {package}, which is not installed; `pip install 'tacita[{tracker}]'` "
        "installs it."
    )
