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
from tacita.methods.distillation.transfer import Transfer
from tacita.models.base import Backbone, TrainedConfig
from tacita.research.experiments.axes import list_combinations, sample_around
from tacita.research.experiments.experiment_spec import (
    Experiment,
    ExperimentCell,
    Settings,
    TunedChoice,
    Tuning,
    Variant,
    build_run_config,
    narrow_experiment,
)
from tacita.research.experiments.low_discrepancy import spread_points
from tacita.research.experiments.single_block import Line
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


def list_tuning_entries(
    experiment: Experiment, only: list[str], trials: int, rounds: int | None = None
) -> list[TuningEntry]:
    """Every method with rates of its own that the words leave; `rounds`: another budget than the table's."""
    tuning = _require_tuning(experiment)
    if rounds:
        tuning = tuning.model_copy(update={"rounds": rounds})
    datasets, backbones, named = narrow_experiment(experiment, only)
    found = []
    for dataset in [one for one in tuning.datasets if one in datasets]:
        for backbone in backbones:
            for name, variant in experiment.variants.items():
                wanted = not named or name in named
                own = not (variant.settings_of or variant.withdraws or variant.kind == "popular")
                if wanted and own and backbone in (variant.backbones or backbones):
                    found += _build_entry(experiment, tuning, (dataset, backbone, name), trials)
    if not found:
        raise TacitaError(f"--only {' --only '.join(only)} leaves no method with rates of its own; leave one out.")
    return found


def interleave_cells(entries: list[TuningEntry]) -> list[ExperimentCell]:
    """The first trial of every method, then the second: a search that is interrupted was fair so far."""
    turns = range(max(len(one.cells) for one in entries))
    return [entry.cells[k] for k in turns for entry in entries if k < len(entry.cells)]


def choose_rates(entry: TuningEntry, lines: dict[str, Line]) -> TunedChoice:
    """The rates that validate best; the first of equals."""
    tried = [(one, lines[cell.key]) for one, cell in zip(entry.trials, entry.cells, strict=True)]
    scored = [(one, float(line["valid"])) for one, line in tried if "failed" not in line]
    if not scored:
        raise TacitaError(f"{entry.name}: no trial has a score; the first one: {tried[0][1]['failed']}")
    best, valid = max(scored, key=lambda pair: pair[1])
    return best.model_copy(update={"valid": valid, "trials": len(tried)})


def is_at_range_end(experiment: Experiment, chosen: TunedChoice) -> bool:
    """Whether a rate is next to an end of the range: a better one may lie outside."""
    tuning = _require_tuning(experiment)
    tenth = (tuning.highest / tuning.lowest) ** 0.1
    rates = [one for one in (chosen.lr, chosen.server_lr) if one is not None]
    return any(one < tuning.lowest * tenth or one > tuning.highest / tenth for one in rates)


def _require_tuning(experiment: Experiment) -> Tuning:
    assert experiment.tune is not None
    return experiment.tune


def _build_entry(experiment: Experiment, tuning: Tuning, where: tuple[str, str, str], trials: int) -> list[TuningEntry]:
    """The trials of one method; none where nothing has a rate."""
    dataset, backbone, name = where
    variant = experiment.variants[name]
    first = _default_rates(_trial_config(experiment, tuning, where, TunedChoice()))
    if first.lr is None:
        return []
    if tuning.first:
        tried = list_combinations(tuning, _trial_config(experiment, tuning, where, TunedChoice()))[:trials]
    else:
        tried = [first, *_spread_rates(tuning, first, trials - 1)]
    return [_add_trials(experiment, tuning, TuningEntry(dataset, backbone, variant.source, (), (), name), tried)]


def _add_trials(experiment: Experiment, tuning: Tuning, entry: TuningEntry, more: list[TunedChoice]) -> TuningEntry:
    """The same method with more trials."""
    where, kind = (
        (entry.dataset, entry.backbone, entry.variant),
        _trial_kind(experiment, experiment.variants[entry.variant]),
    )
    made = tuple(
        ExperimentCell(*where, tuning.seed, _trial_config(experiment, tuning, where, one), kind) for one in more
    )
    return replace(entry, trials=(*entry.trials, *more), cells=(*entry.cells, *made))


def add_second_step(
    experiment: Experiment, entries: list[TuningEntry], lines: dict[str, Line], trials: int, rounds: int | None = None
) -> list[TuningEntry]:
    """The trials of the second step beside those of the first; who has no score in the first has no second."""
    tuning, out = _require_tuning(experiment), []
    if rounds:
        tuning = tuning.model_copy(update={"rounds": rounds})
    for entry in entries:
        left = trials - len(entry.trials)
        if tuning.then and left > 0 and any("failed" not in lines[cell.key] for cell in entry.cells):
            where, best = (entry.dataset, entry.backbone, entry.variant), choose_rates(entry, lines)
            more = sample_around(tuning, _trial_config(experiment, tuning, where, TunedChoice()), best, left)
            entry = _add_trials(experiment, tuning, entry, more)
        out.append(entry)
    return out


def _trial_kind(experiment: Experiment, variant: Variant) -> str:
    return f"{variant.kind or experiment.kind}, tried"


def _trial_config(experiment: Experiment, tuning: Tuning, where: tuple[str, str, str], rates: TunedChoice) -> RunConfig:
    dataset, backbone, name = where
    variant = experiment.variants[name]
    settings = Settings(chosen={dataset: {backbone: {variant.source: rates}}})
    config = build_run_config(experiment, settings, dataset, backbone, variant, tuning.seed)
    fewer = config.train.model_copy(update={"rounds": min(tuning.rounds, config.train.rounds)})
    return config.model_copy(update={"train": fewer})


def _default_rates(config: RunConfig) -> TunedChoice:
    backbone, parts, _ = build_components(config)
    server = [_backbone_rate(part.server_backbone) for part in parts if isinstance(part, Transfer)]
    return TunedChoice(lr=_backbone_rate(backbone), server_lr=server[0] if server else None)


def _backbone_rate(backbone: Backbone) -> float | None:
    return backbone.config.lr if isinstance(backbone.config, TrainedConfig) else None


def _spread_rates(tuning: Tuning, first: TunedChoice, n: int) -> list[TunedChoice]:
    wide = math.log(tuning.highest / tuning.lowest)

    def rate(share: float) -> float:
        return float(f"{tuning.lowest * math.exp(share * wide):.2g}")

    if first.server_lr is None:
        return [TunedChoice(lr=rate(one)) for (one,) in spread_points(n, 1)]
    return [TunedChoice(lr=rate(one), server_lr=rate(other)) for one, other in spread_points(n, 2)]
