"""The verbs of researchers: reproduce a table of a paper, tune settings on validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console
from tacita.cli.options import AsJson, Columns, DataDir, Quiet, Sets, merge_settings, parse_columns
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.research.experiments.search_callbacks import SearchCallbacks
    from tacita.research.experiments.tally_tuning import TallyTrial
    from tacita.runs.assembly import Machine

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
    from tacita.research.experiments import experiment_spec, tables
    from tacita.research.experiments import reproduction as reproducing

    if table == "list":
        console.print_answer("\n".join(experiment_spec.experiment_names()))
        return
    wanted = reproducing.plan_table(table, only or [], seeds, quick, out)
    wanted = reproducing.keep_finished(wanted, out) if finished else wanted
    with console.show_progress("cells", quiet) as tell:
        found = reproducing.reproduce_table(wanted, out, data_dir, workers, tell)
    if as_json:
        console.print_json([vars(one) for one in found.entries])
        return
    experiment = wanted.experiment
    console.show_entries(experiment.title, found.entries, {k: v.label for k, v in experiment.variants.items()})
    counted = ", ".join(f"{n} {mark}" for mark, n in tables.count_verdicts(found.entries).items() if n)
    console.print_note(f"against the paper: {counted or 'nothing published'}; wrote {found.path}.md, .csv and .html")


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
    from tacita.research.experiments.search_callbacks import SearchCallbacks
    from tacita.research.experiments.tuning import build_tuning_config
    from tacita.runs.assembly import Machine

    if paper:
        if sets or columns:
            raise TacitaError("--set and --columns are not for --paper: its tables say every setting.")
        told = _tune_paper(paper, only or [], TuningBudget(trials, rounds, workers), out, data_dir, quiet or as_json)
    else:
        names, machine = data or ["ml-100k"], Machine(data_dir=data_dir)
        more = merge_settings(None, {"columns": parse_columns(columns) or None}, sets or [])
        config = build_tuning_config(names, backbone, method, seed, more)
        watcher = SearchCallbacks(
            partial(console.show_progress, quiet=quiet), None if quiet or as_json else console.print_data_notes
        )
        if backbone == "tally":
            told = _tune_tally(config, names, machine, watcher, as_json)
        else:
            told = _tune_method(config, method, trials, out or STUDIES, machine, watcher)
    if as_json:
        console.print_json(told.data)
        return
    for line in told.lines:
        console.print_answer(line)
    if told.note:
        console.print_note(told.note)


@dataclass(frozen=True)
class TuningOutcome:
    """What a search comes to: for machines, and for people line by line."""

    data: dict[str, Any]
    lines: list[str]
    note: str = ""


def _tune_method(
    config: RunConfig, method: str, trials: int, out: Path, machine: Machine, watcher: SearchCallbacks
) -> TuningOutcome:
    from tacita.research.experiments import tuning

    base, found = tuning.tune(config, method, trials, out, machine, watcher)
    lines = []
    for lr, score in base.tried.items():
        lines.append(f"learning rate {lr}: block-0 validation {score:.4f}{', chosen' if lr == base.lr else ''}")
    for lr, why in base.failed.items():
        lines.append(f"learning rate {lr}: no score, {why}")
    for options, why in found.failed.items():
        lines.append(f"options {options}: no score, {why}")
    count = f"{found.trials} trial{'s' if found.trials != 1 else ''}"
    told = (
        f"after {count}" if tuning.list_open_options(method) else f"the one trial: method '{method}' has none to choose"
    )
    lines.append(f"options {json.dumps(found.options)}: validation {found.valid:.4f} {told}")
    rates: dict[float, Any] = {**base.tried, **base.failed}
    data = {"lr": base.lr, "rates": {str(lr): said for lr, said in rates.items()}, "failed": found.failed}
    data |= {"options": found.options, "valid": found.valid, "trials": found.trials, "folder": str(found.folder)}
    return TuningOutcome(data, lines, f"runs of the trials: {found.folder}")


@dataclass(frozen=True)
class TuningBudget:
    """What a paper's tuning may cost."""

    trials: int
    rounds: int | None
    workers: int


