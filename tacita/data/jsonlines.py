"""JSON lines: one object a line, its keys the names of the columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl

from tacita.data.file_errors import file_error


def is_json(data: bytes) -> bool:
    """Whether a text begins like a JSON object, or like a list of them."""
    return re.match(rb"\s*(\[\s*)?\{", data) is not None


def read_json_lines(path: Path, data: bytes) -> pl.DataFrame:
    """All columns, with the types JSON gives them."""
    if data.lstrip()[:1] == b"[":
        raise file_error(
            path, "one JSON list", "save it as JSON lines: one object a line, no brackets and commas around"
        )
    try:
        return pl.read_ndjson(data, infer_schema_length=None)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        raise _find_json_error(path, data) from None


def _find_json_error(path: Path, data: bytes) -> Exception:
    """The first line that is no object; else some column changes its type."""
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            is_object = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            return file_error(path, f"line {number} is not a JSON object", "correct or remove it")
    return file_error(path, "the values of a column are of several types", "write them all as text, or all as numbers")


def locate_row(data: bytes, row: int) -> str:
    """Where a row stands, blank lines counted."""
    filled_rows = 0
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        if filled_rows == row:
            return f"line {number}"
        filled_rows += 1
    return f"row {row + 1}"
