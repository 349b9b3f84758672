"""What people see in the terminal: progress with time left, tables, one style for all verbs.

Results go to standard output; progress and notes go to standard error, where a bar vanishes when its work ends. Where
that is no terminal, a plain line every few seconds says how things stand.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from tacita.core.errors import make_printable

if TYPE_CHECKING:
    from tacita.core.types import BlockStream
    from tacita.data.datasets import DatasetInfo
    from tacita.federation.rounds import Progress as Standing
    from tacita.federation.rounds import RoundReport
    from tacita.research.experiments.tables import TableEntry
    from tacita.round.plan import Federation
    from tacita.runs.serving import Run
    from tacita.runs.settings_reference import Setting
    from tacita.runs.training import TrainingCallbacks

CONTROL_NAMES = {
    "random": "random",
    "popular": "most popular",
    "alone": "no federation",
    "linear": "centralised linear",
}
MOST_BLOCK_COLUMNS = 5  # fit in 80 characters; more blocks become rows
LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal


class Screen(Console):
    """Where people read: whatever text a file brought along, it cannot steer the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(make_printable(text), **options)


def print_note(text: str) -> None:
    """A note for people, taken literally."""
    Screen(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def print_markup(text: str) -> None:
    """A line of the answer; square brackets are markup, so names have to be escaped."""
    Screen(highlight=False, soft_wrap=True).print(text)


def print_answer(text: str) -> None:
    """A line of the answer, taken literally."""
    Screen(highlight=False, soft_wrap=True).print(text, markup=False)


def print_json(value: Any) -> None:
    """The whole answer, for machines."""
    print(json.dumps(value))


# While it runs


@contextmanager
def _open_bar(quiet: bool, *columns: ProgressColumn) -> Iterator[Progress]:
    """A bar that vanishes when its work ends; a file or pipe gets lines instead."""
    screen = Screen(stderr=True)
    bar = Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_interactive)
    if quiet or screen.is_interactive:
        with bar:
            yield bar
        return
    ended = threading.Event()
    teller = threading.Thread(target=_print_lines, args=(bar, ended, sys.stderr), daemon=True)
    teller.start()  # a thread, because some work is silent for minutes
    try:
        yield bar
    finally:
        ended.set()
        teller.join()


def _print_lines(bar: Progress, ended: threading.Event, out: TextIO) -> None:
    """How the bar stands, every few seconds until its work ends or nobody reads any more."""
    with suppress(OSError, ValueError):
        while not ended.wait(LINE_SECONDS):
            for task in bar.tasks:
                print(_format_line(task), file=out, flush=True)


def _format_line(task: Task) -> str:
    spent = timedelta(seconds=round(task.elapsed or 0))
    counted = f"{task.completed:.0f}/{task.total:.0f}" if task.fields.get("counted") and task.total else ""
    return " · ".join(filter(None, [f"{spent} {task.description}", counted, task.fields.get("note", "")]))


