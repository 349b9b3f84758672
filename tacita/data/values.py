"""Numbers and times out of columns that may be text; what cannot be read becomes null, for the caller to report."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

_DATE_FORMATS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%m %d, %Y",
    "%a %b %d %H:%M:%S %z %Y",
    "%+",
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%dT%H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%dT%H:%M",
    "%Y/%m/%d %H:%M:%S%.f",
    "%Y/%m/%dT%H:%M:%S%.f",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%dT%H:%M",
)
_COMMA_NUMBER = r"^[+-]?\d+(,\d+)?$"
_MAYBE_THOUSANDS = r",\d{3}$"


@dataclass(frozen=True)
class FileHints:
    """What the caller says of a file: role -> column, how its dates are written, its decimal mark, what to drop."""

    columns: dict[str, str] = field(default_factory=dict)
    date_format: str | None = None
    decimal: str | None = None
    drop_missing: bool = False  # rows without a value in a column that is read
    row_by_row: bool = False  # under a budget: what a row holds decides on that row alone


def parse_number(field: str) -> float | None:
    """The number that a field is, with a decimal point or a decimal comma."""
    try:
        return float(field.replace(",", ".", 1))
    except ValueError:
        return None


FloatKind = type[pl.Float32 | pl.Float64]


def parse_finite(values: pl.Series, kind: FloatKind = pl.Float64, decimal: str | None = None) -> pl.Series:
    """Numbers; what is none, or is not finite, becomes null."""
    values = _normalise_decimals(values, decimal)
    numbers = values.cast(pl.Float64, strict=False)
    numbers = numbers.cast(kind)
    is_finite = numbers.is_finite().fill_null(False)
    return numbers.set(~is_finite, None)


def _normalise_decimals(values: pl.Series, decimal: str | None) -> pl.Series:
    """Text with decimal commas as text with points, on request or where it cannot mean anything else."""
    if values.dtype != pl.String:
        return values
    if decimal == ".":
        return values
    has_comma = values.str.contains(_COMMA_NUMBER)
    has_comma = has_comma.fill_null(False)
    if decimal is None and not _has_plain_commas(values, has_comma):
        return values
    numbers = values.set(~has_comma, None)
    return numbers.str.replace(",", ".", literal=True)


def _has_plain_commas(values: pl.Series, has_comma: pl.Series) -> bool:
    """Whether all values are numbers with decimal commas, and no comma may separate thousands."""
    is_filled = values.is_not_null()
    if not has_comma.filter(is_filled).all():
        return False
    return not values.str.contains(_MAYBE_THOUSANDS).any()


def parse_times(values: pl.Series, hints: FileHints = FileHints()) -> tuple[pl.Series, str]:  # noqa: B008
    """Whole numbers whose order is that of the times, from numbers or dates, and their unit where it is known."""
    kind = values.dtype
    if kind.is_temporal():
        unit = ""
        if isinstance(kind, pl.Date):
            unit = "d"
        elif isinstance(kind, pl.Datetime):
            unit = kind.time_unit
        numbers = values.to_physical()
        return numbers.cast(pl.Int64), unit
    if hints.date_format:
        texts = values.cast(pl.String)
        return parse_dates(texts, hints.date_format), "us"
    if kind.is_float():
        return _to_whole_numbers(values, None), ""
    numbers = values.cast(pl.Int64, strict=False)
    is_complete = numbers.null_count() == 0
    if is_complete or kind != pl.String:
        return numbers, ""
    filled = values.drop_nulls()
    is_number = len(filled) > 0 and parse_number(filled[0]) is not None
    if is_number:
        return _to_whole_numbers(values, hints.decimal), ""
    return parse_dates(values), "us"


def _to_whole_numbers(values: pl.Series, decimal: str | None) -> pl.Series:
    """Floats as whole numbers, in millionths where they have fractions and room for it."""
    numbers = parse_finite(values, decimal=decimal)
    magnitudes = numbers.abs()
    largest = float(magnitudes.max() or 0)  # type: ignore[arg-type]
    fractions = numbers.drop_nulls() % 1
    has_fractions = (fractions != 0).any()
    if has_fractions and largest < 9e12:
        numbers = numbers * 1e6
    rounded = numbers.round(0)
    return rounded.cast(pl.Int64, strict=False)


def parse_dates(values: pl.Series, form: str | None = None) -> pl.Series:
    """Text as microseconds, in one format; without one, formats that fit the first value come first."""
    if form is not None:
        return _parse_date_format(values, form)
    first = values.drop_nulls().head(1)

    def count_failures(form: str) -> int:
        times = _parse_date_format(first, form)
        return times.null_count()

    fitting = sorted(_DATE_FORMATS, key=count_failures)
    no_time = pl.Series([None], dtype=pl.Int64)
    times = no_time.new_from_index(0, len(values))
    for form in fitting:
        if not times.null_count():
            break
        parsed = _parse_date_format(values, form)
        times = times.zip_with(times.is_not_null(), parsed)
    return times


def _parse_date_format(values: pl.Series, form: str) -> pl.Series:
    dates = values.str.to_datetime(form, time_unit="us", strict=False)
    return dates.to_physical().cast(pl.Int64)
