"""Opens a table file of any supported kind and finds the columns of users, items, ratings and so on."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polars as pl

from tacita.data.delimited_text import (
    POLARS_ERRORS,
    SAMPLE_BYTES,
    SEPARATORS,
    Layout,
    is_recbole_header,
    iter_filled_rows,
    read_rows,
    read_text_as_utf8,
    sniff_layout,
)
from tacita.data.file_errors import file_error, list_names, quote_value, unreadable_error
from tacita.data.jsonlines import is_json, locate_row, read_json_lines
from tacita.data.roles import (
    RequestedColumns,
    RolePlaces,
    find_roles_by_name,
    find_roles_by_place,
    name_columns_by_number,
    rank_column_name,
)
from tacita.data.unused_columns import find_time_and_note_columns
from tacita.data.values import FileHints

_WELL_KNOWN = (
    "interactions.csv.gz",
    "interactions.csv",
    "interactions.parquet",
    "u.data",
    "ratings.dat",
    "ratings.csv",
    "user_ratedmovies-timestamps.dat",
)
_PLAIN_ENDS = (".csv", ".tsv", ".txt", ".dat", ".jsonl", ".ndjson")
_TABLE_ENDS = (".parquet", *_PLAIN_ENDS, *(f"{end}.gz" for end in _PLAIN_ENDS))
SAMPLE_ROWS = 1000  # that unused columns are judged by before one is read whole
JSON_LINES = "JSON lines"


@dataclass(frozen=True)
class RawTable:
    """The wanted columns of a file, named by their role, still as they were written."""

    path: Path
    kind: str  # of file, for people
    frame: pl.DataFrame
    names: dict[str, str]  # role -> name of its column in the file
    layout: Layout | None  # None: not a text file, so rows instead of lines
    hints: FileHints
    unused: tuple[str, ...]  # columns that nothing was read from
    notes: tuple[str, ...]  # on those that look usable

    def refuse_bad_rows(self, role: str, is_bad: pl.Series, problem: str, hint: str = "") -> None:
        """Raise for the first bad row of a column, if there is one; `hint` is what may help besides correcting it."""
        if not is_bad.any():
            return
        row = int(is_bad.arg_max() or 0)
        value = self.frame[role][row]
        is_id = role in ("user", "item")
        if value is None or value == "":
            name = f"{role} id" if is_id else role
            problem = f"no {name}"
            n_missing = int(self.frame[role].is_null().sum())
            others = f" ({n_missing:,} rows lack it)" if n_missing > 1 else ""
            problem += others
            remedy = "fill it in, or leave such rows out with --drop-missing"
        else:
            problem = f"{problem}: {quote_value(value)}"
            remedy = f"correct it{hint}"
        if not is_id:
            remedy += f", or leave the column out with --columns {role}=-"
        place = self.describe_place(row)
        raise file_error(self.path, f"{place} has {problem}", remedy)

    def describe_place(self, row: int) -> str:
        if self.layout is not None:
            with suppress(csv.Error):
                data = read_text_as_utf8(self.path)
                for index, (line, _) in enumerate(iter_filled_rows(data, self.layout)):
                    if index == row:
                        return f"line {line}"
        if self.kind == JSON_LINES:
            data = read_text_as_utf8(self.path)
            return locate_row(data, row)
        return f"row {row + 1}"


def find_main_file(folder: Path) -> Path | None:
    """The interactions file of a folder: a well-known name, else the only table in it."""
    try:
        if not folder.is_dir():
            return None
        files = {path.name: path for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise unreadable_error(folder, error) from None
    for name in _WELL_KNOWN:
        if name in files:
            return files[name]
    for ends in ((".inter",), _TABLE_ENDS):
        fitting = []
        for name, path in files.items():
            if name.lower().endswith(ends):
                fitting.append(path)
        if len(fitting) == 1:
            return fitting[0]
    return None


def read_table(path: Path, hints: FileHints) -> RawTable:
    """The user, item, rating, ... columns of a Parquet, JSON lines or text file; `hints` may say which."""
    if is_parquet(path):
        table = _read_parquet(path, hints)
    else:
        table = _read_text_table(path, hints)
    return require_usable_table(table)


def require_usable_table(table: RawTable) -> RawTable:
    """The table, if it has rows and the hints fit it."""
    if not table.frame.height:
        raise file_error(table.path, "a header but no rows", "give a file that has interactions in it")
    date_format = table.hints.date_format
    if date_format and "timestamp" not in table.names:
        problem = f"no time column to be read with --date-format '{date_format}'"
        if table.unused:
            remedy = f"name it with --columns time=..., one of {list_names(table.unused)}"
        else:
            remedy = "every column has another use: leave out --date-format"
        raise file_error(table.path, problem, remedy)
    return table


# Columns with types


def is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _read_parquet(path: Path, hints: FileHints) -> RawTable:
    def read(columns: list[str], n_rows: int | None = None) -> pl.DataFrame:
        return pl.read_parquet(path, columns=columns, n_rows=n_rows, glob=False)

    def read_column(name: str) -> pl.Series:
        return read([name]).to_series()

    try:
        with path.open("rb") as file:  # polars reads a path as a pattern
            schema = pl.read_parquet_schema(file)
        names = list(schema)
        roles = find_roles_by_name(path, names, hints.columns)
        sample = read(_list_free_columns(schema, roles), SAMPLE_ROWS)
        roles, notes = find_time_and_note_columns(names, roles, hints, sample, read_column)
        frame = read([names[place] for place in roles.values()])
        return make_typed_table(path, "Parquet", frame, names, roles, hints, notes)
    except POLARS_ERRORS:
        raise file_error(path, "a damaged Parquet file", "write or copy it again") from None


def _list_free_columns(schema: Mapping[str, pl.DataType], roles: RolePlaces) -> list[str]:
    """The columns of single values that have no role."""
    free = []
    for place, (name, kind) in enumerate(schema.items()):
        if not kind.is_nested() and place not in roles.values():
            free.append(name)
    return free


def make_raw_table(path: Path, kind: str, frame: pl.DataFrame, hints: FileHints) -> RawTable:
    """A table out of a frame whose columns have names and types."""
    names = frame.columns
    roles = find_roles_by_name(path, names, hints.columns)
    free = _list_free_columns(frame.schema, roles)
    sample = frame.select(free).head(SAMPLE_ROWS)
    roles, notes = find_time_and_note_columns(names, roles, hints, sample, frame.get_column)
    return make_typed_table(path, kind, frame, names, roles, hints, notes)


def make_typed_table(
    path: Path,
    kind: str,
    frame: pl.DataFrame,
    columns: Sequence[str],
    roles: RolePlaces,
    hints: FileHints,
    notes: list[str],
) -> RawTable:
    """A table out of columns that have types."""
    names = {role: columns[place] for role, place in roles.items()}
    selected = []
    for role, name in names.items():
        selected.append(pl.col(name).alias(role))
    frame = frame.select(selected)
    categories = pl.col(pl.Categorical, pl.Enum)
    frame = frame.with_columns(categories.cast(pl.String))
    texts = pl.col(pl.String)
    frame = frame.with_columns(texts.str.strip_chars())
    for role, dtype in frame.schema.items():
        if not _is_usable_type(dtype, role):
            problem = f"column {quote_value(names[role])} is of type {dtype}"
            raise file_error(path, problem, "make it text")
    return RawTable(
        path=path,
        kind=kind,
        frame=frame,
        names=names,
        layout=None,
        hints=hints,
        unused=_list_unused_columns(columns, roles),
        notes=tuple(notes),
    )


def _is_usable_type(dtype: pl.DataType, role: str) -> bool:
    """Whether a column holds single values; spans of time are only good for times."""
    if dtype.is_nested():
        return False
    if dtype in (pl.Binary, pl.Object):
        return False
    is_span = isinstance(dtype, pl.Duration)
    return role == "timestamp" or not is_span


def _list_unused_columns(names: Sequence[str], roles: RolePlaces) -> tuple[str, ...]:
    unused = []
    for place, name in enumerate(names):
        if place not in roles.values():
            unused.append(name)
    return tuple(unused)


# Columns of text


def _read_text_table(path: Path, hints: FileHints) -> RawTable:
    data = read_text_as_utf8(path)
    if is_json(data):
        frame = read_json_lines(path, data)
        return make_raw_table(path, JSON_LINES, frame, hints)
    return _read_delimited(path, data, hints)


def _read_delimited(path: Path, data: bytes, hints: FileHints) -> RawTable:
    first_rows, layout = sniff_layout(path, data, hints.columns)
    names = layout.names
    if layout.header:
        roles = find_roles_by_name(path, names, hints.columns)
    else:
        roles = find_roles_by_place(path, first_rows, hints.columns)
    rows = read_rows(path, data, layout)
    _refuse_repeated_header(path, data, rows, layout, roles)
    # Columns go by their numbers, since a name may stand twice.
    numbers = name_columns_by_number(len(names))
    free = _list_unused_columns(numbers, roles)
    sample = rows.select(free).head(SAMPLE_ROWS)
    shown_names = dict(zip(numbers, names))
    read_column = rows.get_column
    roles, notes = find_time_and_note_columns(numbers, roles, hints, sample, read_column, shown_names)
    selected = []
    role_names = {}
    for role, place in roles.items():
        column = pl.nth(place)
        selected.append(column.alias(role))
        role_names[role] = names[place]
    frame = rows.select(selected)
    return RawTable(
        path=path,
        kind=_describe_text_format(layout),
        frame=frame,
        names=role_names,
        layout=layout,
        hints=hints,
        unused=_list_unused_columns(names, roles),
        notes=tuple(notes),
    )


def _describe_text_format(layout: Layout) -> str:
    if is_recbole_header(layout.names):
        return "RecBole atomic file"
    header = "with a header" if layout.header else "without a header"
    return f"{layout.separator_name}-separated {header}"


def _refuse_repeated_header(path: Path, data: bytes, rows: pl.DataFrame, layout: Layout, roles: RolePlaces) -> None:
    """Files put one behind the other have their header in the middle, where it would pass for a row."""
    if not layout.header or not rows.height:
        return
    header = [layout.names[place] for place in roles.values()]
    conditions = []
    for place in roles.values():
        name = layout.names[place]
        conditions.append(pl.nth(place) == name)
    repeats_header = pl.all_horizontal(conditions)
    repeats_header = repeats_header.fill_null(False)
    is_repeat = rows.select(repeats_header).to_series()
    if not is_repeat.any():
        return
    for line, fields in iter_filled_rows(data, layout):
        values = [fields[place].strip() for place in roles.values()]
        if values == header:
            raise file_error(path, f"line {line} is the header again", "remove that line")


class FileColumns(NamedTuple):
    """Every column of a file."""

    has_header: bool
    names: tuple[str, ...]  # "1", "2", ... without a header
    frame: pl.DataFrame


def read_all_columns(path: Path, columns: RequestedColumns) -> FileColumns:
    """Every column of a Parquet or text file, which may have only one."""
    if is_parquet(path):
        try:
            frame = pl.read_parquet(path, glob=False)
        except POLARS_ERRORS:
            raise file_error(path, "a damaged Parquet file", "write or copy it again") from None
        return FileColumns(True, tuple(frame.columns), frame)
    data = read_text_as_utf8(path)
    if not data.strip():
        raise file_error(path, "the file is empty", "give a file with a column of ids")
    if is_json(data):
        frame = read_json_lines(path, data)
        return FileColumns(True, tuple(frame.columns), frame)
    if not _has_separator(data):
        return _read_single_column(data, columns)
    _, layout = sniff_layout(path, data, columns)
    frame = read_rows(path, data, layout)
    return FileColumns(layout.header, layout.names, frame)


def _has_separator(data: bytes) -> bool:
    """Whether a separator other than the space occurs at the beginning of the file."""
    sample = data[:SAMPLE_BYTES]
    marks = [separator.encode() for separator in SEPARATORS if separator != " "]
    return any(mark in sample for mark in marks)


def _read_single_column(data: bytes, columns: RequestedColumns) -> FileColumns:
    """A file with one value a line, perhaps under a name."""
    text = data.decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    first = lines[0]
    ranks = [rank_column_name(first, role) for role in ("user", "item", "title")]
    is_known = any(rank is not None for rank in ranks)
    is_requested = first in columns.values()
    has_header = is_known or is_requested or first.lower() == "id"
    name = "1"
    if has_header:
        name = first
        lines = lines[1:]
    frame = pl.DataFrame({name: lines}, schema={name: pl.String})
    return FileColumns(has_header, (name,), frame)
