"""Opens a table file of any supported kind and cuts it into columns, guessing encoding, separator and header.

Rows are handled by polars; Python walks over lines only to find the number of a bad one.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tacita.core.errors import TacitaError
from tacita.data.file_errors import file_error, list_names, quote_value, unreadable_error
from tacita.data.jsonlines import is_json, locate_row, read_json_lines
from tacita.data.roles import find_roles_by_name, find_roles_by_place, has_header, number_columns, rank_name
from tacita.data.unused_columns import inspect_columns
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
_SEPARATORS = {"::": "'::'", "\t": "tab", ",": "comma", ";": "semicolon", "|": "'|'", " ": "space"}
_UNIT_SEPARATOR = "\x1f"  # stands for '::', since the reader takes one character
_SAMPLE_BYTES = 65536
SAMPLE_ROWS = 1000  # that unused columns are judged by before one is read whole
_CONTROL = bytes(range(9)) + bytes(range(14, 31))
JSON_LINES = "JSON lines"
_POLARS_TROUBLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException)


@dataclass(frozen=True)
class Layout:
    """How a text file is cut into columns."""

    separator: str
    quote: str | None
    header: bool
    skip: int  # lines before the first row
    names: tuple[str, ...]  # of all columns; "1", "2", ... without a header


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

    def refuse_bad_rows(self, role: str, bad: pl.Series, what: str, way: str = "") -> None:
        """Raise for the first bad row of a column, if there is one; `way` is what may help besides correcting it."""
        if not bad.any():
            return
        row = int(bad.arg_max() or 0)
        value = self.frame[role][row]
        is_id = role in ("user", "item")
        if value is None or value == "":
            what, remedy = f"no {role}{' id' if is_id else ''}", "fill it in or remove the row"
        else:
            what, remedy = f"{what}: {quote_value(value)}", f"correct it{way}"
        if not is_id:
            remedy += f", or leave the column out with --columns {role}=-"
        raise file_error(self.path, f"{self._describe_place(row)} has {what}", remedy)

    def _describe_place(self, row: int) -> str:
        if self.layout is not None:
            with suppress(csv.Error):
                for index, (line, _) in enumerate(_iter_filled_rows(read_text(self.path), self.layout)):
                    if index == row:
                        return f"line {line}"
        return locate_row(read_text(self.path), row) if self.kind == JSON_LINES else f"row {row + 1}"


def find_main_file(folder: Path) -> Path | None:
    """The interactions file of a folder: a well-known name, else the only table in it."""
    try:
        files = {one.name: one for one in folder.iterdir() if one.is_file()} if folder.is_dir() else {}
    except OSError as error:
        raise unreadable_error(folder, error) from None
    for name in _WELL_KNOWN:
        if name in files:
            return files[name]
    for ends in ((".inter",), _TABLE_ENDS):
        found = [one for name, one in files.items() if name.lower().endswith(ends)]
        if len(found) == 1:
            return found[0]
    return None


def read_table(path: Path, hints: FileHints) -> RawTable:
    """The user, item, rating, ... columns of a Parquet, JSON lines or text file; `hints` may say which."""
    return check_table(_read_parquet(path, hints) if _is_parquet(path) else _read_text_table(path, hints))


def check_table(table: RawTable) -> RawTable:
    """The table, if there is something in it and what was said of it fits."""
    path, hints = table.path, table.hints
    if not table.frame.height:
        raise file_error(path, "a header but no rows", "give a file that has interactions in it")
    if hints.date_format and "timestamp" not in table.names:
        said = f"no time column to be read with --date-format '{hints.date_format}'"
        named = f"name it with --columns time=..., one of {list_names(table.unused)}"
        raise file_error(path, said, named if table.unused else "every column has another use: leave out --date-format")
    return table


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _read_parquet(path: Path, hints: FileHints) -> RawTable:
    try:
        with path.open("rb") as file:  # a path would be taken for a pattern
            every = pl.read_parquet_schema(file)
        names = list(every)
        roles = find_roles_by_name(path, names, hints.columns)

        def read(columns: list[str], n_rows: int | None = None) -> pl.DataFrame:
            return pl.read_parquet(path, columns=columns, n_rows=n_rows, glob=False)

        flat = [name for name, kind in every.items() if not kind.is_nested()]
        sample = read([name for name in flat if names.index(name) not in roles.values()], SAMPLE_ROWS)
        roles, notes = inspect_columns(names, roles, hints, sample, lambda name: read([name]).to_series())
        return _make_typed_table(
            path, "Parquet", read([names[at] for at in roles.values()]), names, roles, hints, notes
        )
    except _POLARS_TROUBLE:
        raise file_error(path, "a damaged Parquet file", "write or copy it again") from None


def _make_typed_table(
    path: Path,
    kind: str,
    frame: pl.DataFrame,
    every: list[str],
    roles: dict[str, int],
    hints: FileHints,
    notes: list[str],
) -> RawTable:
    """A table out of columns that have types."""
    names = {role: every[at] for role, at in roles.items()}
    frame = frame.select(pl.col(name).alias(role) for role, name in names.items())
    frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    frame = frame.with_columns(pl.col(pl.String).str.strip_chars())
    for role, dtype in frame.schema.items():
        spans = isinstance(dtype, pl.Duration) and role != "timestamp"
        if dtype.is_nested() or dtype in (pl.Binary, pl.Object) or spans:
            raise file_error(path, f"column {quote_value(names[role])} is of type {dtype}", "make it text")
    unused = tuple(name for at, name in enumerate(every) if at not in roles.values())
    return RawTable(path, kind, frame, names, None, hints, unused, tuple(notes))


def _read_text_table(path: Path, hints: FileHints) -> RawTable:
    data = read_text(path)
    return _read_json_table(path, data, hints) if is_json(data) else _read_delimited(path, data, hints)


def _read_json_table(path: Path, data: bytes, hints: FileHints) -> RawTable:
    return make_raw_table(path, JSON_LINES, read_json_lines(path, data), hints)


def make_raw_table(path: Path, kind: str, frame: pl.DataFrame, hints: FileHints) -> RawTable:
    """A table out of a frame whose columns have names and types."""
    names = frame.columns
    roles = find_roles_by_name(path, names, hints.columns)
    flat = [name for name, kind in frame.schema.items() if not kind.is_nested()]
    sample = frame.select(name for name in flat if names.index(name) not in roles.values()).head(SAMPLE_ROWS)
    roles, notes = inspect_columns(names, roles, hints, sample, lambda name: frame[name])
    return _make_typed_table(path, kind, frame, names, roles, hints, notes)


def _read_delimited(path: Path, data: bytes, hints: FileHints) -> RawTable:
    columns = hints.columns
    first, layout = sniff_layout(path, data, columns)
    by_name = layout.header
    roles = find_roles_by_name(path, layout.names, columns) if by_name else find_roles_by_place(path, first, columns)
    rows = read_rows(path, data, layout)
    _refuse_repeated_header(path, data, rows, layout, roles)
    free = [at for at in range(len(layout.names)) if at not in roles.values()]
    sample = rows.select(pl.nth(at) for at in free).head(SAMPLE_ROWS)
    # Columns go by their place here: names may stand twice.
    at_place = dict(zip(number_columns(len(layout.names)), layout.names))
    roles, notes = inspect_columns(list(at_place), roles, hints, sample, lambda place: rows[place], at_place)
    frame = rows.select(pl.nth(at).alias(role) for role, at in roles.items())
    separator = _SEPARATORS["::" if layout.separator == _UNIT_SEPARATOR else layout.separator]
    kind = f"{separator}-separated {'with' if layout.header else 'without'} a header"
    if is_atomic(layout.names):
        kind = "RecBole atomic file"
    names = {role: layout.names[at] for role, at in roles.items()}
    unused = tuple(name for at, name in enumerate(layout.names) if at not in roles.values())
    return RawTable(path, kind, frame, names, layout, hints, unused, tuple(notes))


def _refuse_repeated_header(
    path: Path, data: bytes, rows: pl.DataFrame, layout: Layout, roles: Mapping[str, int]
) -> None:
    """Files that were put one behind the other have their header in the middle, where it would pass for a row."""
    if not layout.header or not rows.height:
        return
    again = pl.all_horizontal(pl.nth(at) == layout.names[at] for at in roles.values())
    found = rows.select(again.fill_null(False)).to_series()
    if found.any():
        header = {at: layout.names[at] for at in roles.values()}
        records = _iter_filled_rows(data, layout)
        line = next(line for line, fields in records if all(fields[at].strip() == one for at, one in header.items()))
        raise file_error(path, f"line {line} is the header again", "remove that line")


def read_columns(path: Path, columns: Mapping[str, str]) -> tuple[bool, tuple[str, ...], pl.DataFrame]:
    """Every column of a Parquet or text file, which may have only one: whether they are named, names, values."""
    if _is_parquet(path):
        try:
            frame = pl.read_parquet(path, glob=False)
        except _POLARS_TROUBLE:
            raise file_error(path, "a damaged Parquet file", "write or copy it again") from None
        return True, tuple(frame.columns), frame
    data = read_text(path)
    if not data.strip():
        raise file_error(path, "the file is empty", "give a file with a column of ids")
    if is_json(data):
        frame = read_json_lines(path, data)
        return True, tuple(frame.columns), frame
    if not any(one.encode() in data[:_SAMPLE_BYTES] for one in _SEPARATORS if one != " "):
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        known = any(rank_name(lines[0], role) is not None for role in ("user", "item", "title"))
        header = known or lines[0].lower() == "id" or lines[0] in columns.values()
        names = (lines[0],) if header else number_columns(1)
        return header, names, pl.DataFrame({names[0]: lines[header:]}, schema={names[0]: pl.String})
    _, layout = sniff_layout(path, data, columns)
    return layout.header, layout.names, read_rows(path, data, layout)


def is_atomic(names: Sequence[str]) -> bool:
    """Whether the columns are named as in RecBole's files."""
    return all(name.endswith((":token", ":float", ":token_seq", ":float_seq")) for name in names)


