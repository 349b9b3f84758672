"""The rows of a large file in batches: the columns that have a role, as they were written."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

import polars as pl

from tacita.data.delimited_text import (
    POLARS_ERRORS,
    SAMPLE_BYTES,
    Layout,
    read_rows,
    sniff_layout,
)
from tacita.data.file_errors import file_error
from tacita.data.jsonlines import is_json
from tacita.data.roles import find_roles_by_name, find_roles_by_place, name_columns_by_number
from tacita.data.table_files import SAMPLE_ROWS, is_parquet, make_raw_table
from tacita.data.values import FileHints

BATCH_ROWS = 2_000_000
BATCH_BYTES = 64 << 20
_GZIP_MARK = b"\x1f\x8b"


@dataclass(frozen=True)
class RowBatches:
    """A file that is read batch by batch."""

    path: Path
    kind: str  # of file, for people
    columns: dict[str, str]  # role -> name of its column
    layout: Layout | None = None  # of a text file
    places: dict[str, int] = field(default_factory=dict)  # name of a column -> its place, in a text file

    def __iter__(self) -> Iterator[pl.DataFrame]:
        if self.layout is None:
            return _iterate_parquet(self.path, list(self.columns.values()))
        return _iterate_text(self.path, self.layout, self.places)


def open_batches(path: Path, hints: FileHints) -> RowBatches:
    """Find the columns by the header and the first rows."""
    if is_parquet(path):
        return _open_parquet(path, hints)
    return _open_text(path, hints)


def _open_parquet(path: Path, hints: FileHints) -> RowBatches:
    try:
        sample = pl.scan_parquet(path, glob=False).head(SAMPLE_ROWS).collect()
    except POLARS_ERRORS:
        raise file_error(path, "a damaged Parquet file", "write or copy it again") from None
    table = make_raw_table(path, "Parquet", sample, hints)
    return RowBatches(path, "Parquet", table.names)


def _iterate_parquet(path: Path, columns: list[str]) -> Iterator[pl.DataFrame]:
    rows = pl.scan_parquet(path, glob=False).select(columns)
    start = 0
    while True:
        try:
            batch = rows.slice(start, BATCH_ROWS).collect()
        except POLARS_ERRORS:
            raise file_error(path, "a damaged Parquet file", "write or copy it again") from None
        if not batch.height:
            return
        yield batch
        start += batch.height


def _open_text(path: Path, hints: FileHints) -> RowBatches:
    with _open_bytes(path) as file:
        sample = file.read(SAMPLE_BYTES)
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in sample:
        raise file_error(path, "no text in UTF-8", "save it as Parquet, or as CSV in UTF-8")
    sample = sample.removeprefix(b"\xef\xbb\xbf")
    if is_json(sample):
        raise file_error(path, "JSON lines are not read in pieces", "save them as Parquet or CSV")
    first_rows, layout = sniff_layout(path, sample, hints.columns)
    if layout.header:
        names = layout.names
        places = find_roles_by_name(path, names, hints.columns)
    else:
        names = name_columns_by_number(len(layout.names))
        places = find_roles_by_place(path, first_rows, hints.columns)
    columns = {role: names[place] for role, place in places.items()}
    place_of = {names[place]: place for place in places.values()}
    return RowBatches(path, f"{layout.separator_name}-separated", columns, layout, place_of)


def _iterate_text(path: Path, layout: Layout, places: dict[str, int]) -> Iterator[pl.DataFrame]:
    selected = [pl.nth(place).alias(name) for name, place in places.items()]
    batch_layout = layout
    for text in _iterate_pieces(path, layout.quote):
        yield read_rows(path, text, batch_layout).select(selected)
        batch_layout = replace(layout, header=False, skip=0)


def _iterate_pieces(path: Path, quote: str | None) -> Iterator[bytes]:
    """The text in pieces that end with a row: at a line end outside of quotes."""
    rest = b""
    is_first = True
    with _open_bytes(path) as file:
        while True:
            try:
                read = file.read(BATCH_BYTES)
            except (OSError, EOFError) as error:
                raise file_error(path, f"a damaged file ({error})", "write or copy it again") from None
            if is_first:
                read = read.removeprefix(b"\xef\xbb\xbf")
                is_first = False
            if not read:
                break
            text = rest + read
            end = _find_row_end(text, quote)
            rest = text[end:]
            if end:
                yield text[:end]
    if rest.strip():
        yield rest


def _find_row_end(text: bytes, quote: str | None) -> int:
    """Where the last whole row of a text ends; 0: no row is whole."""
    end = text.rfind(b"\n") + 1
    if not quote:
        return end
    mark = quote.encode()
    n_marks = text.count(mark, 0, end)
    while end and n_marks % 2:
        previous = text.rfind(b"\n", 0, end - 1) + 1
        n_marks -= text.count(mark, previous, end)
        end = previous
    return end


def _open_bytes(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP_MARK
    if is_packed:
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")
