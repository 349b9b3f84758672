"""How long some work still takes: estimated at its last steps, counted down in between."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta

OVERDUE = "longer than expected"
"""Said when the estimate has run out before the next step."""


class Pace:
    """The speed of some work, from its last few steps."""

    def __init__(self) -> None:
        self._reached: deque[tuple[float, int]] = deque(maxlen=50)

    def record(self, done: int) -> None:
        self._reached.append((time.monotonic(), done))

    def step(self) -> None:
        self.record(self._reached[-1][1] + 1 if self._reached else 0)

    @property
    def per_second(self) -> float:
        if not self._reached:
            return 0.0
        began, first = self._reached[0]
        now, last = self._reached[-1]
        return (last - first) / (now - began) if now > began else 0.0

    def format_remaining(self, steps: int) -> str:
        """The time that many steps will take after the last one, in words; it runs down until the next step."""
        per_second = self.per_second
        if per_second <= 0 or steps <= 0:
            return ""
        last_step, _ = self._reached[-1]
        since_last_step = time.monotonic() - last_step
        seconds = steps / per_second - since_last_step
        if seconds < -1 / per_second:  # later than the last step of all by the time of a whole one
            return OVERDUE
        remaining = timedelta(seconds=max(0, round(seconds)))
        return f"{remaining} left"


class TimeLeft:
    """The time left of a phase, in words that are true whenever they are read."""

    def __init__(self, pace: Pace, steps: int, template: str = "{}") -> None:
        self._pace = pace
        self._steps = steps
        self._template = template

    def describe(self) -> str:
        remaining = self._pace.format_remaining(self._steps)
        if not remaining or remaining == OVERDUE:
            return remaining
        return self._template.format(remaining)