# Bytes into text


def read_text(path: Path) -> bytes:
    """The file as UTF-8 with plain line ends, unpacked if it is gzip."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise file_error(path, "a damaged gzip file", "write or copy it again") from None
    data = _to_utf8(data)
    if b"\0" in data or len(data[:4096].translate(None, _CONTROL)) < len(data[:4096]):
        raise file_error(path, "a binary file", "save the data as CSV, TSV or Parquet")
    if b"\r" in data and b"\n" not in data:
        data = data.replace(b"\r", b"\n")
    return data


def _to_utf8(data: bytes) -> bytes:
    """Other encodings turned into UTF-8: UTF-16 by its mark, else Latin-1 as in the old MovieLens files."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return data.decode("utf-16").encode()
        except UnicodeError:
            return b"\0"  # binary
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1").encode()
    return data


# Separator and header


def sniff_layout(path: Path, data: bytes, columns: Mapping[str, str]) -> tuple[list[list[str]], Layout]:
    """The first rows without the header, and how the file is cut."""
    sample = data[:_SAMPLE_BYTES]
    if len(data) > _SAMPLE_BYTES and b"\n" in sample:
        sample = sample[: sample.rindex(b"\n") + 1]
    text = sample.decode("utf-8", "replace")
    if not text.strip():
        raise file_error(path, "the file is empty", "give a file that has interactions in it")
    separator, quote, rows = _guess_separator(path, text)
    full = [number for number, row in enumerate(rows) if any(row)]
    first = rows[full[0]]
    header = has_header([rows[number] for number in full[:50]], columns)
    data_rows = full[1:] if header else full
    names = tuple(name.strip() for name in first) if header else number_columns(len(first))
    skip = data_rows[0] if data_rows else full[0] + 1
    return [rows[number] for number in data_rows], Layout(separator, quote, header, skip, names)


