"""Run cells on all cores and keep each finished one as a line of JSON, so that an interrupted table goes on."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, write_bytes
from tacita.federation.rounds import Progress
from tacita.research.experiments.analyses import measure_forgetting, measure_rank_changes
from tacita.research.experiments.choice_measures import measure_choice
from tacita.research.experiments.experiment_spec import WITHDRAWAL, ExperimentCell
from tacita.research.experiments.process_pool import run_in_processes
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.shared_base import continue_run, train_base, with_parts
from tacita.research.experiments.single_block import (
    Line,
    pack_scores,
    rank_popular,
    train_once,
    train_pooled,
    try_once,
    try_pooled,
)
from tacita.research.experiments.withdrawals import WithdrawalJob, job_key
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble


@dataclass(frozen=True)
class CellJob:
    """All wanted cells that share data, backbone, seed and what is trained first: block 0, or a run before requests."""

    cells: tuple[ExperimentCell, ...]
    data_dir: Path | None


def run_job(job: CellJob) -> list[Line]:
    """What cells share once, then each of them; or a run by itself. In a process of its own, on one core."""
    fed = assemble(job.cells[0].config, Machine(threads=1, data_dir=job.data_dir))
    tell, lines = _choose_runner(fed, job.cells[0].kind), []
    for cell in job.cells:
        began = time.perf_counter()
        try:
            found = tell(cell)
        except TacitaError as error:  # a run that diverges is a finding, not the end of the table
            found = {"failed": str(error)}
        about = {
            "key": cell.key,
            "kind": cell.kind,
            "dataset": cell.dataset,
            "backbone": cell.backbone,
            "variant": cell.variant,
            "seed": cell.seed,
            "tacita": tacita.__version__,
            "seconds": round(time.perf_counter() - began, 2),
            "parts": cell.config.parts,
            "lr": cell.config.backbone.get("lr"),
        }
        lines.append({**about, **found})
    return lines


def _choose_runner(fed: Federation, kind: str) -> Callable[[ExperimentCell], Line]:
    """What finds the line of every cell of a job."""
    if kind in _SINGLE_BLOCK:
        return lambda cell: _SINGLE_BLOCK[cell.kind](fed)
    if kind == WITHDRAWAL:
        return WithdrawalJob(fed).measure_cell
    base = train_base(fed)
    return lambda cell: _MEASURES[cell.kind](with_parts(fed, cell.config), base)


def _measure_stream(fed: Federation, base: Progress) -> Line:
    """Quality of every block after training on it, and every user's for paired tests."""
    progress = continue_run(fed, base)
    kept = ("ndcg@20", "recall@20", "rounds", "best_round", "valid", "valid_served", "users", "on_blocks")
    blocks = []
    for result in progress.results:
        row = {k: _round_values(result[k]) for k in kept}
        row["new"] = _round_values(result["new"]["ndcg@20"])
        row["returning"] = _round_values(result["returning"]["ndcg@20"])
        row["mask_history"] = _round_values(result["mask_history"]["ndcg@20"])
        blocks.append(row)
    scores = np.concatenate([found.values["ndcg@20"] for found in progress.evaluations[1:]])
    metrics = {m: [b[m] for b in blocks[1:]] for m in ("ndcg@20", "recall@20")}
    values = {m: [*row, round(float(np.mean(row)), 6)] for m, row in metrics.items()}
    return {"values": values, "blocks": blocks, "users": pack_scores(scores)}


_MEASURES: dict[str, Callable[[Federation, Progress], Line]] = {
    "stream": _measure_stream,
    "users": measure_forgetting,
    "items": measure_rank_changes,
}
_SINGLE_BLOCK: dict[str, Callable[[Federation], Line]] = {
    "once": train_once,
    "choose": measure_choice,
    "central": train_pooled,
    "popular": rank_popular,
    "once, tried": try_once,
    "central, tried": try_pooled,
}
"""Runs of one block: there is no block 0 to share."""


def _round_values(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [round(v, 6) for v in value] if isinstance(value, list) else value


def _job_key(cell: ExperimentCell) -> str:
    """Cells with the same text here are one job."""
    if cell.kind == WITHDRAWAL:
        return job_key(cell.config)
    return cell.key if cell.kind in _SINGLE_BLOCK else _base_key(cell.config)


def _base_key(config: RunConfig) -> str:
    train = config.train.model_dump_json(exclude={"resume_from", "reset_private_each_block"})
    how = config.evaluate.model_dump_json()  # validation picks the round
    return json.dumps([config.data, config.backbone, config.seed, train, config.split.model_dump_json(), how])


class CellFile:
    """Finished cells under a folder, one file per dataset and backbone."""

    def __init__(self, folder: Path, paper: str) -> None:
        self.folder = folder
        self.paper = paper

    def _path(self, dataset: str, backbone: str) -> Path:
        return self.folder / f"{self.paper}-{dataset}-{backbone}.jsonl"

    def read(self, cells: Iterable[ExperimentCell]) -> dict[str, Line]:
        found: dict[str, Line] = {}
        for dataset, backbone in sorted({(c.dataset, c.backbone) for c in cells}):
            path = self._path(dataset, backbone)
            if not path.is_file():
                continue
            whole = path.read_text(encoding="utf-8")
            for number, text in enumerate(whole.splitlines(keepends=True), 1):
                try:
                    line = json.loads(text)
                    found[line["key"]] = line
                except (ValueError, KeyError, TypeError):
                    if not text.endswith("\n"):  # cut off by a kill: as if it had not been begun
                        write_bytes(path, whole[: len(whole) - len(text)].encode())
                        break
                    raise TacitaError(f"{path}, line {number}: not a finished cell; delete that line.") from None
        return found

    def append(self, lines: list[Line]) -> None:
        for line in lines:
            path = self._path(line["dataset"], line["backbone"])
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")
            except OSError as error:
                raise disk_error(path, error) from None


def run_cells(
    cells: list[ExperimentCell],
    cell_file: CellFile,
    data_dir: Path | None,
    workers: int = 0,
    on_done: OnDone | None = None,
) -> dict[str, Line]:
    """All cells, from the file where finished, run and appended where not."""
    found = cell_file.read(cells)
    groups: dict[str, dict[str, ExperimentCell]] = defaultdict(dict)
    for cell in cells:
        if cell.key not in found:
            groups[_job_key(cell)].setdefault(cell.key, cell)
    jobs = [CellJob(tuple(group.values()), data_dir) for group in groups.values()]
    wanted = {c.key for c in cells}
    if on_done:
        on_done(len(wanted & found.keys()), len(wanted))
    for lines in run_in_processes(run_job, jobs, workers):
        cell_file.append(lines)
        found |= {line["key"]: line for line in lines}
        if on_done:
            on_done(len(wanted & found.keys()), len(wanted))
    return found
