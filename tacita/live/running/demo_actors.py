"""Actors of the live demo, while a person looks at the pages: neighbours, new interactions, an operator.

A withdrawal leaves a node together with those of other people there, and with a run's next block. In the demo nobody
else asks for either, so this module plays both. Requests, messages and certificates are real.
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
from tacita.live.running import node_client
from tacita.live.running.demo import RUN, DemoData, import_block, open_next_block
from tacita.live.running.server import find_stop_reason, open_store
from tacita.live.server.store import count_done_blocks
from tacita.round.request import UNLEARNING_KINDS

POLL_SECONDS = 1.0  # between two looks at the person's requests

log = logging.getLogger(__name__)


@dataclass
class DemoActors:
    """The neighbours and the operator around one person of the demo."""

    folder: Path
    people: DemoData
    user: str
    imported_blocks: int = 2  # blocks of interactions that the nodes have
    _sent_requests: set[tuple[str, str]] = field(default_factory=set)  # kind, neighbour
    _has_reported_end: bool = False  # the person knows that no new interactions come

    def play_until_stopped(self, stopping: threading.Event, seconds: float, tell: Callable[[str], None]) -> None:
        """Play until `stopping` is set, or for so many seconds; `tell` gets a sentence about each event."""
        timer = threading.Timer(seconds, stopping.set)
        timer.start()
        try:
            while not stopping.wait(POLL_SECONDS):
                try:
                    sentence = self.play_step()
                except TacitaError as error:  # a node may be busy; the next step is soon
                    log.info("%s", error)
                    continue
                if sentence:
                    tell(sentence)
        finally:
            timer.cancel()

    def play_step(self) -> str:
        """Do what is due; returns a sentence about it, or an empty one."""
        n_opened = self._count_opened_blocks()
        if n_opened is None:
            return ""
        self._import_next_block(n_opened)
        queued_kinds = self._list_queued_kinds()
        if not queued_kinds:
            return ""
        if self.imported_blocks == n_opened:
            return self._take_end_message()
        for kind in sorted(queued_kinds & set(UNLEARNING_KINDS)):
            self._add_neighbour_requests(kind)
        open_next_block(self.folder)
        n_others = self._read_min_users() - 1
        return (
            f"You asked for something: in this demo {n_others} others of your node ask for the same at once, and the "
            "operator opens the next block. Your page shows how far it is."
        )

    def _count_opened_blocks(self) -> int | None:
        """How many blocks the run has opened; None: one is under way, or the run stopped."""
        with open_store(self.folder / "server") as store:
            row = store.load_run(RUN)
            if row.opened > count_done_blocks(row) or find_stop_reason(store, RUN) is not None:
                return None
            return row.opened

    def _import_next_block(self, n_opened: int) -> None:
        """Import interactions before a block is opened, so that it has something new."""
        n_blocks = len(next(iter(self.people.files.values())))
        if self.imported_blocks == n_opened and self.imported_blocks < n_blocks:
            import_block(self.folder, self.people, self.imported_blocks)
            self.imported_blocks += 1

    def _list_queued_kinds(self) -> set[str]:
        """The kinds of the person's requests that no message carries yet."""
        kinds = set()
        for request in self._list_requests():
            if request["user"] == self.user and request["state"].startswith("queued"):
                kinds.add(request["kind"])
        return kinds

    def _take_end_message(self) -> str:
        if self._has_reported_end:
            return ""
        self._has_reported_end = True
        return "No new interactions are left in this demo, so what is asked now waits."

    @property
    def _home_folder(self) -> Path:
        return self.folder / self.people.find_home_node(self.user)

    def _read_min_users(self) -> int:
        return read_config(self._home_folder).min_users

    def _list_requests(self) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = node_client.ask_daemon(self._home_folder, "requests")
        return requests

    def _add_neighbour_requests(self, kind: str) -> None:
        """Let neighbours withdraw an item each, or everything: a withdrawal leaves only together with others."""
        n_missing = self._read_min_users() - 1
        for neighbour, items in self.people.first_block_items.items():
            if n_missing == 0:
                return
            if not self._may_ask(kind, neighbour):
                continue
            withdrawn = items[:1] if kind == "forget" else []
            try:
                node_client.ask_daemon(self._home_folder, "request", kind=kind, user=neighbour, items=withdrawn)
            except TacitaError as error:  # a neighbour who was in no sum has nothing to withdraw
                log.info("%s", error)
                continue
            finally:
                self._sent_requests.add((kind, neighbour))
            n_missing -= 1

    def _may_ask(self, kind: str, neighbour: str) -> bool:
        """Whether a neighbour lives on the person's node and can still ask for this."""
        is_neighbour = neighbour != self.user and self.people.home[neighbour] == self._home_folder.name
        has_left = ("leave", neighbour) in self._sent_requests
        has_asked = (kind, neighbour) in self._sent_requests
        return is_neighbour and not has_left and not has_asked
