"""The lists that a part keeps on some devices, read when somebody asks for them: a long log costs a round nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from tacita.core.types import AnyArray, Longs, Ragged

Pieces = tuple[AnyArray, Longs, Longs]  # (pieces,) whose list, where in it a piece starts, and how long it is


class Added(Ragged):
    """Lists that are written after those held under the same name, at the price of what is new."""


class Unread(Protocol):
    """A list per user that nobody has read yet; whatever is written meanwhile, it stays as it is."""

    def read(self, pieces: Pieces | None = None) -> Ragged:
        """All of it, or a list for each piece."""
        ...


class Kept(Mapping[str, Ragged]):
    """Name -> a list per user, as they were when this was made."""

    def __init__(self, lists: Mapping[str, Unread | Ragged]) -> None:
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

    def pieces(self, name: str, pieces: Pieces) -> Ragged:
        """One list a piece; of what was not read yet, only the pieces are."""
        one = self._lists[name]
        return _cut(one, pieces) if isinstance(one, Ragged) else one.read(pieces)

    def after(self, renewed: Mapping[str, Ragged]) -> Kept:
        """The same lists once some of them were replaced, or written on."""
        return Kept({**self._lists, **_written(self, renewed)})


def pieces_of(lists: Mapping[str, Ragged], name: str, pieces: Pieces) -> Ragged:
    """Pieces of lists under a name, one list each; the cost grows with what is taken."""
    return lists.pieces(name, pieces) if isinstance(lists, Kept) else _cut(lists[name], pieces)


def lists_after(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> Mapping[str, Ragged]:
    """The lists once some of them were replaced, or written on."""
    return lists.after(renewed) if isinstance(lists, Kept) else {**lists, **_written(lists, renewed)}


def check_pieces(pieces: Pieces, counts: Longs) -> None:
    """Refuse a piece that is not all in its list: past its ends lies what somebody else keeps."""
    user, start, count = pieces
    if (start < 0).any() or (count < 0).any() or (start + count > counts[user]).any():
        raise IndexError("a piece reaches past the end of its list")


def _cut(whole: Ragged, pieces: Pieces) -> Ragged:
    check_pieces(pieces, whole.counts())
    user, start, count = pieces
    return whole.sliced(whole.ptr[user] + start, count)


def _written(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> dict[str, Ragged]:
    return {name: lists[name].joined(one) if isinstance(one, Added) else one for name, one in renewed.items()}
