"""The lists that a part stores on some devices, read on demand: a long log costs a round nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from tacita.core.types import AnyArray, Longs, Ragged

ListSlices = tuple[AnyArray, Longs, Longs]  # (pieces,) the user, where in the list a piece starts, and its length
Lists = Mapping[str, Ragged]  # name -> a list per user


class AppendedLists(Ragged):
    """Lists that are appended to those of the same name; only the new entries cost anything."""


class LazyLists(Protocol):
    """A list per user that is not read yet; later writes do not change it."""

    def read(self, pieces: ListSlices | None = None) -> Ragged:
        """All of it, or a list for each piece."""
        ...


class DeviceLists(Mapping[str, Ragged]):
    """Name -> a list per user, as they were at construction."""

    def __init__(self, lists: Mapping[str, LazyLists | Ragged]) -> None:
        self._lists = dict(lists)

    def __getitem__(self, name: str) -> Ragged:
        lists = self._lists[name]
        if not isinstance(lists, Ragged):
            lists = lists.read()
            self._lists[name] = lists
        return lists

    def __iter__(self) -> Iterator[str]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, name: object) -> bool:  # does not read them
        return name in self._lists

    def read_slices(self, name: str, pieces: ListSlices) -> Ragged:
        """One list a piece; of lists that are not read yet, only the pieces are read."""
        lists = self._lists[name]
        if isinstance(lists, Ragged):
            return _cut_slices(lists, pieces)
        return lists.read(pieces)

    def with_update(self, renewed: Lists) -> DeviceLists:
        """The lists after some of them are replaced, or appended to."""
        changed = _merge_update(self, renewed)
        return DeviceLists({**self._lists, **changed})


def slice_lists(lists: Lists, name: str, pieces: ListSlices) -> Ragged:
    """Pieces of lists under a name, one list each; the cost grows with the pieces."""
    if isinstance(lists, DeviceLists):
        return lists.read_slices(name, pieces)
    return _cut_slices(lists[name], pieces)


def with_updated_lists(lists: Lists, renewed: Lists) -> Lists:
    """The lists after some of them are replaced, or appended to."""
    if isinstance(lists, DeviceLists):
        return lists.with_update(renewed)
    changed = _merge_update(lists, renewed)
    return {**lists, **changed}


def check_slices(pieces: ListSlices, counts: Longs) -> None:
    """Refuse a piece that is not all in its list: past its ends lie the lists of other users."""
    user, start, count = pieces
    is_negative = (start < 0) | (count < 0)
    is_too_long = start + count > counts[user]
    if is_negative.any() or is_too_long.any():
        raise IndexError("a piece reaches past the end of its list")


def _cut_slices(lists: Ragged, pieces: ListSlices) -> Ragged:
    check_slices(pieces, lists.counts())
    user, start, count = pieces
    first_entry = lists.ptr[user] + start
    return lists.slice_entries(first_entry, count)


def _merge_update(lists: Lists, renewed: Lists) -> dict[str, Ragged]:
    merged = {}
    for name, update in renewed.items():
        if isinstance(update, AppendedLists):
            update = lists[name].join_rows(update)
        merged[name] = update
    return merged
