"""What is to be known of a run, a sentence each, in Python's words."""

from __future__ import annotations

from pathlib import Path

from tacita.core.config import RunConfig
from tacita.core.python_messages import replace_options_with_keywords
from tacita.data.filters import format_data_notes
from tacita.report.data import parse_removals
from tacita.report.promises import NO_EPSILON, describe_leaks, list_privacy_lines, summarise_privacy
from tacita.runs.file_schemas import RunResult


def list_notes(config: RunConfig, result: RunResult, folder: Path) -> list[str]:
    """What the command line says of a run, in Python's words."""
    data = result["data"]
    n_blocks = len(result["blocks"])
    removals = parse_removals(data.get("removed") or [])
    specs = config.parts or ()
    parts = [str(spec["name"]) for spec in specs]
    data_notes = format_data_notes(data.get("notes", ()), removals, n_blocks, parts)
    notes = list(data_notes)
    notes += list_privacy_lines(config, result)
    notes += describe_leaks(config, folder)
    return [replace_options_with_keywords(note) for note in notes]


def describe_privacy(config: RunConfig, result: RunResult) -> str:
    """What is promised, in the fewest words that promise no more than that."""
    if summarise_privacy(config, result) != NO_EPSILON:
        return "privacy: see notes"
    if describe_leaks(config, Path()):
        return "no epsilon: what it releases gives people away"
    return "no epsilon"
