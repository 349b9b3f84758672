"""What an operator orders of a server: runs and blocks. Orders lie in the store, where the server looks for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.live.running.server import is_up, open_store, why_stopped
from tacita.live.server.store import ServerStore


@dataclass(frozen=True)
class Terms:
    """When a round goes on, and when a run ends, though nodes are silent."""

    quorum: int | str  # nodes that a round needs, or "all"
    timeout: float  # seconds that a round waits for answers
    give_up: float  # seconds without a quorum that end the run


def begin_run(folder: Path, run: str, settings: RunConfig, terms: Terms) -> None:
    """A new run with its first block open."""
    from tacita.live.server.coordinator import check_run  # brings all that trains, which the other orders do without

    with open_store(folder) as store:
        check_run(settings, store.n_items())
        _need_nodes(store, terms.quorum)
        _need_up(folder)
        store.new_run(run, settings, asdict(terms))
        store.open_block(run)


def open_block(folder: Path, run: str) -> None:
    """The run's next block."""
    with open_store(folder) as store:
        store.run(run)
        _need_up(folder)
        store.open_block(run)


def resume_run(folder: Path, run: str) -> None:
    """Let a run that stopped try again; one that is under way is left alone."""
    with open_store(folder) as store:
        store.run(run)
        _need_up(folder)
        if why_stopped(store, run) is not None:
            store.halt(run, False)
            store.tell(run, {"event": "resumed"})


def stop_run(folder: Path, run: str) -> None:
    """Let a run stop after what it has committed; `resume_run` goes on from there."""
    with open_store(folder) as store:
        store.run(run)
        store.halt(run, True)


def _need_up(folder: Path) -> None:
    if not is_up(folder):
        raise TacitaError(f"the server is not up; start it with `tacita server up --folder {folder}`.")


def _need_nodes(store: ServerStore, quorum: int | str) -> None:
    enrolled = sum(row.revoked is None for row in store.nodes())
    if enrolled == 0:
        raise TacitaError("no node is enrolled; `tacita server enroll KEY.pub --name NAME` lets one in.")
    if isinstance(quorum, int) and quorum > enrolled:
        raise TacitaError(
            f"--quorum {quorum} is more than the number of enrolled nodes, {enrolled}; enrol more or lower it."
        )
