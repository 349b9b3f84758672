"""What `tacita demo` tells: the best model of this project beside a published method, on the same blocks of time."""

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
from tacita.report.data import format_bytes, read_run
from tacita.report.pages import write_report
from tacita.report.run_comparison import ComparedRun, draw_comparison
from tacita.runs.assembly import Machine
from tacita.runs.run_folder import find_free_name
from tacita.runs.serving import Run
from tacita.runs.training import TrainingCallbacks, train

PICTURE, PAGE = "demo.png", "report.html"
SCORE = 8  # bytes of a validation score alone


@dataclass(frozen=True)
class DemoRunSpec:
    """One of the runs that are told of."""

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
    if out is not None and out.exists():
        raise TacitaError(f"{out} exists; choose another --out.")
    return find_free_name("demo") if out is None else out


def train_demo(
    data: str, folder: Path, machine: Machine, watching: Callable[[Path], AbstractContextManager[TrainingCallbacks]]
) -> list[DemoResult]:
    """Train all of them, one after the other; then one page and one picture of both."""
    found = []
    for part in DEMO_RUNS:
        config = resolve_config({"data": data, **part.options}, "the demo")
        with watching(folder / part.folder) as watcher:
            run = train(config, folder / part.folder, machine, watcher)
        found.append(DemoResult(part, run, *_measure_traffic(run)))
    beside = [ComparedRun(one.spec.name, read_run(one.run.folder), one.up, one.down) for one in found]
    title = f"{found[0].run.result['data']['name']}: {' beside '.join(one.name for one in beside)}, no epsilon"
    write_bytes(folder / PICTURE, draw_comparison(beside, title, "png"))
    write_report([one.run.folder for one in found], folder / PAGE)
    return found


def _measure_traffic(run: Run) -> tuple[float, float, int]:
    """Bytes up and down of an average person over the run, and how often people sent more than a score."""
    rounds = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    people = len(json.loads((run.folder / "ids.json").read_text())["users"])
    up, down = (sum(one["clients"] * one[way] for one in rounds) / people for way in ("bytes_up", "bytes_down"))
    return up, down, sum(one["bytes_up"] > SCORE for one in rounds)
