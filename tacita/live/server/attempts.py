"""Attempts to carry out requests, by number: nodes must know which of them failed.

What a device does for a request (it forgets what it takes back) holds only if the server committed its own part. So
every question of an attempt has the attempt's number. Every question says which attempts are over and which of these
failed. A node that answered in a failed one goes back to where it was before. After a crash the server gives out the
same number: the same questions come again, and nodes send the answers that they stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tacita.core.errors import TacitaError
from tacita.live.json_object import JsonObject
from tacita.live.wire import MOST_REQUESTS


class NoAnswer(TacitaError):
    """Nodes were silent or refused: the server can ask again."""


@dataclass
class Attempts:
    """Which attempts are over; kept with the run."""

    resolved: int = 0
    failed: list[int] = field(default_factory=list)  # the latest of those that failed
    latest: float = 0.0  # the time of the last request that was carried out
    _current: int = 0
    _was_used: bool = False

    @staticmethod
    def from_note(note: JsonObject | None) -> Attempts:
        """As a run was committed; runs of older versions had none."""
        values = (note or {}).get("attempts", {})
        resolved = int(values.get("resolved", 0))
        failed = list(values.get("failed", []))
        latest = float(values.get("latest", 0.0))
        return Attempts(resolved, failed, latest)

    def to_note(self) -> JsonObject:
        return {"resolved": self.resolved, "failed": self.failed, "latest": self.latest}

    def begin_attempt(self) -> None:
        self._current = self.resolved + 1
        self._was_used = False

    @property
    def is_open(self) -> bool:
        """Whether requests are being carried out now."""
        return self._current > 0

    def take_attempt_number(self) -> int:
        """The number of the attempt that a question belongs to; 0: to none."""
        self._was_used = True
        return self._current

    def end_attempt(self, effective: bool) -> None:
        """It is over; one that asked nobody leaves no trace."""
        if self._was_used:
            self.resolved = self._current
            if not effective:
                failed = [*self.failed, self._current]
                self.failed = failed[-MOST_REQUESTS:]
        self._current = 0

    def compute_wait_limit(self, give_up: float, timeout: float) -> float:
        """Seconds to wait for answers: a request holds up a run no longer than one exchange, for it is tried again."""
        return min(give_up, timeout) if self._current else give_up

    def order_request_time(self, claimed: float, clock: float) -> float:
        """The time of a request, in the order of the server: nodes claim theirs, and may claim anything.

        Always after what was carried out last, since a replay takes older data for known; never later than the
        server's clock.
        """
        bounded = min(claimed, clock)
        just_after = math.nextafter(self.latest, math.inf)
        self.latest = bounded if bounded > self.latest else just_after
        return self.latest
