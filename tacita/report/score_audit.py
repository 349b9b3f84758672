"""The leakage table of uploaded scores as rows, and as files that people and machines read."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tacita.core.files import disk_error, write_bytes


def make_rows(result: dict[str, Any], names: dict[str, str]) -> list[dict[str, str]]:
    """A row for each setting: every attack with its control behind it."""
    return [
        {
            "alpha": f"{row['alpha']:g}",
            "swap": f"{row['swap']:g}" if row["swap"] else "off",
            "clients": str(row["clients"]),
            **{words: _format_figure(row["attacks"][name]) for name, words in names.items()},
        }
        for row in result["rows"]
    ]


def _format_figure(figure: dict[str, Any]) -> str:
    told = ["-" if figure[kind] is None else f"{figure[kind]:.3f}" for kind in ("found", "control")]
    return f"{told[0]} ({told[1]})"


def describe_audit(result: dict[str, Any]) -> str:
    run = (
        f"{result['data']}, {result['method']}, {result['backbone']}, {result['rounds']} rounds, seed {result['seed']}"
    )
    return (
        f"{run}: what a curious server reads of each client's last upload; in brackets the same attack on scores "
        "shuffled within every upload."
    )


def to_markdown(result: dict[str, Any], names: dict[str, str]) -> str:
    rows = make_rows(result, names)
    lines = ["|" + "|".join(f" {one} " for one in row) + "|" for row in (list(rows[0]), *(r.values() for r in rows))]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join([describe_audit(result), "", *lines, "", result["note"]]) + "\n"


def to_csv(result: dict[str, Any], names: dict[str, str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kinds = ("found", "control", "of", "of_control")
    figures = [name if kind == "found" else f"{name}_{kind}" for name in names for kind in kinds]
    writer.writerow(["alpha", "swap", "threshold", "clients", *figures])
    for row in result["rows"]:
        values = [row["attacks"][name][kind] for name in names for kind in kinds]
        told = ["" if one is None else one if isinstance(one, int) else f"{one:.6f}" for one in values]
        writer.writerow([row["alpha"], row["swap"], row["threshold"], row["clients"], *told])
    return out.getvalue()


def write_audit(result: dict[str, Any], names: dict[str, str], folder: Path) -> Path:
    """scores-DATA.md and .csv in a folder; the name without its ending."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from None
    stem = folder / f"scores-{Path(result['data']).stem}"
    for suffix, text in (("md", to_markdown(result, names)), ("csv", to_csv(result, names))):
        write_bytes(stem.with_name(f"{stem.name}.{suffix}"), text.encode())
    return stem
