"""Code of your own while a run goes on: `Callback` for people, `TrainingCallbacks` for the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.federation.rounds import Progress, RoundReport
from tacita.round.plan import Federation
from tacita.runs.serving import Run


@dataclass(frozen=True)
class TrainingCallbacks:
    """Functions that are called while a run goes on."""

    on_start: Callable[[Federation, Progress], None] = lambda federation, progress: None
    on_round: Callable[[RoundReport], None] = lambda report: None
    on_block: Callable[[dict[str, Any]], None] = lambda scores: None  # a block is tested
    on_controls: Callable[[Federation], None] = lambda federation: None  # the run is trained, its controls begin
    on_control: Callable[[str, int], None] = lambda name, block: None
    on_end: Callable[[Run], None] = lambda run: None


NO_CALLBACKS = TrainingCallbacks()


@dataclass(frozen=True)
class RunStart:
    """What is known of a run before its first round."""

    folder: Path
    config: RunConfig
    data: str  # the name of the data, without its path
    n_users: int
    n_items: int
    n_blocks: int
    rounds: int  # in a block, at most
    states_epsilon: bool  # scores and counts of exact data are outside of what it promises


class Callback:
    """Your own code while a run goes on: derive from it and override what you need.

    `on_round` gets a round (`block`, `round`, `clients`, `bytes_up`, `bytes_down`, `valid`, `notes`, `seconds`),
    `on_block` the row of a block in result.json, `on_end` the finished run with its controls. Whatever they raise ends
    the run, which can be resumed.

    >>> import tacita as tc
    >>> class Printer(tc.Callback):
    ...     def on_block(self, scores):
    ...         print("block", scores["block"], "is tested on", scores["users"], "people")
    >>> shop = tc.train("synthetic:users=300,items=120,per_user=20,seed=3", backbone="tally", out="printed",
    ...                split={"kind": "random"}, callbacks=[Printer()])
    block 0 is tested on 300 people
    """

    def on_start(self, start: RunStart) -> None:
        """Called once, before the first round that is left to do."""

    def on_round(self, report: RoundReport) -> None:
        """Called after each round; `valid` is None where a round is not validated."""

    def on_block(self, scores: dict[str, Any]) -> None:
        """Called when a block is tested."""

    def on_end(self, run: Run) -> None:
        """Called when the run and its controls are on disk."""


def refuse_other_callbacks(callbacks: Sequence[Any]) -> None:
    """Only callbacks can be called back."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            kind = type(callback).__name__
            raise TacitaError(f"callbacks holds an object of type {kind}; derive its class from tacita.Callback.")


def join_callbacks(
    shown: TrainingCallbacks, callbacks: Sequence[Callback], folder: Path, earlier: Sequence[RoundReport] = ()
) -> TrainingCallbacks:
    """Callbacks of people beside those that show progress; `earlier`: rounds that were run before the folder was."""
    if not callbacks:
        return shown
    notifier = _Notifier(shown, callbacks, folder, earlier)
    return TrainingCallbacks(
        on_start=notifier.on_start,
        on_round=notifier.on_round,
        on_block=notifier.on_block,
        on_controls=notifier.on_controls,
        on_control=shown.on_control,
        on_end=notifier.on_end,
    )


class _Notifier:
    """Calls those who show progress first, then the callbacks in their order."""

    def __init__(
        self, shown: TrainingCallbacks, callbacks: Sequence[Callback], folder: Path, earlier: Sequence[RoundReport]
    ) -> None:
        self._shown = shown
        self._callbacks = callbacks
        self._folder = folder
        self._earlier = earlier
        self._has_started = False

    def on_start(self, federation: Federation, progress: Progress) -> None:
        self._shown.on_start(federation, progress)
        self._start(federation)

    def _start(self, federation: Federation) -> None:
        """Tell the callbacks that the run begins, or goes on with its controls alone."""
        if self._has_started:
            return
        self._has_started = True
        start = describe_start(federation, self._folder)
        for callback in self._callbacks:
            callback.on_start(start)
            for report in self._earlier:
                callback.on_round(report)

    def on_round(self, report: RoundReport) -> None:
        self._shown.on_round(report)
        for callback in self._callbacks:
            callback.on_round(report)

    def on_block(self, scores: dict[str, Any]) -> None:
        self._shown.on_block(scores)
        for callback in self._callbacks:
            callback.on_block(dict(scores))

    def on_controls(self, federation: Federation) -> None:
        self._shown.on_controls(federation)
        self._start(federation)

    def on_end(self, run: Run) -> None:
        self._shown.on_end(run)
        if not self._has_started:
            return  # the run was finished before
        for callback in self._callbacks:
            callback.on_end(run)


def describe_start(federation: Federation, folder: Path) -> RunStart:
    stream = federation.stream
    return RunStart(
        folder=folder,
        config=federation.config,
        data=stream.name,
        n_users=stream.n_users,
        n_items=stream.n_items,
        n_blocks=len(stream.blocks),
        rounds=federation.learner.rounds,
        states_epsilon=bool(federation.ledgers),
    )
