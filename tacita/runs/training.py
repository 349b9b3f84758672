"""Train a run into its folder, resumable after a kill at any moment.

While it trains, checkpoint.safetensors holds where it stands; rounds are deterministic, so going on from any
checkpoint gives the numbers of an unbroken run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.files import (
    JsonLinesWriter,
    lock_folder,
    read_arrays,
    remove_temporary_files,
    write_arrays,
    write_bytes,
    write_json,
)
from tacita.data.frames import IN_MEMORY, Frame
from tacita.data.silos import SiloAssignment
from tacita.federation.evaluation import resolve_read_setting
from tacita.federation.rounds import Progress, RoundReport, run_stream, start_run
from tacita.federation.state_arrays import pack_progress, read_progress
from tacita.metrics import summarise_continual
from tacita.report.promises import PRIVACY_KEY, privacy_lines
from tacita.round.plan import Federation
from tacita.runs.assembly import ALL_CORES, Machine, assemble
from tacita.runs.controls import CONTROLS, average_blocks, run_controls
from tacita.runs.ledger import join_accounts, summarise_spending
from tacita.runs.run_folder import (
    UNFINISHED,
    is_finished,
    make_folder,
    matches_config,
    read_config,
    read_ids,
    read_result,
    write_models,
)
from tacita.runs.serving import Run, open_run

CHECKPOINT_SECONDS = 10.0  # at least this long between two checkpoints
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into writing them


@dataclass(frozen=True)
class TrainingCallbacks:
    """Who wants to know how a run is going."""

    on_start: Callable[[Federation, Progress], None] = lambda fed, progress: None
    on_round: Callable[[RoundReport], None] = lambda report: None
    on_controls: Callable[[Federation], None] = lambda fed: None  # the run is trained, its controls begin
    on_control: Callable[[str, int], None] = lambda name, block: None


NO_CALLBACKS = TrainingCallbacks()


def train(
    config: RunConfig,
    out: Path,
    machine: Machine = ALL_CORES,
    watcher: TrainingCallbacks = NO_CALLBACKS,
    frame: Frame | None = None,
) -> Run:
    """A new run in a new folder; what fails before its first round leaves no folder.

    `given`: the table it learns from, where that is in memory.
    """
    if out.exists() or out.is_symlink():
        begun = (out / "config.toml").is_file()
        told = f"exists; go on with `tacita train --out {out} --resume`, or" if begun else "exists and holds no run;"
        raise TacitaError(f"{out} {told} choose another --out.")
    fed = assemble(config, machine, frame)
    make_folder(out, fed.config, fed.stream)
    with lock_folder(out):
        try:
            _train_to_end(fed, start_run(fed), out, watcher)
        except (TacitaError, MemoryError):
            events = out / "events.jsonl"
            if not events.is_file() or events.stat().st_size == 0:
                shutil.rmtree(out, ignore_errors=True)
            raise
        return _run_missing_controls(fed, out, watcher)


def resume(
    out: Path,
    machine: Machine = ALL_CORES,
    watcher: TrainingCallbacks = NO_CALLBACKS,
    controls: bool = True,
    frame: Frame | None = None,
) -> Run:
    """Go on with a run that was interrupted; a finished one is simply opened.

    A run that was only killed in its controls does not train again; without `controls` it ends without the rest.
    """
    if not (out / "config.toml").is_file() or not (out / "ids.json").is_file():
        remedy = "leave out --resume and choose another --out" if out.exists() else "leave out --resume"
        raise TacitaError(f"{out} holds no run to go on with; {remedy} to start one.")
    saved = out / "checkpoint.safetensors"
    with lock_folder(out):
        remove_temporary_files(out)
        config, ids = read_config(out), read_ids(out)
        if is_finished(out):
            if frame is not None and ids["fingerprint"] != assemble(config, machine, frame).stream.fingerprint:
                raise TacitaError(f"{out} is finished, and learned from other data than this table; start a new run.")
            return _publish_run(out)
        if "settings" not in ids:
            raise TacitaError(f"{out} was begun by an earlier version of tacita; start a new run with this one.")
        if config.data == IN_MEMORY and frame is None:
            raise TacitaError(
                f"{out} learned from a table in memory, which is not kept; give it again in Python, as in "
                f"tacita.train(table, out={str(out)!r}, resume=True)."
            )
        fed = assemble(config, machine, frame)
        if ids["fingerprint"] != fed.stream.fingerprint:
            raise TacitaError(f"{out} was trained on other data than '{config.data}' holds now; start a new run.")
        if not (out / "result.json").is_file():
            progress = _read_checkpoint(saved, config) if saved.is_file() else start_run(fed)
            spent = _trim_events(out / "events.jsonl", progress)
            _train_to_end(fed, progress, out, watcher, spent)
        return _run_missing_controls(fed, out, watcher, controls)


def _train_to_end(
    fed: Federation, progress: Progress, out: Path, watcher: TrainingCallbacks, spent: float = 0.0
) -> None:
    """All rounds, then models and numbers on disk: what comes after cannot lose them."""
    watcher.on_start(fed, progress)
    began = time.monotonic() - spent
    due = time.monotonic() + CHECKPOINT_SECONDS
    with JsonLinesWriter(out / "events.jsonl") as events:

        def on_round(report: RoundReport, now: Progress) -> None:
            nonlocal due
            ended = time.monotonic()
            events.add({**asdict(report), "seconds": round(ended - began, 3)})
            if ended >= due:
                events.sync()
                arrays, note = pack_progress(now)
                note["config"] = fed.config.model_dump_json()
                write_arrays(out / "checkpoint.safetensors", arrays, note)
                cost = time.monotonic() - ended
                due = ended + cost + max(CHECKPOINT_SECONDS, cost / CHECKPOINT_SHARE)
            watcher.on_round(report)

        run_stream(fed, progress, on_round)
    write_models(fed, progress, out)
    pending = {UNFINISHED: "controls"} if fed.config.evaluate.controls else {}
    write_json(out / "result.json", {**_build_result(fed, progress), **pending})
    (out / "checkpoint.safetensors").unlink(missing_ok=True)


def _run_missing_controls(fed: Federation, out: Path, watcher: TrainingCallbacks, wanted: bool = True) -> Run:
    """The controls that are still missing, each on disk as soon as it is there."""
    result = read_result(out)
    if result.pop(UNFINISHED, None):
        (out / "report.html").unlink(missing_ok=True)  # somebody may have looked before the controls were there
        if wanted:
            watcher.on_controls(fed)
            try:
                for name, found in run_controls(fed, watcher.on_control, without=tuple(result["controls"])):
                    result["controls"][name] = found
                    write_json(out / "result.json", {**result, UNFINISHED: "controls"})
            except MemoryError:
                raise TacitaError(
                    f"not enough memory for a control; the run itself is in {out}: end it without the rest with "
                    f"`tacita train --out {out} --resume --no-controls`."
                ) from None
        result["controls"] = {name: {"skipped": "switched off"} for name in CONTROLS} | result["controls"]
        write_json(out / "result.json", result)
    return _publish_run(out)


def save_run(fed: Federation, progress: Progress, out: Path) -> None:
    """A run that was trained elsewhere (a trial) as a finished folder, without controls."""
    if out.exists():
        return
    make_folder(out, fed.config, fed.stream)
    write_bytes(out / "events.jsonl", b"")
    write_models(fed, progress, out)
    write_json(out / "result.json", _build_result(fed, progress))


def _publish_run(out: Path) -> Run:
    """A finished run with its report and without its checkpoint, even if it was killed after its last round."""
    from tacita.report.pages import write_report

    run = open_run(out)
    if not (out / "report.html").is_file():
        write_report([out], out / "report.html")
    if (out / "checkpoint.safetensors").is_file():
        (out / "checkpoint.safetensors").unlink()
    return run


def _build_result(fed: Federation, progress: Progress) -> dict[str, Any]:
    blocks = progress.results
    kept = summarise_continual([b["on_blocks"] for b in blocks], [b["users"] for b in blocks])
    counted = join_accounts((*fed.parts, fed.learner), progress.clients.parts)
    result = {
        "tacita": tacita.__version__,
        "config": fed.config.model_dump(mode="json"),
        "read": resolve_read_setting(fed),
        "data": {
            "name": fed.stream.name,
            "fingerprint": fed.stream.fingerprint,
            "source": fed.stream.source,
            "users": fed.stream.n_users,
            "items": fed.stream.n_items,
            "removed": [asdict(one) for one in fed.stream.removed],
            "notes": list(fed.stream.notes),
            **({"silos": _describe_silos(fed.homes)} if fed.homes else {}),
        },
        "blocks": blocks,
        "mean": average_blocks(blocks),
        "continual": {name: None if math.isnan(value) else value for name, value in kept.items()},
        "controls": {},
        "bytes": {
            "up_per_client_and_round": float(np.mean([b["bytes_up"] for b in blocks])),
            "down_per_client_and_round": float(np.mean([b["bytes_down"] for b in blocks])),
        },
        **({} if counted is None else {"privacy": summarise_spending(*counted)}),
    }
    return {**result, PRIVACY_KEY: privacy_lines(fed.config, result)}


def _describe_silos(homes: SiloAssignment) -> dict[str, Any]:
    """How many people live in silos, and how much silos differ."""
    people = np.bincount(homes.silo)
    sizes = {"fewest": int(people.min()), "most": int(people.max())}
    return {"by": homes.by, "people": sizes, "divergence_bits": homes.divergence}


def _read_checkpoint(path: Path, config: RunConfig) -> Progress:
    arrays, note = read_arrays(path, "delete it to train this run again from its first round")
    if not matches_config(note, config):
        raise TacitaError(f"{path.parent / 'config.toml'} was changed after the run began; start a new run instead.")
    return read_progress(arrays, note)


def _trim_events(path: Path, progress: Progress) -> float:
    """Forget events after the checkpoint, whose rounds are about to be run again; returns the time spent before."""
    if not path.is_file():
        return 0.0
    reached = (progress.server.block, progress.server.round) if progress.in_block else (len(progress.results), 0)
    kept, spent = [], 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
            if (event["block"], event["round"]) <= reached:
                kept.append(line + "\n")
                spent = float(event["seconds"])
        except (ValueError, TypeError, LookupError):
            break  # the line that was being written when the run was killed
    write_bytes(path, "".join(kept).encode())
    return spent
