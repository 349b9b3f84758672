"""All that an adversary gets of a run, entry by entry, and what of it differs between neighbours without any noise.

A transcript is played many times, with one person and without that person. What is the same in every play of one world,
and something else in every play of the other, is exact: no noise hides it, so no finite epsilon covers it. All else has
noise in it and is tested by chance (`transcript_bounds.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from tacita.core.types import AnyArray, Bools, Doubles

MAX_WORDS = 60  # letters of a value that a difference shows
ABSENT = "absent"
READER = "reader/"  # begins the name of a score that a reader who knows the mechanism computed

Entry = str | AnyArray


@dataclass
class Transcript:
    """What leaves in one play: names of entries, and texts or arrays of numbers."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Record a number or an array as an array, everything else as text."""
        if isinstance(value, bool | int | float | np.ndarray | np.generic):
            self.entries[name] = np.asarray(value)
        else:
            self.entries[name] = str(value)

    def add_all(self, prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.add(prefix + name, value)

    def describe_form(self, name: str) -> str:
        """What an entry is, whatever its numbers: a text, or an array of some kind and shape."""
        value = self.entries.get(name)
        if value is None:
            return ABSENT
        if isinstance(value, str):
            return f"text {value}"
        return f"{value.dtype.kind} {value.shape}"


Plays = Sequence[Transcript]


@dataclass(frozen=True)
class ExactDifference:
    """An entry that one person changes, and that has no noise."""

    name: str
    without: str  # its value in every play without the person
    with_person: str

    def __str__(self) -> str:
        return f"{self.name}: {self.without} without the person, {self.with_person} with them"


def list_entry_names(plays: Iterable[Transcript], public: Collection[str] = ()) -> list[str]:
    """The entries of some plays, without those that are public (patterns)."""
    names: dict[str, None] = {}
    for play in plays:
        names |= dict.fromkeys(play.entries)
    return [name for name in names if not is_public(name, public)]


def is_public(name: str, public: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in public)


# Exact values


def find_exact_differences(without: Plays, with_person: Plays, public: Collection[str] = ()) -> list[ExactDifference]:
    """The entries, and single numbers of arrays, that are constant in both worlds and not the same."""
    differences = []
    for name in list_entry_names([*without, *with_person], public):
        forms_without = {play.describe_form(name) for play in without}
        forms_with = {play.describe_form(name) for play in with_person}
        if len(forms_without) > 1 or len(forms_with) > 1:
            continue
        if forms_without != forms_with:
            differences.append(ExactDifference(name, _truncate_text(*forms_without), _truncate_text(*forms_with)))
            continue
        if isinstance(without[0].entries.get(name), str):
            continue
        difference = _compare_numbers(name, _stack_plays(without, name), _stack_plays(with_person, name))
        if difference is not None:
            differences.append(difference)
    return differences


def _compare_numbers(name: str, without: Doubles, with_person: Doubles) -> ExactDifference | None:
    """The first number that is constant in both worlds and not the same."""
    is_constant = find_constant(without) & find_constant(with_person)
    is_other = without[0] != with_person[0]
    places = np.flatnonzero(is_constant & is_other)
    if not len(places):
        return None
    place = places[0]
    label = name if without.shape[1] == 1 else f"{name}[{place}]"
    return ExactDifference(label, f"{without[0, place]:g}", f"{with_person[0, place]:g}")


def find_constant(values: Doubles) -> Bools:
    """Columns that hold the same number in every row."""
    return np.asarray((values == values[0]).all(axis=0))


def _stack_plays(plays: Plays, name: str) -> Doubles:
    """(plays, numbers) an array entry of the same shape in all plays."""
    rows = [np.asarray(play.entries[name], np.float64).ravel() for play in plays]
    return np.stack(rows)


def _truncate_text(text: str) -> str:
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."


# Noised values


@dataclass(frozen=True)
class FeatureTable:
    """What varies over plays, as numbers: a row for every play."""

    without: Doubles
    with_person: Doubles
    groups: list[tuple[str, slice]]  # the columns of each entry


def tabulate_features(without: Plays, with_person: Plays, public: Collection[str] = ()) -> FeatureTable:
    """Entries with noise as columns: numbers as they are, and the form of an entry where that varies."""
    blocks_without: list[Doubles] = []
    blocks_with: list[Doubles] = []
    groups = []
    start = 0
    for name in list_entry_names([*without, *with_person], public):
        forms = {play.describe_form(name) for play in (*without, *with_person)}
        if len(forms) > 1:
            reference = without[0].describe_form(name)
            columns_without = _mark_form(without, name, reference)
            columns_with = _mark_form(with_person, name, reference)
        elif isinstance(without[0].entries.get(name), str):
            continue
        else:
            columns_without, columns_with = _select_varying_columns(
                _stack_plays(without, name), _stack_plays(with_person, name)
            )
        width = columns_without.shape[1]
        if not width:
            continue
        blocks_without.append(columns_without)
        blocks_with.append(columns_with)
        groups.append((name, slice(start, start + width)))
        start += width
    return FeatureTable(
        _join_columns(blocks_without, len(without)), _join_columns(blocks_with, len(with_person)), groups
    )


def _mark_form(plays: Plays, name: str, reference: str) -> Doubles:
    """1 where an entry has the form of the first play, else 0."""
    marks = [[float(play.describe_form(name) == reference)] for play in plays]
    return np.array(marks)


def _select_varying_columns(without: Doubles, with_person: Doubles) -> tuple[Doubles, Doubles]:
    both = np.concatenate([without, with_person])
    varies = ~find_constant(both)
    return without[:, varies], with_person[:, varies]


def _join_columns(blocks: list[Doubles], n_rows: int) -> Doubles:
    if not blocks:
        return np.zeros((n_rows, 0))
    return np.concatenate(blocks, axis=1)
