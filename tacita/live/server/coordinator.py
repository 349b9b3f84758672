"""The server's side of a live run: the lab's own loop with the people on nodes, one commit after each round."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Block, BlockStream, Ragged
from tacita.federation.requests import find_waiting_users
from tacita.federation.rounds import Progress, RoundReport, begin_block, end_block, make_initial_progress, run_block
from tacita.federation.state_arrays import collect_json_fields, flatten_server, make_server_note, read_server
from tacita.live.json_object import JsonObject
from tacita.live.server.attempts import Attempts
from tacita.live.server.node_query import QuorumPolicy, Transport
from tacita.live.server.open_requests import ApplyResult, ReceivedRequests
from tacita.live.server.remote_devices import RemoteDevices
from tacita.live.server.request_service import MOST_TRIES, apply_requests, group_requests, select_due_requests
from tacita.live.server.store import STORE_FILE, RunRow, ServerStore
from tacita.live.settings import check_live_settings
from tacita.live.wire import select_prefixed
from tacita.round.clashes import check_parts
from tacita.round.plan import Federation
from tacita.runs.assembly import build_components, check_settings

log = logging.getLogger(__name__)


def refuse_settings_not_live(config: RunConfig, n_items: int) -> None:
    """Refuse settings that cannot be followed live, before anybody is asked anything."""
    check_live_settings(config)
    backbone, parts, _ = build_components(config)
    check_settings(config, backbone)
    check_parts(parts, config.train, n_items)


def continue_run(folder: Path, run: str, transport: Transport, scrub: Callable[[], bool] = lambda: True) -> None:
    """Go on with a run until all blocks that were opened are done.

    When somebody withdrew, `scrub` removes delivered messages that others keep; it returns whether it did.
    """
    with ServerStore(folder / STORE_FILE) as store, _lock_run(folder, run):
        row = store.load_run(run)
        try:
            _run_blocks(store, row, transport, scrub)
        except Exception as error:  # whatever it was, somebody has to look: trying again would end the same way
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, TacitaError):
                message = str(error)
            store.log_event(run, {"event": "stopped", "said": message[:500]})
            raise


@contextlib.contextmanager
def _lock_run(folder: Path, run: str) -> Iterator[None]:
    """One coordinator for a run; a dead one's lock goes with it."""
    path = folder / f"run-{run}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for attempt in range(60):  # a killed server's coordinator may take a moment to end
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 59:
                    raise TacitaError(f"run '{run}' is being coordinated by another process.") from None
                time.sleep(1.0)
        yield
    finally:
        os.close(lock)


def _run_blocks(store: ServerStore, row: RunRow, transport: Transport, scrub: Callable[[], bool]) -> None:
    coordinator = _Coordinator(store, row, transport, scrub)
    progress = coordinator.progress
    if progress.in_block:  # the server stopped when requests had come and were not carried out
        coordinator.apply_open_requests(progress)
    while len(progress.results) < coordinator.row.opened:
        coordinator.run_next_block()


