"""Rows without a value in a column that is read: counted by kind in one pass, and dropped where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from tacita.core.errors import TacitaError
from tacita.data.file_errors import file_error
from tacita.data.table_files import RawTable

CHECKED_ROLES = ("user", "item", "rating", "timestamp")
BLANK_TEXTS = ("", "nan", "null", "na", "n/a", "none", "<na>", "nat")
"""What other programs write for a missing number or time; an id may be called so, unless it is empty."""


@dataclass(frozen=True)
class MissingValues:
    """The rows that lack a value in one column."""

    role: str
    column: str
    is_missing: pl.Series
    count: int

    @property
    def first_row(self) -> int:
        return int(self.is_missing.arg_max() or 0)


def find_missing(table: RawTable) -> list[MissingValues]:
    """Every column that is read and lacks values, in one pass over the table."""
    problems = []
    for role in CHECKED_ROLES:
        if role not in table.names:
            continue
        is_missing = _mark_missing(table.frame[role], is_id=role in ("user", "item"))
        count = int(is_missing.sum())
        if count:
            problems.append(MissingValues(role, table.names[role], is_missing, count))
    return problems


def _mark_missing(values: pl.Series, is_id: bool) -> pl.Series:
    is_missing = values.is_null()
    if values.dtype.is_float():
        is_missing = is_missing | values.is_nan().fill_null(False)
    if values.dtype == pl.String:
        text = values.str.strip_chars()
        blank = text == "" if is_id else text.str.to_lowercase().is_in(BLANK_TEXTS)
        is_missing = is_missing | blank.fill_null(False)
    return is_missing


def drop_or_refuse_missing(table: RawTable) -> RawTable:
    """The table without rows that lack a value, where the caller asked for it; several kinds are refused together."""
    problems = find_missing(table)
    if not problems:
        return table
    if table.hints.drop_missing:
        return _drop_missing_rows(table, problems)
    if len(problems) == 1:
        return table  # the sentence on that column names its first row
    raise _missing_error(table, problems)


def _drop_missing_rows(table: RawTable, problems: list[MissingValues]) -> RawTable:
    is_dropped = pl.zeros(table.frame.height, dtype=pl.Boolean, eager=True)
    counts = []
    for problem in problems:
        is_dropped = is_dropped | problem.is_missing
        counts.append(f"{problem.count:,} without {problem.role}")
    n_dropped = int(is_dropped.sum())
    if n_dropped == table.frame.height:
        raise file_error(table.path, "every row lacks a value", "name other columns with --columns")
    listed = ", ".join(counts)
    note = f"dropped {n_dropped:,} of {table.frame.height:,} rows that lack a value ({listed})."
    return replace(table, frame=table.frame.filter(~is_dropped), layout=None, notes=(*table.notes, note))


def _missing_error(table: RawTable, problems: list[MissingValues]) -> TacitaError:
    """One sentence that counts every kind, with a place for each."""
    counts = []
    for problem in problems:
        place = table.describe_place(problem.first_row)
        counts.append(f"{problem.count:,} without {problem.role} (column {problem.column}, first in {place})")
    listed = ", ".join(counts)
    remedy = "fill them in, leave such rows out with --drop-missing, or a column with --columns ROLE=-"
    return file_error(table.path, f"{table.frame.height:,} rows, of which {listed}", remedy)
