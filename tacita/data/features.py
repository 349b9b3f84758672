"""What a source says of its items beside who chose them: genres, a year, words.

A table remembers only the file that tells (`items_from`); it is read when somebody asks, so that a run without a use
for it pays nothing. Item files of MovieLens, RecBole and Amazon are understood, and any table whose columns are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.core.types import BlockStream
from tacita.data.columns import find_item_file
from tacita.data.datasets import DATASETS, find_verified_file
from tacita.data.file_errors import file_error, list_names, unreadable_error
from tacita.data.roles import find_column, rank_name
from tacita.data.table_files import find_main_file, read_columns

_NAMES = {
    "item": "id",
    "genres": "genres genre class categories category maincategory tags",
    "year": "year releaseyear publicationyear releasedate",
    "text": "title movietitle itemtitle producttitle booktitle itemname artistname name subtitle brand author "
    "description features",
}
_WORDS = {role: names.split() for role, names in _NAMES.items()}
_EMPTY_VALUES = {"", "unknown", "unkonwn", "(no genres listed)", "none", "null"}  # RecBole misspells one
_SEPARATORS = ("|", ";", ",")
_YEAR = re.compile(r"(?<!\d)(?:1[5-9]|20)\d\d(?!\d)")
_TITLE_YEAR = re.compile(r"\s*\(((?:1[5-9]|20)\d\d)(?:-\d*)?\)")
# The flags of MovieLens 100K, in their order, behind five other columns.
# fmt: off
_U_ITEM = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on


@dataclass(frozen=True)
class ItemFeature:
    """What is known of one item."""

    genres: tuple[str, ...] = ()
    year: int | None = None
    text: str = ""  # a line for each column: title, brand, description


@dataclass(frozen=True)
class ItemFeatures:
    """What a source says of its items."""

    source: str
    by_item: dict[str, ItemFeature]  # by raw item id; an item of which nothing is said is not in it
    columns_note: str  # one sentence: which columns of which file were read


def load_item_features(
    source: str,
    item_ids: Sequence[str],
    *,
    data_dir: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> ItemFeatures | None:
    """What a named dataset, a table, or the item file beside it says of the given items; None: nothing.

    `columns` names columns: role (item, genres, year or text) -> name or number.
    """
    if source == "synthetic" or source.startswith("synthetic:"):
        return None
    path = find_verified_file(source, data_dir) if source in DATASETS else Path(source)
    try:
        file = find_main_file(path) if path.is_dir() else path
        if file is None or not file.is_file():
            raise TacitaError(f"{source[:200]!r} has no file that lists items; check the path.")
        return _read_features(find_item_file(file) or file, source, item_ids, columns or {})
    except OSError as error:
        raise unreadable_error(path, error) from None


def load_stream_features(stream: BlockStream) -> ItemFeatures:
    """What the source of a stream says of the stream's items; refused where that is nothing."""
    path = stream.items_from
    try:
        found = None if path is None else _read_features(path, stream.name, stream.item_ids, {})
    except OSError as error:
        raise unreadable_error(Path(str(path)), error) from None
    if found is None:
        raise missing_features_error(stream.name)
    return found


def missing_features_error(source: str) -> TacitaError:
    return TacitaError(
        f"dataset {source} says nothing of its items; put a file items.csv with columns item, title and genres beside "
        "its interactions.csv, or do without item features."
    )


def _read_features(path: Path, source: str, item_ids: Sequence[str], columns: Mapping[str, str]) -> ItemFeatures | None:
    header, names, frame = read_columns(path, columns)
    at = _find_roles(path, names if header else _known_names(path, names), names, columns)
    if not at["item"] or not any(at[role] for role in ("genres", "year", "text")):
        return None
    place = at["item"][0]
    kept = frame.with_columns(frame.to_series(place).cast(pl.String).str.strip_chars().alias("item id"))
    kept = kept.filter(pl.col("item id").is_in(list(item_ids))).unique("item id", keep="first", maintain_order=True)
    read = {role: [kept.to_series(k).to_list() for k in places] for role, places in at.items()}
    genres = [_split_genres(kept.to_series(k), names[k]) for k in at["genres"]]
    if header is False and path.name.removesuffix(".gz") == "u.item":
        genres = [_read_genre_flags(kept)]
    found = {}
    for n, item in enumerate(kept["item id"].to_list()):
        told = _make_feature(
            [one[n] for one in genres], [one[n] for one in read["year"]], [one[n] for one in read["text"]]
        )
        if told != ItemFeature():
            found[item] = told
    said = ", ".join(f"{role}={'+'.join(names[k] for k in places)}" for role, places in at.items() if places)
    return ItemFeatures(source, found, f"{path.name}: {said}.") if found else None


