"""Tables in memory: those of other libraries on their way in, and answers to people on their way out (polars).

polars comes with tacita. pandas does not: a frame of it is known by its interface and converted column by column here.
"""

from __future__ import annotations

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
from tacita.data.roles import check_roles
from tacita.data.table_files import check_table, make_raw_table
from tacita.data.values import FileHints

Frame = pl.DataFrame

IN_MEMORY = "table:in-memory"
"""What `data` says in the settings of a run that learned from a table in memory."""

IN_MEMORY_PATH = Path("the table")  # what sentences call it
ENDINGS = (".parquet", ".csv")


# On the way in


def as_frame(source: Any) -> Frame | None:
    """A table of polars, pandas or Arrow, or a dict of columns, as a frame; None: it is something else."""
    if isinstance(source, pl.DataFrame):
        return source
    if isinstance(source, pl.LazyFrame):
        return source.collect()
    if isinstance(source, Mapping):
        return _convert_frame({str(name): values for name, values in source.items()})
    if all(hasattr(source, name) for name in ("columns", "iloc", "dtypes")):
        return _from_pandas(source)
    if hasattr(source, "__arrow_c_stream__"):
        return _convert_frame(source)
    return None


def _convert_frame(columns: Any) -> Frame:
    try:
        return pl.DataFrame(columns, strict=False)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise TacitaError(
            f"{IN_MEMORY_PATH} cannot be read ({said}); give columns of one length, each of one kind."
        ) from None


def _from_pandas(source: Any) -> Frame:
    names = [str(name) for name in source.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TacitaError(f"{IN_MEMORY_PATH}: two columns are called {quote_value(twice)}; rename one.")
    return _convert_frame({name: _convert_column(source[raw]) for name, raw in zip(names, source.columns, strict=True)})


def _convert_column(column: Any) -> pl.Series:
    """One column of pandas; missing values of any of its kinds become null."""
    values, missing = np.asarray(column.to_numpy()), np.asarray(column.isna().to_numpy(), bool)
    if values.dtype.kind == "M":
        made = pl.Series(values.astype("datetime64[us]"))
    elif values.dtype.kind in "biuf":
        made = pl.Series(values)
    else:
        made = pl.Series([None if gone else one for one, gone in zip(values.tolist(), missing)], strict=False)
    return made.set(pl.Series(missing), None) if missing.any() else made


def read_frame(frame: Frame, columns: Mapping[str, str], date_format: str | None, decimal: str | None) -> Interactions:
    """Interactions of a table in memory: columns are found as in a file."""
    hints = FileHints(check_roles(columns), date_format, decimal)
    if not frame.height:
        raise TacitaError(f"{IN_MEMORY_PATH} has no rows; give one that has interactions in it.")
    table = make_interactions("table", check_table(make_raw_table(IN_MEMORY_PATH, "in memory", frame, hints)))
    return replace(table, items_from=None)  # nothing beside it tells more of its items


def to_raw_ids(source: Any, role: str = "user") -> list[str]:
    """Raw ids as text: of one id, of a list, array or column of them, or of the column of a table that has the role."""
    plain = isinstance(source, pl.DataFrame | pl.LazyFrame | Mapping)
    if plain or all(hasattr(source, name) for name in ("columns", "iloc", "dtypes")):
        frame = as_frame(source)
        if frame is None or role not in frame.columns:
            raise TacitaError(f"a table of {role}s needs a column '{role}'; rename one, or give the column alone.")
        source = frame[role]
    if isinstance(source, str | bytes) or not isinstance(source, Iterable):
        return [_to_raw_id(source, role)]
    return [_to_raw_id(one, role) for one in (source.to_list() if isinstance(source, pl.Series) else source)]


def _to_raw_id(one: Any, role: str) -> str:
    """An id as files have it: whole numbers without a point, texts without spaces around them."""
    role = f"an {role}" if role == "item" else f"a {role}"
    if isinstance(one, Iterable) and not isinstance(one, str | bytes):
        raise TacitaError(f"{role} is named by a text or a whole number, not by a {type(one).__name__}.")
    missing = one is None or type(one).__name__ in ("NAType", "NaTType")  # the last two: of pandas
    if missing or (isinstance(one, float | np.floating) and np.isnan(one)):
        raise TacitaError(f"{role} is missing among those that are given ({one}); leave missing ones out.")
    whole = isinstance(one, float | np.floating) and float(one).is_integer()
    return str(int(one)) if whole else str(one).strip()


# On the way out


def make_frame(columns: Mapping[str, Any]) -> Frame:
    """Columns of one length as a table."""
    return pl.DataFrame(columns)


def lookup_names(names: Sequence[str | None], codes: AnyArray) -> pl.Series:
    """The names that codes stand for, a text each."""
    return pl.Series(names, dtype=pl.String).gather(np.ascontiguousarray(codes, np.int64))


def integer_column(values: Sequence[int | None]) -> pl.Series:
    """Whole numbers, some of which may be missing."""
    return pl.Series(values, dtype=pl.Int64)


def number_column(values: Sequence[float | None]) -> pl.Series:
    """Numbers, some of which may be missing."""
    return pl.Series(values, dtype=pl.Float64)


def check_ending(path: Path) -> None:
    """Refuse a file for a table whose kind nobody knows, before anything is computed."""
    if path.suffix.lower() not in ENDINGS:
        raise TacitaError(f"cannot write {path}: a table goes to a .parquet or a .csv file; choose one of these.")


def has_formula_text(frame: Frame) -> bool:
    """Whether a spreadsheet would compute some text of it, instead of showing it."""
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    return any(bool(frame[name].str.contains(r"^[=+\-@]").any()) for name in texts)


def write_frame(frame: Frame, path: Path) -> None:
    """A table as Parquet or CSV, by the ending of the file: whole or not at all."""
    check_ending(path)
    if path.suffix.lower() == ".csv":
        write_bytes(path, frame.write_csv().encode())
        return
    made = io.BytesIO()
    frame.write_parquet(made)
    write_bytes(path, made.getvalue())
