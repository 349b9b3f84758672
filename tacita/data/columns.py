"""Turns the columns of a file into checked arrays, and finds the titles of its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tacita.core.errors import TacitaError, unknown_name
from tacita.core.types import Floats, Ints, Longs
from tacita.data.problems import listed, problem, shown
from tacita.data.reading import Table, is_atomic, read_columns
from tacita.data.roles import column_at, is_position, rank
from tacita.data.table import Interactions, fingerprint
from tacita.data.values import finite, times

_SPLITS = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
_MISSING = {"nan", "null", "na", "n/a", "none", "<na>"}  # as text
_ITEM_FILES = {
    "interactions.csv": "items.csv",
    "u.data": "u.item",
    "ratings.dat": "movies.dat",
    "ratings.csv": "movies.csv",
    "user_ratedmovies-timestamps.dat": "movies.dat",
}


def interactions(name: str, table: Table) -> Interactions:
    """The table as arrays; the first value that cannot be used is an error."""
    table = _without_other_parts(table)
    user, user_ids = _codes(table, "user")
    item, item_ids = _codes(table, "item")
    rating = _ratings(table) if "rating" in table.names else None
    time, unit = _times(table) if "timestamp" in table.names else (None, "")
    split = _splits(table) if "split" in table.names else None
    block = _blocks(table) if "block" in table.names else None
    titles, title_note = _titles(table, item_ids)
    taken = ", ".join(f"{role}={column}" for role, column in table.names.items())
    beside = f"; not used: {listed(table.unused)}" if table.unused else ""
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
        fingerprint=fingerprint(user, item, rating, time, split, user_ids, item_ids, *extra),
        guessed=f"{table.path.name}: {table.kind}; {taken}{title_note}{beside}.",
        time_is_global=not is_position(table.names.get("timestamp", "")),
        block=block,
        time_unit=unit,
        columns=dict(table.names),
        unused=table.unused,
        notes=(*table.notes, *_maybe_missing(table, "user", user_ids), *_maybe_missing(table, "item", item_ids)),
        items_from=item_file(table.path) or table.path,
    )


def _codes(table: Table, role: str) -> tuple[Ints, tuple[str, ...]]:
    """Codes in order of first appearance, and the raw ids."""
    ids = table.frame[role]
    if ids.dtype.is_float():
        ids = ids.fill_nan(None)  # no number is no id
    if ids.dtype.is_float() and (ids.drop_nulls() % 1 == 0).all():
        ids = ids.cast(pl.Int64, strict=False)  # whole numbers stored as floats because some were missing
    ids = ids.cast(pl.String)
    table.refuse(role, ids.is_null() | (ids == ""), f"an unusable {role} id")
    names = ids.unique(maintain_order=True)
    codes = ids.cast(pl.Enum(names)).to_physical()
    return codes.to_numpy().astype(np.int32), tuple(names.to_list())


def _maybe_missing(table: Table, role: str, names: Sequence[str]) -> list[str]:
    """A note for ids that other programs write where there is none; they are ids here, as somebody may be called so."""
    found = {name: table.frame[role].cast(pl.String) == name for name in names if name.strip().lower() in _MISSING}
    return [
        f"{role} id {shown(name)} may stand for a missing one: its {int(rows.sum()):,} rows count as one {role}; leave "
        "them out of the file if they are not."
        for name, rows in found.items()
    ]


def _ratings(table: Table) -> Floats:
    numbers = finite(table.frame["rating"], pl.Float32, table.hints.decimal)
    way = ", say --decimal , if it has a decimal comma" if table.hints.decimal is None else ""
    table.refuse("rating", numbers.is_null(), "a rating that is no number", way)
    return numbers.to_numpy().astype(np.float32)


def _times(table: Table) -> tuple[Longs, str]:
    numbers, unit = times(table.frame["timestamp"], table.hints)
    form = table.hints.date_format
    what = f"a timestamp that does not fit --date-format '{form}'" if form else ""
    way = "" if form else ', say how dates are written with --date-format "%d.%m.%Y"'
    table.refuse("timestamp", numbers.is_null(), what or "a timestamp that is neither a number nor a date", way)
    return numbers.to_numpy().astype(np.int64), unit


def _blocks(table: Table) -> Ints:
    """The source's own blocks; they say nothing without parts."""
    if "split" not in table.names:
        remedy = "say which column holds train, valid or test with --columns part=NAME"
        raise problem(table.path, "blocks without parts", remedy)
    numbers = table.frame["block"].cast(pl.Int64, strict=False)
    fine = numbers.is_between(0, max(0, table.frame.height - 1)).fill_null(False)
    table.refuse("block", ~fine, "a block that is not one of 0, 1, 2 and so on")
    return numbers.to_numpy().astype(np.int32)


def _without_other_parts(table: Table) -> Table:
    """A column that is merely called part, and holds something else, is no split unless somebody says so."""
    name = table.names.get("split", "")
    if "split" in table.hints.columns or not rank(name, "split") or set(_part_codes(table).drop_nulls()):
        return table
    names = {role: column for role, column in table.names.items() if role not in ("split", "block")}
    dropped = tuple(column for role, column in table.names.items() if role in ("split", "block"))
    return replace(table, names=names, unused=(*table.unused, *dropped))


