"""Fields of the pages' forms, and the numbers that people type into them."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import Request

from tacita.core.errors import TacitaError

MOST_FIELDS = 50

Fields = dict[str, str]
"""The fields of a form, or of a query."""


async def read_form(request: Request) -> Fields:
    """The fields of a form; of several with the same name the last."""
    body = await request.body()
    text = body.decode("utf-8", "replace")
    if text.count("&") >= MOST_FIELDS:
        raise TacitaError(f"a form may have {MOST_FIELDS} fields.")
    values_by_name = parse_qs(text, keep_blank_values=True)
    return {name: values[-1] for name, values in values_by_name.items()}


def parse_count_or_zero(text: str) -> int:
    """A count as a query names it; 0 for everything else."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number else 0


def parse_decimal(text: str) -> float:
    """A number as people type it."""
    if len(text) >= 40:
        return float("nan")
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        raise TacitaError("a budget is a number such as 1.5; smaller is more private.") from None
