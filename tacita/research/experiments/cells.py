"""Run cells on all cores and store each finished one as a line of JSON, so that an interrupted table goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, write_bytes
from tacita.federation.ranks.process_group import limit_torch_threads
from tacita.federation.rounds import Progress
from tacita.kernels.processor import name_processor
from tacita.kernels.threads import limit_library_threads
from tacita.research.experiments.analyses import measure_forgetting, measure_rank_changes
from tacita.research.experiments.choice_measures import measure_choice
from tacita.research.experiments.experiment_cell import WITHDRAWAL, Cells, ExperimentCell
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.shared_base import continue_run, train_base, with_parts
from tacita.research.experiments.single_block import (
    CellLines,
    Line,
    measure_pooled_training,
    measure_popular_ranking,
    measure_trained_run,
    measure_validation_of_pooled,
    measure_validation_of_run,
    pack_scores,
)
from tacita.research.experiments.withdrawals import WithdrawalJob, make_job_key
from tacita.research.experiments.workers import THIS_MACHINE, Workers
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.noise_secret import with_reproducible_noise


@dataclass(frozen=True)
class CellJob:
    """All wanted cells that share data, backbone, seed and a base: block 0, or a run before requests."""

    cells: tuple[ExperimentCell, ...]
    data_dir: Path | None


MeasureCell = Callable[[ExperimentCell], Line]


def run_job(job: CellJob) -> list[Line]:
    """The base of the cells once, then each of them; or a run by itself. On one core, libraries too."""
    limit_torch_threads(1)
    with limit_library_threads(1):
        return _measure_cells(job)


def _measure_cells(job: CellJob) -> list[Line]:
    first = job.cells[0]
    machine = Machine(threads=1, data_dir=job.data_dir)
    federation = assemble_federation(with_reproducible_noise(first.config), machine)
    measure = _choose_measure(federation, first.kind)
    lines = []
    for cell in job.cells:
        began = time.perf_counter()
        try:
            measured = measure(cell)
        except TacitaError as error:  # a run that diverges is a result, not the end of the table
            measured = {"failed": str(error)}
        seconds = time.perf_counter() - began
        lines.append({**_describe_cell(cell, seconds), **measured})
    return lines


def _describe_cell(cell: ExperimentCell, seconds: float) -> Line:
    return {
        "key": cell.key,
        "kind": cell.kind,
        "dataset": cell.dataset,
        "backbone": cell.backbone,
        "variant": cell.variant,
        "seed": cell.seed,
        "tacita": tacita.__version__,
        "processor": name_processor(),
        "seconds": round(seconds, 2),
        "parts": cell.config.parts,
        "lr": cell.config.backbone.get("lr"),
    }


def _choose_measure(federation: Federation, kind: str) -> MeasureCell:
    """The function that measures every cell of a job."""
    if kind in _SINGLE_BLOCK:
        return lambda cell: _SINGLE_BLOCK[cell.kind](federation)
    if kind == WITHDRAWAL:
        return WithdrawalJob(federation).measure_cell
    base = train_base(federation)
    return lambda cell: _MEASURES[cell.kind](with_parts(federation, cell.config), base)


BLOCK_VALUES = ("ndcg@20", "recall@20", "rounds", "best_round", "valid", "valid_served", "users", "on_blocks")
USER_GROUPS = ("new", "returning", "mask_history")


def _measure_stream(federation: Federation, base: Progress) -> Line:
    """Quality of every block after training on it, and every user's for paired tests."""
    progress = continue_run(federation, base)
    blocks = []
    for result in progress.results:
        row = {name: _round_values(result[name]) for name in BLOCK_VALUES}
        for group in USER_GROUPS:
            row[group] = _round_values(result[group]["ndcg@20"])
        blocks.append(row)
    values = {}
    for metric in ("ndcg@20", "recall@20"):
        scores = [row[metric] for row in blocks[1:]]
        mean = round(float(np.mean(scores)), 6)
        values[metric] = [*scores, mean]
    later = progress.evaluations[1:]
    user_scores = np.concatenate([evaluation.values["ndcg@20"] for evaluation in later])
    return {"values": values, "blocks": blocks, "users": pack_scores(user_scores)}


