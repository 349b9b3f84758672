"""An experiment is one TOML file: datasets, backbones, variants, seeds, the published cells and the tolerance.

Settings chosen by tuning lie beside it in settings.toml, with the validation scores they were chosen by. That file is
part of the package and nobody's to write: `tacita tune --paper` writes PAPER/settings.toml among the results, which is
read first; copied here, and no longer there, it is what everybody gets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tacita.core.config import (
    EvaluateConfig,
    RunConfig,
    SplitConfig,
    StrictModel,
    TrainConfig,
    find_later_defaults,
    read_toml,
    validate_model,
)
from tacita.core.errors import unknown_name_error
from tacita.methods import preset_parts, resolve_config
from tacita.methods.distillation.presets import TRANSFER

ROOT = Path(str(resources.files("tacita.research.experiments")))
WITHDRAWAL = "withdrawal"  # the kind of a cell in which people take back what they shared
CELL_VERSION = 1  # raise it when a change makes earlier cells incomparable


class Variant(StrictModel):
    """One column: a method, possibly with the settings of another and some options changed."""

    label: str
    method: str = Field(description="preset whose parts are run")
    settings_of: str | None = Field(None, description="preset whose tuned settings are taken (default: its own)")
    tuned_as: str | None = Field(None, description="name that its own are stored under (default: its preset's)")
    options: dict[str, dict[str, Any]] = Field({}, description="part -> options on top")
    train: dict[str, Any] = {}
    backbone: dict[str, Any] = {}
    privacy: dict[str, Any] = {}
    split: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}
    backbones: list[str] = Field([], description="the only backbones it is run with; none named: all")
    kind: Literal["central", "popular"] | None = Field(
        None, description="central: its model on pooled data; popular: most popular items; default: the table's"
    )
    withdraws: float = Field(0, ge=0, le=1, description="share of those who share that then take everything back")
    item_rows: Literal["random", "side", "sentences"] | None = Field(None, description="default: the table's")
    sends_as: str = Field("", description="variant whose agent sent as many items as this one's schedule will")
    curve: str = Field("", description="what it is a point of in a picture against epsilon; without a promise: a line")

    @property
    def source(self) -> str:
        """The name under which its tuned settings are stored."""
        return self.settings_of or self.tuned_as or self.kind or self.method


class Axis(StrictModel):
    """A setting that is searched, under one name in several places."""

    option: str
    of: list[str] = Field(min_length=1, description="where it is set: backbone, train, train.pfedme or parts")
    choices: list[int | float | str] = []
    lowest: float = Field(
        0, ge=0, description="where there are no choices: of a range that is filled evenly in logarithms"
    )
    highest: float = Field(0, ge=0)
    also: dict[str, str] = Field({}, description="place -> setting of another name that takes the same value there")


class Tuning(StrictModel):
    """How the methods of a paper get their learning rates: every one the same budget, on validation."""

    datasets: list[str] = Field(description="where they are tuned; other datasets take the rates of the first")
    seed: int = Field(ge=0, description="none of the tables' own")
    rounds: int = Field(ge=1, description="most rounds, or epochs, of a trial")
    lowest: float = Field(gt=0, description="lowest rate that is tried beside a method's default")
    highest: float = Field(gt=0)
    first: list[Axis] = Field([], description="all combinations of their choices, before anything else is tried")
    then: list[Axis] = Field([], description="with the best of these, what is left of the budget goes over those")


class Scope(StrictModel):
    datasets: list[str]
    backbones: list[str]
    seeds: int = Field(ge=1)


class Experiment(StrictModel):
    title: str
    kind: Literal["stream", "users", "items", "once", "choose"] = Field(
        "stream",
        description="once: one block, trained to its end (FedKDRec); choose: the same, and somebody leaves; the others "
        "go on from a shared block 0",
    )
    datasets: list[str]
    backbones: list[str]
    variants: dict[str, Variant]
    seeds: int = Field(ge=1)
    seeds_on: dict[str, int] = Field({}, description="dataset -> fewer seeds than the others")
    metrics: list[str] = ["ndcg@20", "recall@20"]
    tolerance: float = Field(0.1, description="relative difference that still counts as agreement")
    rounds: dict[str, int] = Field({}, description="dataset -> most rounds in a block")
    train: dict[str, Any] = Field({}, description="settings of all variants; their own come on top")
    split: dict[str, Any] = {}
    splits: dict[str, dict[str, Any]] = Field({}, description="dataset -> what is split otherwise")
    evaluate: dict[str, Any] = {}
    item_rows: Literal["random", "side", "sentences"] = "random"
    compare: list[str] = Field([], description="variant tested per user against the best of the others")
    across: bool = Field(False, description="the others are those of all backbones")
    baseline: str = Field("", description="variant whose mean is subtracted seed by seed")
    quick: Scope
    tune: Tuning | None = Field(None, description="in a paper's main table: its variants are tuned this way")
    settings_from: list[str] = Field([], description="papers whose tuned settings hold here; default: its own")
    tuned: bool = Field(True, description="false: every method at its default rates and options")
    published: dict[str, dict[str, dict[str, dict[str, list[float | None]]]]] = Field(
        {}, description="dataset -> backbone -> metric -> variant -> one value per column of the paper"
    )
    published_columns: list[str] = ["D1", "D2", "D3"]
    rows: Literal["blocks", "methods"] = Field(
        "blocks", description="methods: a table for each dataset, a line for each method, a column for each metric"
    )
    notes: list[str] = []
    groups: dict[str, list[str]] = Field({}, description="of a page to choose by: title -> variants of one table")
    aside: list[str] = Field([], description="of such a page: groups that nobody is advised to use")
    missing: dict[str, str] = Field({}, description="of such a page: dataset -> why some cells are not there")


class TunedChoice(StrictModel):
    """What tuning chose for one method on one dataset and backbone."""

    lr: float | None = Field(None, description="of the clients' model, or of the centralised one")
    server_lr: float | None = Field(None, description="of the server's model, where predictions are sent")
    options: dict[str, dict[str, Any]] = {}
    train: dict[str, Any] = {}
    valid: float | None = None
    trials: int | None = None


class Settings(StrictModel):
    """dataset -> backbone -> learning rate and per-method options."""

    lr: dict[str, dict[str, float]] = {}
    lr_valid: dict[str, dict[str, float]] = {}
    chosen: dict[str, dict[str, dict[str, TunedChoice]]] = {}
    elsewhere: str | None = Field(None, description="dataset whose choices hold where none were made")

    def find_choice(self, dataset: str, backbone: str, source: str) -> TunedChoice:
        places = [self.chosen.get(name or "", {}).get(backbone, {}).get(source) for name in (dataset, self.elsewhere)]
        return next((one for one in places if one), TunedChoice())


@dataclass(frozen=True)
class ExperimentCell:
    """One number to find: a variant on a dataset with a backbone and a seed."""

    dataset: str
    backbone: str
    variant: str
    seed: int
    config: RunConfig
    kind: str = "stream"
    withdraws: float = 0.0
    follows: ExperimentCell | None = (
        None  # it has to be finished first: how many items it sent completes this one's config
    )

    @property
    def key(self) -> str:
        """Cells with the same effective config are the same cell, whichever table asks for them."""
        what = self.config.model_dump(mode="json", exclude={"method": True, **find_later_defaults(self.config)})
        said = [CELL_VERSION, self.kind, what, *([self.withdraws] if self.withdraws else [])]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def experiment_names() -> list[str]:
    return sorted(f"{p.parent.name}/{p.stem}" for p in ROOT.glob("*/*.toml") if p.stem != "settings")


def load_experiment(name: str, results: Path | None = None) -> tuple[Experiment, Settings]:
    """PAPER/TABLE, or a paper that is one table of its own name; settings as `load_settings` finds them."""
    if f"{name}/{name}" in experiment_names():
        name = f"{name}/{name}"
    if name not in experiment_names():
        raise unknown_name_error("experiment", name, experiment_names())
    path = ROOT / f"{name}.toml"
    experiment = validate_model(Experiment, read_toml(path), name)
    papers = experiment.settings_from or [name.partition("/")[0]]
    return experiment, join_settings(papers, results) if experiment.tuned else Settings()


def join_settings(papers: list[str], results: Path | None = None) -> Settings:
    """What was chosen for the methods of several papers; a rate that all of a paper share becomes each one's own."""
    found = [load_settings(paper, results) for paper in papers]
    if len(found) == 1:
        return found[0]
    chosen: dict[str, dict[str, dict[str, TunedChoice]]] = {}
    for one in found:
        for dataset, backbones in one.chosen.items():
            for backbone, methods in backbones.items():
                shared = {"lr": one.lr.get(dataset, {}).get(backbone)}
                place = chosen.setdefault(dataset, {}).setdefault(backbone, {})
                place |= {k: v if v.lr is not None else v.model_copy(update=shared) for k, v in methods.items()}
    return Settings(chosen=chosen, elsewhere=next((one.elsewhere for one in found if one.elsewhere), None))


