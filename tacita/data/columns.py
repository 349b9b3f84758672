"""Turns the columns of a file into checked arrays, and finds the titles of its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import Floats, Ints, Longs
from tacita.data.delimited_text import is_recbole_header
from tacita.data.file_errors import file_error, list_names, quote_value
from tacita.data.interaction_table import Interactions, compute_fingerprint
from tacita.data.missing_values import BLANK_TEXTS, drop_or_refuse_missing
from tacita.data.roles import RequestedColumns, find_column, is_sequence_position, rank_column_name
from tacita.data.table_files import RawTable, read_all_columns
from tacita.data.values import parse_finite, parse_times

SPLITS = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
MOST_BLOCK = 1000  # that a row may name under a budget, where the number of rows decides nothing
_ITEM_FILES = {
    "interactions.csv": "items.csv",
    "u.data": "u.item",
    "ratings.dat": "movies.dat",
    "ratings.csv": "movies.csv",
    "user_ratedmovies-timestamps.dat": "movies.dat",
}


def make_interactions(name: str, table: RawTable) -> Interactions:
    """The table as arrays; the first value that cannot be used is an error."""
    table = drop_or_refuse_missing(_drop_false_splits(table))
    user, user_ids = _encode_ids(table, "user")
    item, item_ids = _encode_ids(table, "item")
    rating = _parse_ratings(table)
    time, unit = _parse_times(table)
    split = _parse_splits(table)
    block = _parse_blocks(table)
    titles, title_note = _find_titles_with_note(table, item_ids)
    own_blocks: tuple[Ints, ...] = ()  # tables without blocks keep the fingerprint of earlier versions
    if block is not None:
        own_blocks = (block,)
    user_notes = _list_missing_id_notes(table, "user", user_ids)
    item_notes = _list_missing_id_notes(table, "item", item_ids)
    item_file = find_item_file(table.path)
    return Interactions(
        name=name,
        user=user,
        item=item,
        rating=rating,
        timestamp=time,
        split=split,
        user_ids=user_ids,
        item_ids=item_ids,
        titles=titles,
        fingerprint=compute_fingerprint(user, item, rating, time, split, user_ids, item_ids, *own_blocks),
        format_note=_describe_format(table, title_note),
        time_is_global=not is_sequence_position(table.names.get("timestamp", "")),
        block=block,
        time_unit=unit,
        columns=dict(table.names),
        unused=table.unused,
        notes=(*table.notes, *user_notes, *item_notes),
        items_from=item_file or table.path,
        item_file=item_file,
    )


def _describe_format(table: RawTable, title_note: str) -> str:
    """One sentence: the format of the file, and which column has which role."""
    file_name = table.path.name
    roles = _describe_roles(table.names)
    unused = ""
    if table.unused:
        columns = list_names(table.unused)
        unused = f"; not used: {columns}"
    return f"{file_name}: {table.kind}; {roles}{title_note}{unused}."


def _describe_roles(names: Mapping[str, str]) -> str:
    return ", ".join(f"{role}={column}" for role, column in names.items())


def _encode_ids(table: RawTable, role: str) -> tuple[Ints, tuple[str, ...]]:
    """Codes in order of first appearance, and the raw ids."""
    ids = table.frame[role]
    if ids.dtype.is_float():
        ids = ids.fill_nan(None)  # no number is no id
        fractions = ids.drop_nulls() % 1
        if (fractions == 0).all():
            ids = ids.cast(pl.Int64, strict=False)  # whole numbers stored as floats because some were missing
    ids = ids.cast(pl.String)
    is_empty = ids.is_null() | (ids == "")
    table.refuse_bad_rows(role, is_empty, f"an unusable {role} id")
    names = ids.unique(maintain_order=True)
    kind = pl.Enum(names)
    codes = ids.cast(kind).to_physical()
    numbers = codes.to_numpy().astype(np.int32)
    raw_ids = tuple(names.to_list())
    return numbers, raw_ids


def _list_missing_id_notes(table: RawTable, role: str, names: Sequence[str]) -> list[str]:
    """Notes on ids that other programs write for a missing value; they count as ids, since a name may be one."""
    notes = []
    for name in names:
        if name.strip().lower() not in BLANK_TEXTS:
            continue
        ids = table.frame[role]
        is_name = ids.cast(pl.String) == name
        rows = int(is_name.sum())
        quoted = quote_value(name)
        notes.append(
            f"{role} id {quoted} may stand for a missing one: its {rows:,} "
            f"rows count as one {role}; leave "
            "them out of the file if they are not."
        )
    return notes


def _parse_ratings(table: RawTable) -> Floats | None:
    if "rating" not in table.names:
        return None
    decimal = table.hints.decimal
    values = table.frame["rating"]
    numbers = parse_finite(values, pl.Float32, decimal)
    remedy = ""
    if decimal is None:
        remedy = ", say --decimal , if it has a decimal comma"
    is_bad = numbers.is_null()
    table.refuse_bad_rows("rating", is_bad, "a rating that is no number", remedy)
    return numbers.to_numpy().astype(np.float32)


def _parse_times(table: RawTable) -> tuple[Longs | None, str]:
    if "timestamp" not in table.names:
        return None, ""
    values = table.frame["timestamp"]
    numbers, unit = parse_times(values, table.hints)
    is_bad = numbers.is_null()
    date_format = table.hints.date_format
    if date_format:
        problem = f"a timestamp that does not fit --date-format '{date_format}'"
        remedy = ""
    else:
        problem = "a timestamp that is neither a number nor a date"
        remedy = ', say how dates are written with --date-format "%d.%m.%Y"'
    table.refuse_bad_rows("timestamp", is_bad, problem, remedy)
    times = numbers.to_numpy().astype(np.int64)
    return times, unit


def _parse_blocks(table: RawTable) -> Ints | None:
    """The source's own blocks; they say nothing without parts."""
    if "block" not in table.names:
        return None
    if "split" not in table.names:
        remedy = "say which column holds train, valid or test with --columns part=NAME"
        raise file_error(table.path, "blocks without parts", remedy)
    values = table.frame["block"]
    numbers = values.cast(pl.Int64, strict=False)
    n_rows = table.frame.height
    last = MOST_BLOCK if table.hints.row_by_row else max(0, n_rows - 1)
    is_valid = numbers.is_between(0, last)
    is_valid = is_valid.fill_null(False)
    table.refuse_bad_rows("block", ~is_valid, "a block that is not one of 0, 1, 2 and so on")
    return numbers.to_numpy().astype(np.int32)


