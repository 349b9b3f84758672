"""Who took part, read under budgets: the table as rows, and as files that people and machines read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacita.core.files import write_bytes

NOTES = (
    "AUC: 0.5 is a guess, 1 tells everybody apart. In brackets the control: the same people, a release without them.",
    "A smaller AUC is what these readers find; only the epsilon bounds what any reader can find.",
)


def make_rows(result: Mapping[str, Any], readers: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {
            "setting": row["setting"],
            "items told of": str(row["items"]),
            "valid": "-" if row["valid"] is None else f"{row['valid']:.4f}",
            **{words: _format_figure(row["readers"][name]) for name, words in readers.items()},
        }
        for row in result["rows"]
    ]


def _format_figure(figure: Mapping[str, float | None]) -> str:
    if figure["found"] is None:
        return "-"
    return f"{figure['found']:.3f} ({figure['control']:.3f})"


def to_markdown(result: Mapping[str, Any], readers: Mapping[str, str]) -> str:
    rows = make_rows(result, readers)
    lines = ["|" + "|".join(f" {one} " for one in row) + "|" for row in (list(rows[0]), *(r.values() for r in rows))]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    about = (
        f"{result['data']}, first block, {result['people']} people, delta {result['delta']:g}: "
        "AUC of who took part where "
        f"90 % of a history is known, {result['noise_draws']} noise draws for every draw of people."
    )
    return "\n".join([about, "", *lines, "", *NOTES]) + "\n"


def to_csv(result: Mapping[str, Any], readers: Mapping[str, str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kinds = ("found", "control")
    figures = [name if kind == "found" else f"{name}_{kind}" for name in readers for kind in kinds]
    writer.writerow(["setting", "items", "valid", *figures])
    for row in result["rows"]:
        values = [row["valid"], *(row["readers"][name][kind] for name in readers for kind in kinds)]
        writer.writerow([row["setting"], row["items"], *("" if one is None else f"{one:.6f}" for one in values)])
    return out.getvalue()


def write_audit(result: Mapping[str, Any], readers: Mapping[str, str], folder: Path) -> Path:
    """budget-DATA.md and .csv, or of another stem, in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{result.get('stem', 'budget')}-{Path(result['data']).stem}"
    write_bytes(stem.with_suffix(".md"), to_markdown(result, readers).encode())
    write_bytes(stem.with_suffix(".csv"), to_csv(result, readers).encode())
    return stem
