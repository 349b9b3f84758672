"""The audit of a withdrawal as a table, a row for each attack, and as files that people and machines read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tacita.report.text_tables import (
    AuditResult,
    ColumnTitles,
    TextRow,
    render_csv_text,
    render_markdown_table,
    write_tables,
)

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


def make_rows(result: AuditResult, models: ColumnTitles) -> list[TextRow]:
    """A row for each attack, a column for each model."""
    rows = []
    for attack, words in ATTACKS.items():
        row = {"attack": words}
        for model in models:
            figure = result["rows"][model][attack]
            row[model] = _format_figure(figure)
        rows.append(row)
    return rows


def _format_figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        low, high = value
        return f"{low:.3f} to {high:.3f}"
    return f"{value:.3f}"


def describe_audit(result: AuditResult) -> str:
    model = "canaries planted and people held out" if result["planted"] else "the run's own model"
    run = f"{result['data']}, {result['method']}, {result['backbone']}, seed {result['seed']}, {model}"
    request = f"{result['people']} people withdraw {result['withdrawn']} interactions"
    route = " and ".join(result["by"])
    retraining = f"training again {result['seconds_retrain']:.2f} s"
    return f"{run}: {request}, carried out by {route} in {result['seconds']:.2f} s ({retraining})."


def list_notes(result: AuditResult) -> list[str]:
    """What does not fit into the table."""
    places_before = _count_traces(result["artefacts"]["O"])
    places_after = _count_traces(result["artefacts"]["X"])
    rows = result["artefacts"]["X"]["rows"]
    floor = _format_figure(result["noise_floor"])
    return [
        f"Search of the run folder: withdrawn pairs in {places_before} places before, {places_after} after; rows as "
        f"withdrawn items had them in {rows} places outside the model.",
        f"Another seed alone is {floor} away from R1, where O is 1.",
        f"Verdict: {result['verdict']}.",
        result["note"],
    ]


def _count_traces(artefacts: AuditResult) -> int:
    return int(artefacts["pairs"] + artefacts["people"])


def to_markdown(result: AuditResult, models: ColumnTitles) -> str:
    table = render_markdown_table(make_rows(result, models))
    names = "; ".join(f"{name}: {words}" for name, words in models.items())
    notes = [f"{note}\n" for note in list_notes(result)]
    return "\n".join([describe_audit(result), "", *table, "", f"{names}.\n", *notes])


def to_csv(result: AuditResult, models: ColumnTitles) -> str:
    rows = []
    for model in models:
        figures = result["rows"][model]
        cells = [_format_cell(figures[attack]) for attack in ATTACKS]
        rows.append([model, *cells])
    return render_csv_text(["model", *ATTACKS], rows)


def _format_cell(value: Any) -> str:
    """A number, the two ends of an interval, or nothing."""
    if value is None:
        return ""
    numbers = value if isinstance(value, list) else [value]
    return " ".join(f"{number:.6f}" for number in numbers)


def write_audit(result: AuditResult, models: ColumnTitles, folder: Path) -> Path:
    """forget-DATA-METHOD.md and .csv in a folder; the name without its ending."""
    data = Path(result["data"]).stem
    name = f"forget-{data}-{result['method']}"
    return write_tables(folder, name, to_markdown(result, models), to_csv(result, models))
