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
from tacita.data.file_errors import file_error, list_names, quote_value
from tacita.data.interaction_table import Interactions, compute_fingerprint
from tacita.data.roles import find_column, is_position, rank_name
from tacita.data.table_files import RawTable, is_atomic, read_columns
from tacita.data.values import parse_finite, parse_times

_SPLITS = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
_MISSING = {"nan", "null", "na", "n/a", "none", "<na>"}  # as text
_ITEM_FILES = {
    "interactions.csv": "items.csv",
    "u.data": "u.item",
    "ratings.dat": "movies.dat",
    "ratings.csv": "movies.csv",
    "user_ratedmovies-timestamps.dat": "movies.dat",
}


def make_interactions(name: str, table: RawTable) -> Interactions:
    """The table as arrays; the first value that cannot be used is an error."""
    table = _drop_false_splits(table)
    user, user_ids = _encode_ids(table, "user")
    item, item_ids = _encode_ids(table, "item")
    rating = _parse_ratings(table) if "rating" in table.names else None
    time, unit = _parse_times(table) if "timestamp" in table.names else (None, "")
    split = _parse_splits(table) if "split" in table.names else None
    block = _parse_blocks(table) if "block" in table.names else None
    titles, title_note = _find_titles(table, item_ids)
    taken = ", ".join(f"{role}={column}" for role, column in table.names.items())
    beside = f"; not used: {list_names(table.unused)}" if table.unused else ""
    extra = () if block is None else (block,)  # without one the fingerprint is what it was before there were blocks
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
        fingerprint=compute_fingerprint(user, item, rating, time, split, user_ids, item_ids, *extra),
        format_note=f"{table.path.name}: {table.kind}; {taken}{title_note}{beside}.",
        time_is_global=not is_position(table.names.get("timestamp", "")),
        block=block,
        time_unit=unit,
        columns=dict(table.names),
        unused=table.unused,
        notes=(*table.notes, *_note_missing_ids(table, "user", user_ids), *_note_missing_ids(table, "item", item_ids)),
        items_from=find_item_file(table.path) or table.path,
    )


def _encode_ids(table: RawTable, role: str) -> tuple[Ints, tuple[str, ...]]:
    """Codes in order of first appearance, and the raw ids."""
    ids = table.frame[role]
    if ids.dtype.is_float():
        ids = ids.fill_nan(None)  # no number is no id
    if ids.dtype.is_float() and (ids.drop_nulls() % 1 == 0).all():
        ids = ids.cast(pl.Int64, strict=False)  # whole numbers stored as floats because some were missing
    ids = ids.cast(pl.String)
    table.refuse_bad_rows(role, ids.is_null() | (ids == ""), f"an unusable {role} id")
    names = ids.unique(maintain_order=True)
    codes = ids.cast(pl.Enum(names)).to_physical()
    return codes.to_numpy().astype(np.int32), tuple(names.to_list())


def _note_missing_ids(table: RawTable, role: str, names: Sequence[str]) -> list[str]:
    """A note for ids that other programs write where there is none; they are ids here, as somebody may be called so."""
    found = {name: table.frame[role].cast(pl.String) == name for name in names if name.strip().lower() in _MISSING}
    return [
        f"{role} id {quote_value(name)} may stand for a missing one: its {int(rows.sum()):,} "
        f"rows count as one {role}; leave "
        "them out of the file if they are not."
        for name, rows in found.items()
    ]


def _parse_ratings(table: RawTable) -> Floats:
    numbers = parse_finite(table.frame["rating"], pl.Float32, table.hints.decimal)
    way = ", say --decimal , if it has a decimal comma" if table.hints.decimal is None else ""
    table.refuse_bad_rows("rating", numbers.is_null(), "a rating that is no number", way)
    return numbers.to_numpy().astype(np.float32)


def _parse_times(table: RawTable) -> tuple[Longs, str]:
    numbers, unit = parse_times(table.frame["timestamp"], table.hints)
    form = table.hints.date_format
    what = f"a timestamp that does not fit --date-format '{form}'" if form else ""
    way = "" if form else ', say how dates are written with --date-format "%d.%m.%Y"'
    table.refuse_bad_rows(
        "timestamp", numbers.is_null(), what or "a timestamp that is neither a number nor a date", way
    )
    return numbers.to_numpy().astype(np.int64), unit


def _parse_blocks(table: RawTable) -> Ints:
    """The source's own blocks; they say nothing without parts."""
    if "split" not in table.names:
        remedy = "say which column holds train, valid or test with --columns part=NAME"
        raise file_error(table.path, "blocks without parts", remedy)
    numbers = table.frame["block"].cast(pl.Int64, strict=False)
    fine = numbers.is_between(0, max(0, table.frame.height - 1)).fill_null(False)
    table.refuse_bad_rows("block", ~fine, "a block that is not one of 0, 1, 2 and so on")
    return numbers.to_numpy().astype(np.int32)


def _drop_false_splits(table: RawTable) -> RawTable:
    """A column that is merely called part, and holds something else, is no split unless somebody says so."""
    name = table.names.get("split", "")
    if "split" in table.hints.columns or not rank_name(name, "split") or set(_encode_parts(table).drop_nulls()):
        return table
    names = {role: column for role, column in table.names.items() if role not in ("split", "block")}
    dropped = tuple(column for role, column in table.names.items() if role in ("split", "block"))
    return replace(table, names=names, unused=(*table.unused, *dropped))


