"""How much one call may ask for."""

from __future__ import annotations

from tacita.core.errors import TacitaError

MOST_BODY = 2**20
"""Bytes of a body."""
MOST_K = 1000
"""Items of a list."""
MOST_USERS = 1000
"""People of a batch."""
MOST_ROWS = 50_000
"""Items of all lists of a batch together."""
MOST_ITEMS = 10_000
"""Items of a history, and of those to choose from or to leave out."""
MOST_REASONS = 100
"""Items that explain another."""
MOST_LETTERS = 1000
"""Of an id."""
MOST_TOGETHER = 100
"""Calls for one person that are scored together; more of them cost as much each, and keep other calls waiting."""
MOST_WAITING = 1000
"""Calls that wait for an answer; more are turned away."""


def check_batch(n_users: int, k: int) -> None:
    """Refuse a batch whose answer would be too long."""
    if n_users * k > MOST_ROWS:
        raise TacitaError(
            f"{n_users:,} lists of {k:,} items are more than {MOST_ROWS:,} items in one answer; ask for fewer people "
            "or a smaller k."
        )