def _drop_false_splits(table: RawTable) -> RawTable:
    """A column that is merely called part, and holds something else, is no split unless the caller names it."""
    if not _is_false_split(table):
        return table
    names = {}
    dropped = []
    for role, column in table.names.items():
        if role in ("split", "block"):
            dropped.append(column)
        else:
            names[role] = column
    unused = (*table.unused, *dropped)
    return replace(table, names=names, unused=unused)


def _is_false_split(table: RawTable) -> bool:
    if "split" in table.hints.columns:
        return False
    name = table.names.get("split", "")
    if not rank_column_name(name, "split"):  # no such column, or one with the best name
        return False
    parts = _encode_split_parts(table)
    known_parts = parts.drop_nulls()
    return len(known_parts) == 0


def _encode_split_parts(table: RawTable) -> pl.Series:
    values = table.frame["split"]
    text = values.cast(pl.String).str.to_lowercase()
    return text.replace_strict(SPLITS, default=None, return_dtype=pl.Int8)


def _parse_splits(table: RawTable) -> NDArray[np.int8] | None:
    if "split" not in table.names:
        return None
    codes = _encode_split_parts(table)
    table.refuse_bad_rows("split", codes.is_null(), "a split that is not train, valid or test")
    return codes.to_numpy().astype(np.int8)


# Titles


def read_items_with_titles(path: Path, columns: RequestedColumns | None = None) -> tuple[list[tuple[str, str]], str]:
    """Items of a file that lists them, with their titles or "" where it has none, and a note on the columns.

    Each item once, in the file's order. `columns` names the columns: role (item or title) -> name or number.
    """
    if not path.is_file():
        raise TacitaError(f"there is no file {path}; give a file that lists items, one a line.")
    names, frame = read_item_columns(path, columns or {})
    if "title" not in frame.columns:
        no_title = pl.lit("")
        frame = frame.with_columns(no_title.alias("title"))
    texts = pl.col("item", "title").cast(pl.String)
    texts = texts.str.strip_chars()
    pairs = frame.select(texts.fill_null(""))
    pairs = pairs.filter(pl.col("item") != "")
    pairs = pairs.unique("item", keep="first", maintain_order=True)
    if not len(pairs):
        raise file_error(path, "no items in it", "give a file that lists items, one a line")
    items = list(pairs.iter_rows())
    note = _describe_roles(names)
    if "title" not in names:
        note += ", no titles"
    first = " ".join(quote_value(text) for text in items[0] if text)
    return items, f"{path.name}: {note}; the first is {first}."


