"""Follow a run from beside the server: look at its store until the open blocks are done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.running.server import find_stop_reason, is_up, open_store
from tacita.live.server.store import count_done_blocks
from tacita.runs.assembly import build_plan

POLL_SECONDS = 0.3  # seconds between two looks


@dataclass(frozen=True)
class RunProgress:
    """What one look found: the events since the last one, the nodes' names by number, rounds planned in a block."""

    events: list[dict[str, Any]]
    node_names: dict[str, str]
    rounds: int


def follow_run(folder: Path, run: str, on_progress: Callable[[RunProgress], None], most: float) -> list[dict[str, Any]]:
    """Wait until a run's open blocks are done; returns the results of its blocks."""
    end, seen = time.monotonic() + most, 0
    with open_store(folder) as store:
        rounds = build_plan(store.load_run(run).config).learner.rounds
        while True:
            row, events = store.load_run(run), store.events(run, seen)
            seen = events[-1][0] if events else seen
            names = {str(one.number): one.name for one in store.nodes()} if events else {}
            on_progress(RunProgress([event for _, _, event in events], names, rounds))
            if count_done_blocks(row) == row.opened:
                assert row.note is not None
                results: list[dict[str, Any]] = row.note["plain"]["results"]
                return results
            said = find_stop_reason(store, run)
            if said is not None:
                raise TacitaError(f"run '{run}' stopped: {said.rstrip('.')}{_suggest_remedy(run, said)}.")
            if not is_up(folder):
                raise TacitaError(f"the server went down; `tacita server up` goes on with run '{run}'.")
            if time.monotonic() > end:
                raise TacitaError(f"run '{run}' did not end within {most:.0f} s; `tacita server status` tells more.")
            time.sleep(POLL_SECONDS)


def _suggest_remedy(run: str, said: str) -> str:
    if "every node refused" in said:
        return f"; when more people have something new, `tacita server resume {run}` asks again"
    return "" if "resume" in said else f"; `tacita server resume {run}` tries again"
