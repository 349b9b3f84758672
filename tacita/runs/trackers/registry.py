"""Trackers by name, opened for a run and closed however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tacita.core.errors import TacitaError
from tacita.runs.trackers.mlflow_tracker import MlflowTracker
from tacita.runs.trackers.tensorboard_tracker import TensorBoardTracker
from tacita.runs.trackers.tracker import Tracker
from tacita.runs.trackers.wandb_tracker import WandbTracker

TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
ALWAYS = "jsonl"
"""Every run writes events.jsonl, asked or not."""


@contextmanager
def open_trackers(names: str | Sequence[str] | None) -> Iterator[list[Tracker]]:
    """The trackers of these names; one that has not ended with its run is stopped."""
    if names is None:
        names = []
    elif isinstance(names, str):
        names = [names]
    trackers = [make_tracker(name) for name in dict.fromkeys(names) if name != ALWAYS]
    try:
        yield trackers
    except BaseException:
        for tracker in trackers:
            tracker.stop()
        raise


def make_tracker(name: str) -> Tracker:
    if name not in TRACKERS:
        known = ", ".join([ALWAYS, *TRACKERS])
        raise TacitaError(f"--track {name}: there is no such tracker; choose of {known}.")
    return TRACKERS[name]()
