"""The one exception that is shown to people: a sentence that names what is wrong and the remedy."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

DIRECTION_MARKS = {
    *"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
}  # change the direction of letters


def make_printable(text: str) -> str:
    """A text that shows as it is: what steers a terminal, or turns letters round, becomes a mark."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _is_control_character(c) else "\ufffd" for c in text)


def _is_control_character(letter: str) -> bool:
    return letter in DIRECTION_MARKS or unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")


class TacitaError(Exception):
    """Bad input. The command line prints the sentence and exits with code 2."""


class DiskFull(TacitaError):
    """There is no space for a file; what was there before it still is."""

    def __init__(self, path: object) -> None:
        super().__init__(f"no space left to write {path}; free some and try again.")
        self.path = path


MOST_LISTED = 40  # names that an error lists


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> TacitaError:
    """The error for a name that is not in a registry, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names[:MOST_LISTED])}"
    if not near:
        hint += f" and {len(names) - MOST_LISTED:,} more." if len(names) > MOST_LISTED else "."
    return TacitaError(f"unknown {kind} '{name}'; {hint}")
