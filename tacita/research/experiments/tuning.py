"""Choose settings on validation with Optuna: a resumable study, every trial a run with its scores or a reason why not.

All methods get the same budget. The learning rate is chosen on block 0, which the methods share; a method's own
options on the mean validation score of the blocks after it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from tacita.core.config import RunConfig, list_newer_settings_at_default, read_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.federation.rounds import Progress
from tacita.methods import list_preset_parts
from tacita.models import find_backbone_class
from tacita.research.experiments.experiment_cell import CELL_VERSION
from tacita.research.experiments.experiment_spec import ROOT
from tacita.research.experiments.search_callbacks import OnDone, SearchCallbacks
from tacita.research.experiments.shared_base import continue_run, train_base, with_parts
from tacita.round.plan import Federation
from tacita.round.registry import brings_settings
from tacita.runs.assembly import Machine, assemble_federation, states_epsilon
from tacita.runs.training import save_run

Options = dict[str, dict[str, Any]]
"""Part -> option -> value."""

Params = dict[str, Any]
"""'part.option' -> value."""

OptionChoices = dict[str, list[Any]]
Space = dict[str, dict[str, OptionChoices]]
"""'parts' or 'backbones' -> name -> option -> values to try."""


def make_search_space() -> Space:
    space: Space = read_toml(ROOT / "space.toml")
    return space


def list_open_options(method: str) -> OptionChoices:
    """'part.option' -> choices, for every option the preset does not fix."""
    space = make_search_space()["parts"]
    open_options = {}
    for spec in list_preset_parts(method):
        name = spec["name"]
        for option, choices in space.get(name, {}).items():
            if option not in spec:
                open_options[f"{name}.{option}"] = choices
    return open_options


def read_served_validation(progress: Progress) -> float:
    """Mean validation of the incremental blocks, corrections included; of block 0 where it is the only one."""
    blocks = progress.results[1:] or progress.results
    scores = [block["valid_served"] for block in blocks]
    scores = [score for score in scores if score is not None]
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


ParamsKey = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class StudyPlace:
    """Where the trials' runs are kept, and the database of the studies."""

    folder: Path
    database: str | None = None  # a URL; None: a file in the folder

    @property
    def url(self) -> str:
        return self.database or f"sqlite:///{self.folder / 'study.db'}"

    def enter(self, name: str) -> StudyPlace:
        """A folder in this one, with the same database."""
        return replace(self, folder=self.folder / name)


