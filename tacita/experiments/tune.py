"""Choose settings on validation with Optuna: a resumable study, every trial a run with its scores.

All methods get the same budget. The learning rate is chosen on block 0, which the methods share; a method's own
options on the mean validation score of the blocks after it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import tomli_w

from tacita.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig, later_defaults, read_toml
from tacita.devices import Federation
from tacita.errors import TacitaError
from tacita.experiments.plan import CELL_VERSION, ROOT, Chosen, Settings, load_settings, settings_path
from tacita.experiments.shared_base import go_on, train_base, with_parts
from tacita.files import write_bytes
from tacita.methods import preset_parts
from tacita.rounds import Progress
from tacita.runs import Machine, assemble, save_run

Options = dict[str, dict[str, Any]]


def search_space() -> dict[str, dict[str, dict[str, list[Any]]]]:
    space: dict[str, dict[str, dict[str, list[Any]]]] = read_toml(ROOT / "space.toml")
    return space


def open_options(method: str) -> dict[str, list[Any]]:
    """'part.option' -> choices, for every option the preset does not fix."""
    space = search_space()["parts"]
    out = {}
    for spec in preset_parts(method):
        for option, choices in space.get(spec["name"], {}).items():
            if option not in spec:
                out[f"{spec['name']}.{option}"] = choices
    return out


def served_validation(progress: Progress) -> float:
    """Mean validation of the incremental blocks, corrections included; of block 0 where it is the only one."""
    blocks = progress.results[1:] or progress.results
    return float(np.mean([b["valid_served"] or 0.0 for b in blocks]))


@dataclass(frozen=True)
class Tuned:
    options: Options
    valid: float
    trials: int


def tune_method(
    fed: Federation,
    base: Progress,
    method: str,
    trials: int,
    folder: Path,
    on_trial: Callable[[int, float], None] | None = None,
) -> Tuned:
    """Search a method's options from one trained block 0; going on with an interrupted study."""
    choices = open_options(method)
    if not choices:
        return Tuned({}, served_validation(go_on(_variant(fed, method, {}), base)), 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name=_study_name(fed, method),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=fed.config.seed, n_startup_trials=max(4, trials // 2)),
    )
    most = int(np.prod([len(values) for values in choices.values()]))
    seen = {_frozen(t.params): t.value for t in study.trials if t.value is not None}

    def objective(trial: optuna.Trial) -> float:
        picked = {name: trial.suggest_categorical(name, values) for name, values in choices.items()}
        if _frozen(picked) in seen:
            return float(seen[_frozen(picked)])
        try:
            tried = _variant(fed, method, _grouped(picked))
            progress = go_on(tried, base)
        except TacitaError:  # diverged, or too large for the catalogue: as bad as can be, and not tried again
            seen[_frozen(picked)] = 0.0
            return 0.0
        score = served_validation(progress)
        seen[_frozen(picked)] = score
        save_run(tried, progress, folder / _study_name(fed, method) / f"trial-{trial.number:03d}")
        if on_trial:
            on_trial(len(seen), score)
        return score

    attempts = 0
    while len(seen) < min(trials, most) and attempts < 10 * trials:
        attempts += 1
        study.optimize(objective, n_trials=1)
    return Tuned(_grouped(study.best_params), float(study.best_value), len(seen))


def _study_name(fed: Federation, method: str) -> str:
    """A study is about one method on one base: other data, settings or code make another."""
    base = fed.config.model_dump_json(exclude={"method": True, "parts": True, **later_defaults(fed.config)})
    mark = hashlib.sha256(f"{CELL_VERSION}{fed.stream.fingerprint}{base}".encode()).hexdigest()[:8]
    return f"{fed.stream.name}-{fed.backbone.name}-{method}-{mark}"


def _frozen(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _grouped(picked: dict[str, Any]) -> Options:
    out: Options = {}
    for dotted, value in picked.items():
        part, _, option = dotted.partition(".")
        out.setdefault(part, {})[option] = value
    return out


def _variant(fed: Federation, method: str, options: Options) -> Federation:
    parts = [{**spec, **options.get(spec["name"], {})} for spec in preset_parts(method)]
    return with_parts(fed, fed.config.model_copy(update={"method": method, "parts": parts}))


def tune_lr(config: RunConfig, machine: Machine) -> tuple[Federation, Progress, float, dict[float, float]]:
    """The learning rate with the best block-0 validation, with its trained block 0."""
    name = config.backbone["name"]
    tried: dict[float, float] = {}
    best: tuple[Federation, Progress, float] | None = None
    for lr in search_space()["backbones"].get(name, {}).get("lr", []):
        fed = assemble(config.model_copy(update={"backbone": {**config.backbone, "lr": lr}}), machine)
        try:
            base = train_base(fed)
        except TacitaError:
            tried[lr] = 0.0  # diverged
            continue
        tried[lr] = base.best_score
        if best is None or base.best_score > tried[best[2]]:
            best = (fed, base, lr)
    if best is None:
        raise TacitaError(f"no learning rates to try for backbone '{name}' in the search space.")
    return *best, tried


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


def tune_pair(job: PairJob) -> tuple[PairJob, float, float, dict[str, Chosen]]:
    config = RunConfig(
        data=job.dataset,
        backbone={"name": job.backbone},
        seed=1,
        split=SplitConfig(seed=1),
        train=TrainConfig(rounds=job.rounds),
        evaluate=EvaluateConfig(controls=False),
    )
    fed, base, lr, tried = tune_lr(config, Machine(threads=1, data_dir=job.data_dir))
    chosen = {}
    for method in job.methods:
        found = tune_method(fed, base, method, job.trials, job.folder / f"{job.dataset}-{job.backbone}")
        chosen[method] = Chosen(options=found.options, valid=round(found.valid, 6), trials=found.trials)
    return job, lr, round(tried[lr], 6), chosen


def tune_paper(
    paper: str,
    datasets: dict[str, int],
    backbones: list[str],
    methods: list[str],
    trials: int,
    folder: Path,
    data_dir: Path | None,
    on_done: Callable[[int, int], None] | None = None,
) -> Path:
    """Tune every (dataset, backbone) on its own core and store what was chosen beside the experiment files."""
    jobs = [
        PairJob(d, b, tuple(methods), rounds, trials, folder, data_dir)
        for d, rounds in datasets.items()
        for b in backbones
    ]
    settings = load_settings(paper)
    done = 0
    if on_done:
        on_done(0, len(jobs))
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(tune_pair, job) for job in jobs]):
            job, lr, valid, chosen = finished.result()
            settings.lr.setdefault(job.dataset, {})[job.backbone] = lr
            settings.lr_valid.setdefault(job.dataset, {})[job.backbone] = valid
            settings.chosen.setdefault(job.dataset, {}).setdefault(job.backbone, {}).update(chosen)
            store_settings(paper, settings)
            done += 1
            if on_done:
                on_done(done, len(jobs))
    return settings_path(paper)


def store_settings(paper: str, settings: Settings) -> None:
    text = "# Chosen on validation by `tacita tune --paper`: one seed, the same budget for every method.\n"
    write_bytes(settings_path(paper), (text + tomli_w.dumps(settings.model_dump(exclude_none=True))).encode())
