"""Numbers as people read them on pages and in tables."""

from __future__ import annotations

import math


def format_metric(metric: str) -> str:
    """ndcg@20 -> NDCG@20"""
    name, at, k = metric.partition("@")
    is_word = name in ("recall", "precision")
    title = name.capitalize() if is_word else name.upper()
    return title + at + k


def format_score(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.4f}"


def format_bytes(size: float) -> str:
    if not math.isfinite(size):
        return "–"
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            needs_no_decimal = size >= 99.5 or unit == "B"
            digits = 0 if needs_no_decimal else 1
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"


def format_change(value: float, base: float) -> str:
    """The change from base to value."""
    if not (base > 0 and math.isfinite(value / base)):
        return "–"
    return f"{value / base - 1:+.0%}".replace("-", "−")
