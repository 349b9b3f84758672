"""The verbs of a run: train it, report on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import (
    AsJson,
    Columns,
    DataDir,
    DateFormat,
    Decimal,
    DropMissing,
    Imports,
    Quiet,
    RunOut,
    Sets,
    Threads,
    Track,
    check_decimal,
    complete_backbone,
    complete_method,
    import_modules,
    merge_settings,
    parse_columns,
)
from tacita.core.errors import DiskFull, TacitaError

if TYPE_CHECKING:
    from tacita.runs.assembly import Machine
    from tacita.runs.callbacks import TrainingCallbacks
    from tacita.runs.serving import Run
    from tacita.runs.trackers.tracker import Tracker

LOOKING = "reading the data and trying models (the first run also compiles, for a minute)"


@dataclass(frozen=True)
class Watching:
    """Who watches a run: people at a terminal, unless it is quiet, and trackers."""

    quiet: bool
    trackers: list[Tracker]


@contextmanager
def show_run_progress(folder: Path, quiet: bool) -> Iterator[TrainingCallbacks]:
    """Show the progress of a run; if the disk fills up after it began, explain how to go on."""
    try:
        with console.show_training(quiet) as callbacks:
            yield callbacks
    except DiskFull as error:
        if not folder.is_dir():
            raise
        remedy = f"free some, then `tacita train --out {folder} --resume` goes on"
        raise TacitaError(f"no space left to write {error.path}; {remedy}.") from None


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Settings; flags override them.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Dataset name (default: ml-100k), file, or synthetic:...")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="The model: mf, ncf, pfedrec, ego, fedpergnn, interest, lightgcn, neumf, neuncf, tally or "
            "tally-order (the release of these two gives people away, unless there is a privacy.epsilon).",
            autocompletion=complete_backbone,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="fedavg, f3crec, fedkdrec, fedshare, lipm-dpps, ...: `tacita methods` lists them.",
            autocompletion=complete_method,
        ),
    ] = None,
    imports: Imports = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same numbers.")] = None,
    lr: Annotated[float | None, typer.Option(help="Base learning rate of the backbone.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Most rounds in a block.")] = None,
    out: RunOut = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Controls beside the result; also with --resume.")
    ] = True,
    reproducible_noise: Annotated[
        bool,
        typer.Option(
            "--reproducible-noise",
            help="Draw the noise of a budget from the seed: runs repeat, and whoever has the folder can take it off.",
        ),
    ] = False,
    track: Track = None,
    sets: Sets = None,
    columns: Columns = "",
    date_format: DateFormat = None,
    decimal: Decimal = None,
    drop_missing: DropMissing = False,
    data_dir: DataDir = None,
    threads: Threads = 0,
    chunk: Annotated[int, typer.Option(help="Clients trained together. Never changes a number.")] = 256,
    ranks: Annotated[
        int, typer.Option(help="Processes on this machine that share people out; torchrun starts them on several.")
    ] = 1,
    rank_interface: Annotated[
        str | None,
        typer.Option(help="Network of ranks on several hosts, such as eth0: they talk without encryption there."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train one run and write its folder.

    Without --backbone and --method it takes the model that fits the data best. CONFIG.toml holds settings; flags
    override them. The run's own config.toml lists every setting there is.

    Examples:

    `tacita train --data clicks.csv --out runs/first`

    `tacita train --data ml-100k --method f3crec --seed 1 --out runs/first`

    `tacita train --data my.csv --columns user=customer,item=sku`

    `tacita train study.toml --set train.batch_size=256`

    `tacita train --out runs/first --resume`

    `tacita train --data my.csv --track tensorboard`

    `tacita train --data ml-1m --backbone mf --ranks 2`
    """
    from tacita.runs import assembly
    from tacita.runs import ranks as rank_processes
    from tacita.runs.trackers.registry import open_trackers

    import_modules(imports)
    flags: dict[str, Any] = {
        "data": data,
        "backbone.name": backbone,
        "backbone.lr": lr,
        "method": method,
        "seed": seed,
        "train.rounds": rounds,
        "columns": parse_columns(columns) or None,
        "date_format": date_format,
        "decimal": check_decimal(decimal),
        "privacy.reproducible_noise": True if reproducible_noise else None,
        "drop_missing": drop_missing or None,
    }
    if chunk < 1:
        raise TacitaError(f"--chunk {chunk}: at least one client must be trained at a time.")
    machine = assembly.Machine(threads, chunk, data_dir)
    if rank_processes.is_service_rank():
        rank_processes.serve_run(machine, rank_interface)
        return
    rank_processes.check_ranks(ranks)
    arguments = _list_rank_arguments(imports, machine)
    with (
        rank_processes.open_ranks(ranks, rank_interface, machine, arguments) as machine,
        open_trackers(track) as trackers,
    ):
        watching = Watching(quiet, trackers)
        if resume:
            has_flags = any(value is not None for value in flags.values())
            has_settings = config is not None or bool(sets) or has_flags
            run = _resume_run(_check_resumable(out, has_settings), machine, controls, watching)
        else:
            flags["evaluate.controls"] = None if controls else False
            settings = merge_settings(config, flags, sets or [])
            run = _train_run(settings, str(config or "the settings"), out, machine, watching)
    _show_run(run, as_json, quiet)


