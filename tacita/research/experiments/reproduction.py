"""Reproduce a table of a paper: run the cells that are missing, compare with the published ones, write the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.report import accuracy
from tacita.research.experiments import tables
from tacita.research.experiments.cells import CellFile, run_cells
from tacita.research.experiments.choice_page import render_choice_page
from tacita.research.experiments.curves import collect_points
from tacita.research.experiments.experiment_spec import (
    Experiment,
    ExperimentCell,
    list_cells,
    load_experiment,
    narrow_experiment,
)
from tacita.research.experiments.schedules import check_schedules, with_schedules
from tacita.research.experiments.search_callbacks import OnDone
from tacita.research.experiments.single_block import Line


@dataclass(frozen=True)
class TablePlan:
    """A table, or the part of it that was asked for."""

    experiment: Experiment
    cells: list[ExperimentCell]
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
    count = seeds or experiment.seeds
    if quick and only:
        raise TacitaError("--quick has its own dataset and backbone; leave out --only.")
    if quick:
        datasets, backbones = experiment.quick.datasets, experiment.quick.backbones
        count = seeds or experiment.quick.seeds
    paper, _, name = table.partition("/")
    name = name or paper
    fewer = "-part" if count < experiment.seeds else ""
    part = "-quick" if quick else "".join(f"-{word}" for word in dict.fromkeys(only)) or fewer
    cells = list_cells(experiment, settings, datasets, backbones, count, variants)
    if not cells:
        raise TacitaError(f"--only {' --only '.join(only)} leaves nothing of {table} to run; leave one of them out.")
    return TablePlan(experiment, cells, paper, name + part)


def keep_finished(wanted: TablePlan, out: Path) -> TablePlan:
    """What of a table is finished, as a table of its own."""
    lines = CellFile(out / "cells", wanted.paper).read(wanted.cells)
    agents = [one for one in wanted.cells if one.follows and "values" in lines.get(one.follows.key, {})]
    ready = {id(one): with_schedules([one], lines)[0] for one in agents}
    cells = [ready.get(id(one), one) for one in wanted.cells if one.follows is None or id(one) in ready]
    cells = [one for one in cells if one.key in lines]
    if not cells:
        raise TacitaError(f"no cell of this table is finished under {out}; leave out --finished.")
    whole = len(cells) == len(wanted.cells) or wanted.stem.endswith(("-part", "-quick"))
    return replace(wanted, cells=cells, stem=wanted.stem if whole else f"{wanted.stem}-part", planned=wanted)


def reproduce_table(
    wanted: TablePlan,
    out: Path,
    data_dir: Path | None = None,
    workers: int = 0,
    on_done: OnDone | None = None,
) -> ReproducedTable:
    """Run what is not finished under `out` and write the table beside it."""
    kept = CellFile(out / "cells", wanted.paper)
    lines = kept.read(wanted.cells)
    check_schedules(wanted.cells, lines)
    first = [one for one in wanted.cells if one.follows is None]
    lines |= run_cells(first, kept, data_dir, workers, on_done)
    if len(first) < len(wanted.cells):
        wanted = replace(wanted, cells=with_schedules(wanted.cells, lines))
        lines |= run_cells(wanted.cells, kept, data_dir, workers, on_done)
    entries = tables.build_entries(wanted.experiment, wanted.cells, lines)
    folder = out / wanted.paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TacitaError(f"cannot write to {folder}: {error.strerror}.") from None
    path = folder / wanted.stem
    _write_pages(wanted, lines, entries, path)
    if wanted.experiment.kind == "choose":
        whole, planned = out.parent if out.name == "reproduction" else out, wanted.planned or wanted
        page = render_choice_page(wanted.experiment, planned.cells, lines)  # says what is missing
        write_bytes(whole / f"{planned.stem}.md", page.encode())
    return ReproducedTable(entries, path)


def _write_pages(wanted: TablePlan, lines: dict[str, Line], entries: list[tables.TableEntry], path: Path) -> None:
    given = (wanted.experiment, wanted.cells, lines)
    tests = tables.compare_variants(*given)
    failed = tables.failed_cells(wanted.cells, lines)
    also, apart = tables.summarise_streams(*given), tables.seed_differences(*given)
    page = tables.to_markdown(wanted.experiment, entries, tests, failed, also, apart)
    csv, html = tables.to_csv(entries), tables.to_html(wanted.experiment, entries, tests)
    for suffix, text in (("md", page), ("csv", csv), ("html", html)):
        write_bytes(path.with_name(f"{path.name}.{suffix}"), text.encode())
    if drawn := collect_points(wanted.experiment, wanted.cells, lines):
        figures = path.with_name(f"{path.name}-points.csv")
        write_bytes(figures, accuracy.to_csv(drawn).encode())
        accuracy.write_picture(figures, path.with_suffix(".png"))
