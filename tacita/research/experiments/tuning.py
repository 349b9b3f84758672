"""Choose settings on validation with Optuna: a resumable study, every trial a run with its scores or a reason why not.

All methods get the same budget. The learning rate is chosen on block 0, which the methods share; a method's own
options on the mean validation score of the blocks after it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from tacita.core.config import RunConfig, find_later_defaults, read_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.federation.rounds import Progress
from tacita.methods import preset_parts
from tacita.models import backbone_class
from tacita.research.experiments.experiment_spec import CELL_VERSION, ROOT
from tacita.research.experiments.search_callbacks import OnDone, SearchCallbacks
from tacita.research.experiments.shared_base import continue_run, train_base, with_parts
from tacita.round.plan import Federation
from tacita.round.registry import brings_settings
from tacita.runs.assembly import Machine, assemble
from tacita.runs.training import save_run

Options = dict[str, dict[str, Any]]


def search_space() -> dict[str, dict[str, dict[str, list[Any]]]]:
    space: dict[str, dict[str, dict[str, list[Any]]]] = read_toml(ROOT / "space.toml")
    return space


def list_open_options(method: str) -> dict[str, list[Any]]:
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
class TuningResult:
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
) -> TuningResult:
    """Search a method's options from one trained block 0; going on with an interrupted study."""
    choices, name = list_open_options(method), _study_name(fed, method)
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
    seen = {_freeze_params(t.params): t.value for t in study.trials if t.value is not None}
    failed = {_freeze_params(t.params): str(t.user_attrs["why"]) for t in study.trials if "why" in t.user_attrs}

    for _ in range(10 * trials):  # the sampler may come back to what it has seen
        if len(seen) + len(failed) >= min(trials, most):
            break
        trial = study.ask()
        picked = {option: trial.suggest_categorical(option, values) for option, values in choices.items()}
        key = _freeze_params(picked)
        if key not in seen and key not in failed:
            try:
                tried = _build_variant(fed, method, _group_options(picked))
                progress = continue_run(tried, base)
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
    why = {json.dumps(_group_options(dict(key))): said for key, said in failed.items()}
    if not seen:
        told = "; ".join(f"{options}: {said.rstrip('.')}" for options, said in why.items())
        raise TacitaError(f"no trial of method '{method}' could be run: {told}.")
    return TuningResult(
        _group_options(study.best_params), float(study.best_value), len(seen) + len(failed), why, folder / name
    )


def _study_name(fed: Federation, method: str) -> str:
    """A study is about one method on one base: other data, settings or code make another."""
    base = fed.config.model_dump_json(exclude={"method": True, "parts": True, **find_later_defaults(fed.config)})
    mark = hashlib.sha256(f"{CELL_VERSION}{fed.stream.fingerprint}{base}".encode()).hexdigest()[:8]
    return f"{fed.stream.name}-{fed.backbone.name}-{method}-{mark}"


def _freeze_params(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def _group_options(picked: dict[str, Any]) -> Options:
    out: Options = {}
    for dotted, value in picked.items():
        part, _, option = dotted.partition(".")
        out.setdefault(part, {})[option] = value
    return out


def _build_variant(fed: Federation, method: str, options: Options) -> Federation:
    parts = [{**spec, **options.get(spec["name"], {})} for spec in preset_parts(method)]
    return with_parts(fed, fed.config.model_copy(update={"method": method, "parts": parts}))


@dataclass(frozen=True)
class TunedBase:
    """Block 0, trained with the learning rate that validates best, and what the others came to."""

    federation: Federation
    progress: Progress
    lr: float
    tried: dict[float, float]
    failed: dict[float, str]


def tune_lr(
    config: RunConfig,
    machine: Machine,
    on_done: OnDone | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> TunedBase:
    """The learning rate with the best block-0 validation, with its trained block 0."""
    name = config.backbone["name"]
    rates = search_space()["backbones"].get(name, {}).get("lr", [])
    if not rates:
        backbone_class(name)  # a misspelt one is told so
        known = ", ".join(sorted(search_space()["backbones"]))
        raise TacitaError(f"tune has no rates to try for backbone '{name}' (it knows {known}); give train --lr.")
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
    return TunedBase(*best, tried, failed)


def build_tuning_config(
    names: list[str], backbone: str, method: str, seed: int, more: dict[str, Any] | None = None
) -> RunConfig:
    """What is tuned, on the first dataset, with `more` settings; refuses what cannot be."""
    preset_parts(method)
    if len(names) > 1 and backbone != "tally":
        raise TacitaError(
            "several --data are for --backbone tally; the other models are tuned on one dataset at a time."
        )
    if brings_settings(method):
        raise TacitaError(
            f"method '{method}' brings the settings of its paper along, and this search is for methods on time blocks; "
            "tune it with --paper, which see `tacita tune --help`."
        )
    more = more or {}
    for name in ("data", "method", "parts", "seed"):
        if name in more:
            raise TacitaError(f"--set {name} is not for tune; it has an option for that, or searches it itself.")
    said = {**more, "data": names[0], "seed": seed}
    settled: dict[str, dict[str, Any]] = {"backbone": {"name": backbone}, "evaluate": {"controls": False}}
    for table, own in settled.items():
        given = more.get(table, {})
        said[table] = {**given, **own} if isinstance(given, dict) else given
    return validate_model(RunConfig, said, "the options")


def tune(
    config: RunConfig, method: str, trials: int, folder: Path, machine: Machine, watcher: SearchCallbacks
) -> tuple[TunedBase, TuningResult]:
    """The learning rate first, then the method's options from the block 0 it gave."""
    with watcher.counting("learning rates") as tell:
        base = tune_lr(config, machine, tell, watcher.on_data)
    with watcher.counting("trials") as tell:
        tell(0, trials)
        found = tune_method(
            base.federation, base.progress, method, trials, folder, lambda n, score: tell(min(n, trials), trials)
        )
    return base, found
