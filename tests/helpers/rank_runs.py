"""Runs on several ranks, for tests: `python -m helpers.rank_runs FOLDER RANK RANKS` trains what FOLDER/runs.json lists.

All ranks stay alive over all runs. Rank 0 writes a run folder for each below FOLDER/RANKS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import Ragged
from tacita.federation.ranks.process_group import open_local_group
from tacita.federation.ranks.rank_place import RankPlace
from tacita.federation.ranks.rank_team import RankTeam, serve_rank
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import (
    Progress,
    RoundReport,
    begin_block,
    make_initial_progress,
    run_block,
    run_remaining_blocks,
)
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch
from tacita.runs import training
from tacita.runs.assembly import Machine, assemble_federation

MACHINE = Machine(threads=1, chunk=64)
Run = dict[str, Any]  # config, and what is asked for after the rounds of the first block


def read_config(values: dict[str, Any]) -> RunConfig:
    return validate_model(RunConfig, values, "the test")


def train_run(run: Run, out: Path, team: RankTeam | None = None) -> None:
    """A run without controls in a folder; without a team in one process."""
    federation = assemble_federation(read_config(run["config"]), MACHINE)
    progress = make_initial_progress(federation)
    if team is not None:
        setup = {"config": run["config"]}
        progress.devices = team.share_out(federation, progress.local_devices, setup)
    begin_block(federation, progress, 0)
    run_block(federation, progress, ignore_round)
    for request in run.get("requests", []):
        handle_requests(federation, progress, make_request(federation, progress, request))
    run_remaining_blocks(federation, progress, ignore_round)
    training.save_run(federation, progress, out)


def ignore_round(report: RoundReport, progress: Progress) -> None:
    """Nobody watches."""


def make_request(federation: Federation, progress: Progress, request: dict[str, Any]) -> RequestBatch:
    """What some users ask for: their first items, or, of what they share, the first."""
    block = federation.stream.blocks[0]
    keys = federation.stream.user_keys
    record = progress.server.shared
    senders = keys[request["users"]]
    lists = block.train.take(np.array(request["users"]))
    if request["kind"] == "unshare":
        senders = np.unique(record.sender)[:: request["every"]]
        lists = record.take_sender_lists(senders)
    rows = lists.rows()
    is_first = np.arange(len(rows)) - lists.ptr[rows] < request["items"]
    items = lists.filter_entries(is_first)
    return RequestBatch(request["kind"], senders, Ragged(items.ptr, items.ids), number=1)


def make_federation(setup: dict[str, Any]) -> Federation:
    return assemble_federation(read_config(setup["config"]), MACHINE)


def start_ranks(folder: Path, n_ranks: int, runs: dict[str, Run]) -> list[subprocess.Popen[bytes]]:
    """Processes that train these runs."""
    meeting = folder / str(n_ranks)
    meeting.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    processes = []
    for rank in range(n_ranks):
        command = [sys.executable, "-m", "helpers.rank_runs", str(folder), str(rank), str(n_ranks)]
        processes.append(subprocess.Popen(command, env=environment))
    return processes


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]], most_seconds: float) -> list[int | None]:
    """Exit codes when all have ended, one has failed or time is up; whoever still runs then has none, and is killed."""
    until = time.monotonic() + most_seconds
    codes = [process.poll() for process in processes]
    try:
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
        return codes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(folder: Path, rank: int, n_ranks: int) -> None:
    if n_ranks == 1:
        train_all(folder, 1)
        return
    place = RankPlace(rank, n_ranks, rank, n_ranks)
    parent = os.getppid()

    def check_parent() -> None:
        if os.getppid() != parent:
            raise TacitaError("the test has ended before the ranks met.")

    group = open_local_group(place, folder / str(n_ranks), check_parent)
    if rank > 0:
        serve_rank(group, make_federation)
        return
    team = RankTeam(lambda: group)
    train_all(folder, n_ranks, team)
    team.close()


def train_all(folder: Path, n_ranks: int, team: RankTeam | None = None) -> None:
    for name, run in json.loads((folder / "runs.json").read_text()).items():
        train_run(run, folder / str(n_ranks) / name, team)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
