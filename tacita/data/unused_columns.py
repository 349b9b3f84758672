"""Inspects columns whose names do not fit a role: finds the time if it is plain, and notes others that look usable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import polars as pl

from tacita.data.file_errors import quote_value
from tacita.data.roles import RolePlaces
from tacita.data.values import FileHints, parse_finite, parse_times

_TIME_NAME = re.compile(r"(^|_)(day|when|at|on|month|year|week|seen|visited)(_|$)|time|date|stamp", re.I)
_NOT_OF_THE_EVENT = re.compile(r"birth|born|release|publi|regist|signup|sign_up|join|expir|until|updat", re.I)
_RATING_NAME = re.compile(r"^(grade|points?|value|votes?|likes?|liked|feedback|marks?|count|quantity)$", re.I)
_DATE_LOOK = r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([ T]\d{1,2}:\d{2}.*)?$"
_YEAR_1990 = 631_152_000  # in seconds
_YEAR_2100 = 4_102_444_800
_UNITS_PER_SECOND = (1, 10**3, 10**6, 10**9)


def find_time_and_note_columns(
    columns: Sequence[str],
    roles: RolePlaces,
    hints: FileHints,
    sample: pl.DataFrame,
    read_column: Callable[[str], pl.Series],
    shown_names: Mapping[str, str] | None = None,
) -> tuple[RolePlaces, list[str]]:
    """The roles, with the time where one column is plainly it, and notes on others that look usable.

    `columns` are the columns as the sample has them, `shown_names` what people call them where that differs.
    """
    shown = {name: name for name in columns}
    shown.update(shown_names or {})
    notes = []
    if _is_unassigned_role("timestamp", roles, hints):
        times = []
        for name in sample.columns:
            looks_like_times = _is_time_column(shown[name], sample[name], hints)
            if looks_like_times and _has_only_times(read_column(name), hints):
                times.append(name)
        if len(times) == 1:
            place = columns.index(times[0])
            roles = {**roles, "timestamp": place}
        elif times:
            quoted = " and ".join(quote_value(shown[name]) for name in times)
            notes.append(f"columns {quoted} look like times and none was used; choose with --columns time=NAME.")
        else:
            notes += _list_time_notes(sample, shown)
    if _is_unassigned_role("rating", roles, hints):
        notes += _list_rating_notes(sample, shown)
    return roles, notes


def _is_unassigned_role(role: str, roles: RolePlaces, hints: FileHints) -> bool:
    """Whether no column has a role and the caller says nothing of it."""
    return role not in roles and role not in hints.columns


def _has_only_times(values: pl.Series, hints: FileHints = FileHints()) -> bool:  # noqa: B008
    times, _ = parse_times(values, hints)
    return times.null_count() == 0


def _list_rating_notes(sample: pl.DataFrame, shown: Mapping[str, str]) -> list[str]:
    notes = []
    for column in sample.columns:
        name = shown[column]
        if not _RATING_NAME.search(name):
            continue
        numbers = parse_finite(sample[column].drop_nulls())
        if not numbers.null_count():
            quoted = quote_value(name)
            notes.append(f"column {quoted} could be ratings; --columns rating={name} uses it.")
    return notes


def _is_time_column(name: str, values: pl.Series, hints: FileHints) -> bool:
    """Whether a column is plainly the time of its rows: dates by type or look, or a time's name on a time's numbers."""
    if _NOT_OF_THE_EVENT.search(name):
        return False
    if not len(values) or values.null_count():
        return False
    if _has_date_type(values):
        return True
    if _has_epoch_times(values):
        if hints.date_format is not None:
            return False
        return _TIME_NAME.search(name) is not None
    if values.dtype != pl.String:
        return False
    numbers = values.cast(pl.Float64, strict=False)
    is_numeric = numbers.null_count() == 0
    if is_numeric and hints.date_format is None:
        return False
    return _has_only_times(values, hints)


def _has_date_type(values: pl.Series) -> bool:
    return isinstance(values.dtype, pl.Date | pl.Datetime)


def _has_epoch_times(values: pl.Series) -> bool:
    """Whether all values are whole numbers that are times between 1990 and 2100 in one unit."""
    is_text = values.dtype == pl.String
    if not is_text and not values.dtype.is_integer():
        return False
    numbers = values.cast(pl.Int64, strict=False)
    if numbers.null_count():
        return False
    for unit in _UNITS_PER_SECOND:
        first = _YEAR_1990 * unit
        last = _YEAR_2100 * unit
        if numbers.is_between(first, last).all():
            return True
    return False


def _list_time_notes(sample: pl.DataFrame, shown: Mapping[str, str]) -> list[str]:
    notes = []
    for column in sample.columns:
        note = _describe_unused_time(shown[column], sample[column])
        if note:
            notes.append(note)
    return notes


def _describe_unused_time(name: str, values: pl.Series) -> str | None:
    """What to say of a column that may be the time and was not used."""
    filled = values.drop_nulls()
    if not len(filled):
        return None
    is_known = _has_only_times(filled)
    looks_like_dates = False
    if filled.dtype == pl.String:
        is_date = filled.str.contains(_DATE_LOOK)
        looks_like_dates = is_date.all()
    quoted = quote_value(name)
    if looks_like_dates and not is_known:
        form = _guess_date_format(filled)
        example = quote_value(filled[0])
        return (
            f"column {quoted} holds dates such as {example} and was not used; "
            f'--columns time={name} --date-format "{form}" uses it.'
        )
    is_typed = _has_date_type(filled)
    is_named = is_known and _TIME_NAME.search(name)
    if looks_like_dates or is_typed or is_named or _has_epoch_times(filled):
        return f"column {quoted} could be the time and was not used; --columns time={name} uses it."
    return None


def _guess_date_format(values: pl.Series) -> str:
    """The format that the first date seems to have, day before month where that is open."""
    first = str(values[0])
    mark = next(letter for letter in first if letter in "./-")
    second_numbers = values.str.extract(r"^\d+[./-](\d+)")
    largest = second_numbers.cast(pl.Int64, strict=False).max()
    if isinstance(largest, int) and largest > 12:
        date_format = f"%m{mark}%d{mark}%Y"
    else:
        date_format = f"%d{mark}%m{mark}%Y"
    n_colons = first.count(":")
    if n_colons == 2:
        return date_format + " %H:%M:%S"
    if n_colons:
        return date_format + " %H:%M"
    return date_format
