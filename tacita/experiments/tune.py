"""Choose settings on validation with Optuna: a resumable study, every trial a run with its scores or a reason why not.

All methods get the same budget. The learning rate is chosen on block 0, which the methods share; a method's own
options on the mean validation score of the blocks after it.
"""

from __future__ import annotations

import hashlib
import json
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
from tacita.errors import TacitaError
from tacita.experiments.plan import CELL_VERSION, ROOT, Chosen, Settings, load_settings, settings_path
from tacita.experiments.shared_base import go_on, train_base, with_parts
from tacita.files import write_bytes
from tacita.methods import preset_parts
from tacita.plan import Federation
from tacita.rounds import Progress
from tacita.runs import Machine, assemble, save_run
from tacita.types import Stream

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
    scores = [b["valid_served"] for b in blocks if b["valid_served"] is not None]
    if not scores:
        raise TacitaError("nobody could be validated, so there is nothing to choose by; the blocks are too small.")
    return float(np.mean(scores))


@dataclass(frozen=True)
class Tuned:
    """The best of the trials; those that failed have no score, only a reason."""

    options: Options
    valid: float
    trials: int
    failed: dict[str, str]  # options, as JSON -> why
    folder: Path  # of the trials' runs


def tune_method(
    fed: Federation,
    base: Progress,
    method: str,
    trials: int,
    folder: Path,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> Tuned:
    """Search a method's options from one trained block 0; going on with an interrupted study."""
    choices, name = open_options(method), _study_name(fed, method)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name=name,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=fed.config.seed, n_startup_trials=max(4, trials // 2)),
    )
    most = int(np.prod([len(values) for values in choices.values()]))  # 1 where there is nothing to choose
    seen = {_frozen(t.params): t.value for t in study.trials if t.value is not None}
    failed = {_frozen(t.params): str(t.user_attrs["why"]) for t in study.trials if "why" in t.user_attrs}

    for _ in range(10 * trials):  # the sampler may come back to what it has seen
        if len(seen) + len(failed) >= min(trials, most):
            break
        trial = study.ask()
        picked = {option: trial.suggest_categorical(option, values) for option, values in choices.items()}
        key = _frozen(picked)
        if key not in seen and key not in failed:
            try:
                tried = _variant(fed, method, _grouped(picked))
                progress = go_on(tried, base)
                score = served_validation(progress)
            except TacitaError as error:  # diverged, or too large for the catalogue: no score, and not tried again
                failed[key] = str(error)
                trial.set_user_attr("why", str(error))
            else:
                save_run(tried, progress, folder / name / f"trial-{trial.number:03d}")
                seen[key] = score
            if on_trial:
                on_trial(len(seen) + len(failed), seen.get(key))
        if key in seen:
            study.tell(trial, seen[key])
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
    why = {json.dumps(_grouped(dict(key))): said for key, said in failed.items()}
    if not seen:
        told = "; ".join(f"{options}: {said.rstrip('.')}" for options, said in why.items())
        raise TacitaError(f"no trial of method '{method}' could be run: {told}.")
    return Tuned(_grouped(study.best_params), float(study.best_value), len(seen) + len(failed), why, folder / name)


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


@dataclass(frozen=True)
class Base:
    """Block 0, trained with the learning rate that validates best, and what the others came to."""

    fed: Federation
    progress: Progress
    lr: float
    tried: dict[float, float]
    failed: dict[float, str]


def tune_lr(
    config: RunConfig,
    machine: Machine,
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[Stream], None] | None = None,
) -> Base:
    """The learning rate with the best block-0 validation, with its trained block 0."""
    name = config.backbone["name"]
    rates = search_space()["backbones"].get(name, {}).get("lr", [])
    if not rates:
        raise TacitaError(f"no learning rates to try for backbone '{name}' in the search space.")
    tried: dict[float, float] = {}
    failed: dict[float, str] = {}
    best: tuple[Federation, Progress, float] | None = None
    for done, lr in enumerate(rates):
        if on_done:
            on_done(done, len(rates))
        fed = assemble(config.model_copy(update={"backbone": {**config.backbone, "lr": lr}}), machine)
        if on_data and done == 0:
            on_data(fed.stream)
        try:
            base = train_base(fed)
        except TacitaError as error:
            failed[lr] = str(error)
            continue
        if base.best_score < 0:
            failed[lr] = "nobody could be validated in block 0."
            continue
        tried[lr] = base.best_score
        if best is None or base.best_score > tried[best[2]]:
            best = (fed, base, lr)
    if best is None:
        told = "; ".join(f"{lr}: {said.rstrip('.')}" for lr, said in failed.items())
        raise TacitaError(f"backbone '{name}' could be trained with no learning rate: {told}.")
    return Base(*best, tried, failed)


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
class PairDone:
    lr: float
    valid: float
    chosen: dict[str, Chosen]
    failed: list[str]  # a sentence for everything that has no score


def tune_pair(job: PairJob) -> tuple[PairJob, PairDone]:
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
            found = tune_method(base.fed, base.progress, method, job.trials, folder)
        except TacitaError as error:
            failed.append(str(error))
            continue
        failed += [f"{method} {options}: {why}" for options, why in found.failed.items()]
        chosen[method] = Chosen(options=found.options, valid=round(found.valid, 6), trials=found.trials)
    told = [f"{job.dataset}, {job.backbone}, {one}" for one in failed]
    return job, PairDone(base.lr, round(base.tried[base.lr], 6), chosen, told)


def tune_paper(
    paper: str, jobs: list[PairJob], on_done: Callable[[int, int], None] | None = None
) -> tuple[Path, list[str]]:
    """Tune every (dataset, backbone) on its own core and store what was chosen beside the experiment files.

    Returns the file of choices and a sentence for everything that could not be tried.
    """
    settings = load_settings(paper)
    done, failed = 0, []
    if on_done:
        on_done(0, len(jobs))
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(tune_pair, job) for job in jobs]):
            job, found = finished.result()
            settings.lr.setdefault(job.dataset, {})[job.backbone] = found.lr
            settings.lr_valid.setdefault(job.dataset, {})[job.backbone] = found.valid
            settings.chosen.setdefault(job.dataset, {}).setdefault(job.backbone, {}).update(found.chosen)
            store_settings(paper, settings)
            failed += found.failed
            done += 1
            if on_done:
                on_done(done, len(jobs))
    return settings_path(paper), failed


def store_settings(paper: str, settings: Settings) -> None:
    text = "# Chosen on validation by `tacita tune --paper`: one seed, the same budget for every method.\n"
    write_bytes(settings_path(paper), (text + tomli_w.dumps(settings.model_dump(exclude_none=True))).encode())