_MEASURES: dict[str, Callable[[Federation, Progress], Line]] = {
    "stream": _measure_stream,
    "users": measure_forgetting,
    "items": measure_rank_changes,
}
_SINGLE_BLOCK: dict[str, Callable[[Federation], Line]] = {
    "once": measure_trained_run,
    "choose": measure_choice,
    "central": measure_pooled_training,
    "popular": measure_popular_ranking,
    "once, tried": measure_validation_of_run,
    "central, tried": measure_validation_of_pooled,
}
"""Runs of one block: there is no block 0 to share."""


def _round_values(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [round(number, 6) for number in value]
    return value


def _digest_job(cell: ExperimentCell) -> str:
    """Cells with the same key are one job."""
    if cell.kind == WITHDRAWAL:
        return make_job_key(cell.config)
    return cell.key if cell.kind in _SINGLE_BLOCK else _digest_base(cell.config)


def _digest_base(config: RunConfig) -> str:
    train = config.train.model_dump_json(exclude={"resume_from", "reset_private_each_block"})
    split = config.split.model_dump_json()
    evaluate = config.evaluate.model_dump_json()  # validation picks the round
    identity = [config.data, config.backbone, config.seed, train, split, evaluate]
    return json.dumps(identity)


class CellFile:
    """Finished cells under a folder, one file per dataset and backbone."""

    def __init__(self, folder: Path, paper: str) -> None:
        self.folder = folder
        self.paper = paper

    def _path(self, dataset: str, backbone: str) -> Path:
        return self.folder / f"{self.paper}-{dataset}-{backbone}.jsonl"

    def read(self, cells: Iterable[ExperimentCell]) -> CellLines:
        lines: CellLines = {}
        places = {(cell.dataset, cell.backbone) for cell in cells}
        for dataset, backbone in sorted(places):
            path = self._path(dataset, backbone)
            if path.is_file():
                lines |= _read_lines(path)
        return lines

    def append_lines(self, lines: list[Line]) -> None:
        for line in lines:
            path = self._path(line["dataset"], line["backbone"])
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _remove_unfinished_line(path)
                with open(path, "ab", buffering=0) as out:  # a line at once: others may read or append meanwhile
                    out.write(f"{json.dumps(line)}\n".encode())
            except OSError as error:
                raise disk_error(path, error) from None


def _read_lines(path: Path) -> CellLines:
    """The cells of a file, without a last line that was cut off: by a kill, or as another process is writing it."""
    lines: CellLines = {}
    whole = path.read_text(encoding="utf-8")
    for number, text in enumerate(whole.splitlines(keepends=True), 1):
        try:
            line = json.loads(text)
            lines[line["key"]] = line
        except (ValueError, KeyError, TypeError):
            is_cut_off = not text.endswith("\n")
            if not is_cut_off:
                raise TacitaError(f"{path}, line {number}: not a finished cell; delete that line.") from None
            break
    return lines


def _remove_unfinished_line(path: Path) -> None:
    """What a kill left of a last line, as if it had not been begun."""
    whole = path.read_bytes() if path.is_file() else b""
    finished = whole[: whole.rfind(b"\n") + 1]
    if len(finished) < len(whole):
        write_bytes(path, finished)


def run_cells(
    cells: Cells,
    cell_file: CellFile,
    data_dir: Path | None,
    workers: Workers = THIS_MACHINE,
    on_done: OnDone | None = None,
) -> CellLines:
    """All cells, from the file where finished, run and appended where not."""
    finished = cell_file.read(cells)
    wanted = {cell.key for cell in cells}

    def report_progress() -> None:
        if on_done:
            on_done(len(wanted & finished.keys()), len(wanted))

    unfinished = [cell for cell in cells if cell.key not in finished]
    report_progress()
    for lines in workers.run(run_job, _group_jobs(unfinished, data_dir)):
        cell_file.append_lines(lines)
        for line in lines:
            finished[line["key"]] = line
        report_progress()
    return finished


def _group_jobs(cells: Cells, data_dir: Path | None) -> list[CellJob]:
    """A job for all cells that share a base; a cell that is wanted twice is run once."""
    groups: dict[str, dict[str, ExperimentCell]] = {}
    for cell in cells:
        group = groups.setdefault(_digest_job(cell), {})
        group.setdefault(cell.key, cell)
    jobs = []
    for group in groups.values():
        jobs.append(CellJob(tuple(group.values()), data_dir))
    return jobs
