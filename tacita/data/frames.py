"""Tables in memory: those of other libraries on their way in, and answers to people on their way out (polars).

polars comes with tacita. pandas does not: its frames are recognised by their interface and converted column by column.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.core.types import AnyArray
from tacita.data.columns import make_interactions
from tacita.data.file_errors import quote_value
from tacita.data.interaction_table import Interactions
from tacita.data.roles import RequestedColumns, normalise_roles
from tacita.data.row_by_row import make_frame_table, make_interactions_row_by_row
from tacita.data.table_files import make_raw_table, require_usable_table
from tacita.data.values import FileHints

Frame = pl.DataFrame

IN_MEMORY = "table:in-memory"
"""The setting `data` of a run that learned from a table in memory."""

IN_MEMORY_PATH = Path("the table")  # what sentences call it
ENDINGS = (".parquet", ".csv")


# On the way out to pandas


def to_pandas(frame: Frame) -> Any:
    """The same table of pandas, which the caller has loaded."""
    pandas = importlib.import_module("pandas")
    return pandas.DataFrame({name: frame[name].to_list() for name in frame.columns})


# On the way in


def convert_to_frame_or_none(source: Any) -> Frame | None:
    """A table of polars, pandas or Arrow, or a dict of columns, as a frame; None: it is something else."""
    if isinstance(source, pl.DataFrame):
        return source
    if isinstance(source, pl.LazyFrame):
        return source.collect()
    if isinstance(source, Mapping):
        columns = {str(name): values for name, values in source.items()}
        return _convert_frame(columns)
    if is_pandas(source):
        return _from_pandas(source)
    if hasattr(source, "__arrow_c_stream__"):
        return _convert_frame(source)
    return None


def _convert_frame(columns: Any) -> Frame:
    try:
        return pl.DataFrame(columns, strict=False)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        words = str(error).split()
        reason = " ".join(words)[:200].rstrip(".")
        raise TacitaError(
            f"{IN_MEMORY_PATH} cannot be read ({reason}); give columns of one length, each of one kind."
        ) from None


def is_pandas(source: Any) -> bool:
    """Whether it has the interface of a frame of pandas."""
    return all(hasattr(source, name) for name in ("columns", "iloc", "dtypes"))


def _from_pandas(source: Any) -> Frame:
    names = [str(raw_name) for raw_name in source.columns]
    for name in names:
        if names.count(name) > 1:
            raise TacitaError(f"{IN_MEMORY_PATH}: two columns are called {quote_value(name)}; rename one.")
    columns = {}
    for name, raw_name in zip(names, source.columns, strict=True):
        columns[name] = _convert_column(source[raw_name])
    return _convert_frame(columns)


def _convert_column(column: Any) -> pl.Series:
    """One column of pandas; missing values of any of its kinds become null."""
    values = np.asarray(column.to_numpy())
    missing = np.asarray(column.isna().to_numpy(), bool)
    if values.dtype.kind == "M":
        series = pl.Series(values.astype("datetime64[us]"))
    elif values.dtype.kind in "biuf":
        series = pl.Series(values)
    else:
        objects = values.tolist()
        for place in np.flatnonzero(missing):
            objects[place] = None
        series = pl.Series(objects, strict=False)
    if missing.any():
        series = series.set(pl.Series(missing), None)
    return series


def read_frame(
    frame: Frame,
    columns: RequestedColumns,
    date_format: str | None,
    decimal: str | None,
    drop_missing: bool = False,
    row_by_row: bool = False,
) -> Interactions:
    """Interactions of a table in memory: columns are found as in a file."""
    hints = FileHints(normalise_roles(columns), date_format, decimal, drop_missing, row_by_row)
    if not frame.height:
        raise TacitaError(f"{IN_MEMORY_PATH} has no rows; give one that has interactions in it.")
    if row_by_row:
        raw_table = make_frame_table(IN_MEMORY_PATH, frame, hints)
        table = make_interactions_row_by_row("table", raw_table)
    else:
        raw_table = require_usable_table(make_raw_table(IN_MEMORY_PATH, "in memory", frame, hints))
        table = make_interactions("table", raw_table)
    return replace(table, items_from=None, item_file=None)  # no file next to it describes its items


def to_raw_ids(source: Any, role: str = "user") -> list[str]:
    """Raw ids as text: of one id, of a list, array or column of them, or of the column of a table that has the role."""
    is_table = isinstance(source, pl.DataFrame | pl.LazyFrame | Mapping)
    if is_table or is_pandas(source):
        frame = convert_to_frame_or_none(source)
        if frame is None or role not in frame.columns:
            raise TacitaError(f"a table of {role}s needs a column '{role}'; rename one, or give the column alone.")
        source = frame[role]
    if isinstance(source, pl.Series):
        source = source.to_list()
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        return [_to_raw_id(source, role)]
    return [_to_raw_id(raw_id, role) for raw_id in source]


def _to_raw_id(value: Any, role: str) -> str:
    """An id as files have it: whole numbers without a point, texts without spaces around them."""
    role = f"an {role}" if role == "item" else f"a {role}"
    is_text = isinstance(value, str | bytes)
    if isinstance(value, Iterable) and not is_text:
        kind = type(value).__name__
        raise TacitaError(f"{role} is named by a text or a whole number, not by a {kind}.")
    if _is_missing(value):
        raise TacitaError(f"{role} is missing among those that are given ({value}); leave missing ones out.")
    is_float = isinstance(value, float | np.floating)
    if is_float and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _is_missing(value: Any) -> bool:
    if value is None:
        return True
    if type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return True
    is_float = isinstance(value, float | np.floating)
    return is_float and bool(np.isnan(value))


# On the way out


def make_frame(columns: Mapping[str, Any]) -> Frame:
    """Columns of one length as a table."""
    return pl.DataFrame(columns)


def lookup_names(names: Sequence[str | None], codes: AnyArray) -> pl.Series:
    """The names that codes stand for, a text each."""
    texts = pl.Series(names, dtype=pl.String)
    places = np.ascontiguousarray(codes, np.int64)
    return texts.gather(places)


def to_integer_column(values: Sequence[int | None]) -> pl.Series:
    """Whole numbers, some of which may be missing."""
    return pl.Series(values, dtype=pl.Int64)


def to_number_column(values: Sequence[float | None]) -> pl.Series:
    """Numbers, some of which may be missing."""
    return pl.Series(values, dtype=pl.Float64)


def check_table_ending(path: Path) -> None:
    """Refuse a file for a table of an unknown kind, before anything is computed."""
    if path.suffix.lower() not in ENDINGS:
        raise TacitaError(f"cannot write {path}: a table goes to a .parquet or a .csv file; choose one of these.")


def has_formula_text(frame: Frame) -> bool:
    """Whether a spreadsheet would compute some text of it, instead of showing it."""
    for name, kind in frame.schema.items():
        if kind != pl.String:
            continue
        is_formula = frame[name].str.contains(r"^[=+\-@]")
        if is_formula.any():
            return True
    return False


def write_frame(frame: Frame, path: Path) -> None:
    """A table as Parquet or CSV, by the ending of the file: whole or not at all."""
    check_table_ending(path)
    if path.suffix.lower() == ".csv":
        text = frame.write_csv()
        write_bytes(path, text.encode())
        return
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())
