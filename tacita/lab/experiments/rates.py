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
from tacita.lab.assembling import build
from tacita.lab.experiments.axes import around, combinations
from tacita.lab.experiments.once import Line
from tacita.lab.experiments.plan import Cell, Chosen, Experiment, Settings, Tuning, Variant, narrowed, run_config
from tacita.lab.experiments.spreading import spread
from tacita.methods.distillation.transfer import Transfer
from tacita.models.base import Backbone, TrainedConfig


@dataclass(frozen=True)
class Entry:
    """A method on one dataset and backbone, to be tuned, and the rates that will be tried."""

    dataset: str
    backbone: str
    source: str  # under which its choice is stored
    trials: tuple[Chosen, ...]
    cells: tuple[Cell, ...]  # one for each trial
    variant: str = ""  # whose trials they are

    @property
    def name(self) -> str:
        return f"{self.dataset}, {self.backbone}, {self.source}"


def entries_of(experiment: Experiment, only: list[str], trials: int, rounds: int | None = None) -> list[Entry]:
    """Every method with rates of its own that the words leave; `rounds`: another budget than the table's."""
    tuning = _tuning(experiment)
    if rounds:
        tuning = tuning.model_copy(update={"rounds": rounds})
    datasets, backbones, named = narrowed(experiment, only)
    found = []
    for dataset in [one for one in tuning.datasets if one in datasets]:
        for backbone in backbones:
            for name, variant in experiment.variants.items():
                wanted = not named or name in named
                own = not (variant.settings_of or variant.withdraws or variant.kind == "popular")
                if wanted and own and backbone in (variant.backbones or backbones):
                    found += _entry(experiment, tuning, (dataset, backbone, name), trials)
    if not found:
        raise TacitaError(f"--only {' --only '.join(only)} leaves no method with rates of its own; leave one out.")
    return found


def cells_in_turn(entries: list[Entry]) -> list[Cell]:
    """The first trial of every method, then the second: a search that is interrupted was fair so far."""
    turns = range(max(len(one.cells) for one in entries))
    return [entry.cells[k] for k in turns for entry in entries if k < len(entry.cells)]


def choose(entry: Entry, lines: dict[str, Line]) -> Chosen:
    """The rates that validate best; the first of equals."""
    tried = [(one, lines[cell.key]) for one, cell in zip(entry.trials, entry.cells, strict=True)]
    scored = [(one, float(line["valid"])) for one, line in tried if "failed" not in line]
    if not scored:
        raise TacitaError(f"{entry.name}: no trial has a score; the first one: {tried[0][1]['failed']}")
    best, valid = max(scored, key=lambda pair: pair[1])
    return best.model_copy(update={"valid": valid, "trials": len(tried)})


def at_the_end(experiment: Experiment, chosen: Chosen) -> bool:
    """Whether a rate is next to an end of the range: a better one may lie outside."""
    tuning = _tuning(experiment)
    tenth = (tuning.highest / tuning.lowest) ** 0.1
    rates = [one for one in (chosen.lr, chosen.server_lr) if one is not None]
    return any(one < tuning.lowest * tenth or one > tuning.highest / tenth for one in rates)


def _tuning(experiment: Experiment) -> Tuning:
    assert experiment.tune is not None
    return experiment.tune


def _entry(experiment: Experiment, tuning: Tuning, where: tuple[str, str, str], trials: int) -> list[Entry]:
    """The trials of one method; none where nothing has a rate."""
    dataset, backbone, name = where
    variant = experiment.variants[name]
    first = _default_rates(_config(experiment, tuning, where, Chosen()))
    if first.lr is None:
        return []
    if tuning.first:
        tried = combinations(tuning, _config(experiment, tuning, where, Chosen()))[:trials]
    else:
        tried = [first, *_others(tuning, first, trials - 1)]
    return [_tried(experiment, tuning, Entry(dataset, backbone, variant.source, (), (), name), tried)]


def _tried(experiment: Experiment, tuning: Tuning, entry: Entry, more: list[Chosen]) -> Entry:
    """The same method with more trials."""
    where, kind = (entry.dataset, entry.backbone, entry.variant), _kind(experiment, experiment.variants[entry.variant])
    made = tuple(Cell(*where, tuning.seed, _config(experiment, tuning, where, one), kind) for one in more)
    return replace(entry, trials=(*entry.trials, *more), cells=(*entry.cells, *made))


def second_step(
    experiment: Experiment, entries: list[Entry], lines: dict[str, Line], trials: int, rounds: int | None = None
) -> list[Entry]:
    """The trials of the second step beside those of the first; who has no score in the first has no second."""
    tuning, out = _tuning(experiment), []
    if rounds:
        tuning = tuning.model_copy(update={"rounds": rounds})
    for entry in entries:
        left = trials - len(entry.trials)
        if tuning.then and left > 0 and any("failed" not in lines[cell.key] for cell in entry.cells):
            where, best = (entry.dataset, entry.backbone, entry.variant), choose(entry, lines)
            more = around(tuning, _config(experiment, tuning, where, Chosen()), best, left)
            entry = _tried(experiment, tuning, entry, more)
        out.append(entry)
    return out


def _kind(experiment: Experiment, variant: Variant) -> str:
    return f"{variant.kind or experiment.kind}, tried"


def _config(experiment: Experiment, tuning: Tuning, where: tuple[str, str, str], rates: Chosen) -> RunConfig:
    dataset, backbone, name = where
    variant = experiment.variants[name]
    settings = Settings(chosen={dataset: {backbone: {variant.source: rates}}})
    config = run_config(experiment, settings, dataset, backbone, variant, tuning.seed)
    fewer = config.train.model_copy(update={"rounds": min(tuning.rounds, config.train.rounds)})
    return config.model_copy(update={"train": fewer})


def _default_rates(config: RunConfig) -> Chosen:
    backbone, parts, _ = build(config)
    server = [_rate(part.server_backbone) for part in parts if isinstance(part, Transfer)]
    return Chosen(lr=_rate(backbone), server_lr=server[0] if server else None)


def _rate(backbone: Backbone) -> float | None:
    return backbone.config.lr if isinstance(backbone.config, TrainedConfig) else None


def _others(tuning: Tuning, first: Chosen, n: int) -> list[Chosen]:
    wide = math.log(tuning.highest / tuning.lowest)

    def rate(share: float) -> float:
        return float(f"{tuning.lowest * math.exp(share * wide):.2g}")

    if first.server_lr is None:
        return [Chosen(lr=rate(one)) for (one,) in spread(n, 1)]
    return [Chosen(lr=rate(one), server_lr=rate(other)) for one, other in spread(n, 2)]
