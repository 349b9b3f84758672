"""The script of `tacita demo`: the best model of this project beside a published method, on the same blocks of time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.methods import resolve_config
from tacita.report.data import read_run
from tacita.report.formats import format_bytes
from tacita.report.pages import write_report
from tacita.report.run_comparison import ComparedRun, draw_comparison
from tacita.runs.assembly import Machine
from tacita.runs.callbacks import TrainingCallbacks
from tacita.runs.run_folder import find_free_name
from tacita.runs.serving import Run
from tacita.runs.training import train

PICTURE, PAGE = "demo.png", "report.html"
SCORE = 8  # bytes of a validation score alone


@dataclass(frozen=True)
class DemoRunSpec:
    """One of the runs of the demo."""

    folder: str
    name: str
    about: str
    options: dict[str, Any]


DEMO_RUNS = (
    DemoRunSpec("tally-order", "tally-order", "the best model here", {"backbone": {"name": "tally-order"}}),
    DemoRunSpec(
        "f3crec",
        "F3CRec on MF",
        "a published method",
        {"backbone": {"name": "mf"}, "method": "f3crec", "evaluate": {"controls": False}},
    ),
)


@dataclass(frozen=True)
class DemoResult:
    spec: DemoRunSpec
    run: Run
    up: float  # bytes of an average person over all rounds
    down: float
    exchanges: int

    def table_row(self) -> dict[str, Any]:
        """For a table: which is which, how good, what it sent, what it promises."""
        main = read_run(self.run.folder)
        epsilon = self.run.config.privacy.epsilon
        return {
            "": f"{self.spec.name}: {self.spec.about}",
            main.main_metric: f"{main.score:.4f}",
            "up": format_bytes(self.up),
            "down": format_bytes(self.down),
            "rounds": f"{self.exchanges:,}",
            "privacy": "no epsilon" if epsilon is None else f"epsilon {epsilon:g}",
        }


def choose_folder(out: Path | None) -> Path:
    """Where both runs go: a new folder."""
    if out is None:
        return find_free_name("demo")
    if out.exists():
        raise TacitaError(f"{out} exists; choose another --out.")
    return out


def train_demo(
    data: str, folder: Path, machine: Machine, watching: Callable[[Path], AbstractContextManager[TrainingCallbacks]]
) -> list[DemoResult]:
    """Train all of them, one after the other; then one page and one picture of both."""
    results = []
    for spec in DEMO_RUNS:
        config = resolve_config({"data": data, **spec.options}, "the demo")
        run_folder = folder / spec.folder
        with watching(run_folder) as watcher:
            run = train(config, run_folder, machine, watcher)
        up, down, exchanges = _measure_traffic(run)
        results.append(DemoResult(spec, run, up, down, exchanges))
    _write_pages(folder, results)
    return results


def _write_pages(folder: Path, results: list[DemoResult]) -> None:
    """The picture that compares the runs, and their report."""
    compared = []
    for result in results:
        run_data = read_run(result.run.folder)
        name = result.spec.name
        compared.append(ComparedRun(name, run_data, result.up, result.down))
    dataset = results[0].run.result["data"]["name"]
    names = " beside ".join(result.spec.name for result in results)
    title = f"{dataset}: {names}, no epsilon"
    write_bytes(folder / PICTURE, draw_comparison(compared, title, "png"))
    run_folders = [result.run.folder for result in results]
    write_report(run_folders, folder / PAGE)


def _measure_traffic(run: Run) -> tuple[float, float, int]:
    """Bytes up and down of an average person over the run, and how often people sent more than a score."""
    events_text = (run.folder / "events.jsonl").read_text()
    rounds = [json.loads(line) for line in events_text.splitlines()]
    ids = json.loads((run.folder / "ids.json").read_text())
    n_people = len(ids["users"])
    total_up = 0
    total_down = 0
    exchanges = 0
    for event in rounds:
        total_up += event["clients"] * event["bytes_up"]
        total_down += event["clients"] * event["bytes_down"]
        exchanges += event["bytes_up"] > SCORE
    return total_up / n_people, total_down / n_people, exchanges
