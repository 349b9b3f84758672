"""A server: a folder with its settings, keys and store, and the processes that serve nodes.

The operator's verbs write to the store. The running server polls it and acts: it registers and unregisters nodes
with the engine, and keeps a coordinator at work on every run that has an open block.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from tacita.core.config import StrictModel, to_toml
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, temporary_path, write_bytes
from tacita.live.processes import stop_on_signals
from tacita.live.server.store import STORE_FILE, NodeRow, RunRow, ServerStore, count_done_blocks, describe_run_progress
from tacita.live.settings import read_settings
from tacita.live.tls_certificates import (
    CA,
    ServerKeys,
    compute_key_fingerprint,
    convert_to_pem,
    make_ca,
    make_server_certificate,
)

VERSION = 1
ServerExtension = Callable[["LiveServer"], contextlib.AbstractContextManager[Any]]
POLL_SECONDS = 0.5  # between two looks at the store

log = logging.getLogger(__name__)


class ServerConfig(StrictModel):
    """server.toml: where nodes find the server."""

    version: int = Field(VERSION, description="of this file's format")
    host: str = Field("0.0.0.0", description="address on which nodes are served")
    port: int = Field(9092, ge=0, le=65535, description="port on which nodes are served")
    link_port: int = Field(9091, ge=0, le=65535, description="port of Flower's SuperLink, on loopback only")
    page_port: int = Field(0, ge=0, le=65535, description="port of the operator's page, on loopback; 0: any free one")


def create_server(folder: Path, config: ServerConfig, names: list[str]) -> None:
    """Make a folder that appears whole or not at all; `names` are the hosts and addresses that nodes will dial."""
    if folder.exists() or folder.is_symlink():
        raise TacitaError(f"{folder} exists; a server is made in a new folder, `tacita server init FOLDER`.")
    side = temporary_path(folder)
    try:
        side.mkdir(parents=True, mode=0o700)
        write_bytes(side / "server.toml", to_toml(config).encode())
        make_ca(side)
        make_server_certificate(side, names)
        ServerStore.create(side / STORE_FILE).close()
        side.rename(folder)
    except OSError as error:
        raise disk_error(folder, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)


def read_config(folder: Path) -> ServerConfig:
    return read_settings(folder, "server", ServerConfig, VERSION)


def open_store(folder: Path) -> ServerStore:
    read_config(folder)
    return ServerStore(folder / STORE_FILE)


def enroll_node(folder: Path, public_key: Path, name: str) -> str:
    """Enrol a node by its public key; returns the key's fingerprint, to compare with its owner."""
    try:
        key = public_key.read_bytes()
    except OSError as error:
        raise TacitaError(f"cannot read {public_key}: {error.strerror or error}.") from None
    return enroll_key(folder, key, name)


def enroll_key(folder: Path, public_key: bytes, name: str) -> str:
    """Enrol a node by the bytes of its public key."""
    pem = convert_to_pem(public_key)
    with open_store(folder) as store:
        store.add_node(name, pem.decode())
    return compute_key_fingerprint(pem)