def _guess_separator(path: Path, text: str) -> tuple[str, str | None, list[list[str]]]:
    """The separator on which most lines agree with the first one; commas and semicolons go with quotes."""
    best: tuple[float, str, str | None, list[list[str]]] = (0.0, ",", '"', [])
    width = 0
    for separator in _SEPARATORS:
        quote = '"' if separator in ",;" or text.startswith('"') else None
        mark = _UNIT_SEPARATOR if separator == "::" else separator
        try:
            rows = [fields for _, fields in _iter_records(text, mark, quote)]
        except csv.Error:
            continue
        sizes = [len(row) for row in rows if any(row)]
        agreement = sizes.count(sizes[0]) / len(sizes) if sizes and sizes[0] > 1 else 0.0
        # Where every row has one decimal comma, commas agree as well as the semicolons that separate.
        finer = separator == ";" and best[1] == "," and agreement == best[0] and sizes[:1] > [width]
        if agreement > best[0] or (agreement and finer):
            width = sizes[0]
            best = (agreement, mark, quote, rows)
    if not best[0]:
        remedy = "separate user and item by comma, tab, ';', '|' or '::'"
        raise file_error(path, "only one column found", remedy)
    return best[1:]


def _iter_records(text: str, separator: str, quote: str | None) -> Iterator[tuple[int, list[str]]]:
    """The last line and the fields of every record."""
    if separator == _UNIT_SEPARATOR:
        text = text.replace("::", _UNIT_SEPARATOR)
    lines, by = io.StringIO(text, newline=""), separator
    reader = csv.reader(lines, delimiter=by) if quote else csv.reader(lines, delimiter=by, quoting=csv.QUOTE_NONE)
    for fields in reader:
        yield reader.line_num, fields


