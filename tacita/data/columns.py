"""Turns the columns of a file into checked arrays, and finds the titles of its items."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tacita.data.reading import Table, is_atomic, read_rows, read_text, sniff
from tacita.data.roles import is_position, rank
from tacita.data.table import Interactions, fingerprint
from tacita.data.values import finite, times
from tacita.errors import TacitaError
from tacita.types import Floats, Ints, Longs

_SPLITS = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}
_TITLE_FILES = {
    "interactions.csv": "items.csv",
    "u.data": "u.item",
    "ratings.dat": "movies.dat",
    "ratings.csv": "movies.csv",
    "user_ratedmovies-timestamps.dat": "movies.dat",
}


def interactions(name: str, table: Table) -> Interactions:
    """The table as arrays; the first value that cannot be used is an error."""
    user, user_ids = _codes(table, "user")
    item, item_ids = _codes(table, "item")
    rating = _ratings(table) if "rating" in table.names else None
    time = _times(table) if "timestamp" in table.names else None
    split = _splits(table) if "split" in table.names else None
    titles, title_note = _titles(table, item_ids)
    taken = ", ".join(f"{role}={column}" for role, column in table.names.items())
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
        fingerprint=fingerprint(user, item, rating, time, split, user_ids, item_ids),
        guessed=f"{table.path.name}: {table.kind}; {taken}{title_note}.",
        time_is_global=not is_position(table.names.get("timestamp", "")),
    )


def _codes(table: Table, role: str) -> tuple[Ints, tuple[str, ...]]:
    """Codes in order of first appearance, and the raw ids."""
    ids = table.frame[role]
    if ids.dtype.is_float() and (ids.drop_nulls() % 1 == 0).all():
        ids = ids.cast(pl.Int64, strict=False)  # whole numbers stored as floats because some were missing
    ids = ids.cast(pl.String)
    table.refuse(role, ids.is_null() | (ids == ""), f"an unusable {role} id")
    names = ids.unique(maintain_order=True)
    codes = ids.cast(pl.Enum(names)).to_physical()
    return codes.to_numpy().astype(np.int32), tuple(names.to_list())


def _ratings(table: Table) -> Floats:
    numbers = finite(table.frame["rating"], pl.Float32)
    table.refuse("rating", numbers.is_null(), "a rating that is no number")
    return numbers.to_numpy().astype(np.float32)


def _times(table: Table) -> Longs:
    numbers = times(table.frame["timestamp"])
    table.refuse("timestamp", numbers.is_null(), "a timestamp that is neither a number nor a date")
    return numbers.to_numpy().astype(np.int64)


def _splits(table: Table) -> NDArray[np.int8]:
    text = table.frame["split"].cast(pl.String).str.to_lowercase()
    codes = text.replace_strict(_SPLITS, default=None, return_dtype=pl.Int8)
    table.refuse("split", codes.is_null(), "a split that is not train, valid or test")
    return codes.to_numpy().astype(np.int8)


# Titles


def read_items(path: Path) -> list[tuple[str, str]]:
    """Items of a file that lists them, with their titles or "" where it has none; each once, in its order."""
    if not path.is_file():
        raise TacitaError(f"no such file: {path}.")
    frame = _title_frame(path)
    if "title" not in frame.columns or "item" not in frame.columns or len(frame) == 0:
        raise TacitaError(f"{path} lists no items: it needs a column with ids (item) and one with titles (title).")
    pairs = frame.select(pl.col("item").cast(pl.String), pl.col("title").cast(pl.String).fill_null(""))
    pairs = pairs.drop_nulls("item").filter(pl.col("item") != "").unique("item", keep="first", maintain_order=True)
    return list(zip(pairs["item"].to_list(), pairs["title"].to_list(), strict=True))


def _titles(table: Table, item_ids: Sequence[str]) -> tuple[dict[str, str], str]:
    """Titles from the table itself or from the file that goes with it, and a note for the guess."""
    if "title" in table.names:
        return _title_map(table.frame, item_ids), ""
    path = _title_file(table.path)
    if path is None:
        return {}, ""
    try:
        found = _title_map(_title_frame(path), item_ids)
        return found, f"; titles from {path.name}" if found else ""
    except (TacitaError, OSError) as error:
        return {}, f"; titles left out ({str(error).rstrip('.')})"


def _title_file(path: Path) -> Path | None:
    """The file beside the interactions that names the items, by the habits of MovieLens and RecBole."""
    base = path.name.removesuffix(".gz")
    partner = Path(base).stem + ".item" if base.endswith(".inter") else _TITLE_FILES.get(base)
    for name in (partner, f"{partner}.gz") if partner else ():
        if (path.parent / name).is_file():
            return path.parent / name
    return None


def _title_frame(path: Path) -> pl.DataFrame:
    """Columns item and title of an item file; the year goes behind the title where RecBole cut it off."""
    data = read_text(path)
    _, layout = sniff(path, data, {})
    names = [name.split(":")[0].lower() for name in layout.names]
    item: int | None = 0
    title: int | None = 1
    if layout.header:
        item, title = _first_fitting(names, "item", "id"), _first_fitting(names, "title", "name")
    if item is None or title is None:
        return pl.DataFrame(schema={"item": pl.String, "title": pl.String})
    frame = read_rows(path, data, layout)
    made = frame.select(pl.nth(item).alias("item"), pl.nth(title).alias("title"))
    if is_atomic(layout.names) and "release_year" in names:
        made = _with_year(made, frame.to_series(names.index("release_year")))
    return made


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
