"""Tune every method of a paper's main table and store what was chosen among the results, where tables read it.

Streams of blocks have a core for each dataset and backbone; runs of one block (`rates.py`) one for each trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, write_bytes
from tacita.research.experiments.cells import CellFile, run_cells
from tacita.research.experiments.experiment_spec import (
    Experiment,
    Settings,
    TunedChoice,
    load_main_table,
    load_settings,
    narrow_experiment,
    settings_path,
)
from tacita.research.experiments.learning_rates import TuningEntry, add_second_step, choose_rates, interleave_cells
from tacita.research.experiments.process_pool import run_in_processes
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.tuning import tune_lr, tune_method
from tacita.runs.assembly import Machine


@dataclass(frozen=True)
class PairJob:
    """All methods of a paper on one dataset and backbone."""

    dataset: str
    backbone: str
    methods: tuple[str, ...]
    rounds: int
    trials: int
    folder: Path
    data_dir: Path | None


@dataclass(frozen=True)
class PairResult:
    lr: float
    valid: float
    chosen: dict[str, TunedChoice]
    failed: list[str]  # a sentence for everything that has no score


def tune_pair(job: PairJob) -> tuple[PairJob, PairResult]:
    config = RunConfig(
        data=job.dataset,
        backbone={"name": job.backbone},
        seed=1,
        split=SplitConfig(seed=1),
        train=TrainConfig(rounds=job.rounds),
        evaluate=EvaluateConfig(controls=False),
    )
    base = tune_lr(config, Machine(threads=1, data_dir=job.data_dir))
    chosen, failed = {}, [f"learning rate {lr}: {why}" for lr, why in base.failed.items()]
    for method in job.methods:
        folder = job.folder / f"{job.dataset}-{job.backbone}"
        try:
            found = tune_method(base.federation, base.progress, method, job.trials, folder)
        except TacitaError as error:
            failed.append(str(error))
            continue
        failed += [f"{method} {options}: {why}" for options, why in found.failed.items()]
        chosen[method] = TunedChoice(options=found.options, valid=round(found.valid, 6), trials=found.trials)
    told = [f"{job.dataset}, {job.backbone}, {one}" for one in failed]
    return job, PairResult(base.lr, round(base.tried[base.lr], 6), chosen, told)


def list_paper_jobs(
    paper: str, only: list[str], trials: int, folder: Path, data_dir: Path | None, rounds: int | None = None
) -> list[PairJob]:
    """A job for each dataset and backbone of the paper's main table that the words leave."""
    experiment = load_main_table(paper)
    datasets, backbones, named = narrow_experiment(experiment, only)
    asked = [v for name, v in experiment.variants.items() if not named or name in named]
    methods = tuple(v.method for v in asked if v.settings_of is None)
    return [
        PairJob(dataset, backbone, methods, rounds or experiment.rounds.get(dataset, 100), trials, folder, data_dir)
        for dataset in datasets
        for backbone in backbones
    ]


def tune_paper(
    paper: str, jobs: list[PairJob], results: Path, on_done: OnDone | None = None, workers: int = 0
) -> tuple[Path, list[str]]:
    """Tune every (dataset, backbone) on its own core and store what was chosen among the results.

    Returns the file of choices and a sentence for everything that could not be tried.
    """
    settings = load_settings(paper, results)
    failed: list[str] = []
    if on_done:
        on_done(0, len(jobs))
    for done, (job, found) in enumerate(run_in_processes(tune_pair, jobs, workers), 1):
        settings.lr.setdefault(job.dataset, {})[job.backbone] = found.lr
        settings.lr_valid.setdefault(job.dataset, {})[job.backbone] = found.valid
        settings.chosen.setdefault(job.dataset, {}).setdefault(job.backbone, {}).update(found.chosen)
        store_settings(paper, settings, results)
        failed += found.failed
        if on_done:
            on_done(done, len(jobs))
    return settings_path(paper, results), failed


@dataclass(frozen=True)
class RateSearch:
    """Where the trials of a paper are kept, and how they are run."""

    paper: str
    results: Path
    cell_file: CellFile
    data_dir: Path | None
    workers: int = 0
    trials: int = 0  # of a method in all, where there is a second step
    rounds: int | None = None  # of a trial, where it is not the table's budget


def tune_rates(
    search: RateSearch, experiment: Experiment, entries: list[TuningEntry], on_done: OnDone | None = None
) -> tuple[dict[str, TunedChoice], list[str]]:
    """Run the trials that are not kept yet and store the best rates of every method.

    Returns what was chosen, by the entry's name, and a sentence for every trial and method without a score.
    """
    lines = run_cells(interleave_cells(entries), search.cell_file, search.data_dir, search.workers, on_done)
    entries = add_second_step(experiment, entries, lines, search.trials, search.rounds)
    lines |= run_cells(interleave_cells(entries), search.cell_file, search.data_dir, search.workers, on_done)
    chosen: dict[str, TunedChoice] = {}
    failed: list[str] = []
    # only now: another process may have stored its own meanwhile
    settings = load_settings(search.paper, search.results)
    for entry in entries:
        rates = zip(entry.trials, entry.cells, strict=True)
        told = [(one, lines[cell.key].get("failed")) for one, cell in rates]
        failed += [f"{entry.name}, {describe_choice(one)}: {why}" for one, why in told if why]
        try:
            best = choose_rates(entry, lines)
        except TacitaError:
            continue
        chosen[entry.name] = best
        settings.chosen.setdefault(entry.dataset, {}).setdefault(entry.backbone, {})[entry.source] = best
    first = experiment.tune.datasets[0] if experiment.tune else None
    store_settings(search.paper, settings.model_copy(update={"elsewhere": first}), search.results)
    return chosen, failed


def describe_choice(rates: TunedChoice) -> str:
    """A choice in one line."""
    told = [] if rates.lr is None and (rates.train or rates.options) else [f"learning rate {rates.lr}"]
    told += [] if rates.server_lr is None else [f"server {rates.server_lr}"]
    told += [f"{name} {value}" for name, value in rates.train.items()]
    told += [f"{part}.{name} {value}" for part, own in rates.options.items() for name, value in own.items()]
    return ", ".join(told)


def store_settings(paper: str, settings: Settings, results: Path) -> None:
    text = "# Chosen on validation by `tacita tune --paper`: one seed, the same budget for every method.\n"
    path = settings_path(paper, results)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path.parent, error) from None
    write_bytes(path, (text + tomli_w.dumps(settings.model_dump(exclude_none=True))).encode())