def load_main_table(paper: str) -> Experiment:
    """The table whose variants are tuned: the one that says how, or the second."""
    for name in experiment_names():
        if name.startswith(f"{paper}/") and (found := load_experiment(name)[0]).tune:
            return found
    return load_experiment(f"{paper}/table2")[0]


def settings_path(paper: str, results: Path) -> Path:
    """Where tuning writes what it chose: among the results."""
    return results / paper / "settings.toml"


def load_settings(paper: str, results: Path | None = None) -> Settings:
    """What was chosen for a paper: as tuned among some results, else as the package brings it."""
    for folder in (results, ROOT):
        path = None if folder is None else settings_path(paper, folder)
        if path is not None and path.is_file():
            return validate_model(Settings, read_toml(path), str(path.name))
    return Settings()


def build_run_config(
    experiment: Experiment, settings: Settings, dataset: str, backbone: str, variant: Variant, seed: int
) -> RunConfig:
    """The effective config of a cell: preset, tuned options, the variant's own on top."""
    tuned = settings.find_choice(dataset, backbone, variant.source)
    parts = []
    for spec in preset_parts(variant.method):
        fixed = {k: v for k, v in spec.items() if k != "name"}
        parts.append({"name": spec["name"], **tuned.options.get(spec["name"], {}), **fixed})
        if spec["name"] == TRANSFER and tuned.server_lr is not None:
            parts[-1]["server"] = {**fixed.get("server", {}), "lr": tuned.server_lr}
    for name, options in variant.options.items():
        matching = [p for p in parts if p["name"] == name]
        if matching:
            matching[0].update(options)
        else:
            parts.append({"name": name, **options})
    lr = settings.lr.get(dataset, {}).get(backbone) if tuned.lr is None else tuned.lr
    where = f"variant '{variant.label}'"
    rounds = {"rounds": experiment.rounds[dataset]} if dataset in experiment.rounds else {}
    split = {**experiment.split, **experiment.splits.get(dataset, {}), **variant.split}
    evaluate = {"controls": False, **experiment.evaluate, **variant.evaluate}
    said: dict[str, Any] = {
        "data": dataset,
        "backbone": {"name": backbone, **({"lr": lr} if lr is not None else {}), **variant.backbone},
        "method": variant.method,
        "parts": parts,
        "seed": seed,
        "privacy": variant.privacy,
        "item_rows": variant.item_rows or experiment.item_rows,
        # Tied times leave the cut open: every seed draws its own.
        "split": validate_model(SplitConfig, {"seed": seed, **split}, where).model_dump(),
        "train": {**experiment.train, **rounds, **tuned.train, **variant.train},
        "evaluate": validate_model(EvaluateConfig, evaluate, where).model_dump(),
    }
    validate_model(TrainConfig, said["train"], where)
    return resolve_config(said, where)


