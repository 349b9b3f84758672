"""Orders of an operator to a server: runs and blocks. They are written to the store, where the server reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.live.running.server import find_stop_reason, is_up, open_store
from tacita.live.server.store import ServerStore


@dataclass(frozen=True)
class RunTerms:
    """When a round goes on, and when a run ends, although nodes are silent."""

    quorum: int | str  # nodes that a round needs, or "all"
    timeout: float  # seconds that a round waits for answers
    give_up: float  # seconds without a quorum that end the run


def begin_run(folder: Path, run: str, settings: RunConfig, terms: RunTerms) -> None:
    """Begin a new run with its first block open."""
    from tacita.live.server.coordinator import (
        refuse_settings_not_live,  # late: it brings the trainer, which other orders do not need
    )

    with open_store(folder) as store:
        refuse_settings_not_live(settings, store.count_items())
        _check_enough_nodes(store, terms.quorum)
        _check_server_is_up(folder)
        store.create_run(run, settings, asdict(terms))
        store.open_block(run)


def open_block(folder: Path, run: str) -> None:
    """Open the run's next block."""
    with open_store(folder) as store:
        store.load_run(run)
        _check_server_is_up(folder)
        store.open_block(run)


def resume_run(folder: Path, run: str) -> None:
    """Let a run that stopped try again; a run that is under way does not change."""
    with open_store(folder) as store:
        store.load_run(run)
        _check_server_is_up(folder)
        if find_stop_reason(store, run) is not None:
            store.set_run_halted(run, False)
            store.log_event(run, {"event": "resumed"})


def stop_run(folder: Path, run: str) -> None:
    """Let a run stop after its last commit; `resume_run` goes on from there."""
    with open_store(folder) as store:
        store.load_run(run)
        store.set_run_halted(run, True)


def _check_server_is_up(folder: Path) -> None:
    if not is_up(folder):
        raise TacitaError(f"the server is not up; start it with `tacita server up --folder {folder}`.")


def _check_enough_nodes(store: ServerStore, quorum: int | str) -> None:
    n_enrolled = sum(row.revoked is None for row in store.list_nodes())
    if n_enrolled == 0:
        raise TacitaError("no node is enrolled; `tacita server enroll KEY.pub --name NAME` lets one in.")
    if isinstance(quorum, int) and quorum > n_enrolled:
        raise TacitaError(
            f"--quorum {quorum} is more than the number of enrolled nodes, {n_enrolled}; enrol more or lower it."
        )
