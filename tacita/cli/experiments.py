"""The verbs of researchers: reproduce a table of a paper, tune settings on validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import (
    AsJson,
    Columns,
    DataDir,
    Imports,
    Quiet,
    Sets,
    import_modules,
    merge_settings,
    parse_columns,
)
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.core.config import RunConfig
    from tacita.research.experiments.cell_status import CellStatus
    from tacita.research.experiments.search_callbacks import SearchCallbacks
    from tacita.research.experiments.tally_tuning import TallyTrial
    from tacita.research.experiments.tuning import StudyPlace
    from tacita.research.experiments.workers import Workers
    from tacita.runs.assembly import Machine

TABLES = Path("docs/reproduction")
Place = Annotated[
    str,
    typer.Option("--on", metavar="local|ray|ray://HOST:PORT", help="Where jobs run: this machine, or a Ray cluster."),
]
STUDIES = Path("runs/tune")


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="[PAPER/TABLE]", help="For example f3crec/table2; --list shows all.")
    ] = None,
    list_tables: Annotated[
        bool, typer.Option("--list", help="The tables there are; of a named one, cells that are stale or did not run.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A dataset, backbone or variant; repeat for more.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per cell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One dataset, one backbone, two seeds.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Run nothing: the table of what is finished.")] = False,
    check: Annotated[
        int | None, typer.Option(min=1, help="Run so many finished cells once more, drawn at random, and compare.")
    ] = None,
    most_seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="With --check: of those that took no longer.")
    ] = None,
    draw: Annotated[int, typer.Option(min=0, help="With --check: another number draws other cells.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for tables and finished cells.")] = TABLES,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    on: Place = "local",
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

    `tacita reproduce fedshare/table3 --list`

    `tacita reproduce --check 30`

    `tacita reproduce f3crec/table2 --on ray://127.0.0.1:10001`
    """
    from tacita.research.experiments import reproduction as reproducing
    from tacita.research.experiments import tables
    from tacita.research.experiments.workers import Workers

    if check is not None:
        _check_cells(CellDraw(table, only or [], check, most_seconds, draw), out, data_dir, as_json)
        return
    if (list_tables and table is None) or table == "list":
        _show_tables(as_json)
        return
    if table is None:
        raise TacitaError("name a table, as in `tacita reproduce f3crec/table2`; `tacita reproduce --list` shows all.")
    plan = reproducing.plan_table(table, only or [], seeds, quick, out)
    if list_tables:
        _show_statuses(reproducing.list_statuses(plan, out), as_json)
        return
    if finished:
        result = reproducing.write_finished_table(plan, out)
    else:
        with console.show_progress("cells", quiet) as tell:
            result = reproducing.reproduce_table(plan, out, data_dir, Workers(workers, on), tell)
    if as_json:
        console.print_json([vars(entry) for entry in result.entries])
        return
    experiment = plan.experiment
    labels = {name: variant.label for name, variant in experiment.variants.items()}
    result_tables.show_entries(experiment.title, result.entries, labels)
    console.print_note(tables.explain_reading(experiment, result.entries, "beside it"))
    verdicts = tables.count_verdicts(result.entries)
    counts = [f"{n} {verdict}" for verdict, n in verdicts.items() if n]
    summary = ", ".join(counts) or "nothing published"
    console.print_note(f"against the paper: {summary}; wrote {result.path}.md, .csv and .html")


@dataclass(frozen=True)
class CellDraw:
    """Which finished cells are run once more."""

    table: str | None
    only: list[str]
    n_cells: int
    most_seconds: float | None
    seed: int


def _check_cells(draw: CellDraw, out: Path, data_dir: Path | None, as_json: bool) -> None:
    """Run finished cells once more; a cell that comes out otherwise ends the command with an error."""
    from tacita.research.experiments.cell_checks import check_cell, draw_cells, list_stored_cells

    stored = list_stored_cells(out, draw.only, draw.table, draw.most_seconds)
    rows = []
    for entry in draw_cells(stored, draw.n_cells, draw.seed):
        check = check_cell(entry, data_dir)
        rows.append({"cell": entry.name, "verdict": check.verdict, "identical": check.is_identical})
        if not as_json:
            console.print_note(f"{entry.name}: {check.verdict}")
    if as_json:
        console.print_json(rows)
    n_identical = sum(bool(row["identical"]) for row in rows)
    if not as_json:
        console.print_note(f"{n_identical} of {len(rows)} cells come out of this code bit by bit")
    if n_identical < len(rows):
        raise typer.Exit(1)


