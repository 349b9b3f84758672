"""The sentences for bad files: each names the file, what is wrong with it and the remedy, on one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tacita.core.errors import TacitaError


def file_error(path: Path, what: str, remedy: str) -> TacitaError:
    """One sentence on one line, whatever the file held."""
    end = "" if remedy.endswith("?") else "."
    return TacitaError(" ".join(f"{path}: {what}; {remedy}{end}".split()))


def unreadable_error(path: Path, error: OSError) -> TacitaError:
    reason = error.strerror or type(error).__name__
    return file_error(path, f"cannot be read ({reason})", "check the path and its permissions")


def quote_value(value: object) -> str:
    """A value from a file, quoted and kept short."""
    text = repr(value)
    return text if len(text) <= 40 else text[:36] + "...'"


def list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(quote_value(name) for name in names[:20]) + more
