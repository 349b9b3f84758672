"""What a source says of its items: genres, a year, words.

A table only remembers the item file (`items_from`). The file is read on demand, so other runs pay nothing.
Item files of MovieLens, RecBole and Amazon are understood, and any table whose columns are named.
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
from tacita.data.roles import RequestedColumns, find_column, rank_column_name
from tacita.data.table_files import find_main_file, read_all_columns

_TEXT_WORDS = (
    "title movietitle itemtitle producttitle booktitle itemname artistname name subtitle brand author "
    "description features"
)
_WORDS = {
    "item": ["id"],
    "genres": ["genres", "genre", "class", "categories", "category", "maincategory", "tags"],
    "year": ["year", "releaseyear", "publicationyear", "releasedate"],
    "text": _TEXT_WORDS.split(),
}
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


Places = tuple[int, ...]
"""The columns of a role, counted from 0."""
Genres = tuple[str, ...]
GenreColumn = list[Genres]
"""The genres of every row."""


@dataclass(frozen=True)
class ItemFeature:
    """The features of one item."""

    genres: Genres = ()
    year: int | None = None
    text: str = ""  # a line for each column: title, brand, description


@dataclass(frozen=True)
class ItemFeatures:
    """The features of a source's items."""

    source: str
    by_item: dict[str, ItemFeature]  # by raw item id; an item without any value is not in it
    columns_note: str  # one sentence: which columns of which file were read


def load_item_features(
    source: str,
    item_ids: Sequence[str],
    *,
    data_dir: Path | None = None,
    columns: RequestedColumns | None = None,
) -> ItemFeatures | None:
    """What a named dataset, a table, or the item file next to it says of the items; None: nothing.

    `columns` names columns: role (item, genres, year or text) -> name or number.
    """
    if source == "synthetic" or source.startswith("synthetic:"):
        return None
    if source in DATASETS:
        path = find_verified_file(source, data_dir)
    else:
        path = Path(source)
    try:
        file = find_main_file(path) if path.is_dir() else path
        if file is None or not file.is_file():
            raise TacitaError(f"{source[:200]!r} has no file that lists items; check the path.")
        item_file = find_item_file(file) or file
        return _read_features(item_file, source, item_ids, columns or {})
    except OSError as error:
        raise unreadable_error(path, error) from None


def load_stream_features(stream: BlockStream) -> ItemFeatures:
    """What the source of a stream says of the stream's items; refused where that is nothing."""
    path = stream.items_from
    if path is None:
        raise missing_features_error(stream.name)
    try:
        features = _read_features(path, stream.name, stream.item_ids, {})
    except OSError as error:
        raise unreadable_error(path, error) from None
    if features is None:
        raise missing_features_error(stream.name)
    return features


def missing_features_error(source: str) -> TacitaError:
    return TacitaError(
        f"dataset {source} says nothing of its items; put a file items.csv with columns item, title and genres beside "
        "its interactions.csv, or do without item features."
    )


def _read_features(path: Path, source: str, item_ids: Sequence[str], columns: RequestedColumns) -> ItemFeatures | None:
    """The features of the items that the file knows; None: of no item."""
    has_header, names, frame = read_all_columns(path, columns)
    shown_names = names
    if not has_header:
        shown_names = _list_known_names(path, names)
    places = _find_roles(path, shown_names, names, columns)
    item_places = places["item"]
    has_features = places["genres"] or places["year"] or places["text"]
    if not item_places or not has_features:
        return None
    rows = _select_item_rows(frame, item_places[0], item_ids)
    if _has_genre_flags(path, has_header):
        genres = [_read_genre_flags(rows)]
    else:
        genres = _read_genres(rows, names, places["genres"])
    years = _select_values(rows, places["year"])
    texts = _select_values(rows, places["text"])
    by_item = {}
    for row, item in enumerate(rows["item id"]):
        item_genres = [column[row] for column in genres]
        feature = _make_item_feature(item_genres, years[row], texts[row])
        if feature != ItemFeature():
            by_item[item] = feature
    if not by_item:
        return None
    note = _describe_columns(path, names, places)
    return ItemFeatures(source, by_item, note)


def _has_genre_flags(path: Path, has_header: bool) -> bool:
    """Whether the file is MovieLens 100K's u.item."""
    if has_header:
        return False
    return path.name.removesuffix(".gz") == "u.item"


def _read_genres(rows: pl.DataFrame, names: Sequence[str], places: Sequence[int]) -> list[GenreColumn]:
    columns = []
    for place in places:
        values = rows.to_series(place)
        genres = _split_genres(values, names[place])
        columns.append(genres)
    return columns


def _select_item_rows(frame: pl.DataFrame, place: int, item_ids: Sequence[str]) -> pl.DataFrame:
    """The first row of each wanted item, with its id in a column `item id`."""
    ids = frame.to_series(place)
    ids = ids.cast(pl.String)
    ids = ids.str.strip_chars()
    rows = frame.with_columns(ids.alias("item id"))
    wanted_ids = list(item_ids)
    is_wanted = pl.col("item id").is_in(wanted_ids)
    rows = rows.filter(is_wanted)
    return rows.unique("item id", keep="first", maintain_order=True)


