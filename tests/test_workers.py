"""Sweeps on Ray: every cell once, also where a worker is killed, and the same numbers as on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import (
    _isolated_folder,  # noqa: F401  (a fixture that every test here uses)
    assert_refused,
)
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.research.experiments import cells
from tacita.research.experiments.experiment_cell import ExperimentCell
from tacita.research.experiments.workers import Workers

SWEEP = 12


def list_sweep_cells(data: str = "synthetic:users=60,items=40,per_user=12,groups=4") -> list[ExperimentCell]:
    """A cell for each seed, so that no two share a base."""
    wanted = []
    for seed in range(1, SWEEP + 1):
        settings = {"data": data, "seed": seed, "train": {"rounds": 2}, "evaluate": {"controls": False}}
        wanted.append(ExperimentCell("tiny", "mf", "ft", seed, RunConfig.model_validate(settings)))
    return wanted


def list_own_workers() -> list[int]:
    """Ray's processes below this one that run a job now."""
    parents = {}
    titles = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
                titles[int(folder.name)] = (folder / "cmdline").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    own = []
    for pid, title in titles.items():
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and title.startswith("ray::run_job"):
            own.append(pid)
    return own


def kill_worker_after(path: Path, n_lines: int, killed: list[int]) -> None:
    """End one worker without warning, once so many cells are finished."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not killed:
        is_time = path.exists() and len(path.read_text().splitlines()) >= n_lines
        for pid in list_own_workers() if is_time else []:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            break
        time.sleep(0.02)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_sweep_survives_a_killed_worker(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    wanted = list_sweep_cells()
    cell_file = cells.CellFile(tmp_path, "paper")
    path = tmp_path / "paper-tiny-mf.jsonl"
    killed: list[int] = []
    watcher = threading.Thread(target=kill_worker_after, args=(path, 3, killed), daemon=True)
    watcher.start()
    lines = cells.run_cells(wanted, cell_file, None, Workers(2, "ray"))
    watcher.join()
    assert killed, "no worker was killed, so nothing was tried"
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["key"] for line in written) == sorted(cell.key for cell in wanted)
    some = wanted[:2]
    expected = cells.run_cells(some, cells.CellFile(tmp_path / "local", "paper"), None, Workers(1))
    for cell in some:
        assert drop_seconds(lines[cell.key]) == drop_seconds(expected[cell.key])


def drop_seconds(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "seconds"}


def test_a_refusal_on_a_worker_is_one_sentence_here(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    wanted = list_sweep_cells(data="no-such-data")[:1]
    with pytest.raises(TacitaError, match="no-such-data"):
        cells.run_cells(wanted, cells.CellFile(tmp_path, "paper"), None, Workers(1, "ray"))


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TacitaError, match=r"tacita\[cluster\]"):
        list(Workers(1, "ray").run(str, [1]))


@pytest.mark.parametrize("place", ["somewhere", "ray://", "ray://host", "host:1:2", "ray://a b:1"])
def test_an_unknown_place_is_refused(place: str) -> None:
    with pytest.raises(TacitaError, match="--on is local, ray or ray://HOST:PORT"):
        Workers(1, place)


def test_a_search_of_one_method_stays_on_this_machine() -> None:
    assert_refused("tune --on ray", "--paper")


def test_a_database_that_nobody_opens_is_one_sentence(tmp_path: Path) -> None:
    call = "tune --data synthetic:users=40,items=30,per_user=10 --method reg --trials 1 --set train.rounds=1 --quiet "
    assert_refused(f"{call}--out {tmp_path} --storage nothing://there", "--storage")
