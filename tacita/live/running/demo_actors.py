"""Everybody else of the live demo, while one person looks at the pages: neighbours, new interactions, an operator.

What somebody takes back leaves a node together with what others there take back, and with a run's next block. In the
demo nobody else is there to ask for either, so both are played here; what is asked, sent and certified is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.live.node.node import read_config
from tacita.live.node.request_queue import WITHDRAWALS
from tacita.live.running import node_client
from tacita.live.running.demo import RUN, DemoData, import_block, open_next_block
from tacita.live.running.server import find_stop_reason, open_store
from tacita.live.server.store import count_done_blocks

POLL_SECONDS = 1.0  # seconds between two looks at what the person asked for

log = logging.getLogger(__name__)


@dataclass
class DemoActors:
    """Who is around one person of the demo."""

    folder: Path
    people: DemoData
    user: str
    imported_blocks: int = 2  # blocks of interactions that the nodes have
    _sent_requests: set[tuple[str, str]] = field(default_factory=set)  # kind, neighbour
    _has_reported_end: bool = False  # it was told that no interactions are left

    def play_until_stopped(self, stopping: threading.Event, seconds: float, tell: Callable[[str], None]) -> None:
        """Play along until it is told to stop, or for so long."""
        ends = threading.Timer(seconds, stopping.set)
        ends.start()
        try:
            while not stopping.wait(POLL_SECONDS):
                try:
                    said = self.play_step()
                except TacitaError as error:  # a node may be busy; the next look is soon
                    log.info("%s", error)
                    continue
                if said:
                    tell(said)
        finally:
            ends.cancel()

    def play_step(self) -> str:
        """Do what is due; what happened, in a sentence, or nothing."""
        with open_store(self.folder / "server") as store:
            row = store.load_run(RUN)
            if row.opened > count_done_blocks(row) or find_stop_reason(store, RUN) is not None:
                return ""
        blocks = len(next(iter(self.people.files.values())))
        if (
            self.imported_blocks == row.opened and self.imported_blocks < blocks
        ):  # a block that somebody opens finds something new
            import_block(self.folder, self.people, self.imported_blocks)
            self.imported_blocks += 1
        waiting = [
            one for one in self._list_requests() if one["user"] == self.user and one["state"].startswith("queued")
        ]
        if not waiting:
            return ""
        if self.imported_blocks == row.opened:
            told, self._has_reported_end = self._has_reported_end, True
            return "" if told else "No new interactions are left in this demo, so what is asked now waits."
        for kind in sorted({one["kind"] for one in waiting} & set(WITHDRAWALS)):
            self._add_neighbour_requests(kind)
        open_next_block(self.folder)
        least = self._read_min_users()
        return (
            f"You asked for something: in this demo {least - 1} others of your node ask for the same at once, and the "
            "operator opens the next block. Your page shows how far it is."
        )

    @property
    def _home_folder(self) -> Path:
        return self.folder / self.people.home_of(self.user)

    def _read_min_users(self) -> int:
        return read_config(self._home_folder).min_users

    def _list_requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = node_client.ask_daemon(self._home_folder, "requests")
        return found

    def _add_neighbour_requests(self, kind: str) -> None:
        """Neighbours take back one item each, or everything: a withdrawal leaves with those of others only."""
        wanted = self._read_min_users() - 1
        for raw, items in self.people.first_block_items.items():
            if wanted == 0:
                return
            left = ("leave", raw) in self._sent_requests
            if (
                raw == self.user
                or self.people.home[raw] != self._home_folder.name
                or left
                or (kind, raw) in self._sent_requests
            ):
                continue
            asked = {"kind": kind, "user": raw, "items": items[:1] if kind == "forget" else []}
            try:
                node_client.ask_daemon(self._home_folder, "request", **asked)
            except TacitaError as error:  # somebody of whom nothing was told has nothing to take back
                log.info("%s", error)
                continue
            finally:
                self._sent_requests.add((kind, raw))
            wanted -= 1
