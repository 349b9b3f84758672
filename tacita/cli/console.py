"""The terminal: lines of the answer, notes, and progress with the time that is left.

Results go to standard output; progress and notes go to standard error, where a bar vanishes when its work ends. Where
that is no terminal, a plain line every few seconds shows the progress.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
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
from rich.table import Column
from rich.text import Text

from tacita.cli.time_left import Pace, TimeLeft
from tacita.core.errors import make_printable

if TYPE_CHECKING:
    from tacita.core.types import BlockStream
    from tacita.federation.rounds import Progress as RunProgress
    from tacita.federation.rounds import RoundReport
    from tacita.round.plan import Federation
    from tacita.runs.callbacks import TrainingCallbacks

CONTROL_NAMES = {
    "random": "random",
    "popular": "most popular",
    "alone": "no federation",
    "linear": "centralised linear",
}
LINE_SECONDS = 5.0  # between two lines of progress where there is no terminal


class Screen(Console):
    """A console on which no text from a file can steer the terminal."""

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


# Progress


@contextmanager
def _open_bar(quiet: bool, *columns: ProgressColumn) -> Iterator[Progress]:
    """A bar that vanishes when its work ends; a file or pipe gets lines instead."""
    screen = Screen(stderr=True)
    is_hidden = quiet or not screen.is_interactive
    bar = Progress(*columns, console=screen, transient=True, disable=is_hidden)
    if quiet or screen.is_interactive:
        with bar:
            yield bar
        return
    ended = threading.Event()
    printer = threading.Thread(target=_print_lines, args=(bar, ended, sys.stderr), daemon=True)
    printer.start()  # a thread, because some work is silent for minutes
    try:
        yield bar
    finally:
        ended.set()
        printer.join()


def _print_lines(bar: Progress, ended: threading.Event, out: TextIO) -> None:
    """Print the state of a bar every few seconds, until its work ends or nobody reads any more."""
    with suppress(OSError, ValueError):
        while not ended.wait(LINE_SECONDS):
            for task in bar.tasks:
                print(_format_line(task), file=out, flush=True)


def _format_line(task: Task) -> str:
    elapsed = timedelta(seconds=round(task.elapsed or 0))
    count = ""
    if task.fields.get("counted") and task.total:
        count = f"{task.completed:.0f}/{task.total:.0f}"
    return _join_notes(f"{elapsed} {task.description}", count, _format_note(task))


def _format_note(task: Task) -> str:
    """What is said of a task, and the time that is left now."""
    time_left = task.fields.get("time_left")
    remaining = time_left.describe() if time_left is not None else ""
    return _join_notes(task.fields.get("note", ""), remaining)


class NoteColumn(ProgressColumn):
    """The note of a task; its time left moves whenever the screen is drawn."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        return Text(_format_note(task))


def _join_notes(*notes: str) -> str:
    return " · ".join(filter(None, notes))