# Rows


def read_rows(path: Path, data: bytes, layout: Layout) -> pl.DataFrame:
    """All columns as trimmed text, blank lines dropped; every row has the same number of fields."""
    if layout.separator == _UNIT_SEPARATOR:
        data = data.replace(b"::", _UNIT_SEPARATOR.encode())
    names = number_columns(len(layout.names))
    try:
        frame = pl.read_csv(
            data,
            has_header=False,
            skip_rows=layout.skip,
            schema=dict.fromkeys(names, pl.String()),
            separator=layout.separator,
            quote_char=layout.quote,
        )
    except _POLARS_TROUBLE:
        raise _uneven_error(path, data, layout) from None
    if frame[names[0]].null_count():
        frame = frame.filter(~pl.all_horizontal(pl.all().is_null()))
    # A short row ends in a missing value, but so does one whose last field is empty: counting tells.
    doubtful = frame[names[-1]].null_count() and not _has_even_rows(data, layout, frame.height)
    if doubtful and _find_uneven_row(data, layout):
        raise _uneven_error(path, data, layout)
    return frame.select(pl.all().str.strip_chars())


def _has_even_rows(data: bytes, layout: Layout, rows: int) -> bool:
    """A quick proof that no row is short, given that none is long; it fails on quotes and blank lines."""
    rows += layout.header
    return b'"' not in data and data.count(layout.separator.encode()) == (len(layout.names) - 1) * rows


def _iter_filled_rows(data: bytes, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every row that is not blank; slow, for finding the line of a problem."""
    end, titled = 0, layout.header
    for last, fields in _iter_records(data.decode("utf-8", "replace"), layout.separator, layout.quote):
        line, end = end + 1, last
        if any(fields) and titled:
            titled = False
        elif any(fields):
            yield line, fields


def _find_uneven_row(data: bytes, layout: Layout) -> tuple[int, int] | None:
    """Line and number of fields of the first row that differs from the header or the first row."""
    with suppress(csv.Error):
        for line, fields in _iter_filled_rows(data, layout):
            if len(fields) != len(layout.names):
                return line, len(fields)
    return None


def _uneven_error(path: Path, data: bytes, layout: Layout) -> TacitaError:
    found = _find_uneven_row(data, layout)
    if found is None:
        return file_error(path, _describe_open_quote(data, layout), "check its quotes and line ends")
    line, size = found
    fields = "1 field" if size == 1 else f"{size} fields"
    return file_error(path, f"line {line} has {fields} instead of {len(layout.names)}", "correct or remove it")


def _describe_open_quote(data: bytes, layout: Layout) -> str:
    """Where the last row begins, if it swallowed the lines after it."""
    with suppress(csv.Error):
        line, fields = max(_iter_filled_rows(data, layout), default=(0, []))
        if any("\n" in field for field in fields):
            return f"line {line} opens a quote that is not closed"
    return "cannot be cut into rows"
