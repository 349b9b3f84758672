"""Under which id a tool knows a run, so that a run that is resumed goes on in the same log."""

from __future__ import annotations

from pathlib import Path

from tacita.core.files import read_json, write_json

FILE = "trackers.json"


def read_tracked_id(folder: Path, tracker: str) -> str | None:
    path = folder / FILE
    if not path.is_file():
        return None
    ids = read_json(path)
    if not isinstance(ids, dict) or tracker not in ids:
        return None
    return str(ids[tracker])


def write_tracked_id(folder: Path, tracker: str, run_id: str) -> None:
    path = folder / FILE
    ids = read_json(path) if path.is_file() else {}
    write_json(path, {**ids, tracker: run_id})
