"""The one shape that every source ends in: a table of interactions with raw ids, and what can be told of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
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
    format_note: str  # one sentence: format, separator, which column was taken for what
    time_is_global: bool = True  # False: timestamps order the rows of one user, not those of different users
    block: Ints | None = None  # the source's own block of each row
    time_unit: str = ""  # of the timestamps: d, s, ms, us or ns; empty: to be told from their size
    columns: dict[str, str] = field(default_factory=dict)  # role -> the column that was read for it
    unused: tuple[str, ...] = ()  # columns that were not read
    notes: tuple[str, ...] = ()  # sentences on columns that look usable
    items_from: Path | None = None  # the file that may tell more of the items


def describe(table: Interactions) -> dict[str, object]:
    """Counts that tell what kind of data this is; repeated pairs are rows beyond the first of a pair."""
    rows, users, items = len(table.user), len(table.user_ids), len(table.item_ids)
    per_user = np.bincount(table.user, minlength=users)
    pairs = table.user.astype(np.int64) * items + table.item
    pairs.sort()
    distinct = int(np.count_nonzero(np.diff(pairs))) + 1
    time, unrated = table.timestamp, rating_note(table)
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
        "time range": None if time is None else (int(time.min()), int(time.max())),
        "dates": None if time is None else _format_dates(time, table.time_unit),
        "notes": [*table.notes, *([unrated] if unrated else [])],
    }


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS = {"d": 86_400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _format_dates(time: Longs, unit: str) -> tuple[str, str] | None:
    """The first and the last time as dates, where the numbers are times since 1970 in some unit."""
    if not unit:
        middle = float(np.median(time))  # a few wild values do not matter
        fitting = [name for name in ("s", "ms", "us", "ns") if 1e8 <= middle * _SECONDS[name] < 1e11]
        if not fitting:
            return None
        unit = fitting[0]
    try:
        ends = [_EPOCH + timedelta(seconds=int(end) * _SECONDS[unit]) for end in (time.min(), time.max())]
    except OverflowError:
        return None
    return f"{ends[0]:%Y-%m-%d %H:%M}", f"{ends[1]:%Y-%m-%d %H:%M}"


def rating_note(table: Interactions) -> str | None:
    """What to know where ratings differ and nothing is asked of them."""
    if table.rating is None or not len(table.rating):
        return None
    low, high = float(table.rating.min()), float(table.rating.max())
    if low == high:
        return None
    least = 4 if low < 4 <= high else high
    return (
        f"every row counts as liked, whatever its rating ({low:g} to {high:g}); tacita train --set "
        f"split.min_rating={least:g} keeps only rows rated at least that."
    )


def compute_fingerprint(*parts: AnyArray | tuple[str, ...] | None) -> str:
    """SHA-256 over user, item, rating, timestamp, split and both lists of ids, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str} {len(part)}\n".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def number_by_appearance(numbers: Ints) -> tuple[Ints, Ints]:
    """Codes in order of first appearance, and the number that each code stands for."""
    first = np.full(int(numbers.max()) + 1, len(numbers), np.int64)
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(numbers))].astype(np.int32)
    code = np.empty(len(first), np.int32)
    code[order] = np.arange(len(order), dtype=np.int32)
    return code[numbers], order
