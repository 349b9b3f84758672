"""An experiment is one TOML file: datasets, backbones, variants, seeds, the published cells and the tolerance.

Settings chosen by tuning lie beside it in settings.toml, with the validation scores they were chosen by. That file is
part of the package, and no command writes it. `tacita tune --paper` writes PAPER/settings.toml among the results, which
is read first. Copied into the package, and deleted from the results, it is what everybody gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from tacita.core.config import (
    EvaluateConfig,
    RunConfig,
    SplitConfig,
    StrictModel,
    TrainConfig,
    read_toml,
    validate_model,
)
from tacita.core.errors import unknown_name_error
from tacita.methods import list_preset_parts, resolve_config
from tacita.methods.distillation.presets import TRANSFER
from tacita.research.experiments.experiment_cell import WITHDRAWAL, Cells, ExperimentCell, Place

Options = dict[str, Any]
"""Settings by name."""

ROOT = Path(str(resources.files("tacita.research.experiments")))


class Variant(StrictModel):
    """One column: a method, possibly with the settings of another and some options changed."""

    label: str
    method: str = Field(description="preset whose parts are run")
    settings_of: str | None = Field(None, description="preset whose tuned settings are taken (default: its own)")
    tuned_as: str | None = Field(None, description="name that its own are stored under (default: its preset's)")
    options: dict[str, Options] = Field({}, description="part -> options on top")
    train: Options = {}
    backbone: Options = {}
    privacy: Options = {}
    split: Options = {}
    evaluate: Options = {}
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


PublishedRow = list[float | None]
PublishedValues = dict[str, dict[str, PublishedRow]]
"""Metric -> variant -> values."""


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
    train: Options = Field({}, description="settings of all variants; their own come on top")
    backbone_options: dict[str, Options] = Field({}, description="backbone -> its settings in all variants")
    split: Options = {}
    splits: dict[str, Options] = Field({}, description="dataset -> what is split otherwise")
    evaluate: Options = {}
    models: dict[str, dict[str, Options]] = Field(
        {}, description="dataset -> backbone -> options that the paper's model has there"
    )
    item_rows: Literal["random", "side", "sentences"] = "random"
    compare: list[str] = Field([], description="variant tested per user against the best of the others")
    across: bool = Field(False, description="the others are those of all backbones")
    baseline: str = Field("", description="variant whose mean is subtracted seed by seed")
    quick: Scope
    tune: Tuning | None = Field(None, description="in a paper's main table: its variants are tuned this way")
    settings_from: list[str] = Field([], description="papers whose tuned settings hold here; default: its own")
    tuned: bool = Field(True, description="false: every method at its default rates and options")
    published: dict[str, dict[str, PublishedValues]] = Field(
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
    options: dict[str, Options] = {}
    train: Options = {}
    valid: float | None = None
    trials: int | None = None


MethodChoices = dict[str, TunedChoice]
Choices = dict[str, dict[str, MethodChoices]]
"""Dataset -> backbone -> method -> what was chosen."""


class Settings(StrictModel):
    """dataset -> backbone -> learning rate and per-method options."""

    lr: dict[str, dict[str, float]] = {}
    lr_valid: dict[str, dict[str, float]] = {}
    chosen: Choices = {}
    elsewhere: str | None = Field(None, description="dataset whose choices hold where none were made")

    def find_choice(self, dataset: str, backbone: str, source: str) -> TunedChoice:
        for place in (dataset, self.elsewhere or ""):
            methods = self.chosen.get(place, {}).get(backbone, {})
            if source in methods:
                return methods[source]
        return TunedChoice()

    def list_choices(self, dataset: str, backbone: str) -> MethodChoices:
        """The choices for methods on a dataset and backbone, to be changed in place."""
        backbones = self.chosen.setdefault(dataset, {})
        return backbones.setdefault(backbone, {})


def list_experiments() -> list[str]:
    names = []
    for path in ROOT.glob("*/*.toml"):
        if path.stem != "settings":
            names.append(f"{path.parent.name}/{path.stem}")
    return sorted(names)


def load_experiment(name: str, results: Path | None = None) -> tuple[Experiment, Settings]:
    """PAPER/TABLE, or a paper that is one table of its own name; settings as `load_settings` finds them."""
    names = list_experiments()
    own_table = f"{name}/{name}"
    if own_table in names:
        name = own_table
    if name not in names:
        raise unknown_name_error("experiment", name, names)
    path = ROOT / f"{name}.toml"
    experiment = validate_model(Experiment, read_toml(path), name)
    if not experiment.tuned:
        return experiment, Settings()
    papers = experiment.settings_from or [name.partition("/")[0]]
    return experiment, join_settings(papers, results)


def join_settings(papers: list[str], results: Path | None = None) -> Settings:
    """The choices for the methods of several papers; a rate that all of a paper share becomes each method's own."""
    settings_list = [load_settings(paper, results) for paper in papers]
    if len(settings_list) == 1:
        return settings_list[0]
    joined = Settings(chosen={})
    elsewhere = None
    for settings in settings_list:
        elsewhere = elsewhere or settings.elsewhere or None
        for dataset, backbones in settings.chosen.items():
            for backbone, methods in backbones.items():
                shared_lr = settings.lr.get(dataset, {}).get(backbone)
                joined.list_choices(dataset, backbone).update(_with_rates(methods, shared_lr))
    return joined.model_copy(update={"elsewhere": elsewhere})


