"""Callbacks of a search, for progress displays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tacita.core.types import BlockStream

OnDone = Callable[[int, int], None]  # how many are done, of how many


@contextmanager
def _count_silently(what: str) -> Iterator[OnDone]:
    yield lambda done, total: None


@dataclass(frozen=True)
class SearchCallbacks:
    """What to call during a search that counts one thing after another; by default nobody watches."""

    counting: Callable[[str], AbstractContextManager[OnDone]] = _count_silently  # called with what is counted
    on_data: Callable[[BlockStream], None] | None = None