def _known_names(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The names that the columns of MovieLens' item files would have; others without a header have to be named."""
    base = path.name.removesuffix(".gz")
    known: tuple[str, ...] = ()
    if base == "u.item" and len(names) == 5 + len(_U_ITEM):
        known = ("item", "title", "release date")
    elif base == "movies.dat" and len(names) == 3:
        known = ("item", "title", "genres")
    return (*known, *("" for _ in names[len(known) :]))


def _find_roles(
    path: Path, shown: Sequence[str], names: Sequence[str], columns: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The columns of each role: those that were named, else those whose names fit."""
    plain = ["".join(c for c in name.split(":")[0].lower() if c.isalnum()) for name in shown]
    at = {role: tuple(n for n, name in enumerate(plain) if name in words) for role, words in _WORDS.items()}
    fitting = [(rank_name(name, "item"), n) for n, name in enumerate(shown)]
    at["item"] = tuple(n for _, n in sorted((r, n) for r, n in fitting if r is not None))[:1] or at["item"][:1]
    for role, name in columns.items():
        if role not in at:
            raise unknown_name_error("column role", role, at)
        at[role] = () if name == "-" else (find_column(path, role, name, names),)
    if columns and not at["item"]:
        raise file_error(path, f"no item column found among {list_names(names)}", "say which it is with item=NAME")
    return at


def _read_genre_flags(frame: pl.DataFrame) -> list[tuple[str, ...]]:
    """The genres of u.item, where each has a column of 0 and 1."""
    rows = frame.select(pl.nth(range(5, 5 + len(_U_ITEM)))).rows()
    return [tuple(name for name, flag in zip(_U_ITEM, row) if flag == "1") for row in rows]


def _split_genres(column: pl.Series, name: str) -> list[tuple[str, ...]]:
    """The genres of each row: a list, or text with one separator all the way down."""
    if column.dtype.is_nested():
        return [tuple(_iter_leaves(value)) for value in column.to_list()]
    text = column.cast(pl.String).fill_null("").to_list()
    by = next((one for one in _SEPARATORS if any(one in value for value in text)), None)
    if by is None and name.endswith(":token_seq"):
        by = " "
    return [tuple(value.split(by) if by else [value]) for value in text]


def _iter_leaves(value: object) -> Iterator[str]:
    """The texts in a list, or in lists of lists."""
    if isinstance(value, list):
        for one in value:
            yield from _iter_leaves(one)
    elif value is not None:
        yield str(value)


def _make_feature(genres: list[tuple[str, ...]], years: list[object], texts: list[object]) -> ItemFeature:
    """One item's values, cleaned; a year behind the title counts as a year and not as a word."""
    named = dict.fromkeys(one.strip() for some in genres for one in some)
    lines = [" ".join(" ".join(_iter_leaves(value)).split()) for value in texts]
    year = next((int(found[0]) for value in years if (found := _YEAR.search(str(value)[:12]))), None)
    behind = [int(one) for line in lines[:1] for one in _TITLE_YEAR.findall(line)]
    if lines:
        lines[0] = _TITLE_YEAR.sub("", lines[0])
    return ItemFeature(
        genres=tuple(one for one in named if one.lower() not in _EMPTY_VALUES),
        year=year if year is not None else (behind[-1] if behind else None),
        text="\n".join(line for line in lines if line.lower() not in _EMPTY_VALUES),
    )
