"""Cuts a text file into rows and columns, guessing its encoding, separator and header.

Rows are handled by polars; Python walks over lines only to find the number of a bad one.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tacita.core.errors import TacitaError
from tacita.data.file_errors import file_error
from tacita.data.roles import RequestedColumns, has_header, name_columns_by_number

SEPARATORS = {"::": "'::'", "\t": "tab", ",": "comma", ";": "semicolon", "|": "'|'", " ": "space"}
SAMPLE_BYTES = 65536
POLARS_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException)
_UNIT_SEPARATOR = "\x1f"  # stands for '::', since the reader takes one character
_CONTROL = bytes(range(9)) + bytes(range(14, 31))

Rows = list[list[str]]
Record = tuple[int, list[str]]
"""A line number, and the fields of the row."""


@dataclass(frozen=True)
class Layout:
    """How a text file is cut into columns."""

    separator: str
    quote: str | None
    header: bool
    skip: int  # lines before the first row
    names: tuple[str, ...]  # of all columns; "1", "2", ... without a header

    @property
    def separator_name(self) -> str:
        """The separator, for people."""
        if self.separator == _UNIT_SEPARATOR:
            return SEPARATORS["::"]
        return SEPARATORS[self.separator]


# Bytes into text


def read_text_as_utf8(path: Path) -> bytes:
    """The file as UTF-8 with plain line ends, unpacked if it is gzip."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise file_error(path, "a damaged gzip file", "write or copy it again") from None
    data = _to_utf8(data)
    if _is_binary(data):
        raise file_error(path, "a binary file", "save the data as CSV, TSV or Parquet")
    if b"\r" in data and b"\n" not in data:
        data = data.replace(b"\r", b"\n")
    return data


def _is_binary(data: bytes) -> bool:
    if b"\0" in data:
        return True
    beginning = data[:4096]
    printable = beginning.translate(None, _CONTROL)
    return len(printable) < len(beginning)


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


def sniff_layout(path: Path, data: bytes, columns: RequestedColumns) -> tuple[Rows, Layout]:
    """The first rows without the header, and how the file is cut."""
    sample = data[:SAMPLE_BYTES]
    if len(data) > SAMPLE_BYTES and b"\n" in sample:
        end = sample.rindex(b"\n") + 1
        sample = sample[:end]
    text = sample.decode("utf-8", "replace")
    if not text.strip():
        raise file_error(path, "the file is empty", "give a file that has interactions in it")
    guess = _guess_separator(path, text)
    rows = guess.rows
    filled = [number for number, row in enumerate(rows) if any(row)]
    first = rows[filled[0]]
    first_rows = [rows[number] for number in filled[:50]]
    is_titled = has_header(first_rows, columns)
    if is_titled:
        names = tuple(name.strip() for name in first)
        data_rows = filled[1:]
    else:
        names = name_columns_by_number(len(first))
        data_rows = filled
    skip = filled[0] + 1
    if data_rows:
        skip = data_rows[0]
    layout = Layout(guess.separator, guess.quote, is_titled, skip, names)
    return [rows[number] for number in data_rows], layout


@dataclass(frozen=True)
class _SeparatorGuess:
    """A separator, and how well it cuts the beginning of a file."""

    separator: str
    quote: str | None
    rows: Rows
    agreement: float  # share of the rows that have as many fields as the first
    width: int  # fields of the first row


def _guess_separator(path: Path, text: str) -> _SeparatorGuess:
    """The separator on which most lines agree with the first one."""
    best: _SeparatorGuess | None = None
    for name in SEPARATORS:
        guess = _try_separator(text, name)
        if guess is not None and _is_better_separator(guess, best):
            best = guess
    if best is None:
        remedy = "separate user and item by comma, tab, ';', '|' or '::'"
        raise file_error(path, "only one column found", remedy)
    return best


def _try_separator(text: str, name: str) -> _SeparatorGuess | None:
    """How a separator cuts the text; commas and semicolons go with quotes. None: into one column, or not at all."""
    has_quotes = name in ",;" or text.startswith('"')
    quote = '"' if has_quotes else None
    separator = _UNIT_SEPARATOR if name == "::" else name
    try:
        rows = [fields for _, fields in _iter_records(text, separator, quote)]
    except csv.Error:
        return None
    widths = [len(row) for row in rows if any(row)]
    if not widths or widths[0] < 2:
        return None
    agreement = widths.count(widths[0]) / len(widths)
    return _SeparatorGuess(separator, quote, rows, agreement, widths[0])


