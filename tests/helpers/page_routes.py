"""Walking every route of an application behind a guard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def every_route(guard: Any) -> list[tuple[str, str]]:
    """(method, path) of all that an application answers."""
    return [(method, leave.path) for leave in _leaves(guard.app.routes) for method in sorted(leave.methods - {"HEAD"})]


def _leaves(routes: Any) -> Iterator[Any]:
    for route in routes:
        inner = getattr(route, "original_router", None)  # how newer versions of FastAPI keep what was included
        if inner is None:
            yield route
        else:
            yield from _leaves(inner.routes)