@contextmanager
def show_clock(what: str, quiet: bool = False) -> Iterator[None]:
    """A clock beside work whose length is not known."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with _open_bar(quiet, *columns) as bar:
        bar.add_task(what)
        yield


@contextmanager
def show_progress(what: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A bar over a number of steps. Call the yielded function with the steps done, the total, and maybe a note."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        NoteColumn(),
    )
    with _open_bar(quiet, *columns) as bar:
        task = bar.add_task(what, total=None, note="", counted=True, time_left=None)
        pace = Pace()

        def update(done: int, total: int, note: str = "") -> None:
            pace.record(done)
            time_left = TimeLeft(pace, total - done)
            bar.update(task, completed=done, total=total, note=note, time_left=time_left)

        yield update


@contextmanager
def show_training(quiet: bool = False) -> Iterator[TrainingCallbacks]:
    """A bar over all rounds a run may take, then over the controls; a block that ends early moves it ahead."""
    from tacita.runs.callbacks import TrainingCallbacks

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        NoteColumn(),
    )
    with _open_bar(quiet, *columns) as bar:
        shown = _TrainingBar(bar, quiet)
        yield TrainingCallbacks(
            on_start=shown.on_start,
            on_round=shown.on_round,
            on_controls=shown.on_controls,
            on_control=shown.on_control,
        )


class _TrainingBar:
    """A bar that follows the callbacks of a run."""

    def __init__(self, bar: Progress, quiet: bool) -> None:
        self._bar = bar
        self._quiet = quiet
        self._task = bar.add_task("loading", total=None, note="", time_left=None)
        self._afterwards = ""
        self._rounds = 1  # in a block, at most
        self._n_blocks = 1
        self._round_pace = Pace()
        self._control_pace = Pace()
        self._controls = list(CONTROL_NAMES)

    def on_start(self, federation: Federation, progress: RunProgress) -> None:
        self._rounds = federation.learner.rounds
        self._n_blocks = len(federation.stream.blocks)
        if federation.config.evaluate.controls:
            self._afterwards = " + controls"
        rounds_in_block = progress.server.round * progress.in_block
        done = len(progress.results) * self._rounds + rounds_in_block
        total = self._rounds * self._n_blocks
        self._bar.update(self._task, total=total, completed=done, description="training")
        if not self._quiet:
            for note in _list_run_notes(federation):
                self._bar.console.print(note, markup=False, highlight=False, soft_wrap=True)
        self._round_pace.step()

    def on_round(self, report: RoundReport) -> None:
        pace = self._round_pace
        pace.step()
        done = report.block * self._rounds + report.round
        score = f"valid {report.valid:.4f}" if report.valid is not None else ""
        rate = f"{pace.per_second:.3g} rounds/s" if pace.per_second else ""
        time_left = TimeLeft(pace, self._rounds * self._n_blocks - done, f"≤ {{}}{self._afterwards}")
        self._bar.update(
            self._task,
            completed=done,
            description=f"block {report.block + 1}/{self._n_blocks} round {report.round}/{self._rounds}",
            note=_join_notes(score, rate),
            time_left=time_left,
        )

    def on_controls(self, federation: Federation) -> None:
        from tacita.runs.controls import find_skip_reason

        self._n_blocks = len(federation.stream.blocks)
        self._controls = [name for name in CONTROL_NAMES if find_skip_reason(name, federation) is None]
        total = len(self._controls) * self._n_blocks
        first = self._name_control(0)
        self._bar.update(self._task, total=total, completed=0, description=first, note="", time_left=None)
        self._control_pace.step()

    def _name_control(self, done: int) -> str:
        """The control that is being computed after so many blocks of controls."""
        place = done // self._n_blocks
        if place >= len(self._controls):
            return "controls"
        return f"controls: {CONTROL_NAMES[self._controls[place]]}"

    def on_control(self, name: str, block: int) -> None:
        self._control_pace.step()
        done = 0
        if name in self._controls:
            done = self._controls.index(name) * self._n_blocks + block + 1
        total = len(self._controls) * self._n_blocks
        self._bar.update(
            self._task,
            total=total,
            completed=done,
            description=self._name_control(done),
            time_left=TimeLeft(self._control_pace, total - done),
        )


def _list_run_notes(federation: Federation) -> list[str]:
    """What people should know before the first round, a line each."""
    from tacita.core.config import TrainConfig
    from tacita.data.filters import list_data_notes
    from tacita.report.promises import warn_large_delta
    from tacita.round.learner import find_ledger

    config = federation.config
    notes = list_data_notes(federation.stream, [part.name for part in federation.parts])
    has_other_rounds = config.train.rounds != TrainConfig().rounds
    if federation.learner.name == "statistic" and has_other_rounds:
        backbone = federation.backbone.name
        notes.append(f"backbone '{backbone}' has its own rounds: train.rounds (--rounds) is not used.")
    deltas = [float(getattr(part.config, "delta", 0.0)) for part in federation.parts if find_ledger(part) is not None]
    if config.privacy.epsilon is not None:
        deltas.append(config.privacy.delta)
    return notes + warn_large_delta(max(deltas, default=0.0), federation.stream.n_users)


def print_data_notes(stream: BlockStream) -> None:
    """What was read of the data, and what filtering removed."""
    from tacita.data.filters import list_data_notes

    for note in list_data_notes(stream):
        print_note(note)
