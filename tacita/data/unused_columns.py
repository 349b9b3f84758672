"""Columns whose names say nothing: the time among them if it is plain, and a word on those that look usable."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import polars as pl

from tacita.data.file_errors import quote_value
from tacita.data.values import FileHints, parse_finite, parse_times

_TIME_NAME = re.compile(r"(^|_)(day|when|at|on|month|year|week|seen|visited)(_|$)|time|date|stamp", re.I)
_NOT_OF_THE_EVENT = re.compile(r"birth|born|release|publi|regist|signup|sign_up|join|expir|until|updat", re.I)
_RATING_NAME = re.compile(r"^(grade|points?|value|votes?|likes?|liked|feedback|marks?|count|quantity)$", re.I)
_DATE_LOOK = r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([ T]\d{1,2}:\d{2}.*)?$"
_EPOCHS = tuple((631_152_000 * unit, 4_102_444_800 * unit) for unit in (1, 10**3, 10**6, 10**9))  # 1990 to 2100


def inspect_columns(
    every: Sequence[str],
    roles: dict[str, int],
    hints: FileHints,
    sample: pl.DataFrame,
    whole: Callable[[str], pl.Series],
    names: Mapping[str, str] | None = None,
) -> tuple[dict[str, int], list[str]]:
    """The roles, with the time where one column is plainly it, and notes on others that look usable.

    `every` are the columns as the sample has them, `names` what people call them where that differs.
    """
    called = {name: (names or {}).get(name, name) for name in every}
    notes = []
    if "timestamp" not in roles and "timestamp" not in hints.columns:
        plain = [name for name in sample.columns if _is_time(called[name], sample[name], hints)]
        plain = [name for name in plain if not parse_times(whole(name), hints)[0].null_count()]
        if len(plain) == 1:
            roles = {**roles, "timestamp": every.index(plain[0])}
        elif plain:
            either = " and ".join(quote_value(called[name]) for name in plain)
            notes.append(f"columns {either} look like times and none was used; choose with --columns time=NAME.")
        else:
            maybe = (_note_time_column(called[name], sample[name]) for name in sample.columns)
            notes += [note for note in maybe if note]
    if "rating" not in roles and "rating" not in hints.columns:
        for name in sample.columns:
            if _RATING_NAME.search(called[name]) and not parse_finite(sample[name].drop_nulls()).null_count():
                notes.append(
                    f"column {quote_value(called[name])} could be ratings; --columns rating={called[name]} uses it."
                )
    return roles, notes


def _is_time(name: str, values: pl.Series, hints: FileHints) -> bool:
    """Whether a column is plainly the time of its rows: dates by type or look, or a time's name on a time's numbers."""
    if _NOT_OF_THE_EVENT.search(name) or not len(values) or values.null_count():
        return False
    if isinstance(values.dtype, pl.Date | pl.Datetime):
        return True
    if _is_epoch(values):
        return bool(_TIME_NAME.search(name)) and hints.date_format is None
    numeric = values.cast(pl.Float64, strict=False).null_count() == 0
    if values.dtype != pl.String or (numeric and hints.date_format is None):
        return False
    return parse_times(values, hints)[0].null_count() == 0


def _is_epoch(values: pl.Series) -> bool:
    """Whether all values are whole numbers that are times between 1990 and 2100 in one unit."""
    if not (values.dtype.is_integer() or values.dtype == pl.String):
        return False
    numbers = values.cast(pl.Int64, strict=False)
    return not numbers.null_count() and any(numbers.is_between(low, high).all() for low, high in _EPOCHS)


def _note_time_column(name: str, values: pl.Series) -> str | None:
    """What to say of a column that may be the time and was not used."""
    filled = values.drop_nulls()
    if not len(filled):
        return None
    if filled.dtype == pl.String and filled.str.contains(_DATE_LOOK).all() and parse_times(filled)[0].null_count():
        form = _guess_date_format(filled)
        return (
            f"column {quote_value(name)} holds dates such as {quote_value(filled[0])} and was not used; "
            f'--columns time={name} --date-format "{form}" uses it.'
        )
    known = not parse_times(filled)[0].null_count()
    timely = _is_epoch(filled) or isinstance(filled.dtype, pl.Date | pl.Datetime)
    timely |= known and filled.dtype == pl.String and bool(filled.str.contains(_DATE_LOOK).all())
    named = known and _TIME_NAME.search(name)
    if timely or named:
        return f"column {quote_value(name)} could be the time and was not used; --columns time={name} uses it."
    return None


def _guess_date_format(values: pl.Series) -> str:
    """The format that the first date seems to have, day before month where that is open."""
    first = str(values[0])
    mark = next(letter for letter in first if letter in "./-")
    day_first = values.str.extract(r"^\d+[./-](\d+)").cast(pl.Int64, strict=False).max()
    order = "%m{0}%d{0}%Y" if isinstance(day_first, int) and day_first > 12 else "%d{0}%m{0}%Y"
    clock = " %H:%M:%S" if first.count(":") == 2 else " %H:%M" if ":" in first else ""
    return order.format(mark) + clock
