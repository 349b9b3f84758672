"""What pages are made of; templates turn these values into HTML and escape every text but drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TableCell:
    """A place in a table: its text, how it stands out (a class of the style sheet), and a line below it."""

    text: str
    kind: str = ""
    note: str = ""
    note_kind: str = ""


@dataclass(frozen=True)
class PageTable:
    """The first cell of each row names it."""

    caption: str
    head: list[TableCell]
    rows: list[list[TableCell]]


def cells(*texts: str) -> list[TableCell]:
    return [TableCell(text) for text in texts]


def build_plain_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    """A table in which nothing stands out."""
    return PageTable(caption, cells(*head), [cells(*row) for row in rows])


@dataclass(frozen=True)
class Figure:
    """A drawing under its title, and how to read it."""

    title: str
    drawing: str  # SVG from `drawing`, the only text that is not escaped
    how: str


@dataclass(frozen=True)
class Tile:
    """One number that matters."""

    value: str
    name: str
    note: str


@dataclass(frozen=True)
class Fact:
    """Where something comes from."""

    name: str
    value: str
    code: str = ""  # stands before the value


@dataclass(frozen=True)
class RunBody:
    """Everything a page says of one run."""

    label: str
    folder: str
    callouts: list[tuple[str, str]]  # good, note or bad, and a sentence
    tiles: list[Tile]
    figures: list[Figure]
    tables: list[PageTable]
    note: str  # to the tables
    rounds: PageTable
    facts: list[Fact]
    settings: str


@dataclass(frozen=True)
class RunComparison:
    """What a page says of several runs together."""

    warning: str
    figures: list[Figure]
    tables: list[PageTable] = field(default_factory=list)