def _find_titles_with_note(table: RawTable, item_ids: Sequence[str]) -> tuple[dict[str, str], str]:
    """Titles from the table itself or from the file that goes with it, and a note for the guess."""
    if "title" in table.names:
        return _map_titles(table.frame, item_ids), ""
    path = find_item_file(table.path)
    if path is None:
        return {}, ""
    try:
        frame = _read_titles(path)
        titles = _map_titles(frame, item_ids)
    except (TacitaError, OSError) as error:
        reason = str(error).rstrip(".")
        return {}, f"; titles left out ({reason})"
    if not titles:
        return {}, ""
    return titles, f"; titles from {path.name}"


def find_item_file(path: Path) -> Path | None:
    """The file next to the interactions that describes the items, by the habits of MovieLens and RecBole."""
    base = path.name.removesuffix(".gz")
    if base.endswith(".inter"):
        stem = Path(base).stem
        partner = f"{stem}.item"
    elif base in _ITEM_FILES:
        partner = _ITEM_FILES[base]
    else:
        return None
    for name in (partner, f"{partner}.gz"):
        candidate = path.parent / name
        if candidate.is_file():
            return candidate
    return None


def _read_titles(path: Path) -> pl.DataFrame:
    """Columns item and title of an item file; no rows where it has no titles."""
    _, frame = read_item_columns(path, {})
    if "title" in frame.columns:
        return frame
    return pl.DataFrame(schema={"item": pl.String, "title": pl.String})


def read_item_columns(path: Path, columns: RequestedColumns) -> tuple[dict[str, str], pl.DataFrame]:
    """The columns item and, where there is one, title of an item file, and their names in it.

    The year goes behind the title where RecBole cut it off.
    """
    has_header, column_names, frame = read_all_columns(path, columns)
    plain_names = [name.split(":")[0].lower() for name in column_names]
    places = _find_item_columns(plain_names, has_header)
    for role, name in columns.items():
        if role not in places:
            raise unknown_name_error("column role", role, places)
        if role == "title" and name == "-":
            places[role] = None
        else:
            places[role] = find_column(path, role, name, column_names)
    if places["item"] is None:
        problem = f"no item column found among {list_names(column_names)}"
        remedy = "say which it is with --columns item=...,title=... (a name, or a number from 1)"
        raise file_error(path, problem, remedy)
    if places["title"] == places["item"]:
        places["title"] = None
    names = {}
    selected = []
    for role, place in places.items():
        if place is not None:
            names[role] = column_names[place]
            selected.append(frame.to_series(place).alias(role))
    items = pl.DataFrame(selected)
    lacks_year = is_recbole_header(column_names) and "release_year" in plain_names
    if "title" in names and lacks_year:
        year_place = plain_names.index("release_year")
        year = frame.to_series(year_place)
        items = _append_year(items, year)
    return names, items


def _find_item_columns(names: Sequence[str], has_header: bool) -> dict[str, int | None]:
    """Where item and title are: by their names under a header, else the first two columns."""
    if has_header:
        item = _find_first_fitting_column(names, "item", "id")
        title = _find_first_fitting_column(names, "title", "name")
        return {"item": item, "title": title}
    if len(names) > 1:
        return {"item": 0, "title": 1}
    return {"item": 0, "title": None}


def _find_first_fitting_column(names: Sequence[str], role: str, also: str) -> int | None:
    for place, name in enumerate(names):
        rank = rank_column_name(name, role)
        if name == also or rank is not None:
            return place
    return None


def _append_year(items: pl.DataFrame, year: pl.Series) -> pl.DataFrame:
    """'Toy Story' of 1995 as 'Toy Story (1995)'; a movie without a year has its title in both places."""
    title = pl.col("title")
    year_text = pl.col("year")
    ending = pl.lit(" (") + year_text + ")"
    has_year = (year_text != "") & (year_text != title)
    lacks_ending = has_year & ~title.str.ends_with(ending)
    dated_title = title + ending
    whole_title = pl.when(lacks_ending).then(dated_title).otherwise(title)
    whole_title = whole_title.replace("unkonwn", "unknown")  # RecBole misspells the one movie without a name
    with_year = items.with_columns(year.alias("year"))
    return with_year.select("item", whole_title)


def _map_titles(frame: pl.DataFrame, item_ids: Sequence[str]) -> dict[str, str]:
    """The first title of every item that occurs."""
    texts = pl.col("item", "title").cast(pl.String)
    pairs = frame.select(texts).drop_nulls()
    pairs = pairs.filter(pl.col("title") != "")
    pairs = pairs.unique("item", keep="first", maintain_order=True)
    titles = dict(pairs.iter_rows())
    return {item: titles[item] for item in item_ids if item in titles}
