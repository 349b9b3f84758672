"""The lists that a part keeps on some devices, read when somebody asks for them: a long log costs a round nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from tacita.core.types import AnyArray, Longs, Ragged

ListSlices = tuple[AnyArray, Longs, Longs]  # (pieces,) whose list, where in it a piece starts, and how long it is


class AppendedLists(Ragged):
    """Lists that are written after those held under the same name, at the price of what is new."""


class LazyLists(Protocol):
    """A list per user that nobody has read yet; whatever is written meanwhile, it stays as it is."""

    def read(self, pieces: ListSlices | None = None) -> Ragged:
        """All of it, or a list for each piece."""
        ...


class DeviceLists(Mapping[str, Ragged]):
    """Name -> a list per user, as they were when this was made."""

    def __init__(self, lists: Mapping[str, LazyLists | Ragged]) -> None:
        self._lists = dict(lists)

    def __getitem__(self, name: str) -> Ragged:
        one = self._lists[name]
        if not isinstance(one, Ragged):
            one = self._lists[name] = one.read()
        return one

    def __iter__(self) -> Iterator[str]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

    def __contains__(self, name: object) -> bool:  # what is looked for is not read
        return name in self._lists

    def read_slices(self, name: str, pieces: ListSlices) -> Ragged:
        """One list a piece; of what was not read yet, only the pieces are."""
        one = self._lists[name]
        return _cut_slices(one, pieces) if isinstance(one, Ragged) else one.read(pieces)

    def with_update(self, renewed: Mapping[str, Ragged]) -> DeviceLists:
        """The same lists once some of them were replaced, or written on."""
        return DeviceLists({**self._lists, **_merge_update(self, renewed)})


def slice_lists(lists: Mapping[str, Ragged], name: str, pieces: ListSlices) -> Ragged:
    """Pieces of lists under a name, one list each; the cost grows with what is taken."""
    return lists.read_slices(name, pieces) if isinstance(lists, DeviceLists) else _cut_slices(lists[name], pieces)


def update_lists(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> Mapping[str, Ragged]:
    """The lists once some of them were replaced, or written on."""
    return lists.with_update(renewed) if isinstance(lists, DeviceLists) else {**lists, **_merge_update(lists, renewed)}


def check_slices(pieces: ListSlices, counts: Longs) -> None:
    """Refuse a piece that is not all in its list: past its ends lies what somebody else keeps."""
    user, start, count = pieces
    if (start < 0).any() or (count < 0).any() or (start + count > counts[user]).any():
        raise IndexError("a piece reaches past the end of its list")


def _cut_slices(whole: Ragged, pieces: ListSlices) -> Ragged:
    check_slices(pieces, whole.counts())
    user, start, count = pieces
    return whole.slice_entries(whole.ptr[user] + start, count)


def _merge_update(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> dict[str, Ragged]:
    return {
        name: lists[name].join_rows(one) if isinstance(one, AppendedLists) else one for name, one in renewed.items()
    }
