"""The server's side of a live run: the lab's own loop with the people on nodes, one commit after each round."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Block, BlockStream, Ragged
from tacita.federation.rounds import Progress, RoundReport, begin_block, end_block, run_block, start_run
from tacita.federation.state_arrays import json_fields, pack_server, read_server, server_note
from tacita.live.server.attempts import Attempts
from tacita.live.server.open_requests import ApplyResult, ReceivedRequests
from tacita.live.server.remote_devices import QuorumPolicy, RemoteDevices, Transport
from tacita.live.server.request_service import MOST_TRIES, apply_requests, group_requests, select_due
from tacita.live.server.store import STORE_FILE, RunRow, ServerStore
from tacita.live.settings import check_live_settings
from tacita.round.plan import Federation
from tacita.runs.assembly import build_components, check_settings

log = logging.getLogger(__name__)


def check_run(config: RunConfig, n_items: int) -> None:
    """Refuse settings that cannot be followed live, before anybody is asked anything."""
    check_live_settings(config)
    backbone, parts, _ = build_components(config)
    check_settings(config, backbone)
    for part in parts:
        part.check(n_items)


def continue_run(folder: Path, run: str, transport: Transport, scrub: Callable[[], bool] = lambda: True) -> None:
    """Go on with a run until all blocks that were opened are done.

    `scrub` removes what others keep of messages that were delivered, when somebody withdrew; it returns whether it did.
    """
    with ServerStore(folder / STORE_FILE) as store, _lock_run(folder, run):
        row = store.load_run(run)
        try:
            _run_blocks(store, row, transport, scrub)
        except Exception as error:  # whatever it was, somebody has to look: trying again would end the same way
            said = str(error) if isinstance(error, TacitaError) else f"{type(error).__name__}: {error}"
            store.log_event(run, {"event": "stopped", "said": said[:500]})
            raise


@contextlib.contextmanager
def _lock_run(folder: Path, run: str) -> Iterator[None]:
    """One coordinator for a run; a dead one's lock goes with it."""
    held = os.open(folder / f"run-{run}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for attempt in range(60):  # a killed server's coordinator may take a moment to end
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 59:
                    raise TacitaError(f"run '{run}' is being coordinated by another process.") from None
                time.sleep(1.0)
        yield
    finally:
        os.close(held)


def _run_blocks(store: ServerStore, row: RunRow, transport: Transport, scrub: Callable[[], bool]) -> None:
    fed = build_federation(store, row)
    remote = RemoteDevices(
        transport,
        row.name,
        store.allowed_nodes,
        store.catalogue,
        QuorumPolicy(**row.options),
        log_event=lambda event: store.log_event(row.name, event),
        outcomes=lambda: store.list_outcomes(row.name),
        attempts=Attempts.from_note(row.note),
        record_nodes=store.note_nodes,
    )
    progress = _restore_progress(store, row, fed, remote)
    began = time.monotonic()

    def commit(event: dict[str, Any], now: Progress, carried: ApplyResult | None = None) -> None:
        arrays = pack_server(now.server, "now/") | pack_server(now.best_server, "best/")
        arrays |= {f"homes/{name}": v for name, v in remote.location_arrays().items()}
        if any(v.dtype.kind == "f" and not np.isfinite(v).all() for v in arrays.values()):
            raise TacitaError("the model is no longer finite: training diverged, or a node sent a wrong sum.")
        note = {"plain": json_fields(now), "now": server_note(now.server), "best": server_note(now.best_server)}
        note["attempts"] = remote.attempts.to_note()
        event["seconds"] = round(time.monotonic() - began, 3)
        store.commit_round(
            row.name,
            note,
            arrays,
            remote.accepted_answers,
            ReceivedRequests(remote.received_requests, remote.acknowledged_ends),
            event,
            carried,
        )
        remote.accepted_answers, remote.received_requests, remote.acknowledged_ends = [], [], []
        if store.needs_scrub and scrub():
            store.scrub()

    def on_round(report: RoundReport, now: Progress) -> None:
        event = {"event": "round", "block": report.block, "round": report.round, "clients": report.clients}
        if report.valid is not None:
            event["valid"] = report.valid
        asked, remote.reached_nodes = len(remote.reached_nodes), set()
        commit(event | {"asked": asked, "bytes_up": report.bytes_up, "bytes_down": report.bytes_down}, now)
        requests(now)

    def requests(now: Progress) -> None:
        _apply_requests(store, row.name, fed, now, commit)

    if progress.in_block:  # stopped when they had been heard and were not carried out
        requests(progress)
    while len(progress.results) < row.opened:
        if not progress.in_block:
            store.log_event(row.name, {"event": "block", "block": len(progress.results)})
            begin_block(fed, progress, len(progress.results))
        run_block(fed, progress, on_round)
        end_block(fed, progress)
        commit({"event": "block done", **progress.results[-1]}, progress)
        row = store.load_run(row.name)
        fed = build_federation(store, row)  # another block may have been opened


def _apply_requests(store: ServerStore, run: str, fed: Federation, now: Progress, commit: Callable[..., None]) -> None:
    """Carry out what people asked for, and try again what nodes did not answer; a commit after each."""
    assert isinstance(now.devices, RemoteDevices)
    now.devices.silent_nodes = set()
    behind: set[tuple[int, int]] = set()  # whose earlier request has to be tried again
    for group in group_requests(select_due(store.open_requests(run), now.server)):
        people = {(one.node, one.request.sender) for one in group}
        if behind & people:
            behind |= people
            continue
        carried = apply_requests(fed, now, group)
        tries = int(carried.event.get("tries", 0))
        behind |= people if tries else set()
        now.devices.drop_requesters(now.server.parts.get(fed.learner.name, {}).get("asked", np.zeros(0, np.uint64)))
        commit({"event": "request", **carried.event}, now, carried)
        if tries == MOST_TRIES:
            store.log_event(run, {**carried.event, "event": "request stuck"})


def build_federation(store: ServerStore, row: RunRow) -> Federation:
    """What a server knows of the federation: items and settings, and nobody."""
    backbone, parts, draws = build_components(row.config)
    items = store.catalogue()
    nobody, none = Ragged.empty(0), np.zeros(0, bool)
    sizes = store.block_sizes(row.name)
    blocks = tuple(Block(b, 0, n, nobody, nobody, nobody, none, 0) for b, n in enumerate(sizes))
    ids = tuple(item for item, _ in items)
    stream = BlockStream(row.name, blocks, (), ids, np.zeros(0, np.uint64), derive_keys(ids), dict(items), "")
    for part in parts:
        if sizes:
            part.check(sizes[0])
    return Federation(backbone, parts, row.config, draws, stream=stream)


def _restore_progress(store: ServerStore, row: RunRow, fed: Federation, remote: RemoteDevices) -> Progress:
    """Where the run stands: as it was committed after its last round."""
    if row.note is None:
        return start_run(fed, remote)
    arrays = store.load_arrays(row.name)
    remote.restore_locations({k.removeprefix("homes/"): v for k, v in arrays.items() if k.startswith("homes/")})
    now, best = (read_server(arrays, row.note[tag], f"{tag}/") for tag in ("now", "best"))
    progress = Progress(now, remote, best, **row.note["plain"])
    remote.best_round = progress.best_round
    log.info("run '%s' goes on after block %d round %d", row.name, now.block, now.round)
    return progress
