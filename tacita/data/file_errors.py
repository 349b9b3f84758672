"""The sentences for bad files: each names the file, what is wrong with it and the remedy, on one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tacita.core.errors import TacitaError

_MAX_NAMES = 20


def file_error(path: Path, problem: str, remedy: str) -> TacitaError:
    """One sentence on one line, whatever the file holds."""
    end = "" if remedy.endswith("?") else "."
    sentence = f"{path}: {problem}; {remedy}{end}"
    words = sentence.split()
    return TacitaError(" ".join(words))


def unreadable_error(path: Path, error: OSError) -> TacitaError:
    reason = error.strerror or type(error).__name__
    problem = f"cannot be read ({reason})"
    return file_error(path, problem, "check the path and its permissions")


def quote_value(value: object) -> str:
    """A value from a file, quoted and shortened."""
    text = repr(value)
    if len(text) <= 40:
        return text
    return text[:36] + "...'"


def list_names(names: Sequence[str]) -> str:
    listed = ", ".join(quote_value(name) for name in names[:_MAX_NAMES])
    n_more = len(names) - _MAX_NAMES
    if n_more > 0:
        listed += f" and {n_more} more"
    return listed
