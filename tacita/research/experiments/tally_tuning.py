"""Settings of `tally` chosen on validation: the same small grid and the same rule for every dataset.

A run itself learns what depends on its data (recency on each block's validation, repeat from how often people come
back); the grid is over the rest. The rule: the highest mean validation of the blocks after the first.
The defaults are the setting whose validation, relative to each dataset's best, is highest on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.research.experiments.search_callbacks import OnDone, SearchCallbacks
from tacita.research.experiments.shared_base import ignore_round
from tacita.research.experiments.tuning import read_served_validation
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, build_components
from tacita.runs.controls import average_incremental_blocks

Options = dict[str, float]
GRID: dict[str, list[float]] = {
    "ridge": [100.0, 200.0, 500.0, 1000.0],
    "decay": [1.0, 0.7, 0.5],
}


@dataclass(frozen=True)
class TallyTrial:
    options: Options
    valid: float  # mean of the selecting metric over the blocks after the first; NaN where it failed
    test: dict[str, float]
    failed: str = ""  # why there is no score


DatasetTrials = dict[str, list[TallyTrial]]


def run_grid_trials(
    config: RunConfig,
    machine: Machine,
    on_done: OnDone | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> list[TallyTrial]:
    """Every setting of the grid on one dataset; other options as in the config."""
    federation = assemble_federation(config, machine)
    if on_data:
        on_data(federation.stream)
    grid = []
    for values in product(*GRID.values()):
        grid.append(dict(zip(GRID, values, strict=True)))
    trials = []
    for n_done, options in enumerate(grid):
        if on_done:
            on_done(n_done, len(grid))
        try:
            trials.append(_run_options_trial(federation, config, options))
        except TacitaError as error:
            trials.append(TallyTrial(options, float("nan"), {}, str(error)))
    return trials


def _run_options_trial(federation: Federation, config: RunConfig, options: Options) -> TallyTrial:
    backbone_options: dict[str, Any] = {**config.backbone, **options}
    changed = config.model_copy(update={"backbone": backbone_options})
    progress = make_initial_progress(federation)
    backbone, _, _ = build_components(changed)
    run_remaining_blocks(replace(federation, config=changed, backbone=backbone), progress, ignore_round)
    return TallyTrial(options, read_served_validation(progress), average_incremental_blocks(progress.results))


def run_trials_on_datasets(
    config: RunConfig,
    names: list[str],
    machine: Machine,
    watcher: SearchCallbacks,
    on_tried: Callable[[str, list[TallyTrial]], None],
) -> DatasetTrials:
    """The grid on one dataset after the other; `on_tried` is called after each."""
    trials = {}
    for name in names:
        dataset_config = config.model_copy(update={"data": name})
        with watcher.counting(f"settings, {name}") as on_done:
            trials[name] = run_grid_trials(dataset_config, machine, on_done, watcher.on_data)
        on_tried(name, trials[name])
    return trials


def choose_trial(trials: list[TallyTrial]) -> TallyTrial:
    scored = [trial for trial in trials if not trial.failed]
    if not scored:
        raise TacitaError(f"no setting could be tried; the first one: {trials[0].failed}")
    return max(scored, key=lambda trial: trial.valid)


def choose_common_options(trials: DatasetTrials) -> Options:
    """The setting that serves all datasets; one that failed on any of them does not."""
    relative = []
    for own in trials.values():
        best = choose_trial(own).valid
        relative.append([trial.valid / best for trial in own])
    means = np.mean(relative, axis=0)
    if np.isnan(means).all():
        raise TacitaError("no setting could be tried on all of the datasets; tune them one by one.")
    any_trials = next(iter(trials.values()))
    return any_trials[int(np.nanargmax(means))].options
