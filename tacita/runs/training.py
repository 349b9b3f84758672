"""Train a run into its folder, resumable after a kill at any moment.

While it trains, checkpoint.safetensors holds where it stands; rounds are deterministic, so going on from any
checkpoint gives the numbers of an unbroken run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.files import (
    JsonLinesWriter,
    disk_error,
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
from tacita.federation.rounds import Progress, RoundReport, make_initial_progress, run_remaining_blocks
from tacita.federation.state_arrays import flatten_progress_with_note, read_progress
from tacita.metrics import summarise_continual
from tacita.report.promises import PRIVACY_KEY, list_privacy_lines
from tacita.round.plan import Federation
from tacita.runs.assembly import ALL_CORES, Machine, assemble_federation
from tacita.runs.callbacks import NO_CALLBACKS, TrainingCallbacks
from tacita.runs.controls import CONTROLS, average_incremental_blocks, run_controls
from tacita.runs.default_model import RoundRecord, TrainingStart
from tacita.runs.file_schemas import RunIds, RunResult, ScoreRow
from tacita.runs.ledger import CountedParts, join_accounts, summarise_spending
from tacita.runs.noise_secret import delete_secret, hold_ranks, missing_secret_error, read_secret, store_secret
from tacita.runs.ranks import count_ranks, describe_ranks, explain_lost_rank, rounds_under_secret_noise, share_out
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

CHECKPOINT_SECONDS = 20.0  # at least this long between two checkpoints
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into writing them
CHECKPOINT = "checkpoint.safetensors"


def train(
    config: RunConfig,
    out: Path,
    machine: Machine = ALL_CORES,
    watcher: TrainingCallbacks = NO_CALLBACKS,
    frame: Frame | None = None,
    start: TrainingStart | None = None,
) -> Run:
    """A new run in a new folder; a failure before its first round leaves no folder.

    `frame`: the table it learns from, where that is in memory. `start`: a first block that was trained already.
    """
    refuse_existing_folder(out)
    if start is None:
        federation = assemble_federation(config, machine, frame)
        start = TrainingStart(federation, make_initial_progress(federation), ())
    federation = start.federation
    make_folder(out, federation.config, federation.stream)
    with lock_folder(out):
        try:
            if federation.draws.lab_secret:
                store_secret(out, federation.draws.lab_secret)
            spent = _write_rounds(out / "events.jsonl", start.rounds)
            _train_to_end(federation, start.progress, out, watcher, machine, spent)
        except (TacitaError, MemoryError):
            events = out / "events.jsonl"
            if not events.is_file() or events.stat().st_size == 0:
                delete_secret(out)
                shutil.rmtree(out, ignore_errors=True)
            raise
        run = _run_missing_controls(federation, out, watcher)
        watcher.on_end(run)
        return run


def _write_rounds(events: Path, rounds: Sequence[RoundRecord]) -> float:
    """Log rounds that were run before there was a folder; returns the time that they took."""
    with JsonLinesWriter(events) as log:
        for record in rounds:
            log.add({**asdict(record.report), "seconds": record.seconds})
    return rounds[-1].seconds if rounds else 0.0


def refuse_existing_folder(out: Path) -> None:
    """A new run needs a new folder in a place that can hold one."""
    for parent in out.parents:
        if parent.exists() and not parent.is_dir():
            raise disk_error(out, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not out.exists() and not out.is_symlink():
        return
    if (out / "config.toml").is_file():
        raise TacitaError(f"{out} exists; go on with `tacita train --out {out} --resume`, or choose another --out.")
    raise TacitaError(f"{out} exists and holds no run; choose another --out.")


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
    _refuse_missing_run(out)
    with lock_folder(out):
        remove_temporary_files(out)
        config = read_config(out)
        ids = read_ids(out)
        if is_finished(out):
            if frame is not None:
                fingerprint = assemble_federation(config, machine, frame).stream.fingerprint
                _refuse_other_table(out, ids, fingerprint)
            return _publish_run(out)
        _refuse_unresumable(out, config, ids, frame)
        secret = read_secret(out)
        federation = assemble_federation(config, machine, frame, noise_secret=secret)
        if ids["fingerprint"] != federation.stream.fingerprint:
            raise TacitaError(f"{out} was trained on other data than '{config.data}' holds now; start a new run.")
        if not (out / "result.json").is_file():
            if federation.draws.lab_secret and secret is None:
                raise missing_secret_error(out)
            checkpoint = out / CHECKPOINT
            progress = (
                read_checkpoint(checkpoint, config) if checkpoint.is_file() else make_initial_progress(federation)
            )
            spent = _trim_events(out / "events.jsonl", progress)
            _train_to_end(federation, progress, out, watcher, machine, spent)
        run = _run_missing_controls(federation, out, watcher, controls)
        watcher.on_end(run)
        return run


def _refuse_missing_run(out: Path) -> None:
    if (out / "config.toml").is_file() and (out / "ids.json").is_file():
        return
    remedy = "leave out --resume and choose another --out" if out.exists() else "leave out --resume"
    raise TacitaError(f"{out} holds no run to go on with; {remedy} to start one.")


def _refuse_other_table(out: Path, ids: RunIds, fingerprint: str) -> None:
    if ids["fingerprint"] != fingerprint:
        raise TacitaError(f"{out} is finished, and learned from other data than this table; start a new run.")


def _refuse_unresumable(out: Path, config: RunConfig, ids: RunIds, frame: Frame | None) -> None:
    """Refuse a run of an earlier version, and one whose table is gone."""
    if "settings" not in ids:
        raise TacitaError(f"{out} was begun by an earlier version of tacita; start a new run with this one.")
    if config.data == IN_MEMORY and frame is None:
        raise TacitaError(
            f"{out} learned from a table in memory, which is not kept; give it again in Python, as in "
            f"tacita.train(table, out={str(out)!r}, resume=True)."
        )


class CheckpointWriter:
    """Writes checkpoints of a run, so seldom that they take a small share of its time."""

    def __init__(self, federation: Federation, path: Path) -> None:
        self.federation = federation
        self.path = path
        self.due = time.monotonic() + CHECKPOINT_SECONDS

    def is_due(self, now: float) -> bool:
        return now >= self.due

    def write(self, progress: Progress, now: float) -> None:
        arrays, note = flatten_progress_with_note(progress.with_local_devices())
        note["config"] = self.federation.config.model_dump_json()
        write_arrays(self.path, arrays, note)
        cost = time.monotonic() - now
        pause = max(CHECKPOINT_SECONDS, cost / CHECKPOINT_SHARE)
        self.due = now + cost + pause


def _train_to_end(
    federation: Federation,
    progress: Progress,
    out: Path,
    watcher: TrainingCallbacks,
    machine: Machine,
    spent: float = 0.0,
) -> None:
    """All rounds, then models and numbers on disk, before anything else can fail."""
    watcher.on_start(federation, progress)
    began = time.monotonic() - spent
    checkpoints = CheckpointWriter(federation, out / CHECKPOINT)
    with JsonLinesWriter(out / "events.jsonl") as events:

        def on_round(report: RoundReport, progress: Progress) -> None:
            now = time.monotonic()
            seconds = round(now - began, 3)
            events.add({**asdict(report), "seconds": seconds})
            if checkpoints.is_due(now):
                events.sync()
                checkpoints.write(progress, now)
            watcher.on_round(report)

        needs_same_ranks = rounds_under_secret_noise(federation)
        with explain_lost_rank(machine, out, needs_same_ranks):
            progress = share_out(federation, progress, machine)
            if needs_same_ranks:
                _refuse_other_ranks(out, count_ranks(machine))
            run_remaining_blocks(federation, progress, on_round, watcher.on_block)
            progress = progress.with_local_devices()
            if machine.ranks is not None:
                machine.ranks.close()
    write_models(federation, progress, out)
    result = _build_result(federation, progress)
    ranks = describe_ranks(machine)
    if ranks is not None:
        result["ranks"] = ranks
    if federation.config.evaluate.controls:
        result[UNFINISHED] = "controls"
    write_json(out / "result.json", result)
    (out / CHECKPOINT).unlink(missing_ok=True)
    delete_secret(out)


def _refuse_other_ranks(out: Path, n_ranks: int) -> None:
    """Go on with the number of ranks that a run began with, where another one would show sums without their noise."""
    n_first = hold_ranks(out, n_ranks)
    if n_first == n_ranks:
        return
    raise TacitaError(
        f"{out} draws its noise from a secret and began on {n_first} rank(s). On {n_ranks} its sums would have other "
        "last digits under the same noise, and the difference would hold no noise; go on with as many ranks as before. "
        "Runs with train.aggregator = 'ideal' go on with any number."
    )


def _run_missing_controls(
    federation: Federation, out: Path, watcher: TrainingCallbacks, wants_controls: bool = True
) -> Run:
    """The controls that are still missing, each on disk as soon as it is computed."""
    result = read_result(out)
    if result.pop(UNFINISHED, None):
        (out / "report.html").unlink(missing_ok=True)  # it may have been opened before the controls were there
        if wants_controls:
            watcher.on_controls(federation)
            _write_controls(federation, out, watcher, result)
        skipped = {name: {"skipped": "switched off"} for name in CONTROLS}
        result["controls"] = skipped | result["controls"]
        write_json(out / "result.json", result)
    return _publish_run(out)


def _write_controls(federation: Federation, out: Path, watcher: TrainingCallbacks, result: RunResult) -> None:
    """Compute the missing controls into `result`, and write it after each of them."""
    done = tuple(result["controls"])
    try:
        for name, scores in run_controls(federation, watcher.on_control, without=done):
            result["controls"][name] = scores
            write_json(out / "result.json", {**result, UNFINISHED: "controls"})
    except MemoryError:
        raise TacitaError(
            f"not enough memory for a control; the run itself is in {out}: end it without the rest with "
            f"`tacita train --out {out} --resume --no-controls`."
        ) from None


def save_run(federation: Federation, progress: Progress, out: Path) -> None:
    """A run that was trained elsewhere (a trial) as a finished folder, without controls."""
    if out.exists():
        return
    progress = progress.with_local_devices()
    make_folder(out, federation.config, federation.stream)
    write_bytes(out / "events.jsonl", b"")
    write_models(federation, progress, out)
    write_json(out / "result.json", _build_result(federation, progress))


def _publish_run(out: Path) -> Run:
    """A finished run with its report and without its checkpoint, even if it was killed after its last round."""
    from tacita.report.pages import write_report

    run = open_run(out)
    if not (out / "report.html").is_file():
        write_report([out], out / "report.html")
    (out / CHECKPOINT).unlink(missing_ok=True)
    return run


def _build_result(federation: Federation, progress: Progress) -> RunResult:
    blocks = progress.results
    counted: CountedParts = (*federation.parts, federation.learner)
    joined = join_accounts(counted, progress.clients.parts)
    bytes_up = [block["bytes_up"] for block in blocks]
    bytes_down = [block["bytes_down"] for block in blocks]
    result = {
        "tacita": tacita.__version__,
        "config": federation.config.model_dump(mode="json"),
        "read": resolve_read_setting(federation),
        "data": _describe_data(federation),
        "blocks": blocks,
        "mean": average_incremental_blocks(blocks),
        "continual": _measure_continual(blocks),
        "controls": {},
        "bytes": {
            "up_per_client_and_round": float(np.mean(bytes_up)),
            "down_per_client_and_round": float(np.mean(bytes_down)),
        },
    }
    if joined is not None:
        result["privacy"] = summarise_spending(*joined)
    return {**result, PRIVACY_KEY: list_privacy_lines(federation.config, result)}


def _measure_continual(blocks: list[ScoreRow]) -> ScoreRow:
    """How well the run learned new blocks and kept earlier ones; None: there is nothing to measure."""
    scores = [block["on_blocks"] for block in blocks]
    users = [block["users"] for block in blocks]
    measures: ScoreRow = {}
    for name, value in summarise_continual(scores, users).items():
        measures[name] = None if math.isnan(value) else value
    return measures


def _describe_data(federation: Federation) -> dict[str, Any]:
    stream = federation.stream
    description = {
        "name": stream.name,
        "fingerprint": stream.fingerprint,
        "source": stream.source,
        "users": stream.n_users,
        "items": stream.n_items,
        "removed": [asdict(removal) for removal in stream.removed],
        "notes": list(stream.notes),
    }
    if federation.homes:
        description["silos"] = _describe_silos(federation.homes)
    return description


def _describe_silos(homes: SiloAssignment) -> dict[str, Any]:
    """How many people live in silos, and how much silos differ."""
    n_people = np.bincount(homes.silo)
    fewest = int(n_people.min())
    most = int(n_people.max())
    sizes = {"fewest": fewest, "most": most}
    return {"by": homes.by, "people": sizes, "divergence_bits": homes.divergence}


def read_checkpoint(path: Path, config: RunConfig) -> Progress:
    arrays, note = read_arrays(path, "delete it to train this run again from its first round")
    if not matches_config(note, config):
        raise TacitaError(f"{path.parent / 'config.toml'} was changed after the run began; start a new run instead.")
    return read_progress(arrays, note)


def _trim_events(path: Path, progress: Progress) -> float:
    """Drop events after the checkpoint, whose rounds are about to be run again; returns the time spent before."""
    if not path.is_file():
        return 0.0
    reached = (len(progress.results), 0)
    if progress.in_block:
        reached = (progress.server.block, progress.server.round)
    lines = []
    spent = 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
            if (event["block"], event["round"]) <= reached:
                lines.append(line + "\n")
                spent = float(event["seconds"])
        except (ValueError, TypeError, LookupError):
            break  # the line that was being written when the run was killed
    write_bytes(path, "".join(lines).encode())
    return spent
