"""Who took part, read under budgets: the table as rows, and as files that people and machines read."""

from __future__ import annotations

from pathlib import Path

from tacita.report.text_tables import (
    AuditResult,
    ColumnTitles,
    TextRow,
    format_csv_number,
    list_figure_columns,
    list_figure_values,
    render_csv_text,
    render_markdown_page,
    write_text,
)

KINDS = ("found", "control")
NOTES = (
    "AUC: 0.5 is a guess, 1 tells everybody apart. In brackets the control: the same people, a release without them.",
    "A smaller AUC is what these readers find; only the epsilon bounds what any reader can find.",
)


def make_rows(result: AuditResult, readers: ColumnTitles) -> list[TextRow]:
    return [_make_row(row, readers) for row in result["rows"]]


def _make_row(row: AuditResult, readers: ColumnTitles) -> TextRow:
    cells = {
        "setting": row["setting"],
        "items told of": str(row["items"]),
        "valid": "-" if row["valid"] is None else f"{row['valid']:.4f}",
    }
    figures = row["readers"]
    for name, words in readers.items():
        cells[words] = _format_figure(figures[name])
    return cells


def _format_figure(figure: AuditResult) -> str:
    if figure["found"] is None:
        return "-"
    control = f"{figure['control']:.3f}"
    return f"{figure['found']:.3f} ({control})"


def to_markdown(result: AuditResult, readers: ColumnTitles) -> str:
    rows = make_rows(result, readers)
    about = (
        f"{result['data']}, first block, {result['people']} people, delta {result['delta']:g}: "
        "AUC of who took part where "
        f"90 % of a history is known, {result['noise_draws']} noise draws for every draw of people."
    )
    return render_markdown_page(about, rows, NOTES)


def to_csv(result: AuditResult, readers: ColumnTitles) -> str:
    rows = []
    for row in result["rows"]:
        figures = list_figure_values(row["readers"], readers, KINDS)
        cells = [row["setting"], row["items"]]
        for value in [row["valid"], *figures]:
            cells.append(format_csv_number(value, 6))
        rows.append(cells)
    header = ["setting", "items", "valid"]
    header += list_figure_columns(readers, KINDS)
    return render_csv_text(header, rows)


def write_audit(result: AuditResult, readers: ColumnTitles, folder: Path) -> Path:
    """budget-DATA.md and .csv, or of another stem, in a folder that may be new; the path without its ending."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = result.get("stem", "budget")
    data = Path(result["data"]).stem
    stem = folder / f"{prefix}-{data}"
    write_text(stem.with_suffix(".md"), to_markdown(result, readers))
    write_text(stem.with_suffix(".csv"), to_csv(result, readers))
    return stem