def _select_values(rows: pl.DataFrame, places: Sequence[int]) -> list[tuple[object, ...]]:
    """The values of some columns, a tuple for each row."""
    if not places:
        return [()] * rows.height
    columns = []
    for place in places:
        values = rows.to_series(place)
        columns.append(values.to_list())
    return list(zip(*columns))


def _describe_columns(path: Path, names: Sequence[str], places: Mapping[str, Places]) -> str:
    """One sentence: which columns of the file have which role."""
    roles = []
    for role, role_places in places.items():
        if role_places:
            columns = "+".join(names[place] for place in role_places)
            roles.append(f"{role}={columns}")
    listed = ", ".join(roles)
    return f"{path.name}: {listed}."


def _list_known_names(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The names that the columns of MovieLens' item files would have; others without a header have to be named."""
    base = path.name.removesuffix(".gz")
    known: tuple[str, ...] = ()
    n_flags = len(_U_ITEM)
    if base == "u.item" and len(names) == 5 + n_flags:
        known = ("item", "title", "release date")
    elif base == "movies.dat" and len(names) == 3:
        known = ("item", "title", "genres")
    n_unknown = len(names) - len(known)
    return (*known, *[""] * n_unknown)


def _find_roles(
    path: Path, shown_names: Sequence[str], names: Sequence[str], columns: RequestedColumns
) -> dict[str, Places]:
    """The places of each role's columns: those that the caller names, else those whose names fit."""
    places = _find_roles_by_name(shown_names)
    for role, name in columns.items():
        if role not in places:
            raise unknown_name_error("column role", role, places)
        if name == "-":
            places[role] = ()
        else:
            place = find_column(path, role, name, names)
            places[role] = (place,)
    if columns and not places["item"]:
        problem = f"no item column found among {list_names(names)}"
        raise file_error(path, problem, "say which it is with item=NAME")
    return places


def _find_roles_by_name(names: Sequence[str]) -> dict[str, Places]:
    """Every column whose name fits a role; for the item only the one that fits best."""
    places: dict[str, Places] = dict.fromkeys(_WORDS, ())
    ranked_items = []
    for place, name in enumerate(names):
        base = name.split(":")[0].lower()
        plain = "".join(letter for letter in base if letter.isalnum())
        for role, words in _WORDS.items():
            if plain in words:
                places[role] += (place,)
        rank = rank_column_name(name, "item")
        if rank is not None:
            ranked_items.append((rank, place))
    if ranked_items:
        _, best = min(ranked_items)
        places["item"] = (best,)
    else:
        places["item"] = places["item"][:1]
    return places


def _read_genre_flags(frame: pl.DataFrame) -> GenreColumn:
    """The genres of u.item, where each has a column of 0 and 1."""
    n_flags = len(_U_ITEM)
    flag_places = range(5, 5 + n_flags)
    flags = frame.select(pl.nth(flag_places))
    column = []
    for row in flags.iter_rows():
        genres: Genres = ()
        for name, flag in zip(_U_ITEM, row):
            if flag == "1":
                genres += (name,)
        column.append(genres)
    return column


def _split_genres(column: pl.Series, name: str) -> GenreColumn:
    """The genres of each row: a list, or text with one separator all the way down."""
    if column.dtype.is_nested():
        return [tuple(_iter_nested_texts(value)) for value in column.to_list()]
    strings = column.cast(pl.String).fill_null("")
    texts = strings.to_list()
    separator = _find_genre_separator(texts)
    if separator is None and name.endswith(":token_seq"):
        separator = " "
    if separator is None:
        return [(text,) for text in texts]
    return [tuple(text.split(separator)) for text in texts]


def _find_genre_separator(texts: Sequence[str]) -> str | None:
    """The first known separator that occurs anywhere."""
    for separator in _SEPARATORS:
        if any(separator in text for text in texts):
            return separator
    return None


def _iter_nested_texts(value: object) -> Iterator[str]:
    """The texts in a list, or in lists of lists."""
    if isinstance(value, list):
        for element in value:
            yield from _iter_nested_texts(element)
    elif value is not None:
        yield str(value)


def _make_item_feature(genres: list[Genres], years: Sequence[object], texts: Sequence[object]) -> ItemFeature:
    """One item's values, cleaned; a year behind the title counts as a year and not as a word."""
    lines = []
    for value in texts:
        line = " ".join(_iter_nested_texts(value))
        lines.append(" ".join(line.split()))
    year = _find_year(years)
    if lines:
        title = lines[0]
        title_years = _TITLE_YEAR.findall(title)
        lines[0] = _TITLE_YEAR.sub("", title)
        if year is None and title_years:
            year = int(title_years[-1])
    filled_lines = [line for line in lines if line.lower() not in _EMPTY_VALUES]
    return ItemFeature(
        genres=_clean_genres(genres),
        year=year,
        text="\n".join(filled_lines),
    )


def _find_year(values: Sequence[object]) -> int | None:
    """The first year that some value begins with, or nearly so."""
    for value in values:
        beginning = str(value)[:12]
        match = _YEAR.search(beginning)
        if match is not None:
            return int(match[0])
    return None


def _clean_genres(columns: Sequence[Genres]) -> Genres:
    """Each genre once, in order; words for a missing value are left out."""
    genres: list[str] = []
    for column in columns:
        for value in column:
            genre = value.strip()
            is_missing = genre.lower() in _EMPTY_VALUES
            if not is_missing and genre not in genres:
                genres.append(genre)
    return tuple(genres)
