"""The one shape that every source ends in: a table of interactions with raw ids, and what can be told of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacita.types import AnyArray, Floats, Ints, Longs


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
    guessed: str  # one sentence: format, separator, which column was taken for what
    time_is_global: bool = True  # False: timestamps order the rows of one user, not those of different users


def describe(table: Interactions) -> dict[str, object]:
    """Counts that tell what kind of data this is; repeated pairs are rows beyond the first of a pair."""
    rows, users, items = len(table.user), len(table.user_ids), len(table.item_ids)
    per_user = np.bincount(table.user, minlength=users)
    pairs = table.user.astype(np.int64) * items + table.item
    pairs.sort()
    distinct = int(np.count_nonzero(np.diff(pairs))) + 1
    time = table.timestamp
    return {
        "rows": rows,
        "users": users,
        "items": items,
        "density": distinct / (users * items),
        "repeated pairs": rows - distinct,
        "min per user": int(per_user.min()),
        "median per user": float(np.median(per_user)),
        "max per user": int(per_user.max()),
        "time range": None if time is None else (int(time.min()), int(time.max())),
    }


def fingerprint(*parts: AnyArray | tuple[str, ...] | None) -> str:
    """SHA-256 over user, item, rating, timestamp, split and both lists of ids, in this order."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str} {len(part)}\n".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def by_appearance(numbers: Ints) -> tuple[Ints, Ints]:
    """Codes in order of first appearance, and the number that each code stands for."""
    first = np.full(int(numbers.max()) + 1, len(numbers), np.int64)
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(numbers))].astype(np.int32)
    code = np.empty(len(first), np.int32)
    code[order] = np.arange(len(order), dtype=np.int32)
    return code[numbers], order
