"""The audit of a withdrawal as a table, a row for each attack, and as files that people and machines read."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from tacita.core.files import disk_error, write_bytes

ATTACKS = {
    "auc_pairs": "pairs (AUC)",
    "auc_pairs_ci": "95 % interval",
    "auc_difference": "difference to O (AUC)",
    "auc_user": "people (AUC)",
    "distance_ratio": "distance to R1, O is 1",
    "gram_distance": "cosines, distance to R1",
    "rank_percentile": "rank of withdrawn items",
    "jaccard20": "same top 20 as R1",
    "relearn_ratio": "relearnt, R1 is 1",
    "canary_exposure": "canaries (bits)",
}


def make_rows(result: dict[str, Any], models: dict[str, str]) -> list[dict[str, str]]:
    """A row for each attack, a column for each model."""
    return [
        {"attack": words, **{name: _format_figure(result["rows"][name][attack]) for name in models}}
        for attack, words in ATTACKS.items()
    ]


def _format_figure(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]:.3f} to {value[1]:.3f}"
    return "-" if value is None else f"{value:.3f}"


def describe_audit(result: dict[str, Any]) -> str:
    what = "canaries planted and people held out" if result["planted"] else "the run's own model"
    return (
        f"{result['data']}, {result['method']}, {result['backbone']}, seed {result['seed']}, {what}: "
        f"{result['people']} people withdraw {result['withdrawn']} interactions, carried out by "
        f"{' and '.join(result['by'])} in {result['seconds']:.2f} s (training again {result['seconds_retrain']:.2f} s)."
    )


def list_notes(result: dict[str, Any]) -> list[str]:
    """What does not fit into the table."""
    search = {name: one["pairs"] + one["people"] for name, one in result["artefacts"].items()}
    rows = result["artefacts"]["X"]["rows"]
    floor = result["noise_floor"]
    return [
        f"Search of the run folder: withdrawn pairs in {search['O']} places before, {search['X']} after; rows as "
        f"withdrawn items had them in {rows} places outside the model.",
        f"Another seed alone is {'-' if floor is None else f'{floor:.3f}'} away from R1, where O is 1.",
        f"Verdict: {result['verdict']}.",
        result["note"],
    ]


def to_markdown(result: dict[str, Any], models: dict[str, str]) -> str:
    rows = make_rows(result, models)
    lines = ["|" + "|".join(f" {one} " for one in row) + "|" for row in (list(rows[0]), *(r.values() for r in rows))]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    names = "; ".join(f"{name}: {words}" for name, words in models.items())
    return "\n".join(
        [describe_audit(result), "", *lines, "", f"{names}.\n", *(f"{line}\n" for line in list_notes(result))]
    )


def to_csv(result: dict[str, Any], models: dict[str, str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["model", *ATTACKS])
    for name in models:
        values = [result["rows"][name][one] for one in ATTACKS]
        told = ["" if v is None else " ".join(f"{x:.6f}" for x in (v if isinstance(v, list) else [v])) for v in values]
        writer.writerow([name, *told])
    return out.getvalue()


def write_audit(result: dict[str, Any], models: dict[str, str], folder: Path) -> Path:
    """forget-DATA-METHOD.md and .csv in a folder; the name without its ending."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from None
    stem = folder / f"forget-{Path(result['data']).stem}-{result['method']}"
    for suffix, text in (("md", to_markdown(result, models)), ("csv", to_csv(result, models))):
        write_bytes(stem.with_name(f"{stem.name}.{suffix}"), text.encode())
    return stem
