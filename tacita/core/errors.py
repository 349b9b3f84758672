"""The one exception that is shown to people: a sentence that names what is wrong and the remedy."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

# These change the direction of letters.
DIRECTION_MARKS = {*"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}


def make_printable(text: str) -> str:
    """A text that shows as it is: characters that steer a terminal, or turn letters round, become a mark."""
    if text.isascii() and text.isprintable():
        return text
    letters = []
    for letter in text:
        if _is_control_character(letter):
            letter = "\ufffd"
        letters.append(letter)
    return "".join(letters)


def _is_control_character(letter: str) -> bool:
    if letter in "\n\t":
        return False
    if letter in DIRECTION_MARKS:
        return True
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")


class TacitaError(Exception):
    """Bad input. The command line prints the sentence and exits with code 2."""


class DiskFull(TacitaError):
    """There is no space for a file; the earlier file is still in place."""

    def __init__(self, path: object) -> None:
        super().__init__(f"no space left to write {path}; free some and try again.")
        self.path = path


MOST_LISTED = 40  # names that an error lists
OWN_NAMES = "One of your own is known after --import FILE.py, or from a package's entry points `tacita.parts`."


def unknown_name_error(kind: str, name: str, known: Iterable[str], hint: str = "") -> TacitaError:
    """The error for a name that is not in a registry, with the nearest known one; `hint`: another remedy."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near and hint:
        return TacitaError(f"unknown {kind} '{name}'; did you mean '{near[0]}'? {hint}")
    if near:
        return TacitaError(f"unknown {kind} '{name}'; did you mean '{near[0]}'?")
    listed = ", ".join(names[:MOST_LISTED])
    n_more = len(names) - MOST_LISTED
    if n_more > 0:
        listed += f" and {n_more:,} more"
    sentence = f"unknown {kind} '{name}'; known: {listed}."
    return TacitaError(f"{sentence} {hint}" if hint else sentence)


def unknown_extension_error(kind: str, name: str, known: Iterable[str]) -> TacitaError:
    """The same for a name that people may register in code of their own."""
    return unknown_name_error(kind, name, known, OWN_NAMES)
