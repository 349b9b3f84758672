"""The verbs of researchers: reproduce a table of a paper, tune settings on validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, Columns, DataDir, Quiet, Sets, columns_of, settings_of
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.lab.assembling import Machine
    from tacita.lab.experiments.tally_choice import Tried
    from tacita.lab.experiments.watching import Watcher

TABLES, STUDIES = Path("docs/reproduction"), Path("runs/tune")


def reproduce(
    table: Annotated[str, typer.Argument(help="PAPER/TABLE, for example f3crec/table2; 'list' shows all.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A dataset, backbone or variant; repeat for more.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per cell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One dataset, one backbone, two seeds.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Run nothing: the table of what is finished.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for tables and finished cells.")] = TABLES,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """A table of a paper over seeds: ours with an interval, the paper's, a verdict per cell.

    Finished cells are kept, so an interrupted table goes on where it was.

    Examples:

    `tacita reproduce f3crec/table2 --quick`

    `tacita reproduce f3crec/table2 --only ml-100k --only mf --seeds 10`

    `tacita reproduce fedkdrec/table1 --only ml-100k --only central`

    `tacita reproduce fedshare/table3 --finished`
    """
    from tacita.lab.experiments import plan, tables
    from tacita.lab.experiments import reproduce as reproducing

    if table == "list":
        console.answer("\n".join(plan.experiment_names()))
        return
    wanted = reproducing.plan_table(table, only or [], seeds, quick, out)
    wanted = reproducing.only_finished(wanted, out) if finished else wanted
    with console.counting("cells", quiet) as tell:
        found = reproducing.reproduce(wanted, out, data_dir, workers, tell)
    if as_json:
        console.print_json([vars(one) for one in found.entries])
        return
    experiment = wanted.experiment
    console.show_entries(experiment.title, found.entries, {k: v.label for k, v in experiment.variants.items()})
    counted = ", ".join(f"{n} {mark}" for mark, n in tables.disagreements(found.entries).items() if n)
    console.say(f"against the paper: {counted or 'nothing published'}; wrote {found.path}.md, .csv and .html")


def tune(
    data: Annotated[
        list[str] | None, typer.Option(help="Dataset name or file (default: ml-100k); with tally repeat it for more.")
    ] = None,
    backbone: Annotated[str, typer.Option(help="mf, ncf, pfedrec or tally.")] = "mf",
    method: Annotated[str, typer.Option(help="Preset whose options are searched.")] = "f3crec",
    trials: Annotated[int, typer.Option(min=1, help="Different settings to try.")] = 12,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the study (default: runs/tune); with --paper also of what is chosen (docs/reproduction)."
        ),
    ] = None,
    paper: Annotated[
        str, typer.Option(help="Tune every method of a paper's main table; `reproduce` reads the choice in --out.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="With --paper: a dataset, backbone or variant; repeat for more.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="With --paper: most rounds of a trial (default: the table's).")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="With --paper: processes; 0: one per core.")] = 0,
    sets: Sets = None,
    columns: Columns = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search a method's options on validation; every trial is a run in --out, or a sentence that says why not.

    The study is resumable. The settings of tally are few: all are tried, and listed with their scores.

    Examples:

    `tacita tune --data ml-100k --backbone mf --method f3crec --trials 12`

    `tacita tune --paper f3crec`

    `tacita tune --paper fedkdrec --only neumf --only fedkdrec_paper --workers 1`

    `tacita tune --backbone tally --data ml-100k --data ml-latest-small --data lastfm-2k`

    `tacita tune --data my.csv --columns user=customer,item=sku --set train.rounds=30 --json`
    """
    from tacita.lab.assembling import Machine
    from tacita.lab.experiments.tune import tuning_config
    from tacita.lab.experiments.watching import Watcher

    if paper:
        if sets or columns:
            raise TacitaError("--set and --columns are not for --paper: its tables say every setting.")
        told = _tune_paper(paper, only or [], Budget(trials, rounds, workers), out, data_dir, quiet or as_json)
    else:
        names, machine = data or ["ml-100k"], Machine(data_dir=data_dir)
        more = settings_of(None, {"columns": columns_of(columns) or None}, sets or [])
        config = tuning_config(names, backbone, method, seed, more)
        watcher = Watcher(partial(console.counting, quiet=quiet), None if quiet or as_json else console.say_data)
        if backbone == "tally":
            told = _tune_tally(config, names, machine, watcher, as_json)
        else:
            told = _tune_method(config, method, trials, out or STUDIES, machine, watcher)
    if as_json:
        console.print_json(told.data)
        return
    for line in told.answers:
        console.answer(line)
    if told.said:
        console.say(told.said)


@dataclass(frozen=True)
class Told:
    """What a search comes to: for machines, and for people line by line."""

    data: dict[str, Any]
    answers: list[str]
    said: str = ""


