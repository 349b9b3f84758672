"""Tune every method of a paper's main table and store the choices among the results, where tables read them.

Streams of blocks have a core for each dataset and backbone; runs of one block (`learning_rates.py`) one for each trial.
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
    find_settings_path,
    load_main_table,
    load_settings,
    narrow_experiment,
)
from tacita.research.experiments.learning_rates import TuningEntry, add_second_step, choose_rates, interleave_cells
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.single_block import CellLines
from tacita.research.experiments.tuning import StudyPlace, tune_lr, tune_method
from tacita.research.experiments.workers import THIS_MACHINE, Workers
from tacita.runs.assembly import Machine


@dataclass(frozen=True)
class PairJob:
    """All methods of a paper on one dataset and backbone."""

    dataset: str
    backbone: str
    methods: tuple[str, ...]
    rounds: int
    trials: int
    place: StudyPlace
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
    place = job.place.enter(f"{job.dataset}-{job.backbone}")
    chosen = {}
    failed = []
    for lr, reason in base.failed.items():
        failed.append(f"learning rate {lr}: {reason}")
    for method in job.methods:
        try:
            result = tune_method(base.federation, base.progress, method, job.trials, place)
        except TacitaError as error:
            failed.append(str(error))
            continue
        for options, reason in result.failed.items():
            failed.append(f"{method} {options}: {reason}")
        choice = TunedChoice(
            options=result.options,
            valid=round(result.valid, 6),
            trials=result.trials,
        )
        chosen[method] = choice
    pair = f"{job.dataset}, {job.backbone}"
    sentences = [f"{pair}, {failure}" for failure in failed]
    base_valid = round(base.tried[base.lr], 6)
    return job, PairResult(base.lr, base_valid, chosen, sentences)


def list_paper_jobs(
    paper: str, only: list[str], trials: int, place: StudyPlace, data_dir: Path | None, rounds: int | None = None
) -> list[PairJob]:
    """A job for each dataset and backbone of the paper's main table that the words leave."""
    experiment = load_main_table(paper)
    datasets, backbones, names = narrow_experiment(experiment, only)
    methods = []
    for name in names or experiment.variants:
        variant = experiment.variants[name]
        if variant.settings_of is None:
            methods.append(variant.method)
    jobs = []
    for dataset in datasets:
        n_rounds = rounds or experiment.rounds.get(dataset, 100)
        for backbone in backbones:
            job = PairJob(
                dataset,
                backbone,
                methods=tuple(methods),
                rounds=n_rounds,
                trials=trials,
                place=place,
                data_dir=data_dir,
            )
            jobs.append(job)
    return jobs


def tune_paper(
    paper: str, jobs: list[PairJob], results: Path, on_done: OnDone | None = None, workers: Workers = THIS_MACHINE
) -> tuple[Path, list[str]]:
    """Tune every (dataset, backbone) on its own core and store the choices among the results.

    Returns the file of choices and a sentence for everything that could not be tried.
    """
    settings = load_settings(paper, results)
    failed: list[str] = []
    if on_done:
        on_done(0, len(jobs))
    finished = workers.run(tune_pair, jobs)
    for n_done, (job, result) in enumerate(finished, 1):
        _note_result(settings, job, result)
        store_settings(paper, settings, results)
        failed += result.failed
        if on_done:
            on_done(n_done, len(jobs))
    return find_settings_path(paper, results), failed


def _note_result(settings: Settings, job: PairJob, result: PairResult) -> None:
    """Put the choices of a job in the settings."""
    rates = settings.lr.setdefault(job.dataset, {})
    rates[job.backbone] = result.lr
    scores = settings.lr_valid.setdefault(job.dataset, {})
    scores[job.backbone] = result.valid
    choices = settings.list_choices(job.dataset, job.backbone)
    choices.update(result.chosen)


@dataclass(frozen=True)
class RateSearch:
    """Where the trials of a paper are stored, and how they are run."""

    paper: str
    results: Path
    cell_file: CellFile
    data_dir: Path | None
    workers: Workers = THIS_MACHINE
    trials: int = 0  # of a method in all, where there is a second step
    rounds: int | None = None  # of a trial, where it is not the table's budget


def tune_rates(
    search: RateSearch, experiment: Experiment, entries: list[TuningEntry], on_done: OnDone | None = None
) -> tuple[dict[str, TunedChoice], list[str]]:
    """Run the trials that are not stored yet and store the best rates of every method.

    Returns the choices, by the entry's name, and a sentence for every trial and method without a score.
    """
    lines = _run_trials(search, entries, on_done)
    entries = add_second_step(experiment, entries, lines, search.trials, search.rounds)
    lines |= _run_trials(search, entries, on_done)
    chosen: dict[str, TunedChoice] = {}
    failed: list[str] = []
    settings = load_settings(search.paper, search.results)  # only now: another process may have stored its own
    for entry in entries:
        failed += _describe_failures(entry, lines)
        try:
            best = choose_rates(entry, lines)
        except TacitaError:
            continue
        chosen[entry.name] = best
        choices = settings.list_choices(entry.dataset, entry.backbone)
        choices[entry.source] = best
    elsewhere = experiment.tune.datasets[0] if experiment.tune else None
    settings = settings.model_copy(update={"elsewhere": elsewhere})
    store_settings(search.paper, settings, search.results)
    return chosen, failed


def _run_trials(search: RateSearch, entries: list[TuningEntry], on_done: OnDone | None) -> CellLines:
    cells = interleave_cells(entries)
    return run_cells(cells, search.cell_file, search.data_dir, search.workers, on_done)


def _describe_failures(entry: TuningEntry, lines: CellLines) -> list[str]:
    """A sentence for every trial without a score."""
    sentences = []
    for trial, cell in zip(entry.trials, entry.cells, strict=True):
        reason = lines[cell.key].get("failed")
        if reason:
            choice = describe_choice(trial)
            sentences.append(f"{entry.name}, {choice}: {reason}")
    return sentences


def describe_choice(rates: TunedChoice) -> str:
    """A choice in one line."""
    words = []
    has_other_settings = bool(rates.train or rates.options)
    if rates.lr is not None or not has_other_settings:
        words.append(f"learning rate {rates.lr}")
    if rates.server_lr is not None:
        words.append(f"server {rates.server_lr}")
    for name, value in rates.train.items():
        words.append(f"{name} {value}")
    for part, options in rates.options.items():
        for name, value in options.items():
            words.append(f"{part}.{name} {value}")
    return ", ".join(words)


def store_settings(paper: str, settings: Settings, results: Path) -> None:
    comment = "# Chosen on validation by `tacita tune --paper`: one seed, the same budget for every method.\n"
    path = find_settings_path(paper, results)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path.parent, error) from None
    text = comment + tomli_w.dumps(settings.model_dump(exclude_none=True))
    write_bytes(path, text.encode())
