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
from tacita.live.node.wants import WITHDRAW
from tacita.live.running import control
from tacita.live.running.demo import RUN, People, bring, next_block
from tacita.live.running.server import open_store, why_stopped
from tacita.live.server.store import done_blocks

LOOK = 1.0  # seconds between two looks at what the person asked for

log = logging.getLogger(__name__)


@dataclass
class Company:
    """Who is around one person of the demo."""

    folder: Path
    people: People
    user: str
    brought: int = 2  # blocks of interactions that the nodes have
    _asked: set[tuple[str, str]] = field(default_factory=set)  # kind, neighbour
    _over: bool = False  # it was told that no interactions are left

    def keep(self, stopping: threading.Event, seconds: float, tell: Callable[[str], None]) -> None:
        """Play along until it is told to stop, or for so long."""
        ends = threading.Timer(seconds, stopping.set)
        ends.start()
        try:
            while not stopping.wait(LOOK):
                try:
                    said = self.look()
                except TacitaError as error:  # a node may be busy; the next look is soon
                    log.info("%s", error)
                    continue
                if said:
                    tell(said)
        finally:
            ends.cancel()

    def look(self) -> str:
        """Do what is due; what happened, in a sentence, or nothing."""
        with open_store(self.folder / "server") as store:
            row = store.run(RUN)
            if row.opened > done_blocks(row) or why_stopped(store, RUN) is not None:
                return ""
        blocks = len(next(iter(self.people.files.values())))
        if self.brought == row.opened and self.brought < blocks:  # a block that somebody opens finds something new
            bring(self.folder, self.people, self.brought)
            self.brought += 1
        waiting = [one for one in self._requests() if one["user"] == self.user and one["state"].startswith("queued")]
        if not waiting:
            return ""
        if self.brought == row.opened:
            told, self._over = self._over, True
            return "" if told else "No new interactions are left in this demo, so what is asked now waits."
        for kind in sorted({one["kind"] for one in waiting} & set(WITHDRAW)):
            self._join(kind)
        next_block(self.folder)
        least = self._least()
        return (
            f"You asked for something: in this demo {least - 1} others of your node ask for the same at once, and the "
            "operator opens the next block. Your page shows how far it is."
        )

    @property
    def _home(self) -> Path:
        return self.folder / self.people.home_of(self.user)

    def _least(self) -> int:
        return read_config(self._home).min_users

    def _requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = control.ask_daemon(self._home, "requests")
        return found

    def _join(self, kind: str) -> None:
        """Neighbours take back one item each, or everything: a withdrawal leaves with those of others only."""
        wanted = self._least() - 1
        for raw, items in self.people.first.items():
            if wanted == 0:
                return
            left = ("leave", raw) in self._asked
            if raw == self.user or self.people.home[raw] != self._home.name or left or (kind, raw) in self._asked:
                continue
            asked = {"kind": kind, "user": raw, "items": items[:1] if kind == "forget" else []}
            try:
                control.ask_daemon(self._home, "request", **asked)
            except TacitaError as error:  # somebody of whom nothing was told has nothing to take back
                log.info("%s", error)
                continue
            finally:
                self._asked.add((kind, raw))
            wanted -= 1