def _show_statuses(statuses: Sequence[CellStatus], as_json: bool) -> None:
    """How many cells of a table are finished, and which are not."""
    rows = []
    for entry in statuses:
        cell = entry.cell
        row = {
            "dataset": cell.dataset,
            "backbone": cell.backbone,
            "variant": cell.variant,
            "seed": cell.seed,
            "status": entry.status,
            "changed since": ", ".join(entry.changes),
        }
        rows.append(row)
    if as_json:
        console.print_json(rows)
        return
    unfinished = [row for row in rows if row["status"] != "finished"]
    left_aligned = ("dataset", "backbone", "variant", "status", "changed since")
    if unfinished:
        result_tables.show_table("cells that are not finished", unfinished, left_aligned=left_aligned)
    n_stale = sum(entry.status == "stale" for entry in statuses)
    n_finished = len(rows) - len(unfinished)
    n_missing = len(unfinished) - n_stale
    console.print_note(f"{n_finished} of {len(rows)} cells are finished; {n_stale} are stale, {n_missing} did not run")


def _show_tables(as_json: bool) -> None:
    from tacita.research.experiments.experiment_spec import list_experiments, load_experiment

    titles = {name: load_experiment(name)[0].title for name in list_experiments()}
    if as_json:
        console.print_json(titles)
        return
    rows = [{"table": name, "title": title} for name, title in titles.items()]
    result_tables.show_table("tables (tacita reproduce PAPER/TABLE)", rows, left_aligned=("table", "title"))


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
    on: Place = "local",
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Optuna's database, for hosts without a folder in common (default: a file)."),
    ] = None,
    imports: Imports = None,
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

    `tacita tune --paper fedkdrec --only neumf --only fedkdrec --workers 1`

    `tacita tune --backbone tally --data ml-100k --data ml-latest-small --data lastfm-2k`

    `tacita tune --data my.csv --columns user=customer,item=sku --set train.rounds=30 --json`
    """
    from tacita.research.experiments.tuning import StudyPlace, build_tuning_config
    from tacita.research.experiments.workers import LOCAL, Workers
    from tacita.runs.assembly import Machine

    import_modules(imports)
    hides_notes = quiet or as_json
    if paper:
        if sets or columns:
            raise TacitaError("--set and --columns are not for --paper: its tables say every setting.")
        budget = TuningBudget(trials, rounds, Workers(workers, on), storage)
        outcome = _tune_paper(paper, only or [], budget, out, data_dir, hides_notes)
    else:
        if on != LOCAL:
            raise TacitaError("--on is for --paper, whose jobs are independent; a single search stays on this machine.")
        names = data or ["ml-100k"]
        machine = Machine(data_dir=data_dir)
        settings = merge_settings(None, {"columns": parse_columns(columns) or None}, sets or [])
        config = build_tuning_config(names, backbone, method, seed, settings)
        callbacks = _make_callbacks(quiet, hides_notes)
        if backbone == "tally":
            outcome = _tune_tally(config, names, machine, callbacks, as_json)
        else:
            outcome = _tune_method(config, method, trials, StudyPlace(out or STUDIES, storage), machine, callbacks)
    if as_json:
        console.print_json(outcome.data)
    else:
        _show_tuning_outcome(outcome)


def _make_callbacks(quiet: bool, hides_notes: bool) -> SearchCallbacks:
    from tacita.research.experiments.search_callbacks import SearchCallbacks

    on_data = None if hides_notes else console.print_data_notes
    return SearchCallbacks(partial(console.show_progress, quiet=quiet), on_data)


@dataclass(frozen=True)
class TuningOutcome:
    """The result of a search: for machines, and for people line by line."""

    data: dict[str, Any]
    lines: list[str]
    note: str = ""


def _show_tuning_outcome(outcome: TuningOutcome) -> None:
    for line in outcome.lines:
        console.print_answer(line)
    if outcome.note:
        console.print_note(outcome.note)


def _tune_method(
    config: RunConfig, method: str, trials: int, place: StudyPlace, machine: Machine, callbacks: SearchCallbacks
) -> TuningOutcome:
    from tacita.research.experiments import tuning

    base, best = tuning.tune(config, method, trials, place, machine, callbacks)
    lines = []
    for lr, score in base.tried.items():
        mark = ", chosen" if lr == base.lr else ""
        lines.append(f"learning rate {lr}: block-0 validation {score:.4f}{mark}")
    for lr, reason in base.failed.items():
        lines.append(f"learning rate {lr}: no score, {reason}")
    for options, reason in best.failed.items():
        lines.append(f"options {options}: no score, {reason}")
    if tuning.list_open_options(method):
        effort = "after 1 trial" if best.trials == 1 else f"after {best.trials} trials"
    else:
        effort = f"the one trial: method '{method}' has none to choose"
    lines.append(f"options {json.dumps(best.options)}: validation {best.valid:.4f} {effort}")
    rates: dict[float, Any] = {**base.tried, **base.failed}
    data = {
        "lr": base.lr,
        "rates": {str(lr): result for lr, result in rates.items()},
        "failed": best.failed,
        "options": best.options,
        "valid": best.valid,
        "trials": best.trials,
        "folder": str(best.folder),
    }
    return TuningOutcome(data, lines, f"runs of the trials: {best.folder}")


@dataclass(frozen=True)
class TuningBudget:
    """Bounds on the cost of a paper's tuning."""

    trials: int
    rounds: int | None
    workers: Workers
    storage: str | None