def _encode_parts(table: RawTable) -> pl.Series:
    text = table.frame["split"].cast(pl.String).str.to_lowercase()
    return text.replace_strict(_SPLITS, default=None, return_dtype=pl.Int8)


def _parse_splits(table: RawTable) -> NDArray[np.int8]:
    codes = _encode_parts(table)
    table.refuse_bad_rows("split", codes.is_null(), "a split that is not train, valid or test")
    return codes.to_numpy().astype(np.int8)


# Titles


def read_items(path: Path, columns: Mapping[str, str] | None = None) -> tuple[list[tuple[str, str]], str]:
    """Items of a file that lists them, with their titles or "" where it has none, and what was understood of it.

    Each item once, in the file's order. `columns` names the columns: role (item or title) -> name or number.
    """
    if not path.is_file():
        raise TacitaError(f"there is no file {path}; give a file that lists items, one a line.")
    names, frame = read_item_columns(path, columns or {})
    if "title" not in frame.columns:
        frame = frame.with_columns(pl.lit("").alias("title"))
    pairs = frame.select(pl.col("item", "title").cast(pl.String).str.strip_chars().fill_null(""))
    pairs = pairs.filter(pl.col("item") != "").unique("item", keep="first", maintain_order=True)
    if not len(pairs):
        raise file_error(path, "no items in it", "give a file that lists items, one a line")
    items = list(zip(pairs["item"].to_list(), pairs["title"].to_list(), strict=True))
    taken = ", ".join(f"{role}={name}" for role, name in names.items())
    first = " ".join(f"{quote_value(text)}" for text in items[0] if text)
    return items, f"{path.name}: {taken}{'' if 'title' in names else ', no titles'}; the first is {first}."


def _find_titles(table: RawTable, item_ids: Sequence[str]) -> tuple[dict[str, str], str]:
    """Titles from the table itself or from the file that goes with it, and a note for the guess."""
    if "title" in table.names:
        return _map_titles(table.frame, item_ids), ""
    path = find_item_file(table.path)
    if path is None:
        return {}, ""
    try:
        found = _map_titles(_read_titles(path), item_ids)
        return found, f"; titles from {path.name}" if found else ""
    except (TacitaError, OSError) as error:
        return {}, f"; titles left out ({str(error).rstrip('.')})"


def find_item_file(path: Path) -> Path | None:
    """The file beside the interactions that describes the items, by the habits of MovieLens and RecBole."""
    base = path.name.removesuffix(".gz")
    partner = Path(base).stem + ".item" if base.endswith(".inter") else _ITEM_FILES.get(base)
    for name in (partner, f"{partner}.gz") if partner else ():
        if (path.parent / name).is_file():
            return path.parent / name
    return None


def _read_titles(path: Path) -> pl.DataFrame:
    """Columns item and title of an item file; the year goes behind the title where RecBole cut it off."""
    _, made = read_item_columns(path, {})
    return made if "title" in made.columns else pl.DataFrame(schema={"item": pl.String, "title": pl.String})


def read_item_columns(path: Path, columns: Mapping[str, str]) -> tuple[dict[str, str], pl.DataFrame]:
    """The columns item and, where there is one, title of an item file, and their names in it."""
    header, every, frame = read_columns(path, columns)
    names = [name.split(":")[0].lower() for name in every]
    at: dict[str, int | None] = {"item": 0, "title": 1 if len(names) > 1 else None}
    if header:
        at = {"item": _find_first_fitting(names, "item", "id"), "title": _find_first_fitting(names, "title", "name")}
    for role, name in columns.items():
        if role not in at:
            raise unknown_name_error("column role", role, at)
        at[role] = None if name == "-" and role == "title" else find_column(path, role, name, every)
    if at["item"] is None:
        known = f"no item column found among {list_names(every)}"
        raise file_error(path, known, "say which it is with --columns item=...,title=... (a name, or a number from 1)")
    if at["title"] == at["item"]:
        at["title"] = None
    found = {role: place for role, place in at.items() if place is not None}
    made = frame.select(pl.nth(place).alias(role) for role, place in found.items())
    if "title" in found and is_atomic(every) and "release_year" in names:
        made = _append_year(made, frame.to_series(names.index("release_year")))
    return {role: every[place] for role, place in found.items()}, made


def _find_first_fitting(names: Sequence[str], role: str, also: str) -> int | None:
    return next((at for at, name in enumerate(names) if name == also or rank_name(name, role) is not None), None)


def _append_year(made: pl.DataFrame, year: pl.Series) -> pl.DataFrame:
    """'Toy Story' of 1995 as 'Toy Story (1995)'; a movie without a year has its title in both places."""
    title, ending = pl.col("title"), pl.lit(" (") + pl.col("year") + ")"
    dated = (pl.col("year") != "") & (pl.col("year") != title) & ~title.str.ends_with(ending)
    whole = pl.when(dated).then(title + ending).otherwise(title)
    # RecBole misspells the one movie without a name.
    return made.with_columns(year.alias("year")).select("item", whole.replace("unkonwn", "unknown"))


def _map_titles(frame: pl.DataFrame, item_ids: Sequence[str]) -> dict[str, str]:
    """The first title of every item that occurs."""
    pairs = frame.select(pl.col("item", "title").cast(pl.String)).drop_nulls()
    pairs = pairs.filter(pl.col("title") != "").unique("item", keep="first", maintain_order=True)
    found = dict(zip(pairs["item"].to_list(), pairs["title"].to_list()))
    return {item: found[item] for item in item_ids if item in found}
