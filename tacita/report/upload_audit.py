"""What one round's uploads show, without a defence and under budgets: the table as rows and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

from tacita.report.text_tables import AuditResult, ColumnTitles, TextRow, render_markdown_page, write_text

NOTES = (
    "AUC: 0.5 is a guess, 1 reads everything. In brackets the control: the same guess where the answer is not in what "
    "is read. F1 of items that are named; in brackets what somebody else has, and as many items drawn from what moved.",
    "Without a defence and under DPPS the server reads each upload; under secure sums those sums; under DP-FedAvg, "
    "which trusts whoever adds up, others read the noised sum of everybody. Only an epsilon bounds what any reader can "
    "find.",
)


def make_rows(result: AuditResult, readers: ColumnTitles) -> list[TextRow]:
    rows = []
    for row in result["rows"]:
        cells = {"setting": row["setting"]}
        figures = row["readers"]
        for name, words in readers.items():
            cells[words] = _format_figure(figures[name])
        rows.append(cells)
    return rows


def _format_figure(figure: AuditResult) -> str:
    controls = []
    for name in ("control", "chance"):
        if name in figure:
            controls.append(f"{figure[name]:.3f}")
    in_brackets = ", ".join(controls)
    return f"{figure['found']:.3f} ({in_brackets})"


def to_markdown(result: AuditResult, readers: ColumnTitles) -> str:
    rows = make_rows(result, readers)
    about = (
        f"{result['data']}, {result['backbone']}, the first round, {result['people']} people, "
        f"seed {result['seed']}; the "
        "whole budget lies on this round."
    )
    return render_markdown_page(about, rows, NOTES)


def write_audit(result: AuditResult, readers: ColumnTitles, folder: Path) -> Path:
    """uploads-DATA.md and .json in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(result["data"]).stem
    stem = folder / f"uploads-{data}"
    json_text = json.dumps(result, indent=1) + "\n"
    write_text(stem.with_suffix(".md"), to_markdown(result, readers))
    write_text(stem.with_suffix(".json"), json_text)
    return stem