@dataclass
class Study:
    """The trials of a method: those with a score, and those that failed with a reason."""

    study: optuna.Study
    scores: dict[ParamsKey, float]
    failed: dict[ParamsKey, str]

    @staticmethod
    def open(name: str, place: StudyPlace, seed: int, trials: int) -> Study:
        """A study as it stands in its database; a new one if there is none."""
        n_startup = max(4, trials // 2)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=n_startup)
        study = optuna.create_study(
            storage=_open_storage(place.url),
            study_name=name,
            load_if_exists=True,
            direction="maximize",
            sampler=sampler,
        )
        scores = {}
        failed = {}
        for trial in study.trials:
            key = _freeze_params(trial.params)
            if trial.value is not None:
                scores[key] = trial.value
            if "why" in trial.user_attrs:
                failed[key] = str(trial.user_attrs["why"])
        return Study(study, scores, failed)

    @property
    def n_tried(self) -> int:
        return len(self.scores) + len(self.failed)

    def report_trial(self, trial: optuna.Trial, key: ParamsKey) -> None:
        """Tell the sampler what a trial came to."""
        if key in self.scores:
            self.study.tell(trial, self.scores[key])
        else:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def list_failure_reasons(self) -> dict[str, str]:
        """Options, as JSON -> why they have no score."""
        reasons = {}
        for key, reason in self.failed.items():
            options = _group_options(dict(key))
            reasons[json.dumps(options)] = reason
        return reasons


def tune_method(
    federation: Federation,
    base: Progress,
    method: str,
    trials: int,
    place: StudyPlace,
    on_trial: Callable[[int, float | None], None] | None = None,
) -> TuningResult:
    """Search a method's options from one trained block 0; going on with an interrupted study."""
    choices = list_open_options(method)
    _refuse_counted_method(federation, method)
    name = _name_study(federation, method)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder = place.folder
    folder.mkdir(parents=True, exist_ok=True)
    study = Study.open(name, place, federation.config.seed, trials)
    n_combinations = math.prod(len(values) for values in choices.values())  # 1 where there is nothing to choose
    for _ in range(10 * trials):  # the sampler may come back to earlier params
        if study.n_tried >= min(trials, n_combinations):
            break
        trial = study.study.ask()
        params: Params = {}
        for option, values in choices.items():
            params[option] = trial.suggest_categorical(option, values)
        key = _freeze_params(params)
        if key not in study.scores and key not in study.failed:
            variant = partial(_build_variant, federation, method, _group_options(params))
            _run_trial(study, trial, key, variant, base, folder / name)
            if on_trial:
                on_trial(study.n_tried, study.scores.get(key))
        study.report_trial(trial, key)
    reasons = study.list_failure_reasons()
    if not study.scores:
        listed = _list_reasons(reasons)
        raise TacitaError(f"no trial of method '{method}' could be run: {listed}.")
    return TuningResult(
        options=_group_options(study.study.best_params),
        valid=float(study.study.best_value),
        trials=study.n_tried,
        failed=reasons,
        folder=folder / name,
    )


def _open_storage(url: str) -> optuna.storages.RDBStorage:
    """Optuna's database, or one sentence where nobody can open it."""
    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # of the driver that the URL names, whichever that is
        reason = str(error).splitlines()[0][:200]
        raise TacitaError(f"Optuna cannot open the database of the studies: {reason}; see --storage.") from None


def _refuse_counted_method(federation: Federation, method: str) -> None:
    """Trials go on from a block 0 that was trained without noise: no epsilon would hold for them."""
    variant = _build_variant(federation, method, {})
    if states_epsilon(variant.config, variant.parts):
        raise TacitaError(
            f"trials of method '{method}' would state an epsilon and go on from a first block that has none; train a "
            "run for each setting instead (`tacita train --set ...`)."
        )


def _run_trial(
    study: Study,
    trial: optuna.Trial,
    key: ParamsKey,
    build_variant: Callable[[], Federation],
    base: Progress,
    folder: Path,
) -> None:
    """A run from block 0 to its end; its score, or why it has none, is noted in the study."""
    try:
        variant = build_variant()
        progress = continue_run(variant, base)
        score = read_served_validation(progress)
    except TacitaError as error:  # diverged, or too large for the catalogue: no score, and not tried again
        study.failed[key] = str(error)
        trial.set_user_attr("why", str(error))
        return
    save_run(variant, progress, folder / f"trial-{trial.number:03d}")
    study.scores[key] = score


def _list_reasons(reasons: Mapping[Any, str]) -> str:
    listed = []
    for name, reason in reasons.items():
        listed.append(f"{name}: {reason.rstrip('.')}")
    return "; ".join(listed)


def _name_study(federation: Federation, method: str) -> str:
    """A study is about one method on one base: other data, settings or code make another."""
    config = federation.config
    stream = federation.stream
    later_defaults = list_newer_settings_at_default(config)
    base = config.model_dump_json(exclude={"method": True, "parts": True, **later_defaults})
    identity = f"{CELL_VERSION}{stream.fingerprint}{base}"
    mark = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"{stream.name}-{federation.backbone.name}-{method}-{mark}"


def _freeze_params(params: Params) -> ParamsKey:
    return tuple(sorted(params.items()))


def _group_options(params: Params) -> Options:
    options: Options = {}
    for dotted, value in params.items():
        part, _, option = dotted.partition(".")
        options.setdefault(part, {})[option] = value
    return options


def _build_variant(federation: Federation, method: str, options: Options) -> Federation:
    parts = []
    for spec in list_preset_parts(method):
        own = options.get(spec["name"], {})
        parts.append({**spec, **own})
    config = federation.config.model_copy(update={"method": method, "parts": parts})
    return with_parts(federation, config)


@dataclass(frozen=True)
class TunedBase:
    """Block 0, trained with the learning rate that validates best, and the scores of the others."""

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
    rates = _list_rates(config.backbone["name"])
    scores: dict[float, float] = {}
    failed: dict[float, str] = {}
    best: TunedBase | None = None
    for number, lr in enumerate(rates):
        if on_done:
            on_done(number, len(rates))
        rate_config = config.model_copy(update={"backbone": {**config.backbone, "lr": lr}})
        federation = assemble_federation(rate_config, machine)
        if on_data and number == 0:
            on_data(federation.stream)
        try:
            base = train_base(federation)
        except TacitaError as error:
            failed[lr] = str(error)
            continue
        if base.best_score < 0:
            failed[lr] = "nobody could be validated in block 0."
            continue
        scores[lr] = base.best_score
        if best is None or base.best_score > scores[best.lr]:
            best = TunedBase(federation, base, lr, scores, failed)
    if best is None:
        listed = _list_reasons(failed)
        raise TacitaError(f"backbone '{config.backbone['name']}' could be trained with no learning rate: {listed}.")
    return best


def _list_rates(backbone: str) -> list[float]:
    """The learning rates to try for a backbone."""
    space = make_search_space()["backbones"]
    rates = space.get(backbone, {}).get("lr", [])
    if not rates:
        find_backbone_class(backbone)  # refuses a misspelt name
        known = ", ".join(sorted(space))
        raise TacitaError(f"tune has no rates to try for backbone '{backbone}' (it knows {known}); give train --lr.")
    return rates


def build_tuning_config(
    names: list[str], backbone: str, method: str, seed: int, more: Params | None = None
) -> RunConfig:
    """The config of a search on the first dataset, with `more` settings; refuses what cannot be tuned."""
    more = more or {}
    _refuse_untunable(names, backbone, method, more)
    config = {**more, "data": names[0], "seed": seed}
    fixed: Options = {"backbone": {"name": backbone}, "evaluate": {"controls": False}}
    for table, options in fixed.items():
        own = more.get(table, {})
        config[table] = {**own, **options} if isinstance(own, dict) else own
    return validate_model(RunConfig, config, "the options")


def _refuse_untunable(names: list[str], backbone: str, method: str, more: Params) -> None:
    """Refuse a method, a number of datasets or settings that this search is not for."""
    list_preset_parts(method)  # refuses an unknown method
    if len(names) > 1 and backbone != "tally":
        raise TacitaError(
            "several --data are for --backbone tally; the other models are tuned on one dataset at a time."
        )
    if brings_settings(method):
        raise TacitaError(
            f"method '{method}' brings the settings of its paper along, and this search is for methods on time blocks; "
            "tune it with --paper, which see `tacita tune --help`."
        )
    for name in ("data", "method", "parts", "seed"):
        if name in more:
            raise TacitaError(f"--set {name} is not for tune; it has an option for that, or searches it itself.")


def tune(
    config: RunConfig, method: str, trials: int, place: StudyPlace, machine: Machine, watcher: SearchCallbacks
) -> tuple[TunedBase, TuningResult]:
    """The learning rate first, then the method's options from the block 0 it gave."""
    with watcher.counting("learning rates") as on_done:
        base = tune_lr(config, machine, on_done, watcher.on_data)
    with watcher.counting("trials") as on_done:
        on_done(0, trials)

        def on_trial(n_tried: int, score: float | None) -> None:
            on_done(min(n_tried, trials), trials)

        result = tune_method(base.federation, base.progress, method, trials, place, on_trial)
    return base, result