def _list_rank_arguments(imports: list[str] | None, machine: Machine) -> list[str]:
    """The command of another rank: rank 0 tells it everything but what is of this machine."""
    arguments = ["train", "--threads", str(machine.threads)]
    for name in imports or ():
        arguments += ["--import", name]
    if machine.data_dir is not None:
        arguments += ["--data-dir", str(machine.data_dir)]
    return arguments


def _check_resumable(folder: Path | None, has_settings: bool) -> Path:
    """A run goes on in its own folder, with its own settings."""
    if folder is None:
        raise TacitaError("--resume needs --out FOLDER, the run to go on with.")
    if has_settings:
        raise TacitaError(f"--resume goes on with the settings in {folder / 'config.toml'}; leave out all others.")
    return folder


def _train_run(settings: dict[str, Any], source: str, out: Path | None, machine: Machine, watching: Watching) -> Run:
    from tacita.runs import training
    from tacita.runs.callbacks import join_callbacks
    from tacita.runs.default_model import resolve_model
    from tacita.runs.run_folder import find_free_folder

    def note(text: str) -> None:
        if not watching.quiet:
            console.print_note(text)

    if out is not None:
        training.refuse_existing_folder(out)
    with console.show_clock(LOOKING, watching.quiet):
        config, start = resolve_model(settings, source, machine, None, note)
    folder = out if out is not None else find_free_folder(config)
    earlier = [] if start is None else [record.report for record in start.rounds]
    with show_run_progress(folder, watching.quiet) as shown:
        callbacks = join_callbacks(shown, watching.trackers, folder, earlier)
        return training.train(config, folder, machine, callbacks, start=start)


def _resume_run(folder: Path, machine: Machine, controls: bool, watching: Watching) -> Run:
    from tacita.runs import training
    from tacita.runs.callbacks import join_callbacks
    from tacita.runs.run_folder import is_finished

    was_finished = is_finished(folder)
    with show_run_progress(folder, watching.quiet) as shown:
        callbacks = join_callbacks(shown, watching.trackers, folder)
        run = training.resume(folder, machine, callbacks, controls)
    if was_finished and not watching.quiet:
        console.print_note(f"{folder} was finished before: nothing was left to do.")
    return run


def _show_run(run: Run, as_json: bool, quiet: bool) -> None:
    if as_json:
        console.print_json(run.result)
        return
    from tacita.report.promises import describe_leaks, list_privacy_lines

    result_tables.show_result(run, brief=quiet)
    ranks = run.result.get("ranks")
    if ranks is not None and not quiet:
        console.print_note(f"Ranks: {ranks['ranks']} on {ranks['hosts']} host(s), {ranks['threads']} thread(s) each.")
    for line in list_privacy_lines(run.config, run.result):
        console.print_answer(line)
    if "privacy" in run.result and not quiet:
        console.print_note(f"What it cost people so far: `tacita ledger {run.folder}`.")
    if not quiet:
        for line in describe_leaks(run.config, run.folder):
            console.print_note(f"Note: {line}")


