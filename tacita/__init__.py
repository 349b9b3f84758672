"""tacita: recommend without collecting.

The names of `__all__` are the Python interface: they and what they are documented to do stay. docs/python.md shows them
at work.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacita.core.errors import TacitaError
from tacita.core.python_messages import translate_errors

__version__ = "0.1.0"

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tacita.data.frames import Frame
    from tacita.runs.assembly import Machine
    from tacita.runs.callbacks import Callback, TrainingCallbacks
    from tacita.runs.recommender import Recommender
    from tacita.runs.serving import Run

__all__ = ["Callback", "Recommender", "Run", "TacitaError", "__version__", "compare", "load", "open_run", "train"]


def __getattr__(name: str) -> Any:
    if name == "Run":  # what runs are made of takes a second to import
        from tacita.runs.serving import Run

        return Run
    if name == "Callback":
        from tacita.runs.callbacks import Callback

        return Callback
    if name == "Recommender":
        from tacita.runs.recommender import Recommender

        return Recommender
    raise AttributeError(f"module 'tacita' has no attribute {name!r}")


def train(
    data: Any = None,
    *,
    backbone: str | dict[str, Any] | None = None,
    method: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> Run:
    """Train a run and return it, finished.

    `data` is a table of polars or pandas, a dict of columns, the path of a file, or the name of a dataset (default:
    "ml-100k"). Without a backbone or method the model that fits it best is taken. Columns are found as in a file;
    `columns={"user": "customer", "item": "sku"}` says which they are. All other settings are those of a config file,
    tables as dicts: `train={"rounds": 50}`; the command `tacita settings` lists them.

    Without `out` the folder is made under runs/, named after data, backbone, method and seed. `resume` goes on with the
    run in `out` and takes no settings but `evaluate={"controls": False}`; a table in memory has to be given again.

    On a terminal and in a notebook progress goes to standard error, as on the command line, unless `quiet=True`.
    `callbacks=[...]` calls your own code after every round and block and at the end (`tc.Callback`), and
    `track="tensorboard"` (or "mlflow", "wandb", or several in a list) logs the run for that tool.

    What is wrong is told as a `TacitaError`, in one sentence that names the remedy.

    >>> import tacita as tc
    >>> clicks = {"customer": ["ann", "ann", "ann", "bob", "bob", "bob"] * 5, "sku": list("abcdefghij") * 3}
    >>> shop = tc.train(clicks, columns={"user": "customer", "item": "sku"}, backbone="tally", out="clicks",
    ...                evaluate={"k": [3], "select_by": "ndcg@3"})
    >>> sorted(shop.users)
    ['ann', 'bob']
    """
    from tacita.core.files import to_folder_path
    from tacita.data.frames import IN_MEMORY
    from tacita.runs import assembly
    from tacita.runs.trackers.registry import open_trackers

    quiet = bool(settings.pop("quiet", False))
    own_callbacks = list(settings.pop("callbacks", None) or ())
    track = settings.pop("track", None)
    with translate_errors(), open_trackers(track) as trackers:
        table = _table(data)
        machine = assembly.Machine(data_dir=None if data_dir is None else to_folder_path(data_dir, "data_dir"))
        target = None if out is None else to_folder_path(out, "out")
        arguments: dict[str, Any] = {
            "backbone": {"name": backbone} if isinstance(backbone, str) else backbone,
            "method": method,
            "seed": seed,
            "data": IN_MEMORY if table is not None else data and str(data),
        }
        settings |= {name: value for name, value in arguments.items() if value is not None}
        callbacks = [*own_callbacks, *trackers]
        if resume:
            controls = _check_resumable(settings, target, names_data=table is None and data is not None)
            assert target is not None
            return _resume(target, machine, table, controls, _Watchers(quiet, callbacks))
        return _train(settings, target, machine, table, _Watchers(quiet, callbacks))


@dataclass(frozen=True)
class _Watchers:
    """Who is told how a run goes."""

    quiet: bool
    callbacks: list[Callback]

    def __post_init__(self) -> None:
        from tacita.runs.callbacks import refuse_other_callbacks

        refuse_other_callbacks(self.callbacks)


def _train(
    settings: dict[str, Any], target: Path | None, machine: Machine, table: Frame | None, watchers: _Watchers
) -> Run:
    from tacita.runs import training
    from tacita.runs.callbacks import join_callbacks
    from tacita.runs.default_model import resolve_model
    from tacita.runs.run_folder import find_free_folder

    config, start = resolve_model(settings, "the settings", machine, table, log.info)
    folder = target or find_free_folder(config)
    earlier = [] if start is None else [record.report for record in start.rounds]
    with _watching(watchers.quiet) as shown:
        callbacks = join_callbacks(shown, watchers.callbacks, folder, earlier)
        return training.train(config, folder, machine, callbacks, table, start)


def _resume(folder: Path, machine: Machine, table: Frame | None, controls: bool, watchers: _Watchers) -> Run:
    from tacita.runs import training
    from tacita.runs.callbacks import join_callbacks

    with _watching(watchers.quiet) as shown:
        callbacks = join_callbacks(shown, watchers.callbacks, folder)
        return training.resume(folder, machine, callbacks, controls, frame=table)


def _check_resumable(settings: dict[str, Any], target: Path | None, names_data: bool) -> bool:
    """Whether a run that goes on gets its controls; refused where anything else is said of it."""
    evaluate = settings.pop("evaluate", {"controls": True})
    has_others = settings.keys() - {"data"} or evaluate not in ({"controls": True}, {"controls": False})
    if target is None or has_others or names_data:
        raise TacitaError(
            "resume=True goes on with the run in out, which has to be given, and its own settings; leave out "
            'all others but evaluate={"controls": False}.'
        )
    return bool(evaluate["controls"])


def _table(data: Any) -> Frame | None:
    """A table in memory; None: data is named, or left out."""
    from tacita.data.frames import convert_to_frame_or_none

    table = None if data is None or isinstance(data, str | Path) else convert_to_frame_or_none(data)
    if data is not None and table is None and not isinstance(data, str | Path):
        raise TacitaError(
            f"data of type {type(data).__name__} cannot be read; give a table of polars or pandas, a dict of "
            "columns, the path of a file or the name of a dataset."
        )
    return table


@contextmanager
def _watching(quiet: bool) -> Iterator[TrainingCallbacks]:
    """Who shows how a run goes: on a terminal a bar, in a notebook a line every few seconds, elsewhere nobody."""
    from tacita.runs.callbacks import NO_CALLBACKS

    if quiet or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield NO_CALLBACKS
        return
    from tacita.cli.console import show_training

    with show_training() as watcher:
        yield watcher


def load(run: str | Path) -> Run:
    """A finished run from its folder: to read its numbers, or to recommend from it.

    >>> import tacita as tc
    >>> tc.load("example").users == run.users
    True
    """
    from tacita.core.files import to_folder_path
    from tacita.runs import serving

    with translate_errors():
        return serving.open_run(to_folder_path(run))


open_run = load
"""The name that `load` had first."""


def compare(runs: Iterable[Run | str | Path], over: str | None = None) -> Frame:
    """Several runs as a table, a row each: run, method, backbone, data, seed, the mean of every metric, LA, RA and HM,
    bytes per client and round (of tally: and block, which is one exchange), epsilon (null: no epsilon), what the model
    reads of people when it is tested (`read`) and protocol.

    Only rows of the same `protocol` number share data, split, mask and ranking, and can be compared. With
    `over="seeds"` runs that differ in nothing but `seed` and `split.seed` are one row, with the half-width of the 95 %
    interval beside every mean, null where there is one run only, and a `name` that tells it from the others. Runs with
    the same numbers count once, and `note` says so.

    >>> import tacita as tc
    >>> tc.compare([run, "example"])["protocol"].to_list()
    [0, 0]
    """
    from tacita.runs.comparison import compare as compared

    with translate_errors():
        return compared(runs, over)
