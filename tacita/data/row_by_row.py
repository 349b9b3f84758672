"""Reads a table under a budget: what a row holds decides on that row alone.

Elsewhere formats are guessed from all rows: one odd value changes how others' rows are read, and no epsilon counts
that. Here columns go by the header or by name, the separator by the header or the file's ending, each value has one
way to be read, and a row that cannot be read is left out, uncounted.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from tacita.data.columns import MOST_BLOCK, SPLITS, make_interactions
from tacita.data.delimited_text import POLARS_ERRORS, SEPARATORS
from tacita.data.file_errors import file_error
from tacita.data.interaction_table import Interactions
from tacita.data.roles import RequestedColumns, RolePlaces, find_roles_by_name, name_columns_by_number, rank_column_name
from tacita.data.table_files import JSON_LINES, RawTable, is_parquet, make_typed_table, require_usable_table
from tacita.data.values import FileHints

NOTE = (
    "rows: under a budget each is read by itself, with no format guessed from others; rows that cannot be read are "
    "left out, and not counted."
)
_ENDINGS = {".csv": ",", ".tsv": "\t", ".data": "\t", ".txt": "\t", ".dat": "::"}
"""The separator of a file without a header, whose first row is somebody's."""
_FIELD_END = "\x1f"
_WHOLE_NUMBER = r"^[+-]?\d+$"
_NUMBER = r"^[+-]?\d+(\.\d*)?([eE][+-]?\d+)?$"


def read_interactions_row_by_row(path: Path, name: str, hints: FileHints) -> Interactions:
    """Interactions of a file."""
    if is_parquet(path):
        raw_table = _read_parquet_rows(path, hints)
    elif _has_json_ending(path):
        raw_table = _read_json_rows(path, hints)
    else:
        raw_table = _read_delimited_rows(path, hints)
    return make_interactions_row_by_row(name, raw_table)


def make_interactions_row_by_row(name: str, table: RawTable) -> Interactions:
    """The rows that can be read, as arrays. Times that are numbers count as seconds."""
    table, unit = _clean_rows(require_usable_table(table))
    interactions = make_interactions(name, table)
    return replace(interactions, time_unit=unit, notes=(*interactions.notes, NOTE))


def make_frame_table(path: Path, frame: pl.DataFrame, hints: FileHints) -> RawTable:
    """The columns of a table in memory, by their names."""
    roles = find_roles_by_name(path, frame.columns, hints.columns)
    return make_typed_table(path, "in memory", frame, frame.columns, roles, hints, [])


def _read_parquet_rows(path: Path, hints: FileHints) -> RawTable:
    try:
        with path.open("rb") as file:  # polars reads a path as a pattern
            names = list(pl.read_parquet_schema(file))
        roles = find_roles_by_name(path, names, hints.columns)
        frame = pl.read_parquet(path, columns=[names[place] for place in roles.values()], glob=False)
    except POLARS_ERRORS:
        raise file_error(path, "a damaged Parquet file", "write or copy it again") from None
    return make_typed_table(path, "Parquet", frame, names, roles, hints, [])


# Text


def _has_json_ending(path: Path) -> bool:
    base = path.name.lower().removesuffix(".gz")
    return base.endswith((".jsonl", ".ndjson"))