def _tune_paper(
    paper: str, only: list[str], budget: TuningBudget, out: Path | None, data_dir: Path | None, quiet: bool
) -> TuningOutcome:
    from tacita.research.experiments.experiment_spec import find_settings_path, load_main_table
    from tacita.research.experiments.paper_tuning import list_paper_jobs, tune_paper
    from tacita.research.experiments.tuning import StudyPlace

    results = out or TABLES
    if load_main_table(paper).tune:
        outcome = _tune_rates(paper, only, budget, results, data_dir, quiet)
    else:
        place = StudyPlace(out or STUDIES, budget.storage)
        jobs = list_paper_jobs(paper, only, budget.trials, place, data_dir, budget.rounds)
        with console.show_progress("dataset-backbone pairs", quiet) as tell:
            _, failed = tune_paper(paper, jobs, results, tell, budget.workers)
        outcome = TuningOutcome({"failed": failed}, [f"no score: {reason}" for reason in failed])
    path = find_settings_path(paper, results)
    data = {**outcome.data, "settings": str(path)}
    return TuningOutcome(data, outcome.lines, f"stored the choices in {path}")


def _tune_rates(
    paper: str, only: list[str], budget: TuningBudget, results: Path, data_dir: Path | None, quiet: bool
) -> TuningOutcome:
    from tacita.research.experiments.cells import CellFile
    from tacita.research.experiments.experiment_spec import load_main_table
    from tacita.research.experiments.learning_rates import is_at_range_end, list_tuning_entries
    from tacita.research.experiments.paper_tuning import RateSearch, describe_choice, tune_rates

    experiment = load_main_table(paper)
    entries = list_tuning_entries(experiment, only, budget.trials, budget.rounds)
    cells = CellFile(results / "trials", paper)
    search = RateSearch(paper, results, cells, data_dir, budget.workers, budget.trials, budget.rounds)
    with console.show_progress("trials", quiet) as tell:
        choices, failed = tune_rates(search, experiment, entries, tell)
    lines = []
    rows = {}
    for name, choice in choices.items():
        text = describe_choice(choice)
        edge = ", next to an end of the range" if is_at_range_end(experiment, choice) else ""
        lines.append(f"{name}: {text}: validation {choice.valid:.4f}, best of {choice.trials}{edge}")
        rows[name] = {"chosen": text, "valid": choice.valid, "trials": choice.trials}
    lines += [f"no score: {reason}" for reason in failed]
    return TuningOutcome({"chosen": rows, "failed": failed}, lines)


def _tune_tally(
    config: RunConfig, names: list[str], machine: Machine, callbacks: SearchCallbacks, as_json: bool
) -> TuningOutcome:
    """Try the whole grid; for people, the trials of a dataset are printed as soon as they end."""
    from tacita.research.experiments import tally_tuning

    on_tried = (lambda name, trials: None) if as_json else _show_trials
    trials_by_dataset = tally_tuning.run_trials_on_datasets(config, names, machine, callbacks, on_tried)
    datasets = {}
    chosen = {}
    for name, trials in trials_by_dataset.items():
        datasets[name] = [vars(trial) for trial in trials]
        chosen[name] = tally_tuning.choose_trial(trials).options
    data: dict[str, Any] = {"datasets": datasets, "chosen": chosen}
    if len(trials_by_dataset) == 1:
        return TuningOutcome(data, [])
    together = tally_tuning.choose_common_options(trials_by_dataset)
    return TuningOutcome({**data, "together": together}, [f"together: options {json.dumps(together)}"])


def _show_trials(dataset: str, trials: list[TallyTrial]) -> None:
    from tacita.research.experiments.tally_tuning import choose_trial

    for trial in trials:
        result = f"no score, {trial.failed}" if trial.failed else f"validation {trial.valid:.4f}"
        console.print_answer(f"{dataset}: options {json.dumps(trial.options)}: {result}")
    best = choose_trial(trials)
    result = f"validation {best.valid:.4f}, test {json.dumps(best.test)}"
    console.print_answer(f"{dataset}: chosen {json.dumps(best.options)}: {result}")
