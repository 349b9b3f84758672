"""The models of a run that are served: read once, and again whenever the run's folder has changed.

A finished run is served as its files are. Of a run that still trains, the newest block can be served: the best round of
its last checkpoint, with the people and items that have come by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays
from tacita.federation.rounds import Progress
from tacita.report.promises import summarise_privacy
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.loaded_run import LoadedRun, Stamp, load_run, read_settled, read_stamp
from tacita.runs.run_folder import SavedRun, build_lists, read_config, read_ids, read_result
from tacita.runs.serving import count_rounds
from tacita.runs.training import CHECKPOINT, read_checkpoint


@dataclass(frozen=True)
class ServedModels:
    """What answers are computed from."""

    loaded: LoadedRun
    rounds: int  # that the run's own people had, for newcomers
    privacy: str  # what the run promises, in one sentence


ModelReader = Callable[[], ServedModels]
StampReader = Callable[[], Stamp]


class ModelCache:
    """The models of a run in memory; `load` is for one thread."""

    def __init__(self, read_models: ModelReader, read_stamp: StampReader) -> None:
        self._read_models = read_models
        self._read_stamp = read_stamp
        self._stamp: Stamp = ()
        self._models: ServedModels | None = None

    def load(self) -> ServedModels:
        """The models as the folder has them now: what somebody took back is not served from memory."""
        stamp = self._read_stamp()
        is_current = stamp == self._stamp
        if self._models is None or not stamp or not is_current:
            models, self._stamp = read_settled(self._read_models, self._read_stamp)
            self._models = models
        return self._models


def serve_finished_run(folder: Path) -> ModelCache:
    def read_models() -> ServedModels:
        _refuse_training_run(folder)
        result = read_result(folder)
        loaded = load_run(folder)
        privacy = summarise_privacy(loaded.saved.config, result)
        return ServedModels(loaded, count_rounds(result), privacy)

    return ModelCache(read_models, lambda: read_stamp(folder))


def _refuse_training_run(folder: Path) -> None:
    """A run that still trains has no files of models; its newest block can be served instead."""
    is_finished = (folder / "result.json").is_file()
    if not is_finished and (folder / CHECKPOINT).is_file():
        raise TacitaError(f"{folder} is not finished; `tacita serve {folder} --block` serves its newest block.")


def serve_newest_block(folder: Path, machine: Machine) -> ModelCache:
    """The newest block of a run that still trains; once it is finished, the finished run."""
    finished = serve_finished_run(folder)
    federations: list[Federation] = []  # the data, read once

    def read_models() -> ServedModels:
        if (folder / "result.json").is_file():
            return finished.load()
        if not federations:
            federations.append(_assemble_data(folder, machine))
        return _read_newest_block(folder, federations[0])

    def read_both_stamps() -> Stamp:
        if (folder / "result.json").is_file():
            return read_stamp(folder)
        try:
            stat = (folder / CHECKPOINT).stat()
        except OSError:  # there is none yet, or the run has just ended
            return ()
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns)

    return ModelCache(read_models, read_both_stamps)


def _assemble_data(folder: Path, machine: Machine) -> Federation:
    """The run with its data, which a checkpoint does not hold."""
    config = read_config(folder)
    federation = assemble_federation(config, machine)
    if read_ids(folder)["fingerprint"] != federation.stream.fingerprint:
        raise TacitaError(f"{folder} learns from other data than '{config.data}' holds now; serve it once finished.")
    return federation


def _read_newest_block(folder: Path, federation: Federation) -> ServedModels:
    checkpoint = folder / CHECKPOINT
    if not checkpoint.is_file():
        raise TacitaError(f"{folder} has no checkpoint yet: one is written every ten seconds or so; try again then.")
    progress = read_checkpoint(checkpoint, federation.config)
    block = progress.best_server.block
    stream = federation.stream
    seen_stream = replace(stream, blocks=stream.blocks[: block + 1])
    saved = _build_saved_run(folder, replace(federation, stream=seen_stream), progress)
    plan = federation
    loaded = LoadedRun(saved, plan, progress.best_server, progress.best_clients)
    rounds = [int(result["best_round"]) for result in progress.results]
    n_rounds = max(1, sum(rounds) + progress.best_round)
    privacy = f"Privacy: block {block} is still being trained; what the run promises is said once it is finished."
    return ServedModels(loaded, n_rounds, privacy)


def _build_saved_run(folder: Path, federation: Federation, progress: Progress) -> SavedRun:
    """A run folder's content as it would be if the run ended with this block."""
    ids = read_ids(folder)
    n_users = progress.best_clients.n_users
    n_items = len(progress.best_server.items)
    users = ids["users"][:n_users]
    items = ids["items"][:n_items]
    lists: Arrays = build_lists(federation)
    no_arrays: Arrays = {}
    return SavedRun(folder, federation.config, {**ids, "users": users, "items": items}, no_arrays, {}, lists, {})