def _read_lines(path: Path) -> list[str]:
    """The lines that are not blank; one that is no UTF-8 is Latin-1 by itself."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise file_error(path, "a damaged gzip file", "write or copy it again") from None
    lines = [_decode_line(line) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    filled = [line for line in lines if line.strip()]
    if not filled:
        raise file_error(path, "the file is empty", "give a file that has interactions in it")
    return filled


def _decode_line(line: bytes) -> str:
    line = line.removesuffix(b"\r")
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _read_json_rows(path: Path, hints: FileHints) -> RawTable:
    """JSON lines have no header, so their keys have to be named."""
    if not {"user", "item"} <= hints.columns.keys():
        raise file_error(
            path,
            "no header says what its keys are, and under a budget rows do not decide that",
            "name them with --columns user=...,item=...",
        )
    columns = {role: key for role, key in hints.columns.items() if key != "-"}
    values: dict[str, list[str | None]] = {role: [] for role in columns}
    for line in _read_lines(path):
        row = _parse_object(line)
        for role, key in columns.items():
            values[role].append(_to_text(row.get(key)))
    frame = pl.DataFrame(values, schema=dict.fromkeys(columns, pl.String()))
    return RawTable(path, JSON_LINES, frame, columns, None, hints, (), ())


def _parse_object(line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _to_text(value: object) -> str | None:
    """A single value as text, whole numbers without a point."""
    if value is None or isinstance(value, dict | list | bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    has_half_character = any("\ud800" <= letter <= "\udfff" for letter in text)
    return None if has_half_character else text


def _read_delimited_rows(path: Path, hints: FileHints) -> RawTable:
    lines = _read_lines(path)
    if _names_only_numbers(hints.columns):
        separator = _ENDINGS.get(Path(path.name.removesuffix(".gz")).suffix.lower(), ",")
        roles = _place_numbers(path, hints.columns)
        names: Sequence[str] = name_columns_by_number(1 + max(roles.values()))
        fields = _cut_rows(lines, separator, least=len(names))
    else:
        separator, names, roles = _read_header(path, lines[0], hints.columns)
        fields = _cut_rows(lines[1:], separator, least=len(names), most=len(names))
    _refuse_blocks_without_parts(path, hints.columns, roles)
    columns = {role: fields.list.get(place).str.strip_chars() for role, place in roles.items()}
    frame = pl.DataFrame(columns)
    role_names = {role: names[place] for role, place in roles.items()}
    places = set(roles.values())
    unused = tuple(name for place, name in enumerate(names) if place not in places)
    kind = f"{SEPARATORS[separator]}-separated rows"
    return RawTable(path, kind, frame, role_names, None, hints, unused, ())


def _names_only_numbers(columns: RequestedColumns) -> bool:
    """Whether user and item are named by numbers alone, as columns without a header are."""
    chosen = [name for name in columns.values() if name != "-"]
    return {"user", "item"} <= columns.keys() and all(name.isdigit() for name in chosen)


def _place_numbers(path: Path, columns: RequestedColumns) -> RolePlaces:
    """The places of columns without a header, by what was asked for alone: no row says how many there are."""
    roles = {role: int(number) - 1 for role, number in columns.items() if number != "-"}
    if min(roles.values()) < 0:
        raise file_error(path, "columns are counted from 1, so there is no column 0", "correct --columns")
    if len(set(roles.values())) < len(roles):
        raise file_error(path, "two roles ask for one column", "give each role its own column")
    return roles


def _refuse_blocks_without_parts(path: Path, columns: RequestedColumns, roles: RolePlaces) -> None:
    asks_for_blocks = columns.get("block", "-") != "-"
    if asks_for_blocks and "split" not in roles:
        raise file_error(
            path, "blocks without parts", "say which column holds train, valid or test with --columns part=NAME"
        )


def _read_header(path: Path, line: str, columns: RequestedColumns) -> tuple[str, list[str], RolePlaces]:
    """The first separator with which the first line names columns of users and items."""
    for separator in SEPARATORS:
        names = _cut_line(line, separator)
        if len(names) > 1 and all(_names_role(names, role, columns) for role in ("user", "item")):
            return separator, names, find_roles_by_name(path, names, columns)
    raise file_error(
        path,
        "the first line names no columns of users and items, and under a budget rows do not decide which they are",
        "give the file a header, name columns of it with --columns user=NAME,item=NAME, or without a header say all "
        "numbers: --columns user=1,item=2",
    )


def _names_role(names: Sequence[str], role: str, columns: RequestedColumns) -> bool:
    requested = columns.get(role)
    if requested is None:
        return any(rank_column_name(name, role) is not None for name in names)
    plain_names = [name.split(":")[0] for name in names]
    return requested.isdigit() or requested in (*names, *plain_names)


def _cut_line(line: str, separator: str) -> list[str]:
    """The fields of one line; quotes end with it."""
    if '"' in line and separator != "::":
        try:
            fields = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:
            fields = []
    else:
        fields = line.split(separator)
    return [field.strip() for field in fields]


def _cut_rows(lines: list[str], separator: str, least: int, most: int | None = None) -> pl.Series:
    """The fields of the rows that have enough of them, and not more than there may be."""
    texts = [_FIELD_END.join(_cut_line(line, separator)) if '"' in line else line for line in lines]
    series = pl.Series(texts, dtype=pl.String)
    is_cut = pl.Series(['"' in line for line in lines], dtype=pl.Boolean)
    cut = series.str.replace_all(separator, _FIELD_END, literal=True)
    fields = cut.zip_with(~is_cut, series).str.split(_FIELD_END)
    n_fields = fields.list.len()
    is_whole = n_fields >= least
    if most is not None:
        is_whole &= n_fields <= most
    return fields.filter(is_whole)


# Values


def _clean_rows(table: RawTable) -> tuple[RawTable, str]:
    """The table with the rows whose values can all be read, each by itself, and the unit of its times."""
    dropped = {"title"}
    if _is_doubtful_split(table):
        dropped |= {"split", "block"}
    names = {role: name for role, name in table.names.items() if role not in dropped}
    columns, unit = _read_columns(table, names)
    frame = pl.DataFrame(columns).drop_nulls()
    if not frame.height:
        raise file_error(
            table.path,
            "no row can be read by itself",
            "write times as whole numbers or say --date-format, ratings with a point or say --decimal , and leave "
            "other columns out with --columns ROLE=-",
        )
    unused = tuple(name for role, name in table.names.items() if role not in names)
    hints = replace(table.hints, date_format=None, decimal=None)  # values have their types now
    clean = replace(table, frame=frame, names=names, layout=None, unused=(*table.unused, *unused), hints=hints)
    return clean, unit


def _read_columns(table: RawTable, roles: Iterable[str]) -> tuple[dict[str, pl.Series], str]:
    """Each column with null where a value cannot be read, and the unit of times."""
    columns: dict[str, pl.Series] = {}
    unit = ""
    for role in roles:
        values = table.frame[role]
        if role == "rating":
            ratings = _read_numbers(values, table.hints.decimal).cast(pl.Float32)
            columns[role] = ratings.set(~ratings.is_finite().fill_null(False), None)
        elif role == "timestamp":
            columns[role], unit = _read_times(values, table.hints)
        elif role == "split":
            text = values.cast(pl.String).str.to_lowercase()
            columns[role] = text.set(~text.is_in(list(SPLITS)).fill_null(False), None)
        elif role == "block":
            block = _read_numbers(values, None).floor().cast(pl.Int64, strict=False)
            columns[role] = block.set(~block.is_between(0, MOST_BLOCK).fill_null(False), None)
        else:
            columns[role] = _read_ids(values)
    return columns, unit


def _is_doubtful_split(table: RawTable) -> bool:
    """A column that is merely called part is one of parts only if the caller says so."""
    name = table.names.get("split", "")
    return "split" not in table.hints.columns and rank_column_name(name, "split") != 0


def _read_ids(values: pl.Series) -> pl.Series:
    """Ids as text; a whole number has no point, whatever others are."""
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        is_whole = (whole.cast(pl.Float64) == values).fill_null(False)
        texts = values.set(values.is_nan().fill_null(False), None).cast(pl.String)
        return whole.cast(pl.String).zip_with(is_whole, texts)
    texts = values.cast(pl.String).str.strip_chars()
    return texts.set((texts == "").fill_null(False), None)


def _read_numbers(values: pl.Series, decimal: str | None) -> pl.Series:
    """Numbers with a decimal point, or with a comma where the caller says so."""
    if values.dtype == pl.String:
        if decimal == ",":
            values = values.str.replace(",", ".", literal=True)
        values = values.set(~values.str.contains(_NUMBER).fill_null(False), None)
    numbers = values.cast(pl.Float64, strict=False)
    return numbers.set(~numbers.is_finite().fill_null(False), None)


def _read_times(values: pl.Series, hints: FileHints) -> tuple[pl.Series, str]:
    """Whole numbers, and their unit: dates by their type or by the caller's format, else numbers without fractions."""
    kind = values.dtype
    if kind.is_temporal():
        unit = "d" if isinstance(kind, pl.Date) else str(getattr(kind, "time_unit", ""))
        return values.to_physical().cast(pl.Int64), unit
    if hints.date_format:
        dates = values.cast(pl.String).str.to_datetime(hints.date_format, time_unit="us", strict=False)
        return dates.to_physical().cast(pl.Int64), "us"
    if kind.is_integer():
        return values.cast(pl.Int64, strict=False), "s"
    if kind == pl.String:
        whole = values.set(~values.str.contains(_WHOLE_NUMBER).fill_null(False), None).cast(pl.Int64, strict=False)
        floored = _read_numbers(values, hints.decimal).floor().cast(pl.Int64, strict=False)
        return whole.zip_with(whole.is_not_null(), floored), "s"
    return _read_numbers(values, None).floor().cast(pl.Int64, strict=False), "s"