class _Coordinator:
    """One run of a server: its federation, its devices behind nodes, and a commit after each round."""

    def __init__(self, store: ServerStore, row: RunRow, transport: Transport, scrub: Callable[[], bool]) -> None:
        self.row = row
        self._store = store
        self._scrub = scrub
        self._federation = build_server_federation(store, row)
        self._remote = _make_devices(store, row, transport)
        self.progress = _restore_progress(store, row, self._federation, self._remote)
        self._start = time.monotonic()

    def run_next_block(self) -> None:
        """Run the open block to its end, from wherever it is."""
        progress = self.progress
        if not progress.in_block:
            block = len(progress.results)
            self._store.log_event(self.row.name, {"event": "block", "block": block})
            begin_block(self._federation, progress, block)
        run_block(self._federation, progress, self._on_round)
        end_block(self._federation, progress)
        result = progress.results[-1]
        self._commit({"event": "block done", **result}, progress)
        self.row = self._store.load_run(self.row.name)
        self._federation = build_server_federation(self._store, self.row)  # another block may have been opened

    def _on_round(self, report: RoundReport, progress: Progress) -> None:
        event = {"event": "round", "block": report.block, "round": report.round, "clients": report.clients}
        if report.valid is not None:
            event["valid"] = report.valid
        event["asked"] = len(self._remote.reached_nodes)
        event["bytes_up"] = report.bytes_up
        event["bytes_down"] = report.bytes_down
        self._remote.reached_nodes = set()
        self._commit(event, progress)
        self.apply_open_requests(progress)

    def apply_open_requests(self, progress: Progress) -> None:
        """Carry out requests, and try again those whose nodes did not answer; a commit after each."""
        remote = self._remote
        run = self.row.name
        remote.silent_nodes = set()
        due = select_due_requests(self._store.list_open_requests(run), progress.server)
        waiting_users: set[tuple[int, int]] = set()  # whose earlier request has to be tried again
        for group in group_requests(due):
            users = {request.user for request in group}
            if waiting_users & users:
                waiting_users |= users
                continue
            result = apply_requests(self._federation, progress, group)
            n_tries = int(result.event.get("tries", 0))
            if n_tries:
                waiting_users |= users
            remote.locations.drop_requesters(find_waiting_users(self._federation, progress.server))
            self._commit({"event": "request", **result.event}, progress, result)
            if n_tries == MOST_TRIES:
                self._store.log_event(run, {**result.event, "event": "request stuck"})

    def _commit(self, event: JsonObject, progress: Progress, result: ApplyResult | None = None) -> None:
        remote = self._remote
        arrays = flatten_server(progress.server, "now/")
        arrays |= flatten_server(progress.best_server, "best/")
        for name, array in remote.locations.to_arrays().items():
            arrays[f"homes/{name}"] = array
        _check_finite(arrays)
        note = {
            "plain": collect_json_fields(progress),
            "now": make_server_note(progress.server),
            "best": make_server_note(progress.best_server),
            "attempts": remote.attempts.to_note(),
        }
        seconds = time.monotonic() - self._start
        event["seconds"] = round(seconds, 3)
        received = ReceivedRequests(remote.received_requests, remote.acknowledged_ends)
        accepted = remote.accepted_answers
        self._store.commit_round(self.row.name, note, arrays, accepted, received, event, result)
        remote.accepted_answers = []
        remote.received_requests = []
        remote.acknowledged_ends = []
        if self._store.needs_scrub and self._scrub():
            self._store.scrub_deleted_bytes()


def _check_finite(arrays: Arrays) -> None:
    for array in arrays.values():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise TacitaError("the model is no longer finite: training diverged, or a node sent a wrong sum.")


def _make_devices(store: ServerStore, row: RunRow, transport: Transport) -> RemoteDevices:
    run = row.name
    return RemoteDevices(
        transport,
        run,
        store.list_allowed_nodes,
        store.read_catalogue,
        QuorumPolicy(**row.options),
        log_event=lambda event: store.log_event(run, event),
        outcomes=lambda: store.list_outcomes(run),
        attempts=Attempts.from_note(row.note),
        record_nodes=store.store_node_notes,
    )


def build_server_federation(store: ServerStore, row: RunRow) -> Federation:
    """The federation as the server knows it: items and settings, and no user."""
    backbone, parts, draws = build_components(row.config)
    items = store.read_catalogue()
    item_ids = tuple(item for item, _ in items)
    sizes = store.list_block_sizes(row.name)
    no_lists = Ragged.empty(0)
    no_users = np.zeros(0, bool)
    blocks = []
    for index, n_items in enumerate(sizes):
        block = Block(index, 0, n_items, no_lists, no_lists, no_lists, no_users, 0)
        blocks.append(block)
    no_keys = np.zeros(0, np.uint64)
    item_keys = derive_keys(item_ids)
    stream = BlockStream(row.name, tuple(blocks), (), item_ids, no_keys, item_keys, dict(items), "")
    if sizes:
        check_parts(parts, row.config.train, sizes[0])
    return Federation(backbone, parts, row.config, draws, stream=stream)


def _restore_progress(store: ServerStore, row: RunRow, federation: Federation, remote: RemoteDevices) -> Progress:
    """The run as it was committed after its last round."""
    if row.note is None:
        return make_initial_progress(federation, remote)
    arrays = store.load_arrays(row.name)
    remote.locations.restore_from_arrays(select_prefixed(arrays, "homes/"))
    server = read_server(arrays, row.note["now"], "now/")
    best_server = read_server(arrays, row.note["best"], "best/")
    progress = Progress(server, remote, best_server, **row.note["plain"])
    remote.best_round = progress.best_round
    log.info("run '%s' goes on after block %d round %d", row.name, server.block, server.round)
    return progress
