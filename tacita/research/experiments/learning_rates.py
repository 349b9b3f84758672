"""Learning rates of the methods of a paper whose runs are of one block, chosen on validation.

One budget for all: as many trials of as many rounds, the first at the method's default rates, the others at points
that fill the same range evenly. The points are known beforehand, so trials can be run in any order, by several
processes, and a larger budget goes on from a smaller one. A trial is a cell that never looks at the test items.
Where a paper names axes (FedShare), more than rates is searched, in two steps (`axes.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.methods.distillation.transfer import PredictionTransfer
from tacita.models.base import Backbone, TrainedConfig
from tacita.research.experiments.axes import list_combinations, sample_around
from tacita.research.experiments.experiment_cell import Cells, ExperimentCell, Place
from tacita.research.experiments.experiment_spec import (
    Experiment,
    Settings,
    TunedChoice,
    Tuning,
    Variant,
    build_run_config,
    narrow_experiment,
)
from tacita.research.experiments.low_discrepancy import spread_points
from tacita.research.experiments.single_block import CellLines
from tacita.runs.assembly import build_components


@dataclass(frozen=True)
class TuningEntry:
    """A method on one dataset and backbone, to be tuned, and the rates that will be tried."""

    dataset: str
    backbone: str
    source: str  # under which its choice is stored
    trials: tuple[TunedChoice, ...]
    cells: tuple[ExperimentCell, ...]  # one for each trial
    variant: str = ""  # whose trials they are

    @property
    def name(self) -> str:
        return f"{self.dataset}, {self.backbone}, {self.source}"

    @property
    def place(self) -> Place:
        return self.dataset, self.backbone, self.variant


def list_tuning_entries(
    experiment: Experiment, only: list[str], trials: int, rounds: int | None = None
) -> list[TuningEntry]:
    """Every method with rates of its own that the words leave; `rounds`: another budget than the table's."""
    tuning = _require_tuning(experiment, rounds)
    datasets, backbones, names = narrow_experiment(experiment, only)
    entries = []
    for dataset in tuning.datasets:
        if dataset not in datasets:
            continue
        for backbone in backbones:
            for name in names or experiment.variants:
                variant = experiment.variants[name]
                has_backbone = backbone in (variant.backbones or backbones)
                if has_backbone and _has_own_rates(variant):
                    entries += _build_tuning_entries(experiment, tuning, (dataset, backbone, name), trials)
    if not entries:
        raise TacitaError(f"--only {' --only '.join(only)} leaves no method with rates of its own; leave one out.")
    return entries


def _has_own_rates(variant: Variant) -> bool:
    borrows_settings = bool(variant.settings_of)
    has_no_rates = variant.kind == "popular" or variant.withdraws > 0
    return not borrows_settings and not has_no_rates


def interleave_cells(entries: list[TuningEntry]) -> Cells:
    """The first trial of every method, then the second: a search that is interrupted was fair so far."""
    most_trials = max(len(entry.cells) for entry in entries)
    cells = []
    for turn in range(most_trials):
        for entry in entries:
            if turn < len(entry.cells):
                cells.append(entry.cells[turn])
    return cells


def choose_rates(entry: TuningEntry, lines: CellLines) -> TunedChoice:
    """The rates that validate best; the first of equals."""
    best = None
    best_valid = 0.0
    for trial, cell in zip(entry.trials, entry.cells, strict=True):
        line = lines[cell.key]
        if "failed" in line:
            continue
        valid = float(line["valid"])
        if best is None or valid > best_valid:
            best = trial
            best_valid = valid
    if best is None:
        reason = lines[entry.cells[0].key]["failed"]
        raise TacitaError(f"{entry.name}: no trial has a score; the first one: {reason}")
    return best.model_copy(update={"valid": best_valid, "trials": len(entry.trials)})


def is_at_range_end(experiment: Experiment, chosen: TunedChoice) -> bool:
    """Whether a rate is next to an end of the range: a better one may lie outside."""
    tuning = _require_tuning(experiment)
    tenth = (tuning.highest / tuning.lowest) ** 0.1
    low_end = tuning.lowest * tenth
    high_end = tuning.highest / tenth
    for rate in (chosen.lr, chosen.server_lr):
        if rate is None:
            continue
        if rate < low_end or rate > high_end:
            return True
    return False


