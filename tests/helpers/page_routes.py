"""Walking every route of an application behind a guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def every_route(guard: Any) -> list[tuple[str, str]]:
    """(method, path) of all that an application answers."""
    return [(method, one.path) for one in _leaves(guard.app.routes) for method in sorted(one.methods - {"HEAD"})]


def _leaves(routes: Any) -> Iterator[Any]:
    for one in routes:
        inner = getattr(one, "original_router", None)  # how newer versions of FastAPI keep what was included
        if inner is None:
            yield one
        else:
            yield from _leaves(inner.routes)