def _with_rates(methods: MethodChoices, lr: float | None) -> MethodChoices:
    """The same choices, with a rate for those that have none of their own."""
    complete = {}
    for name, choice in methods.items():
        has_rate = choice.lr is not None
        complete[name] = choice if has_rate else choice.model_copy(update={"lr": lr})
    return complete


def load_main_table(paper: str) -> Experiment:
    """The table whose variants are tuned: the one that says how, or the second."""
    for name in list_experiments():
        if name.startswith(f"{paper}/"):
            experiment, _ = load_experiment(name)
            if experiment.tune:
                return experiment
    second, _ = load_experiment(f"{paper}/table2")
    return second


def find_settings_path(paper: str, results: Path) -> Path:
    """Where tuning writes its choices: among the results."""
    return results / paper / "settings.toml"


def load_settings(paper: str, results: Path | None = None) -> Settings:
    """The choices for a paper: as tuned among some results, else as the package brings them."""
    folders = [ROOT] if results is None else [results, ROOT]
    for folder in folders:
        path = find_settings_path(paper, folder)
        if path.is_file():
            return validate_model(Settings, read_toml(path), str(path.name))
    return Settings()


def build_run_config(
    experiment: Experiment, settings: Settings, dataset: str, backbone: str, variant: Variant, seed: int
) -> RunConfig:
    """The effective config of a cell: preset, tuned options, the variant's own on top."""
    source = f"variant '{variant.label}'"
    tuned = settings.find_choice(dataset, backbone, variant.source)
    lr = tuned.lr
    if lr is None:
        lr = settings.lr.get(dataset, {}).get(backbone)
    backbone_options: Options = {"name": backbone}
    if lr is not None:
        backbone_options["lr"] = lr
    backbone_options |= experiment.models.get(dataset, {}).get(backbone, {})
    if variant.backbone.get("name", backbone) == backbone:
        backbone_options |= experiment.backbone_options.get(backbone, {})
    backbone_options |= variant.backbone
    train = dict(experiment.train)
    if dataset in experiment.rounds:
        train["rounds"] = experiment.rounds[dataset]
    train |= tuned.train
    train |= variant.train
    split: Options = {"seed": seed}  # tied times leave the cut open: every seed draws its own
    split |= experiment.split
    split |= experiment.splits.get(dataset, {})
    split |= variant.split
    evaluate: Options = {"controls": False}
    evaluate |= experiment.evaluate
    evaluate |= variant.evaluate
    config: Options = {
        "data": dataset,
        "backbone": backbone_options,
        "method": variant.method,
        "parts": _list_parts(variant, tuned),
        "seed": seed,
        "privacy": variant.privacy,
        "item_rows": variant.item_rows or experiment.item_rows,
        "split": validate_model(SplitConfig, split, source).model_dump(),
        "train": train,
        "evaluate": validate_model(EvaluateConfig, evaluate, source).model_dump(),
    }
    validate_model(TrainConfig, train, source)
    return resolve_config(config, source, with_tuned=False)