@contextmanager
def show_clock(what: str, quiet: bool = False) -> Iterator[None]:
    """A clock beside work whose length is not known."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with _open_bar(quiet, *columns) as bar:
        bar.add_task(what)
        yield


@contextmanager
def show_progress(what: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar over things that are done one by one: call it with how many are done, of how many, and maybe a note."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with _open_bar(quiet, *columns) as bar:
        task = bar.add_task(what, total=None, note="", counted=True)
        pace = Pace()

        def tell(done: int, total: int, note: str = "") -> None:
            pace.record(done)
            told = " · ".join(filter(None, [note, pace.format_remaining(total - done)]))
            bar.update(task, completed=done, total=total, note=told)

        yield tell


class Pace:
    """How fast something goes, from its last few steps."""

    def __init__(self) -> None:
        self._reached: deque[tuple[float, int]] = deque(maxlen=50)

    def record(self, done: int) -> None:
        self._reached.append((time.monotonic(), done))

    def step(self) -> None:
        self.record(self._reached[-1][1] + 1 if self._reached else 0)

    @property
    def per_second(self) -> float:
        if not self._reached:
            return 0.0
        (began, first), (now, last) = self._reached[0], self._reached[-1]
        return (last - first) / (now - began) if now > began else 0.0

    def format_remaining(self, steps: int) -> str:
        """The time that many steps will take, in words."""
        going = self.per_second > 0 and steps > 0
        return f"{timedelta(seconds=round(steps / self.per_second))} left" if going else ""


@contextmanager
def show_training(quiet: bool = False) -> Iterator[TrainingCallbacks]:
    """A bar over all rounds a run may take, then one over the controls; a block that ends early moves it ahead."""
    from tacita.runs.training import TrainingCallbacks

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with _open_bar(quiet, *columns) as bar:
        task = bar.add_task("loading", total=None, note="")
        per_block, n_blocks, pace, controls = 1, 1, Pace(), list(CONTROL_NAMES)
        checking = Pace()

        def on_start(fed: Federation, standing: Standing) -> None:
            nonlocal per_block, n_blocks
            per_block, n_blocks = fed.learner.rounds, len(fed.stream.blocks)
            done = len(standing.results) * per_block + standing.server.round * standing.in_block
            bar.update(task, total=per_block * n_blocks, completed=done, description="training")
            for note in () if quiet else _list_run_notes(fed):
                bar.console.print(note, markup=False, highlight=False, soft_wrap=True)
            pace.step()

        def on_round(report: RoundReport) -> None:
            pace.step()
            done = report.block * per_block + report.round
            score = f"valid {report.valid:.4f}" if report.valid is not None else ""
            left = pace.format_remaining(per_block * n_blocks - done)
            rate = f"{pace.per_second:.3g} rounds/s" if pace.per_second else ""
            bar.update(
                task,
                completed=done,
                description=f"block {report.block + 1}/{n_blocks} round {report.round}/{per_block}",
                note=" · ".join(filter(None, [score, rate, f"≤ {left}" if left else ""])),
            )

        def on_controls(fed: Federation) -> None:
            nonlocal n_blocks
            n_blocks = len(fed.stream.blocks)
            bar.update(task, total=len(controls) * n_blocks, completed=0, description="controls", note="")

        def on_control(name: str, block: int) -> None:
            checking.step()
            done = controls.index(name) * n_blocks + block + 1 if name in controls else 0
            bar.update(
                task,
                total=len(controls) * n_blocks,
                completed=done,
                description=f"controls: {CONTROL_NAMES.get(name, name)}",
                note=checking.format_remaining(len(controls) * n_blocks - done),
            )

        yield TrainingCallbacks(on_start, on_round, on_controls, on_control)


def _list_run_notes(fed: Federation) -> list[str]:
    """What people should know before the first round, a line each."""
    from tacita.core.config import TrainConfig
    from tacita.data.filters import list_data_notes
    from tacita.report.promises import warn_large_delta

    notes = list_data_notes(fed.stream, [part.name for part in fed.parts])
    if fed.learner.name != "rows" and fed.config.train.rounds != TrainConfig().rounds:
        notes.append(f"backbone '{fed.backbone.name}' has its own rounds: train.rounds (--rounds) is not used.")
    deltas = [float(getattr(part.config, "delta", 0.0)) for part in fed.parts if part.ledger() is not None]
    deltas += [fed.config.privacy.delta] if fed.config.privacy.epsilon is not None else []
    return notes + warn_large_delta(max(deltas, default=0.0), fed.stream.n_users)


def print_data_notes(stream: BlockStream) -> None:
    """What was read of the data, and what filtering took."""
    from tacita.data.filters import list_data_notes

    for note in list_data_notes(stream):
        print_note(note)


# Results


def show_result(run: Run, brief: bool = False) -> None:
    """Quality per block beside the controls, one table per metric, and what to think of it."""
    from tacita.report.data import find_read_mode, method_name

    result, backbone = run.result, run.config.backbone.get("name", "mf")
    method = method_name(backbone, run.config.method, run.config.parts)
    scored = {method: (result["blocks"], result["mean"])}
    read, skipped = find_read_mode(result), []
    for name, control in result["controls"].items():
        if "skipped" in control:
            skipped.append(f"{CONTROL_NAMES.get(name, name)} was skipped: {control['skipped']}.")
        else:
            scored[CONTROL_NAMES.get(name, name)] = (control["blocks"], control["mean"])
    for metric in list(result["mean"])[:2]:
        title = f"{metric}: {method} on {result['data']['name']}"
        title += f", backbone {backbone}" if backbone != method else ""
        title += f", read {read}" if read else ""
        Screen().print(_score_table(title, metric, scored))
    untested = [str(block["block"]) for block in result["blocks"] if not block["users"]]
    if untested:
        print_answer(f"Nobody could be tested in block {', '.join(untested)}: no score, left out of every mean.")
    for line in skipped:
        print_note(line)
    if not brief:
        _show_verdict(run)


def _score_table(title: str, metric: str, scored: Mapping[str, tuple[list[dict[str, Any]], dict[str, float]]]) -> Table:
    """Methods as rows and blocks as columns, or the other way round where there are many blocks."""
    tested = [bool(b["users"]) for b in next(iter(scored.values()))[0]]
    n_blocks = len(tested)
    known = [*tested, any(tested[1:] or tested)]  # a block that tested nobody has no score, only a dash
    columns = {
        name: [f"{v:.4f}" if ok else "–" for v, ok in zip([*(b[metric] for b in blocks), mean[metric]], known)]
        for name, (blocks, mean) in scored.items()
    }
    heads = [f"block {n}" for n in range(n_blocks)]
    heads.append("mean" if n_blocks < 3 or not all(tested[1:]) else f"mean 1–{n_blocks - 1}")
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    table.add_column("")
    if n_blocks <= MOST_BLOCK_COLUMNS:
        for head in heads:
            table.add_column(head, justify="right", style="bold" if head.startswith("mean") else "")
        for place, (name, values) in enumerate(columns.items()):
            table.add_row(escape(name), *values, style="" if place else "cyan")
        return table
    for place, name in enumerate(columns):
        table.add_column(escape(name), justify="right", style="" if place else "cyan")
    for head, row in zip(heads, zip(*columns.values(), strict=True), strict=True):
        table.add_row(head, *row, style="bold" if head.startswith("mean") else "")
    return table


def _show_verdict(run: Run) -> None:
    from tacita.report.data import format_bytes, judge_run, read_run

    found = read_run(run.folder)
    for _, sentence in judge_run(found)[: max(1, len(found.better_controls))]:
        print_note(sentence)
    print_note(
        f"Sent per client and {found.exchange_unit}: {format_bytes(found.up)} up, {format_bytes(found.down)} down."
    )
    print_note(f"Report: {run.folder / 'report.html'}")


def show_entries(title: str, entries: Sequence[TableEntry], labels: Mapping[str, str]) -> None:
    """Cells of a paper's table: ours with its interval, the published value, and what that means."""
    colours = {"agrees": "green", "higher": "cyan", "lower": "red"}
    print_markup(f"[bold]{escape(title)}[/bold]")
    for place in dict.fromkeys((one.dataset, one.backbone) for one in entries):
        table = Table(title=escape(", ".join(place)), title_justify="left")
        for name in ("method", "what", "ours", "paper", ""):
            table.add_column(name, justify="right" if name in ("ours", "paper") else "left", no_wrap=name == "ours")
        for one in (one for one in entries if (one.dataset, one.backbone) == place):
            ours = f"{one.mean:.4f}" if math.isnan(one.half) else f"{one.mean:.4f} ± {one.half:.4f}"
            theirs = "" if one.published is None else f"{one.published:.4f}"
            cells = (labels.get(one.variant, one.variant), f"{one.metric} {one.column}", ours, theirs)
            table.add_row(*map(escape, cells), one.verdict, style=colours.get(one.verdict, ""))
        Screen().print(table)