def _tune_paper(
    paper: str, only: list[str], budget: TuningBudget, out: Path | None, data_dir: Path | None, quiet: bool
) -> TuningOutcome:
    from tacita.research.experiments.experiment_spec import load_main_table, settings_path
    from tacita.research.experiments.paper_tuning import list_paper_jobs, tune_paper

    results = out or TABLES
    if load_main_table(paper).tune:
        told = _tune_rates(paper, only, budget, results, data_dir, quiet)
    else:
        jobs = list_paper_jobs(paper, only, budget.trials, out or STUDIES, data_dir, budget.rounds)
        with console.show_progress("dataset-backbone pairs", quiet) as tell:
            _, failed = tune_paper(paper, jobs, results, tell, budget.workers)
        told = TuningOutcome({"failed": failed}, [f"no score: {one}" for one in failed])
    path = settings_path(paper, results)
    return TuningOutcome({**told.data, "settings": str(path)}, told.lines, f"stored the choices in {path}")


def _tune_rates(
    paper: str, only: list[str], budget: TuningBudget, results: Path, data_dir: Path | None, quiet: bool
) -> TuningOutcome:
    from tacita.research.experiments.cells import CellFile
    from tacita.research.experiments.experiment_spec import load_main_table
    from tacita.research.experiments.learning_rates import is_at_range_end, list_tuning_entries
    from tacita.research.experiments.paper_tuning import RateSearch, describe_choice, tune_rates

    experiment = load_main_table(paper)
    entries = list_tuning_entries(experiment, only, budget.trials, budget.rounds)
    kept = CellFile(results / "trials", paper)
    search = RateSearch(paper, results, kept, data_dir, budget.workers, budget.trials, budget.rounds)
    with console.show_progress("trials", quiet) as tell:
        chosen, failed = tune_rates(search, experiment, entries, tell)
    lines = []
    for name, one in chosen.items():
        edge = ", next to an end of the range" if is_at_range_end(experiment, one) else ""
        lines.append(f"{name}: {describe_choice(one)}: validation {one.valid:.4f}, best of {one.trials}{edge}")
    lines += [f"no score: {why}" for why in failed]
    said = {
        name: {"chosen": describe_choice(one), "valid": one.valid, "trials": one.trials} for name, one in chosen.items()
    }
    return TuningOutcome({"chosen": said, "failed": failed}, lines)


def _tune_tally(
    config: RunConfig, names: list[str], machine: Machine, watcher: SearchCallbacks, as_json: bool
) -> TuningOutcome:
    """The grid; what is found on a dataset is told as soon as it is known, unless all is told at once."""
    from tacita.research.experiments import tally_tuning

    on_tried = (lambda name, tried: None) if as_json else _show_trials
    tried = tally_tuning.try_datasets(config, names, machine, watcher, on_tried)
    data: dict[str, Any] = {"datasets": {name: [vars(one) for one in found] for name, found in tried.items()}}
    data["chosen"] = {name: tally_tuning.choose_trial(found).options for name, found in tried.items()}
    if len(tried) == 1:
        return TuningOutcome(data, [])
    together = tally_tuning.choose_common_options(tried)
    return TuningOutcome({**data, "together": together}, [f"together: options {json.dumps(together)}"])


def _show_trials(name: str, tried: list[TallyTrial]) -> None:
    from tacita.research.experiments.tally_tuning import choose_trial

    for one in tried:
        said = f"no score, {one.failed}" if one.failed else f"validation {one.valid:.4f}"
        console.print_answer(f"{name}: options {json.dumps(one.options)}: {said}")
    best = choose_trial(tried)
    told = f"validation {best.valid:.4f}, test {json.dumps(best.test)}"
    console.print_answer(f"{name}: chosen {json.dumps(best.options)}: {told}")
