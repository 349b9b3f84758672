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
from tacita.core.types import Stream
from tacita.federation.rounds import run_stream, start
from tacita.lab.assembling import Machine, assemble, build
from tacita.lab.controls import mean_of
from tacita.lab.experiments.tune import served_validation
from tacita.lab.experiments.watching import OnDone, Watcher

GRID: dict[str, list[float]] = {"ridge": [100.0, 200.0, 500.0, 1000.0], "decay": [1.0, 0.7, 0.5]}


@dataclass(frozen=True)
class Tried:
    options: dict[str, float]
    valid: float  # mean of the selecting metric over the blocks after the first; NaN where it failed
    test: dict[str, float]
    failed: str = ""  # why there is no score


def try_all(
    config: RunConfig,
    machine: Machine,
    on_done: OnDone | None = None,
    on_data: Callable[[Stream], None] | None = None,
) -> list[Tried]:
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
        progress = start(fed)
        try:
            run_stream(replace(fed, config=tried, backbone=build(tried)[0]), progress, lambda report, now: None)
            found.append(Tried(options, served_validation(progress), mean_of(progress.results)))
        except TacitaError as error:
            found.append(Tried(options, float("nan"), {}, str(error)))
    return found


def try_datasets(
    config: RunConfig,
    names: list[str],
    machine: Machine,
    watcher: Watcher,
    on_tried: Callable[[str, list[Tried]], None],
) -> dict[str, list[Tried]]:
    """The grid on one dataset after the other; `on_tried` hears of each when it is done."""
    tried = {}
    for name in names:
        with watcher.counting(f"settings, {name}") as tell:
            tried[name] = try_all(config.model_copy(update={"data": name}), machine, tell, watcher.on_data)
        on_tried(name, tried[name])
    return tried


def chosen(found: list[Tried]) -> Tried:
    scored = [one for one in found if not one.failed]
    if not scored:
        raise TacitaError(f"no setting could be tried; the first one: {found[0].failed}")
    return max(scored, key=lambda one: one.valid)


def chosen_together(found: dict[str, list[Tried]]) -> dict[str, float]:
    """The setting that serves all datasets; one that failed on any of them does not."""
    relative = np.mean([[one.valid / chosen(tried).valid for one in tried] for tried in found.values()], axis=0)
    if np.isnan(relative).all():
        raise TacitaError("no setting could be tried on all of the datasets; tune them one by one.")
    return next(iter(found.values()))[int(np.nanargmax(relative))].options