def is_up(folder: Path) -> bool:
    """Whether a process serves this folder. Callers share the lock, so none takes another for the server."""
    try:
        with open(folder / "up.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


@contextlib.contextmanager
def _hold_server_lock(folder: Path) -> Iterator[None]:
    lock = os.open(folder / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + 1.0  # a caller of `is_up` may hold it for a moment
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TacitaError(f"the server in {folder} is up already; one process serves it.") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


class LiveServer:
    """The running server: gateway, SuperLink and, through it, the coordinators of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.config = read_config(folder)
        self.stopping = threading.Event()
        self._flower_runs: dict[str, int] = {}  # run -> Flower's run that is at work on it
        self._failures: dict[str, tuple[int, float]] = {}  # run -> failures in a row, time of the next attempt
        self._enrolled_keys: frozenset[str] = frozenset()
        self._enrolment_read_at = 0.0
        self._enrolment_lock = threading.Lock()

    def serve(
        self,
        ready: Callable[[LiveServer], None] = lambda server: None,
        insecure_run_as_root: bool = False,
        extension: ServerExtension | None = None,
    ) -> None:
        """Serve until it is stopped; `extension` serves something else meanwhile, such as the operator's page."""
        if not insecure_run_as_root:
            _refuse_root()
        from tacita.live.engine.flower import SuperLink, write_flower_app  # late: Flower takes a second to load
        from tacita.live.engine.gateway import Gateway, bind_listener

        with contextlib.ExitStack() as stack:
            stack.enter_context(_hold_server_lock(self.folder))
            self.store = stack.enter_context(ServerStore(self.folder / STORE_FILE))
            self._enrolment_store = stack.enter_context(ServerStore(self.folder / STORE_FILE))
            keys = ServerKeys.in_folder(self.folder)
            keys.check_validity()
            bind_listener(self.config.host, self.config.port).close()  # before anything is started
            log.info("starting Flower's SuperLink")
            app = write_flower_app(self.folder / "app")
            self.link = SuperLink(self.folder / "flower", self.config.link_port, keys)
            stack.enter_context(self.link)
            self._sync_nodes()
            gateway = Gateway(self.config.host, self.config.port, self.link.url, keys, self.is_enrolled)
            stack.enter_context(gateway)
            stack.enter_context(stop_on_signals(self.stopping))
            log.info("serving nodes on %s:%d; Ctrl-C stops", self.config.host, gateway.port)
            if extension is not None:
                stack.enter_context(extension(self))
            ready(self)
            while not self.stopping.wait(POLL_SECONDS):
                self._poll_store(app)
                if not gateway.is_alive:
                    raise TacitaError("the gateway ended; the log says why.")
            log.info("stopping")
            self._stop_runs()
        log.info("stopped")

    def is_enrolled(self, key: str) -> bool:
        """Whether a key's fingerprint may speak; a revoked one may not from the next second on."""
        with self._enrolment_lock:
            if time.monotonic() - self._enrolment_read_at > POLL_SECONDS:
                enrolled = [row for row in self._enrolment_store.list_nodes() if row.revoked is None]
                self._enrolled_keys = frozenset(compute_key_fingerprint(row.public_key.encode()) for row in enrolled)
                self._enrolment_read_at = time.monotonic()
            return key in self._enrolled_keys

    def _poll_store(self, app: Path) -> None:
        """Read the store once: nodes that came or left, runs that need a coordinator."""
        try:
            if not self.link.is_alive:
                log.warning("the SuperLink ended and is started again")
                self._flower_runs.clear()
                self.link.stop()
                self.link.start()
            self._sync_nodes()
            for row in self.store.list_runs():
                self._sync_coordinator(row, app)
        except TacitaError as error:
            log.warning("%s", error)
            self.stopping.wait(2.0)

    def _sync_nodes(self) -> None:
        known: dict[int, str] | None = None
        for row in self.store.list_nodes():
            if row.revoked is None and row.number is None:
                self.store.set_node_number(row.name, self._register_node(row))
                log.info("node '%s' is enrolled", row.name)
            elif row.revoked is not None and row.number is not None:
                known = self.link.list_node_states() if known is None else known
                if row.number in known:
                    self.link.unregister_node(row.number)
                    log.info("node '%s' is revoked", row.name)

    def _register_node(self, row: NodeRow) -> int:
        path = self.folder / "flower" / f".{row.name}.pub"
        write_bytes(path, row.public_key.encode())
        try:
            return self.link.register_node(path, row.name)
        finally:
            path.unlink(missing_ok=True)

    def _sync_coordinator(self, row: RunRow, app: Path) -> None:
        """Keep a coordinator at work on a run with an open block, unless it stopped for a reason."""
        if self._has_coordinator(row.name):
            return
        if row.opened == count_done_blocks(row) or find_stop_reason(self.store, row.name) is not None:
            return
        _, not_before = self._failures.get(row.name, (0, 0.0))
        if time.monotonic() >= not_before:
            self._flower_runs[row.name] = self.link.start_run({"store": str(self.folder), "run": row.name}, app)
            log.info("run '%s': block %d is under way", row.name, count_done_blocks(row))

    def _has_coordinator(self, run: str) -> bool:
        """Whether a coordinator still works on a run; its end is noted, and a halted run is stopped."""
        halted = self.store.is_run_halted(run)
        flower_run = self._flower_runs.get(run)
        if flower_run is None:
            return False
        if halted:
            with contextlib.suppress(TacitaError):  # it may have ended just now
                self.link.stop_run(flower_run)
        state = self.link.read_run_state(flower_run)
        if not state.startswith("finished"):
            return True
        del self._flower_runs[run]
        if state == "finished:completed" or halted:
            self._failures.pop(run, None)
        else:
            self._note_failure(run)
            log.warning("the coordinator of run '%s' ended: %s", run, state)
        return False

    def _note_failure(self, run: str) -> None:
        """Count a failure, and wait longer after each before the next attempt."""
        n_before, _ = self._failures.get(run, (0, 0.0))
        n_failures = n_before + 1
        pause = min(60.0, 2.0**n_failures)
        self._failures[run] = (n_failures, time.monotonic() + pause)

    def _stop_runs(self) -> None:
        for flower_run in self._flower_runs.values():
            with contextlib.suppress(TacitaError):
                self.link.stop_run(flower_run)


def _refuse_root() -> None:
    if os.geteuid() == 0:
        raise TacitaError(
            "a server that runs as root gives every account on this machine root, because whoever reaches Flower's "
            "port on loopback can run code as the server's user; start it as a user of its own, or with "
            "--insecure-run-as-root."
        )


def find_stop_reason(store: ServerStore, run: str) -> str | None:
    """Why a run stopped for good; None: it goes on."""
    if store.is_run_halted(run):
        return "the operator stopped it."
    last = store.find_last_event(run)
    return str(last["said"]) if last is not None and last.get("event") == "stopped" else None


def read_status(folder: Path) -> dict[str, Any]:
    """The state of the server, its nodes and its runs, for people and machines."""
    config = read_config(folder)
    up = is_up(folder)
    with ServerStore(folder / STORE_FILE) as store:
        online = read_online_nodes(folder, config) if up else {}
        nodes = [_describe_node(store, row, online) for row in store.list_nodes()]
        runs = [_describe_run(store, row) for row in store.list_runs()]
        return {
            "up": up,
            "address": f"{config.host}:{config.port}",
            "catalogue": len(store.read_catalogue()),
            "nodes": nodes,
            "runs": runs,
            "sees": "one sum per node and round, how many people are in it, sums of scores where no epsilon "
            "is counted, and when a node is online; "
            "sums of several runs can be subtracted down to one person",
        }


def _describe_node(store: ServerStore, row: NodeRow, online: dict[int, str]) -> dict[str, Any]:
    if row.revoked is not None:
        state = "revoked"
    else:
        state = "waiting" if row.number is None else "enrolled"
    is_online = None
    if row.number is not None and row.number in online:
        is_online = online[row.number] == "online"
    return {
        "name": row.name,
        "state": state,
        "online": is_online,
        "fingerprint": compute_key_fingerprint(row.public_key.encode()),
        "last answer": store.find_last_answer_time(row.number),
    }


def _describe_run(store: ServerStore, row: RunRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "standing": describe_run_progress(row),
        "stopped": find_stop_reason(store, row.name),
        "requests": store.list_pending(row.name),
        "results": [] if row.note is None else row.note["plain"]["results"],
    }


def read_online_nodes(folder: Path, config: ServerConfig) -> dict[int, str]:
    """The state of each node that the engine knows; empty while it starts."""
    from tacita.live.engine.flower import SuperLinkClient

    with contextlib.suppress(TacitaError):
        return SuperLinkClient(config.link_port, folder / CA).list_node_states()
    return {}
