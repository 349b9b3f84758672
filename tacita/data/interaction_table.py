"""The table of interactions with raw ids that every source becomes, and its summary."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tacita.core.types import AnyArray, Floats, Ints, Longs


@dataclass(frozen=True)
class Interactions:
    """One row per interaction, in file order, with raw ids to translate back."""

    name: str  # dataset name or file stem
    user: Ints  # position in user_ids
    item: Ints
    rating: Floats | None
    timestamp: Longs | None  # any unit: only the order matters
    split: NDArray[np.int8] | None  # the source's own split: 0 train, 1 valid, 2 test
    user_ids: tuple[str, ...]  # raw ids as text, in order of first appearance
    item_ids: tuple[str, ...]
    titles: dict[str, str]  # raw item id -> title, may be empty
    fingerprint: str  # SHA-256 over the arrays and ids, not the titles
    format_note: str  # one sentence: format, separator, which column has which role
    time_is_global: bool = True  # False: timestamps order the rows of one user, not those of different users
    block: Ints | None = None  # the source's own block of each row
    time_unit: str = ""  # of the timestamps: d, s, ms, us or ns; empty: guessed from their size
    columns: dict[str, str] = field(default_factory=dict)  # role -> the column that was read for it
    unused: tuple[str, ...] = ()  # columns that were not read
    notes: tuple[str, ...] = ()  # sentences on columns that look usable
    items_from: Path | None = None  # the file that may describe the items
    item_file: Path | None = None  # the file beside the interactions that lists the items
    catalogue: str = ""  # digest of the public list of items that `item_ids` is; empty: they are those of the rows


def describe_interactions(table: Interactions) -> dict[str, object]:
    """Counts that characterise the data; repeated pairs are rows beyond the first of a pair."""
    rows = len(table.user)
    users = len(table.user_ids)
    items = len(table.item_ids)
    per_user = np.bincount(table.user, minlength=users)
    pairs = table.user.astype(np.int64) * items + table.item
    pairs.sort()
    changes = np.count_nonzero(np.diff(pairs))
    distinct = int(changes) + 1
    time = table.timestamp
    time_range = None
    dates = None
    if time is not None:
        time_range = (int(time.min()), int(time.max()))
        dates = _format_date_range(time, table.time_unit)
    notes = list(table.notes)
    unrated = warn_of_unfiltered_ratings(table)
    if unrated:
        notes.append(unrated)
    repeated = describe_repeats(table)
    if repeated:
        notes.append(repeated)
    return {
        "columns": dict(table.columns),
        "unused columns": list(table.unused),
        "rows": rows,
        "users": users,
        "items": items,
        "density": distinct / (users * items),
        "repeated pairs": rows - distinct,
        "min per user": int(per_user.min()),
        "median per user": float(np.median(per_user)),
        "max per user": int(per_user.max()),
        "time range": time_range,
        "dates": dates,
        "notes": notes,
    }


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECONDS_PER_UNIT = {"d": 86_400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _format_date_range(time: Longs, unit: str) -> tuple[str, str] | None:
    """The first and the last time as dates, where the numbers are times since 1970 in some unit."""
    known_unit = unit or guess_time_unit(time)
    if known_unit is None:
        return None
    try:
        first = _to_date(time.min(), known_unit)
        last = _to_date(time.max(), known_unit)
    except OverflowError:
        return None
    return f"{first:%Y-%m-%d %H:%M}", f"{last:%Y-%m-%d %H:%M}"


def guess_time_unit(time: Longs) -> str | None:
    """The unit in which the middle time is between 1973 and 5138."""
    middle = float(np.median(time))  # a few wild values do not matter
    for unit in ("s", "ms", "us", "ns"):
        seconds = middle * SECONDS_PER_UNIT[unit]
        if 1e8 <= seconds < 1e11:
            return unit
    return None


def _to_date(time: np.int64, unit: str) -> datetime:
    seconds = int(time) * SECONDS_PER_UNIT[unit]
    return _EPOCH + timedelta(seconds=seconds)


def select_rows(table: Interactions, rows: Longs) -> Interactions:
    """The table with some of its rows; ids, titles and the fingerprint stay."""
    return replace(
        table,
        user=table.user[rows],
        item=table.item[rows],
        rating=None if table.rating is None else table.rating[rows],
        timestamp=None if table.timestamp is None else table.timestamp[rows],
        split=None if table.split is None else table.split[rows],
        block=None if table.block is None else table.block[rows],
    )


@dataclass(frozen=True)
class RepeatedRows:
    """Rows beyond the first of a user and item."""

    n_same: int  # the whole row is there before: user, item and, where there are any, time and rating
    n_other: int  # the same user and item, at another time or with another rating


def count_repeated_rows(table: Interactions) -> RepeatedRows:
    pair = table.user.astype(np.int64) * len(table.item_ids) + table.item
    ordered = np.sort(pair)
    if np.all(ordered[1:] != ordered[:-1]):
        return RepeatedRows(0, 0)
    keys = [column for column in (table.rating, table.timestamp) if column is not None]
    order = np.lexsort((*keys, pair))
    sorted_pair = pair[order]
    repeats_pair = sorted_pair[1:] == sorted_pair[:-1]
    repeats_row = repeats_pair.copy()
    for column in keys:
        sorted_column = column[order]
        repeats_row &= sorted_column[1:] == sorted_column[:-1]
    n_same = int(np.count_nonzero(repeats_row))
    n_pairs = int(np.count_nonzero(repeats_pair))
    return RepeatedRows(n_same, n_pairs - n_same)


def describe_repeats(table: Interactions) -> str | None:
    """That rows are repeated, with counts; None: every user and item is there once."""
    repeats = count_repeated_rows(table)
    kinds = []
    if repeats.n_same:
        kinds.append(f"{_count_rows(repeats.n_same)} of {len(table.user):,} repeat a whole row of the file")
    if repeats.n_other:
        kinds.append(f"{_count_rows(repeats.n_other)} with a user and item again, at another time or rating")
    if not kinds:
        return None
    return f"repeated rows: {'; '.join(kinds)}. A user's repeated item counts once in a block (split.repeats)."


def _count_rows(n_rows: int) -> str:
    return "1 row" if n_rows == 1 else f"{n_rows:,} rows"


def warn_of_unfiltered_ratings(table: Interactions) -> str | None:
    """A warning where ratings differ and no least rating is set."""
    if table.rating is None or not len(table.rating):
        return None
    low = float(table.rating.min())
    high = float(table.rating.max())
    if low == high:
        return None
    least = high
    if low < 4 <= high:
        least = 4
    return (
        f"every row counts as liked, whatever its rating ({low:g} to {high:g}); tacita train --set "
        f"split.min_rating={least:g} keeps only rows rated at least that."
    )


def compute_fingerprint(*parts: AnyArray | tuple[str, ...] | None) -> str:
    """SHA-256 over user, item, rating, timestamp, split and both lists of ids, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            header = f"{part.dtype.str} {len(part)}\n"
            digest.update(header.encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def number_by_appearance(numbers: Ints) -> tuple[Ints, Ints]:
    """Codes in order of first appearance, and the number that each code stands for."""
    n_rows = len(numbers)
    n_codes = int(numbers.max()) + 1
    first = np.full(n_codes, n_rows, np.int64)
    first[numbers[::-1]] = np.arange(n_rows - 1, -1, -1)
    n_present = np.count_nonzero(first < n_rows)
    order = np.argsort(first, kind="stable")[:n_present].astype(np.int32)
    code = np.empty(n_codes, np.int32)
    code[order] = np.arange(len(order), dtype=np.int32)
    return code[numbers], order
