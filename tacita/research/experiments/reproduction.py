"""Reproduce a table of a paper: run the cells that are missing, compare with the published ones, write the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.report import accuracy
from tacita.research.experiments import tables
from tacita.research.experiments.cell_status import (
    CellStatus,
    list_cell_statuses,
    list_earlier_rows,
    with_earlier_lines,
)
from tacita.research.experiments.cells import CellFile, run_cells
from tacita.research.experiments.choice_page import render_choice_page
from tacita.research.experiments.comparisons import compare_seeds, compare_variants, summarise_streams
from tacita.research.experiments.curves import collect_points
from tacita.research.experiments.experiment_cell import Cells
from tacita.research.experiments.experiment_spec import Experiment, list_cells, load_experiment, narrow_experiment
from tacita.research.experiments.schedules import check_schedules, with_upload_sizes
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.single_block import CellLines
from tacita.research.experiments.table_html import render_html
from tacita.research.experiments.table_markdown import to_markdown
from tacita.research.experiments.workers import THIS_MACHINE, Workers


@dataclass(frozen=True)
class TablePlan:
    """A table, or the part of it that is wanted."""

    experiment: Experiment
    cells: Cells
    paper: str
    stem: str  # of the files; a narrowed table does not overwrite the whole one
    planned: TablePlan | None = None  # the same with the cells that are not finished, where these were left out


@dataclass(frozen=True)
class ReproducedTable:
    entries: list[tables.TableEntry]
    path: Path  # of the files, without their suffix


def plan_table(table: str, only: list[str], seeds: int | None, quick: bool, results: Path | None = None) -> TablePlan:
    """The cells of PAPER/TABLE that the words ask for, with what was tuned among some results."""
    experiment, settings = load_experiment(table, results)
    datasets, backbones, variants = narrow_experiment(experiment, only)
    n_seeds = seeds or experiment.seeds
    if quick and only:
        raise TacitaError("--quick has its own dataset and backbone; leave out --only.")
    if quick:
        datasets = experiment.quick.datasets
        backbones = experiment.quick.backbones
        n_seeds = seeds or experiment.quick.seeds
    cells = list_cells(experiment, settings, datasets, backbones, n_seeds, variants)
    if not cells:
        raise TacitaError(f"--only {' --only '.join(only)} leaves nothing of {table} to run; leave one of them out.")
    paper, _, name = table.partition("/")
    stem = name or paper
    if quick:
        stem += "-quick"
    elif only:
        words = dict.fromkeys(only)
        stem = "-".join([stem, *words])
    elif n_seeds < experiment.seeds:
        stem += "-part"
    return TablePlan(experiment, cells, paper, stem)


def list_statuses(wanted: TablePlan, out: Path) -> list[CellStatus]:
    """Which cells of a table are finished under `out`, which earlier code made, and which did not run."""
    lines = CellFile(out / "cells", wanted.paper).read(wanted.cells)
    return list_cell_statuses(_with_known_sizes(wanted.cells, lines), lines)


def _with_known_sizes(cells: Cells, lines: CellLines) -> Cells:
    """The same cells; those that follow an agent are complete where it is finished."""
    known = []
    for cell in cells:
        if cell.follows is not None and "values" in lines.get(cell.follows.key, {}):
            (cell,) = with_upload_sizes([cell], lines)
        known.append(cell)
    return known


def read_finished(wanted: TablePlan, out: Path) -> tuple[TablePlan, CellLines]:
    """The finished cells of a table, as a table of its own; with marked ones where only earlier code ran."""
    lines = CellFile(out / "cells", wanted.paper).read(wanted.cells)
    independent = [cell for cell in wanted.cells if cell.follows is None]
    lines = with_earlier_lines(independent, lines)
    known = [cell for cell in _with_known_sizes(wanted.cells, lines) if cell.follows is None]
    lines = with_earlier_lines(known, lines)
    cells = [cell for cell in known if cell.key in lines]
    if not cells:
        raise TacitaError(f"no cell of this table is finished under {out}; leave out --finished.")
    stem = wanted.stem
    is_complete = len(cells) == len(wanted.cells)
    if not is_complete and not stem.endswith(("-part", "-quick")):
        stem = f"{stem}-part"
    return replace(wanted, cells=cells, stem=stem, planned=wanted), lines


def write_finished_table(wanted: TablePlan, out: Path) -> ReproducedTable:
    """Run nothing: the table of what is finished."""
    plan, lines = read_finished(wanted, out)
    return _write_table(plan, lines, out)


def reproduce_table(
    wanted: TablePlan,
    out: Path,
    data_dir: Path | None = None,
    workers: Workers = THIS_MACHINE,
    on_done: OnDone | None = None,
) -> ReproducedTable:
    """Run what is not finished under `out` and write the table beside it."""
    cell_file = CellFile(out / "cells", wanted.paper)
    lines = cell_file.read(wanted.cells)
    check_schedules(wanted.cells, lines)
    independent = [cell for cell in wanted.cells if cell.follows is None]
    lines |= run_cells(independent, cell_file, data_dir, workers, on_done)
    if len(independent) < len(wanted.cells):
        wanted = replace(wanted, cells=with_upload_sizes(wanted.cells, lines))
        lines |= run_cells(wanted.cells, cell_file, data_dir, workers, on_done)
    return _write_table(wanted, lines, out)


def _write_table(plan: TablePlan, lines: CellLines, out: Path) -> ReproducedTable:
    folder = out / plan.paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TacitaError(f"cannot write to {folder}: {error.strerror}.") from None
    path = folder / plan.stem
    for suffix, text in render_pages(plan, lines).items():
        page_path = path.with_name(path.name + suffix)
        write_bytes(page_path, text.encode())
    points_path = path.with_name(f"{path.name}-points.csv")
    if collect_points(plan.experiment, plan.cells, lines):
        accuracy.write_picture(points_path, path.with_suffix(".png"))
    if plan.experiment.kind == "choose":
        _write_choice_page(plan, lines, out)
    entries = tables.build_entries(plan.experiment, plan.cells, lines)
    return ReproducedTable(entries, path)


def render_pages(plan: TablePlan, lines: CellLines) -> dict[str, str]:
    """What a name of pages ends with -> the text."""
    experiment = plan.experiment
    entries = tables.build_entries(experiment, plan.cells, lines)
    tests = compare_variants(experiment, plan.cells, lines)
    earlier = list_earlier_rows(plan.cells, lines, tables.label_variants(experiment))
    failures = tables.list_failed_cells(plan.cells, lines)
    markdown = to_markdown(
        experiment,
        entries,
        tests,
        failures=[*failures, *earlier],
        streams=summarise_streams(experiment, plan.cells, lines),
        differences=compare_seeds(experiment, plan.cells, lines),
    )
    pages = {
        ".md": markdown,
        ".csv": tables.to_csv(entries),
        ".html": render_html(experiment, entries, tests, earlier),
    }
    points = collect_points(experiment, plan.cells, lines)
    if points:
        pages["-points.csv"] = accuracy.to_csv(points)
    return pages


def _write_choice_page(plan: TablePlan, lines: CellLines, out: Path) -> None:
    """The page that helps to choose; it names the cells that are missing."""
    folder = out.parent if out.name == "reproduction" else out
    planned = plan.planned or plan
    page = render_choice_page(plan.experiment, planned.cells, lines)
    write_bytes(folder / f"{planned.stem}.md", page.encode())
