"""Settings of `tally` chosen on validation: the same small grid and the same rule for every dataset.

What depends on the data at hand is learned inside a run (recency on each block's validation, repeat from how often
people come back); the grid is over what is left. The rule: the highest mean validation of the blocks after the first.
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
from tacita.federation.rounds import run_stream, start_run
from tacita.research.experiments.search_callbacks import OnDone, SearchCallbacks
from tacita.research.experiments.tuning import served_validation
from tacita.runs.assembly import Machine, assemble, build_components
from tacita.runs.controls import average_blocks

GRID: dict[str, list[float]] = {"ridge": [100.0, 200.0, 500.0, 1000.0], "decay": [1.0, 0.7, 0.5]}


@dataclass(frozen=True)
class TallyTrial:
    options: dict[str, float]
    valid: float  # mean of the selecting metric over the blocks after the first; NaN where it failed
    test: dict[str, float]
    failed: str = ""  # why there is no score


def try_grid(
    config: RunConfig,
    machine: Machine,
    on_done: OnDone | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> list[TallyTrial]:
    """Every setting of the grid on one dataset; other options as in the config."""
    fed = assemble(config, machine)
    if on_data:
        on_data(fed.stream)
    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    found = []
    for done, options in enumerate(grid):
        if on_done:
            on_done(done, len(grid))
        changed: dict[str, Any] = {**config.backbone, **options}
        tried = config.model_copy(update={"backbone": changed})
        progress = start_run(fed)
        try:
            run_stream(
                replace(fed, config=tried, backbone=build_components(tried)[0]), progress, lambda report, now: None
            )
            found.append(TallyTrial(options, served_validation(progress), average_blocks(progress.results)))
        except TacitaError as error:
            found.append(TallyTrial(options, float("nan"), {}, str(error)))
    return found


def try_datasets(
    config: RunConfig,
    names: list[str],
    machine: Machine,
    watcher: SearchCallbacks,
    on_tried: Callable[[str, list[TallyTrial]], None],
) -> dict[str, list[TallyTrial]]:
    """The grid on one dataset after the other; `on_tried` hears of each when it is done."""
    tried = {}
    for name in names:
        with watcher.counting(f"settings, {name}") as tell:
            tried[name] = try_grid(config.model_copy(update={"data": name}), machine, tell, watcher.on_data)
        on_tried(name, tried[name])
    return tried


def choose_trial(trials: list[TallyTrial]) -> TallyTrial:
    scored = [one for one in trials if not one.failed]
    if not scored:
        raise TacitaError(f"no setting could be tried; the first one: {trials[0].failed}")
    return max(scored, key=lambda one: one.valid)


def choose_common_options(trials: dict[str, list[TallyTrial]]) -> dict[str, float]:
    """The setting that serves all datasets; one that failed on any of them does not."""
    relative = np.mean([[one.valid / choose_trial(tried).valid for one in tried] for tried in trials.values()], axis=0)
    if np.isnan(relative).all():
        raise TacitaError("no setting could be tried on all of the datasets; tune them one by one.")
    return next(iter(trials.values()))[int(np.nanargmax(relative))].options
