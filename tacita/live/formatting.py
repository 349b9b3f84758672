"""Times, spans, sizes and budgets as people say them."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def format_time(at: float | None) -> str:
    if at is None:
        return ""
    local = datetime.fromtimestamp(at, UTC).astimezone()
    return f"{local:%d %b %Y, %H:%M}"


def format_age(seconds: float | None) -> str:
    """A span of time as people say it."""
    if seconds is None:
        return "never"
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            ending = "" if count == 1 else "s"
            return f"{count} {unit}{ending}"
    return "a moment"


def format_duration(seconds: float) -> str:
    """The same to the second."""
    if seconds < 60:
        return format_count(round(seconds), "second")
    return format_age(seconds)


def format_bytes(n: float) -> str:
    if n < 1000:
        return f"{n:.0f} bytes"
    for unit in ("kB", "MB"):
        n /= 1000
        if n < 1000:
            return f"{n:.1f} {unit}"
    n /= 1000
    return f"{n:.1f} GB"


def format_count(n: int, singular: str, plural: str = "") -> str:
    if n == 1:
        return f"{n:,} {singular}"
    return f"{n:,} {plural or singular + 's'}"


def format_odds(epsilon: float, delta: float = 0.0) -> str:
    """How often in 100, at most, somebody who saw all that left guesses right whether your data was used.

    Half of the time it was. Rounded up: it is a bound.
    """
    bounded = min(700.0, max(0.0, epsilon))
    percent = 100 * (1 + (delta - 1) / (1 + math.exp(bounded)))
    if percent <= 99:
        return f"{math.ceil(percent)}"
    tenths = math.ceil(10 * percent)
    return f"{tenths / 10:g}"