def _tune_method(config: RunConfig, method: str, trials: int, out: Path, machine: Machine, watcher: Watcher) -> Told:
    from tacita.lab.experiments import tune as tuning

    base, found = tuning.tune(config, method, trials, out, machine, watcher)
    lines = []
    for lr, score in base.tried.items():
        lines.append(f"learning rate {lr}: block-0 validation {score:.4f}{', chosen' if lr == base.lr else ''}")
    for lr, why in base.failed.items():
        lines.append(f"learning rate {lr}: no score, {why}")
    for options, why in found.failed.items():
        lines.append(f"options {options}: no score, {why}")
    count = f"{found.trials} trial{'s' if found.trials != 1 else ''}"
    told = f"after {count}" if tuning.open_options(method) else f"the one trial: method '{method}' has none to choose"
    lines.append(f"options {json.dumps(found.options)}: validation {found.valid:.4f} {told}")
    rates: dict[float, Any] = {**base.tried, **base.failed}
    data = {"lr": base.lr, "rates": {str(lr): said for lr, said in rates.items()}, "failed": found.failed}
    data |= {"options": found.options, "valid": found.valid, "trials": found.trials, "folder": str(found.folder)}
    return Told(data, lines, f"runs of the trials: {found.folder}")


@dataclass(frozen=True)
class Budget:
    """What a paper's tuning may cost."""

    trials: int
    rounds: int | None
    workers: int


def _tune_paper(
    paper: str, only: list[str], budget: Budget, out: Path | None, data_dir: Path | None, quiet: bool
) -> Told:
    from tacita.lab.experiments.plan import main_table, settings_path
    from tacita.lab.experiments.tune_paper import paper_jobs, tune_paper

    results = out or TABLES
    if main_table(paper).tune:
        told = _tune_rates(paper, only, budget, results, data_dir, quiet)
    else:
        jobs = paper_jobs(paper, only, budget.trials, out or STUDIES, data_dir, budget.rounds)
        with console.counting("dataset-backbone pairs", quiet) as tell:
            _, failed = tune_paper(paper, jobs, results, tell, budget.workers)
        told = Told({"failed": failed}, [f"no score: {one}" for one in failed])
    path = settings_path(paper, results)
    return Told({**told.data, "settings": str(path)}, told.answers, f"stored the choices in {path}")


def _tune_rates(paper: str, only: list[str], budget: Budget, results: Path, data_dir: Path | None, quiet: bool) -> Told:
    from tacita.lab.experiments.cells import CellFile
    from tacita.lab.experiments.plan import main_table
    from tacita.lab.experiments.rates import at_the_end, entries_of
    from tacita.lab.experiments.tune_paper import Search, shown, tune_rates

    experiment = main_table(paper)
    entries = entries_of(experiment, only, budget.trials, budget.rounds)
    kept = CellFile(results / "trials", paper)
    search = Search(paper, results, kept, data_dir, budget.workers, budget.trials, budget.rounds)
    with console.counting("trials", quiet) as tell:
        chosen, failed = tune_rates(search, experiment, entries, tell)
    lines = []
    for name, one in chosen.items():
        edge = ", next to an end of the range" if at_the_end(experiment, one) else ""
        lines.append(f"{name}: {shown(one)}: validation {one.valid:.4f}, best of {one.trials}{edge}")
    lines += [f"no score: {why}" for why in failed]
    said = {name: {"chosen": shown(one), "valid": one.valid, "trials": one.trials} for name, one in chosen.items()}
    return Told({"chosen": said, "failed": failed}, lines)


def _tune_tally(config: RunConfig, names: list[str], machine: Machine, watcher: Watcher, as_json: bool) -> Told:
    """The grid; what is found on a dataset is told as soon as it is known, unless all is told at once."""
    from tacita.lab.experiments import tally_choice

    on_tried = (lambda name, tried: None) if as_json else _show_tried
    tried = tally_choice.try_datasets(config, names, machine, watcher, on_tried)
    data: dict[str, Any] = {"datasets": {name: [vars(one) for one in found] for name, found in tried.items()}}
    data["chosen"] = {name: tally_choice.chosen(found).options for name, found in tried.items()}
    if len(tried) == 1:
        return Told(data, [])
    together = tally_choice.chosen_together(tried)
    return Told({**data, "together": together}, [f"together: options {json.dumps(together)}"])


def _show_tried(name: str, tried: list[Tried]) -> None:
    from tacita.lab.experiments.tally_choice import chosen

    for one in tried:
        said = f"no score, {one.failed}" if one.failed else f"validation {one.valid:.4f}"
        console.answer(f"{name}: options {json.dumps(one.options)}: {said}")
    best = chosen(tried)
    told = f"validation {best.valid:.4f}, test {json.dumps(best.test)}"
    console.answer(f"{name}: chosen {json.dumps(best.options)}: {told}")
