"""Times, spans, sizes and budgets as people say them."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def format_time(at: float | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC).astimezone():%d %b %Y, %H:%M}"


def format_age(seconds: float | None) -> str:
    """A span of time as people say it."""
    if seconds is None:
        return "never"
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            n = int(seconds // length)
            return f"{n} {unit}{'s' if n != 1 else ''}"
    return "a moment"


def format_duration(seconds: float) -> str:
    """The same to the second."""
    return format_count(round(seconds), "second") if seconds < 60 else format_age(seconds)


def format_bytes(n: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def format_count(n: int, singular: str, plural: str = "") -> str:
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def format_odds(epsilon: float, delta: float = 0.0) -> str:
    """How often in 100 whoever saw all that left is right at most who says whether it was made with your data.

    Half of the time it was. Rounded up: it is a bound.
    """
    right = 100 * (1 + (delta - 1) / (1 + math.exp(min(700.0, max(0.0, epsilon)))))
    return f"{math.ceil(right)}" if right <= 99 else f"{math.ceil(10 * right) / 10:g}"
