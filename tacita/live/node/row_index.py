"""Rows of users in arrays, by the ids of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tacita.core.types import AnyArray, Arrays, Longs

ABSENT = -1
ItemNumbers = dict[str, int]  # by raw id


def index_rows(user_ids: AnyArray) -> dict[int, int]:
    """The row of each user."""
    return {user: row for row, user in enumerate(user_ids.tolist())}


def find_user_rows(row_of_user: Mapping[int, int], user_ids: AnyArray) -> Longs:
    """The row of each of some users; `ABSENT` for those who have none."""
    rows = [row_of_user.get(user, ABSENT) for user in user_ids.tolist()]
    return np.array(rows, np.int64)


def drop_user_id_column(arrays: Arrays) -> Arrays:
    """Stored device arrays without the column of user ids."""
    return {name: array for name, array in arrays.items() if name != "users"}


def map_item_numbers(items: Iterable[str]) -> ItemNumbers:
    """The number of each item, in the order of the catalogue."""
    return {item: number for number, item in enumerate(items)}


def find_item_numbers(item_numbers: ItemNumbers, items: Iterable[str]) -> Longs:
    """The number of each item; `ABSENT` for unknown ones."""
    numbers = [item_numbers.get(item, ABSENT) for item in items]
    return np.array(numbers, np.int64)
