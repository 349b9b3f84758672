"""The verbs of researchers: reproduce a table of a paper, tune settings on validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacita.cli import console
from tacita.errors import TacitaError

if TYPE_CHECKING:
    from tacita.config import RunConfig
    from tacita.runs import Machine

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds datasets (default: $TACITA_DATA).")]


def reproduce(
    table: Annotated[str, typer.Argument(help="PAPER/TABLE, for example f3crec/table2; 'list' shows all.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="A dataset or backbone; repeat for more.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per cell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One dataset, one backbone, two seeds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for tables and finished cells.")] = Path("docs/reproduction"),
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
) -> None:
    """A table of a paper over seeds: ours with an interval, the paper's, a verdict per cell.

    Finished cells are kept, so an interrupted table goes on where it was.

    Examples:

    `tacita reproduce f3crec/table2 --quick`

    `tacita reproduce f3crec/table2 --only ml-100k --only mf --seeds 10`
    """
    from tacita.experiments import cells, plan, tables
    from tacita.files import write_bytes

    if table == "list":
        print("\n".join(plan.experiment_names()))
        return
    experiment, settings = plan.load_experiment(table)
    datasets, backbones = plan.narrowed(experiment, only or [])
    count = seeds or experiment.seeds
    if quick and only:
        raise TacitaError("--quick has its own dataset and backbone; leave out --only.")
    if quick:
        datasets, backbones = experiment.quick.datasets, experiment.quick.backbones
        count = seeds or experiment.quick.seeds
    paper, _, name = table.partition("/")
    wanted = plan.cells_of(experiment, settings, datasets, backbones, count)
    with console.counting("cells", quiet) as tell:
        lines = cells.run_cells(wanted, cells.CellFile(out / "cells", paper), data_dir, workers, tell)
    found = tables.entries(experiment, wanted, lines)
    tests = tables.comparisons(experiment, wanted, lines)
    folder = out / paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TacitaError(f"cannot write to {folder}: {error.strerror}.") from None
    part = "-quick" if quick else "-part" if only or count < experiment.seeds else ""
    stem = name + part  # a narrowed table does not overwrite the whole one
    also = tables.beside(experiment, wanted, lines)
    apart = tables.seed_differences(experiment, wanted, lines)
    page = tables.to_markdown(experiment, found, tests, tables.failed_cells(wanted, lines), also, apart)
    write_bytes(folder / f"{stem}.md", page.encode())
    write_bytes(folder / f"{stem}.csv", tables.to_csv(found).encode())
    write_bytes(folder / f"{stem}.html", tables.to_html(experiment, found, tests).encode())
    if as_json:
        print(json.dumps([vars(e) for e in found]))
        return
    console.show_entries(experiment.title, found, {k: v.label for k, v in experiment.variants.items()})
    told = ", ".join(f"{n} {mark}" for mark, n in tables.disagreements(found).items() if n) or "nothing published"
    console.say(f"against the paper: {told}; wrote {folder / stem}.md, .csv and .html")


def tune(
    data: Annotated[
        list[str] | None, typer.Option(help="Dataset name or file (default: ml-100k); with tally repeat it for more.")
    ] = None,
    backbone: Annotated[str, typer.Option(help="mf, ncf, pfedrec or tally.")] = "mf",
    method: Annotated[str, typer.Option(help="Preset whose options are searched.")] = "f3crec",
    trials: Annotated[int, typer.Option(min=1, help="Different settings to try.")] = 12,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the study; an existing one goes on.")] = Path("runs/tune"),
    paper: Annotated[str, typer.Option(help="Tune every method of a paper's main table and store the choice.")] = "",
    only: Annotated[list[str] | None, typer.Option("--only", help="With --paper: a dataset or backbone.")] = None,
    data_dir: DataDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
) -> None:
    """Search a method's options on validation; every trial is a run in --out, or a sentence that says why not.

    The study is resumable. The settings of tally are few: all are tried, and listed with their scores.

    Examples:

    `tacita tune --data ml-100k --backbone mf --method f3crec --trials 12`

    `tacita tune --paper f3crec`

    `tacita tune --backbone tally --data ml-100k --data ml-latest-small --data lastfm-2k`
    """
    from tacita.config import EvaluateConfig, RunConfig
    from tacita.experiments import tune as tuning
    from tacita.methods import preset_parts
    from tacita.runs import Machine

    if paper:
        _tune_paper(paper, only or [], trials, out, data_dir, quiet)
        return
    preset_parts(method)
    names = data or ["ml-100k"]
    if len(names) > 1 and backbone != "tally":
        raise TacitaError(
            "several --data are for --backbone tally; the other models are tuned on one dataset at a time."
        )
    config = RunConfig(data=names[0], backbone={"name": backbone}, seed=seed, evaluate=EvaluateConfig(controls=False))
    if backbone == "tally":
        _tune_tally(config, names, Machine(data_dir=data_dir), quiet)
        return
    with console.counting("learning rates", quiet) as tell:
        base = tuning.tune_lr(config, Machine(data_dir=data_dir), tell, None if quiet else console.say_data)
    with console.counting("trials", quiet) as tell:
        tell(0, trials)
        found = tuning.tune_method(
            base.fed, base.progress, method, trials, out, lambda n, score: tell(min(n, trials), trials)
        )
    for lr, score in base.tried.items():
        console.answer(f"learning rate {lr}: block-0 validation {score:.4f}{', chosen' if lr == base.lr else ''}")
    for lr, why in base.failed.items():
        console.answer(f"learning rate {lr}: no score, {why}")
    for options, why in found.failed.items():
        console.answer(f"options {options}: no score, {why}")
    count = f"{found.trials} trial{'s' if found.trials != 1 else ''}"
    told = f"after {count}" if tuning.open_options(method) else f"the one trial: method '{method}' has none to choose"
    console.answer(f"options {json.dumps(found.options)}: validation {found.valid:.4f} {told}")
    console.say(f"runs of the trials: {found.folder}")


def _tune_paper(paper: str, only: list[str], trials: int, out: Path, data_dir: Path | None, quiet: bool) -> None:
    from tacita.experiments import plan
    from tacita.experiments import tune as tuning

    experiment, _ = plan.load_experiment(f"{paper}/table2")
    datasets, backbones = plan.narrowed(experiment, only)
    methods = tuple(v.method for v in experiment.variants.values() if v.settings_of is None)
    jobs = [
        tuning.PairJob(d, b, methods, experiment.rounds.get(d, 100), trials, out, data_dir)
        for d in datasets
        for b in backbones
    ]
    with console.counting("dataset-backbone pairs", quiet) as tell:
        path, failed = tuning.tune_paper(paper, jobs, tell)
    for one in failed:
        console.answer(f"no score: {one}")
    console.say(f"stored the choices in {path}")


def _tune_tally(config: RunConfig, names: list[str], machine: Machine, quiet: bool) -> None:
    from tacita.experiments import tally_choice

    tried = {}
    for name in names:
        with console.counting(f"settings, {name}", quiet) as tell:
            on_data = None if quiet else console.say_data
            tried[name] = tally_choice.try_all(config.model_copy(update={"data": name}), machine, tell, on_data)
        for one in tried[name]:
            said = f"no score, {one.failed}" if one.failed else f"validation {one.valid:.4f}"
            console.answer(f"{name}: options {json.dumps(one.options)}: {said}")
        best = tally_choice.chosen(tried[name])
        told = f"validation {best.valid:.4f}, test {json.dumps(best.test)}"
        console.answer(f"{name}: chosen {json.dumps(best.options)}: {told}")
    if len(tried) > 1:
        console.answer(f"together: options {json.dumps(tally_choice.chosen_together(tried))}")