def _require_tuning(experiment: Experiment, rounds: int | None = None) -> Tuning:
    """How a table's methods are tuned; `rounds`: another budget than the table's."""
    assert experiment.tune is not None
    if rounds:
        return experiment.tune.model_copy(update={"rounds": rounds})
    return experiment.tune


def _build_tuning_entries(experiment: Experiment, tuning: Tuning, place: Place, trials: int) -> list[TuningEntry]:
    """The trials of one method; none where nothing has a rate."""
    dataset, backbone, name = place
    default_config = _build_trial_config(experiment, tuning, place, TunedChoice())
    first = _list_default_rates(default_config)
    if first.lr is None:
        return []
    if tuning.first:
        choices = list_combinations(tuning, default_config)[:trials]
    else:
        choices = [first, *_spread_rates(tuning, first, trials - 1)]
    source = experiment.variants[name].source
    empty = TuningEntry(dataset, backbone, source, (), (), name)
    return [_add_trials(experiment, tuning, empty, choices)]


def _add_trials(experiment: Experiment, tuning: Tuning, entry: TuningEntry, choices: list[TunedChoice]) -> TuningEntry:
    """The same method with more trials."""
    variant = experiment.variants[entry.variant]
    kind = _name_trial_kind(experiment, variant)
    cells = list(entry.cells)
    for choice in choices:
        config = _build_trial_config(experiment, tuning, entry.place, choice)
        cell = ExperimentCell(*entry.place, tuning.seed, config, kind)
        cells.append(cell)
    trials = (*entry.trials, *choices)
    return replace(entry, trials=trials, cells=tuple(cells))


def add_second_step(
    experiment: Experiment, entries: list[TuningEntry], lines: CellLines, trials: int, rounds: int | None = None
) -> list[TuningEntry]:
    """The trials of the second step beside those of the first; a method without a score in the first has no second."""
    tuning = _require_tuning(experiment, rounds)
    extended = []
    for entry in entries:
        n_remaining = trials - len(entry.trials)
        own_lines = [lines[cell.key] for cell in entry.cells]
        has_score = any("failed" not in line for line in own_lines)
        if tuning.then and n_remaining > 0 and has_score:
            best = choose_rates(entry, lines)
            default_config = _build_trial_config(experiment, tuning, entry.place, TunedChoice())
            choices = sample_around(tuning, default_config, best, n_remaining)
            entry = _add_trials(experiment, tuning, entry, choices)
        extended.append(entry)
    return extended


def _name_trial_kind(experiment: Experiment, variant: Variant) -> str:
    return f"{variant.kind or experiment.kind}, tried"


def _build_trial_config(experiment: Experiment, tuning: Tuning, place: Place, rates: TunedChoice) -> RunConfig:
    dataset, backbone, name = place
    variant = experiment.variants[name]
    settings = Settings(chosen={dataset: {backbone: {variant.source: rates}}})
    config = build_run_config(experiment, settings, dataset, backbone, variant, tuning.seed)
    rounds = min(tuning.rounds, config.train.rounds)
    train = config.train.model_copy(update={"rounds": rounds})
    return config.model_copy(update={"train": train})


def _list_default_rates(config: RunConfig) -> TunedChoice:
    backbone, parts, _ = build_components(config)
    server_lr = None
    for part in parts:
        if isinstance(part, PredictionTransfer):
            server_lr = _read_backbone_rate(part.server_backbone)
            break
    return TunedChoice(lr=_read_backbone_rate(backbone), server_lr=server_lr)


def _read_backbone_rate(backbone: Backbone) -> float | None:
    return backbone.config.lr if isinstance(backbone.config, TrainedConfig) else None


def _spread_rates(tuning: Tuning, first: TunedChoice, n: int) -> list[TunedChoice]:
    width = math.log(tuning.highest / tuning.lowest)

    def rate(share: float) -> float:
        value = tuning.lowest * math.exp(share * width)
        return float(f"{value:.2g}")

    if first.server_lr is None:
        return [TunedChoice(lr=rate(share)) for (share,) in spread_points(n, 1)]
    choices = []
    for share, server_share in spread_points(n, 2):
        choices.append(TunedChoice(lr=rate(share), server_lr=rate(server_share)))
    return choices