def _is_better_separator(guess: _SeparatorGuess, best: _SeparatorGuess | None) -> bool:
    """Whether a guess beats the best so far.

    Where every row has one decimal comma, commas agree as well as the semicolons that separate: more columns win then.
    """
    if best is None or guess.agreement > best.agreement:
        return True
    is_semicolon_over_comma = guess.separator == ";" and best.separator == ","
    is_equal = guess.agreement == best.agreement
    return is_semicolon_over_comma and is_equal and guess.width > best.width


def _iter_records(text: str, separator: str, quote: str | None) -> Iterator[Record]:
    """The last line and the fields of every record."""
    if separator == _UNIT_SEPARATOR:
        text = text.replace("::", _UNIT_SEPARATOR)
    lines = io.StringIO(text, newline="")
    if quote:
        reader = csv.reader(lines, delimiter=separator)
    else:
        reader = csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE)
    for fields in reader:
        yield reader.line_num, fields


# Rows


def read_rows(path: Path, data: bytes, layout: Layout) -> pl.DataFrame:
    """All columns as trimmed text, blank lines dropped; every row has the same number of fields."""
    if layout.separator == _UNIT_SEPARATOR:
        data = data.replace(b"::", _UNIT_SEPARATOR.encode())
    names = name_columns_by_number(len(layout.names))
    try:
        frame = pl.read_csv(
            data,
            has_header=False,
            skip_rows=layout.skip,
            schema=dict.fromkeys(names, pl.String()),
            separator=layout.separator,
            quote_char=layout.quote,
        )
    except POLARS_ERRORS:
        raise _uneven_error(path, data, layout) from None
    if frame[names[0]].null_count():
        is_blank = pl.all_horizontal(pl.all().is_null())
        frame = frame.filter(~is_blank)
    # A short row ends in a missing value, but so does one whose last field is empty: only counting decides.
    has_missing_end = frame[names[-1]].null_count() > 0
    may_be_uneven = has_missing_end and not _has_even_rows(data, layout, frame.height)
    if may_be_uneven and _find_uneven_row(data, layout):
        raise _uneven_error(path, data, layout)
    return frame.select(pl.all().str.strip_chars())


def _has_even_rows(data: bytes, layout: Layout, n_rows: int) -> bool:
    """A quick proof that no row is short, given that none is long; it fails on quotes and blank lines."""
    if b'"' in data:
        return False
    n_lines = n_rows + layout.header
    per_line = len(layout.names) - 1
    n_separators = data.count(layout.separator.encode())
    return n_separators == per_line * n_lines


def iter_filled_rows(data: bytes, layout: Layout) -> Iterator[Record]:
    """Line number and fields of every row that is not blank; slow, for finding the line of a problem."""
    text = data.decode("utf-8", "replace")
    previous_line = 0
    is_header = layout.header
    for last_line, fields in _iter_records(text, layout.separator, layout.quote):
        line = previous_line + 1
        previous_line = last_line
        if not any(fields):
            continue
        if is_header:
            is_header = False
        else:
            yield line, fields


def _find_uneven_row(data: bytes, layout: Layout) -> tuple[int, int] | None:
    """Line and number of fields of the first row that differs from the header or the first row."""
    with suppress(csv.Error):
        for line, fields in iter_filled_rows(data, layout):
            if len(fields) != len(layout.names):
                return line, len(fields)
    return None


def _uneven_error(path: Path, data: bytes, layout: Layout) -> TacitaError:
    uneven = _find_uneven_row(data, layout)
    if uneven is None:
        problem = _describe_open_quote(data, layout)
        return file_error(path, problem, "check its quotes and line ends")
    line, size = uneven
    fields = "1 field" if size == 1 else f"{size} fields"
    problem = f"line {line} has {fields} instead of {len(layout.names)}"
    return file_error(path, problem, "correct or remove it")


def _describe_open_quote(data: bytes, layout: Layout) -> str:
    """Where the last row begins, if it swallowed the lines after it."""
    with suppress(csv.Error):
        line, fields = max(iter_filled_rows(data, layout), default=(0, []))
        if any("\n" in field for field in fields):
            return f"line {line} opens a quote that is not closed"
    return "cannot be cut into rows"


def is_recbole_header(names: Sequence[str]) -> bool:
    """Whether the columns are named as in RecBole's files."""
    return all(name.endswith((":token", ":float", ":token_seq", ":float_seq")) for name in names)
