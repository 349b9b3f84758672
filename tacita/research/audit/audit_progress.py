"""How audits report their progress, and the values that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tacita.core.types import BlockStream

AuditTable = dict[str, Any]
"""An audit, or a row of it, as its JSON file has it."""
Advance = Callable[[], None]
OnStep = Callable[[int, int], None] | None
"""Called with the steps done and the number of all steps."""
OnData = Callable[[BlockStream], None] | None
"""Called with the data before the first step."""


def ignore_progress() -> None:
    """Nobody watches."""


class StepCounter:
    """Counts steps and reports each."""

    def __init__(self, total: int, on_step: OnStep) -> None:
        self.done = 0
        self.total = total
        self.on_step = on_step

    def reach(self, done: int) -> None:
        self.done = done
        if self.on_step:
            self.on_step(min(done, self.total), self.total)

    def advance(self) -> None:
        self.reach(self.done + 1)