def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders, or one CSV of accuracies.")
    ] = None,
    named: Annotated[
        list[Path] | None, typer.Option("--run", help="A run folder, instead of as an argument; repeat for more.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="What to write, by its ending: a page (.html), a picture (.pdf, .svg, .png) or a table (.csv, .tex, "
            ".md). Default: report.html."
        ),
    ] = None,
    render_csv: Annotated[Path | None, typer.Option("--csv", help="The table as CSV, a row for each recipe.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="The picture: one run, or all with intervals.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="The table as LaTeX (booktabs).")] = None,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """A page about one or many runs; or their table or picture, for a paper.

    Runs that differ in nothing but `seed` and `split.seed` are taken together: mean and 95 % interval over them.

    Examples:

    `tacita report runs/a runs/b --out compare.html`

    `tacita report runs/a runs/b --out table.csv`

    `tacita report runs/seed-1 runs/seed-2 runs/seed-3 --csv table.csv --svg means.svg --latex table.tex`

    `tacita report docs/audit/accuracy.csv --out accuracy.png`: accuracy against epsilon, from a table of figures.
    """
    if folders and named:
        raise TacitaError(f"runs are named twice, as {folders[0]} and by --run {named[0]}; leave out --run.")
    import_modules(imports)
    sources = [*(folders or ()), *(named or ())]
    _check_report(sources, out, svg)
    if any(source.suffix.lower() == ".csv" for source in sources):
        _draw_accuracy(sources, svg or out)
        return
    has_other_kind = render_csv or svg or latex or as_json
    if out is None and not has_other_kind:
        out = Path("report.html")
    tables = {"csv": render_csv, "latex": latex}
    pages = [svg]
    table_kind = TABLE_KINDS.get(out.suffix.lower()) if out is not None else None
    if table_kind is None:
        pages.append(out)
    else:
        _write_reports(sources, [], {table_kind: out})
    _write_reports(sources, pages, tables)
    _show_seed_groups(sources, as_json)
    for path in (out, render_csv, svg, latex):
        if path is not None:
            console.print_note(f"wrote {path}")


TABLE_KINDS = {".csv": "csv", ".tex": "latex", ".md": "markdown"}
REPORT_ENDINGS = (".html", ".htm", ".pdf", ".png", ".svg", *TABLE_KINDS)


def _check_report(sources: list[Path], out: Path | None, svg: Path | None) -> None:
    if not sources:
        raise TacitaError("name one run folder or more, as in `tacita report runs/a runs/b`.")
    if out is not None and out.suffix.lower() not in REPORT_ENDINGS:
        raise TacitaError(
            f"--out {out}: the ending says what is written; choose .html, .pdf, .svg or .png for a page or picture, "
            ".csv, .tex or .md for a table."
        )
    if svg is not None and svg.suffix.lower() != ".svg":
        raise TacitaError(f"--svg {svg}: a picture of this kind goes to a .svg file; choose that ending.")


def _write_reports(folders: list[Path], pages: list[Path | None], tables: dict[str, Path | None]) -> None:
    from tacita.report.pages import write_report
    from tacita.report.seeds import write_tables

    kinds = {path: kind for kind, path in tables.items() if path is not None}
    if kinds:
        write_tables(folders, kinds)
    for page in pages:
        if page is not None:
            write_report(folders, page)


def _show_seed_groups(folders: list[Path], as_json: bool) -> None:
    """Print the rows of the table for machines, and the notes of groups for people."""
    from tacita.report.seeds import label_groups, make_rows, read_groups

    groups = read_groups(folders)
    if as_json:
        console.print_json(make_rows(groups))
    for label, group in zip(label_groups(groups), groups, strict=True):
        if group.note:
            console.print_note(f"Note, {label}: {group.note}.")


def _draw_accuracy(tables: list[Path], picture: Path | None) -> None:
    from tacita.report import accuracy

    if len(tables) != 1 or picture is None:
        raise TacitaError(
            "accuracy against epsilon is drawn from one CSV file alone; say where to with --out FILE.png."
        )
    accuracy.write_picture(tables[0], picture)
    console.print_note(f"wrote {picture}")
