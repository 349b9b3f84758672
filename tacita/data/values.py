"""Numbers and times out of columns that may be text; what cannot be read becomes null, for the caller to report."""

from __future__ import annotations

import polars as pl

_DAYS = ("%Y-%m-%d", "%Y/%m/%d", "%m %d, %Y", "%a %b %d %H:%M:%S %z %Y", "%+")
_CLOCKS = (" %H:%M:%S%.f", "T%H:%M:%S%.f", " %H:%M", "T%H:%M")
_DATE_FORMATS = _DAYS + tuple(day + clock for day in _DAYS[:2] for clock in _CLOCKS)


def is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def finite(values: pl.Series, kind: type[pl.Float32 | pl.Float64] = pl.Float64) -> pl.Series:
    """Numbers; what is none, or is not finite, becomes null."""
    numbers = values.cast(pl.Float64, strict=False).cast(kind)
    return numbers.set(~numbers.is_finite().fill_null(False), None)


def times(values: pl.Series) -> pl.Series:
    """Whole numbers whose order is that of the times: as they are, from floats, or from dates."""
    if values.dtype.is_temporal():
        return values.to_physical().cast(pl.Int64)
    if values.dtype.is_float():
        return _whole(values)
    numbers = values.cast(pl.Int64, strict=False)
    if not numbers.null_count() or values.dtype != pl.String:
        return numbers
    first = values.drop_nulls()
    return _whole(values) if len(first) and is_number(first[0]) else dates(values)


def _whole(values: pl.Series) -> pl.Series:
    """Floats as whole numbers, in millionths where they have fractions and room for it."""
    numbers = finite(values)
    largest = float(numbers.abs().max() or 0)  # type: ignore[arg-type]
    fractions = bool((numbers.drop_nulls() % 1 != 0).any())
    if fractions and largest < 9e12:
        numbers = numbers * 1e6
    return numbers.round(0).cast(pl.Int64, strict=False)


def dates(values: pl.Series) -> pl.Series:
    """Text as microseconds; formats that fit the first value are tried first, then the rest where needed."""
    first = values.drop_nulls().head(1)
    fitting = sorted(_DATE_FORMATS, key=lambda form: _as_date(first, form).null_count())
    found = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    for form in fitting:
        if not found.null_count():
            break
        found = found.zip_with(found.is_not_null(), _as_date(values, form))
    return found


def _as_date(values: pl.Series, form: str) -> pl.Series:
    return values.str.to_datetime(form, time_unit="us", strict=False).to_physical().cast(pl.Int64)
