"""Follow a run from outside the server: poll its store until the open blocks are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.running.server import find_stop_reason, is_up, open_store
from tacita.live.server.store import RunRow, ServerStore, count_done_blocks
from tacita.runs.assembly import build_plan

POLL_SECONDS = 0.3  # between two looks at the store


@dataclass(frozen=True)
class RunProgress:
    """The events since the last poll, the nodes' names by number, and the rounds planned in a block."""

    events: list[dict[str, Any]]
    node_names: dict[str, str]
    rounds: int


def follow_run(folder: Path, run: str, on_progress: Callable[[RunProgress], None], most: float) -> list[dict[str, Any]]:
    """Wait until a run's open blocks are done; returns the results of its blocks."""
    end = time.monotonic() + most
    last_event_id = 0
    with open_store(folder) as store:
        rounds = build_plan(store.load_run(run).config).learner.rounds
        while True:
            row = store.load_run(run)
            rows = store.list_events(run, last_event_id)
            node_names = {}
            if rows:
                last_event_id = rows[-1][0]
                node_names = {str(node.number): node.name for node in store.list_nodes()}
            events = [event for _, _, event in rows]
            on_progress(RunProgress(events, node_names, rounds))
            if count_done_blocks(row) == row.opened:
                return _list_results(row)
            _check_run_goes_on(folder, store, run)
            if time.monotonic() > end:
                raise TacitaError(f"run '{run}' did not end within {most:.0f} s; `tacita server status` tells more.")
            time.sleep(POLL_SECONDS)


def _list_results(row: RunRow) -> list[dict[str, Any]]:
    assert row.note is not None
    results: list[dict[str, Any]] = row.note["plain"]["results"]
    return results


def _check_run_goes_on(folder: Path, store: ServerStore, run: str) -> None:
    stop_reason = find_stop_reason(store, run)
    if stop_reason is not None:
        remedy = _suggest_remedy(run, stop_reason)
        raise TacitaError(f"run '{run}' stopped: {stop_reason.rstrip('.')}{remedy}.")
    if not is_up(folder):
        raise TacitaError(f"the server went down; `tacita server up` goes on with run '{run}'.")


def _suggest_remedy(run: str, stop_reason: str) -> str:
    if "every node refused" in stop_reason:
        return f"; when more people have something new, `tacita server resume {run}` asks again"
    return "" if "resume" in stop_reason else f"; `tacita server resume {run}` tries again"
