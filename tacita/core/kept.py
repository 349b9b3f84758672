"""The lists that a part keeps on some devices, read when somebody asks for them: a long log costs a round nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tacita.core.types import AnyArray, Longs, Ragged

Pieces = tuple[AnyArray, Longs, Longs]  # (pieces,) whose list, where in it a piece starts, and how long it is
Read = Callable[[str, Pieces | None], Ragged]


class Added(Ragged):
    """Lists that are written after those held under the same name, at the price of what is new."""


class Kept(Mapping[str, Ragged]):
    """Name -> a list per user. What was read once stays as it was then."""

    def __init__(self, names: tuple[str, ...], read: Read, known: Mapping[str, Ragged] | None = None) -> None:
        self._names, self._read, self._known = names, read, dict(known or {})

    def __getitem__(self, name: str) -> Ragged:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known[name] = self._read(name, None)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def pieces(self, name: str, pieces: Pieces) -> Ragged:
        """One list a piece; of what was not read yet, only the pieces are."""
        return _cut(self[name], pieces) if name in self._known else self._read(name, pieces)

    def after(self, renewed: Mapping[str, Ragged]) -> Kept:
        """The same lists once some of them were replaced, or written on."""
        return Kept(self._names, self._read, {**self._known, **_written(self, renewed)})


def pieces_of(lists: Mapping[str, Ragged], name: str, pieces: Pieces) -> Ragged:
    """Pieces of lists under a name, one list each; the cost grows with what is taken."""
    return lists.pieces(name, pieces) if isinstance(lists, Kept) else _cut(lists[name], pieces)


def lists_after(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> Mapping[str, Ragged]:
    """The lists once some of them were replaced, or written on."""
    return lists.after(renewed) if isinstance(lists, Kept) else {**lists, **_written(lists, renewed)}


def _cut(whole: Ragged, pieces: Pieces) -> Ragged:
    user, start, count = pieces
    return whole.sliced(whole.ptr[user] + start, count)


def _written(lists: Mapping[str, Ragged], renewed: Mapping[str, Ragged]) -> dict[str, Ragged]:
    return {name: lists[name].joined(one) if isinstance(one, Added) else one for name, one in renewed.items()}