def list_cells(
    experiment: Experiment,
    settings: Settings,
    datasets: list[str],
    backbones: list[str],
    seeds: int,
    only: Sequence[str] = (),
) -> list[ExperimentCell]:
    """Every cell, or those of some variants; seeds first so that an interrupted run covers all columns evenly."""

    def cell(dataset: str, backbone: str, name: str, seed: int) -> ExperimentCell:
        variant = experiment.variants[name]
        config = build_run_config(experiment, settings, dataset, backbone, variant, seed)
        follows = cell(dataset, backbone, variant.sends_as, seed) if variant.sends_as else None
        kind = WITHDRAWAL if variant.withdraws else variant.kind or experiment.kind
        return ExperimentCell(dataset, backbone, name, seed, config, kind, variant.withdraws, follows)

    return [
        cell(dataset, backbone, name, seed)
        for seed in range(1, seeds + 1)
        for dataset in datasets
        if seed <= experiment.seeds_on.get(dataset, seeds)
        for backbone in backbones
        for name, variant in experiment.variants.items()
        if (not variant.backbones or backbone in variant.backbones) and (not only or name in only)
    ]


def narrow_experiment(experiment: Experiment, only: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Datasets, backbones and variants left by `--only` words; a table with its variants unnarrowed names none."""
    known = {*experiment.datasets, *experiment.backbones, *experiment.variants}
    for word in only:
        if word not in known:
            raise unknown_name_error("dataset, backbone or variant of this table", word, known)
    datasets = [d for d in experiment.datasets if d in only] or experiment.datasets
    backbones = [b for b in experiment.backbones if b in only] or experiment.backbones
    return datasets, backbones, [v for v in experiment.variants if v in only and v not in experiment.backbones]