def show_recommendations(user: str, items: Sequence[Mapping[str, Any]], wanted: int = 0) -> None:
    titled = any(one["title"] for one in items)
    popular = any(one.get("basis") == "popularity" for one in items)
    for_whom = f"for user {user}" + (": popular items, nothing is known of this person" if popular else "")
    table = Table(title=escape(for_whom), title_justify="left")
    number = "popularity" if popular else "score"  # decayed over blocks, noised under a budget: no count of people
    for name in ["", "item", *(["title"] if titled else []), number]:
        table.add_column(name, justify="right" if name in ("", number) else "left", overflow="fold")
    for place, one in enumerate(items, 1):
        title = [escape(one["title"] or "")] if titled else []
        table.add_row(str(place), escape(one["item"]), *title, f"{one['score']:.4g}")
    Screen().print(table)
    if len(items) < wanted:
        print_note(f"Only {len(items)} items are left that user {user} does not know; --seen lists the others too.")


def show_table(title: str, rows: Sequence[Mapping[str, Any]], left_aligned: Sequence[str] = ()) -> None:
    """Plain rows under a title; columns that nobody filled are left out."""
    shown = [name for name in (rows[0] if rows else ()) if any(row[name] not in (None, "") for row in rows)]
    table = Table(title=escape(title), title_justify="left")
    for name in shown:
        table.add_column(name, justify="left" if name in left_aligned else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape("" if row[name] is None else _format_value("", row[name])) for name in shown))
    Screen().print(table)


def show_settings(settings: Sequence[Setting]) -> None:
    """Settings under the table, model or part they belong to."""
    for place in dict.fromkeys(one.owner for one in settings):
        print_markup(f"[bold]{escape(place)}[/bold]")
        for one in (one for one in settings if one.owner == place):
            print_markup(f"  [cyan]{escape(one.key)}[/cyan] = {escape(one.default)}  [dim]({escape(one.kind)})[/dim]")
            print_markup(f"      {escape(one.about)}")


def show_datasets(datasets: Mapping[str, DatasetInfo]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, info in datasets.items():
        table.add_row(name, f"{escape(info.about)}\n[dim]{escape(info.terms)}[/dim]")
    Screen(highlight=False).print(table)
    print_note(
        "ml-100k is downloaded when it is first used; the others are read from a folder (--data-dir or TACITA_DATA)."
    )


def show_facts(facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        print_markup(f"[bold]{escape(key)}[/bold]: {escape(_format_value(key, value))}")


def _format_value(key: str, value: Any) -> str:
    if value is None:
        return "none"
    if key == "time range":
        return " to ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(_format_value("", one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value('', one)}" for name, one in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def show_bench(result: Mapping[str, Any], as_json: bool) -> None:
    """Medians; single timings are in the JSON."""
    if as_json:
        print_json(result)
        return
    show_facts({k: v for k, v in result.items() if k != "rows" and not k.endswith("_all")})
    rows = [{k: v for k, v in row.items() if not k.endswith("_all")} for row in result.get("rows", [])]
    if rows:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(_format_value("", value) for value in row.values()))
        Screen().print(table)


def show_checks(checks: Sequence[Mapping[str, str]]) -> None:
    marks = {"ok": "[green]ok   [/green]", "note": "[yellow]note [/yellow]", "fails": "[red]fails[/red]"}
    for check in checks:
        print_markup(f"{marks[check['state']]}  {escape(check['what'])}: {escape(check['detail'])}")