def _list_parts(variant: Variant, tuned: TunedChoice) -> list[Options]:
    """The parts of a variant's preset with tuned options, then its own options on top."""
    parts: list[Options] = []
    for spec in list_preset_parts(variant.method):
        name = spec["name"]
        options = tuned.options.get(name, {})
        part = {"name": name, **options, **spec}
        if name == TRANSFER and tuned.server_lr is not None:
            part["server"] = {**spec.get("server", {}), "lr": tuned.server_lr}
        parts.append(part)
    for name, options in variant.options.items():
        matching = [part for part in parts if part["name"] == name]
        if matching:
            matching[0].update(options)
        else:
            parts.append({"name": name, **options})
    return parts


def list_cells(
    experiment: Experiment,
    settings: Settings,
    datasets: list[str],
    backbones: list[str],
    seeds: int,
    only: Sequence[str] = (),
) -> Cells:
    """Every cell, or those of some variants; seeds first so that an interrupted run covers all columns evenly."""
    cells = []
    for seed in range(1, seeds + 1):
        for dataset in datasets:
            if seed > experiment.seeds_on.get(dataset, seeds):
                continue
            for backbone in backbones:
                for name in _list_variants(experiment, backbone, only):
                    place = (dataset, backbone, name)
                    cells.append(_build_cell(experiment, settings, place, seed))
    return cells


def _list_variants(experiment: Experiment, backbone: str, only: Sequence[str]) -> list[str]:
    """The variants that are run with a backbone, of some or of all."""
    names = []
    for name, variant in experiment.variants.items():
        has_backbone = not variant.backbones or backbone in variant.backbones
        is_wanted = not only or name in only
        if has_backbone and is_wanted:
            names.append(name)
    return names


def _build_cell(experiment: Experiment, settings: Settings, place: Place, seed: int) -> ExperimentCell:
    """The cell of a variant at (dataset, backbone, variant), and the one that it has to wait for."""
    dataset, backbone, name = place
    variant = experiment.variants[name]
    config = build_run_config(experiment, settings, dataset, backbone, variant, seed)
    follows = None
    if variant.sends_as:
        follows = _build_cell(experiment, settings, (dataset, backbone, variant.sends_as), seed)
    kind = WITHDRAWAL if variant.withdraws else variant.kind or experiment.kind
    return ExperimentCell(dataset, backbone, name, seed, config, kind, variant.withdraws, follows)


class Narrowed(NamedTuple):
    """What `--only` words leave of a table."""

    datasets: list[str]
    backbones: list[str]
    variants: list[str]  # empty: all


def narrow_experiment(experiment: Experiment, only: list[str]) -> Narrowed:
    """Datasets, backbones and variants that the words name; all of those of which they name none."""
    known = {*experiment.datasets, *experiment.backbones, *experiment.variants}
    for word in only:
        if word not in known:
            raise unknown_name_error("dataset, backbone or variant of this table", word, known)
    datasets = _select_named(experiment.datasets, only)
    backbones = _select_named(experiment.backbones, only)
    variants = _select_named(experiment.variants, only)
    variants = [name for name in variants if name not in experiment.backbones]
    return Narrowed(
        datasets=datasets or experiment.datasets,
        backbones=backbones or experiment.backbones,
        variants=variants,
    )


def _select_named(names: Iterable[str], words: list[str]) -> list[str]:
    return [name for name in names if name in words]