def _part_codes(table: Table) -> pl.Series:
    text = table.frame["split"].cast(pl.String).str.to_lowercase()
    return text.replace_strict(_SPLITS, default=None, return_dtype=pl.Int8)


def _splits(table: Table) -> NDArray[np.int8]:
    codes = _part_codes(table)
    table.refuse("split", codes.is_null(), "a split that is not train, valid or test")
    return codes.to_numpy().astype(np.int8)


# Titles


def read_items(path: Path, columns: Mapping[str, str] | None = None) -> tuple[list[tuple[str, str]], str]:
    """Items of a file that lists them, with their titles or "" where it has none, and what was understood of it.

    Each item once, in the file's order. `columns` names the columns: role (item or title) -> name or number.
    """
    if not path.is_file():
        raise TacitaError(f"there is no file {path}; give a file that lists items, one a line.")
    names, frame = item_columns(path, columns or {})
    if "title" not in frame.columns:
        frame = frame.with_columns(pl.lit("").alias("title"))
    pairs = frame.select(pl.col("item", "title").cast(pl.String).str.strip_chars().fill_null(""))
    pairs = pairs.filter(pl.col("item") != "").unique("item", keep="first", maintain_order=True)
    if not len(pairs):
        raise problem(path, "no items in it", "give a file that lists items, one a line")
    items = list(zip(pairs["item"].to_list(), pairs["title"].to_list(), strict=True))
    taken = ", ".join(f"{role}={name}" for role, name in names.items())
    first = " ".join(f"{shown(text)}" for text in items[0] if text)
    return items, f"{path.name}: {taken}{'' if 'title' in names else ', no titles'}; the first is {first}."


def _titles(table: Table, item_ids: Sequence[str]) -> tuple[dict[str, str], str]:
    """Titles from the table itself or from the file that goes with it, and a note for the guess."""
    if "title" in table.names:
        return _title_map(table.frame, item_ids), ""
    path = item_file(table.path)
    if path is None:
        return {}, ""
    try:
        found = _title_map(_title_frame(path), item_ids)
        return found, f"; titles from {path.name}" if found else ""
    except (TacitaError, OSError) as error:
        return {}, f"; titles left out ({str(error).rstrip('.')})"


def item_file(path: Path) -> Path | None:
    """The file beside the interactions that describes the items, by the habits of MovieLens and RecBole."""
    base = path.name.removesuffix(".gz")
    partner = Path(base).stem + ".item" if base.endswith(".inter") else _ITEM_FILES.get(base)
    for name in (partner, f"{partner}.gz") if partner else ():
        if (path.parent / name).is_file():
            return path.parent / name
    return None


def _title_frame(path: Path) -> pl.DataFrame:
    """Columns item and title of an item file; the year goes behind the title where RecBole cut it off."""
    _, made = item_columns(path, {})
    return made if "title" in made.columns else pl.DataFrame(schema={"item": pl.String, "title": pl.String})


def item_columns(path: Path, columns: Mapping[str, str]) -> tuple[dict[str, str], pl.DataFrame]:
    """The columns item and, where there is one, title of an item file, and their names in it."""
    header, every, frame = read_columns(path, columns)
    names = [name.split(":")[0].lower() for name in every]
    at: dict[str, int | None] = {"item": 0, "title": 1 if len(names) > 1 else None}
    if header:
        at = {"item": _first_fitting(names, "item", "id"), "title": _first_fitting(names, "title", "name")}
    for role, name in columns.items():
        if role not in at:
            raise unknown_name("column role", role, at)
        at[role] = None if name == "-" and role == "title" else column_at(path, role, name, every)
    if at["item"] is None:
        known = f"no item column found among {listed(every)}"
        raise problem(path, known, "say which it is with --columns item=...,title=... (a name, or a number from 1)")
    if at["title"] == at["item"]:
        at["title"] = None
    found = {role: place for role, place in at.items() if place is not None}
    made = frame.select(pl.nth(place).alias(role) for role, place in found.items())
    if "title" in found and is_atomic(every) and "release_year" in names:
        made = _with_year(made, frame.to_series(names.index("release_year")))
    return {role: every[place] for role, place in found.items()}, made


def _first_fitting(names: Sequence[str], role: str, also: str) -> int | None:
    return next((at for at, name in enumerate(names) if name == also or rank(name, role) is not None), None)


def _with_year(made: pl.DataFrame, year: pl.Series) -> pl.DataFrame:
    """'Toy Story' of 1995 as 'Toy Story (1995)'; a movie without a year has its title in both places."""
    title, ending = pl.col("title"), pl.lit(" (") + pl.col("year") + ")"
    dated = (pl.col("year") != "") & (pl.col("year") != title) & ~title.str.ends_with(ending)
    whole = pl.when(dated).then(title + ending).otherwise(title)
    # RecBole misspells the one movie without a name.
    return made.with_columns(year.alias("year")).select("item", whole.replace("unkonwn", "unknown"))


def _title_map(frame: pl.DataFrame, item_ids: Sequence[str]) -> dict[str, str]:
    """The first title of every item that occurs."""
    pairs = frame.select(pl.col("item", "title").cast(pl.String)).drop_nulls()
    pairs = pairs.filter(pl.col("title") != "").unique("item", keep="first", maintain_order=True)
    found = dict(zip(pairs["item"].to_list(), pairs["title"].to_list()))
    return {item: found[item] for item in item_ids if item in found}
