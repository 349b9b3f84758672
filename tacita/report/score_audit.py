"""The leakage table of uploaded scores as rows, and as files that people and machines read."""

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
    write_tables,
)

SETTINGS = ("alpha", "swap", "threshold", "clients")
KINDS = ("found", "control", "of", "of_control")


def make_rows(result: AuditResult, names: ColumnTitles) -> list[TextRow]:
    """A row for each setting: every attack with its control behind it."""
    return [_make_row(row, names) for row in result["rows"]]


def _make_row(row: AuditResult, names: ColumnTitles) -> TextRow:
    cells = {
        "alpha": f"{row['alpha']:g}",
        "swap": f"{row['swap']:g}" if row["swap"] else "off",
        "clients": str(row["clients"]),
    }
    for name, words in names.items():
        figure = row["attacks"][name]
        value = _format_number(figure["found"])
        control = _format_number(figure["control"])
        cells[words] = f"{value} ({control})"
    return cells


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}"


def describe_audit(result: AuditResult) -> str:
    run = (
        f"{result['data']}, {result['method']}, {result['backbone']}, {result['rounds']} rounds, seed {result['seed']}"
    )
    return (
        f"{run}: what a curious server reads of each client's last upload; in brackets the same attack on scores "
        "shuffled within every upload."
    )


def to_markdown(result: AuditResult, names: ColumnTitles) -> str:
    rows = make_rows(result, names)
    return render_markdown_page(describe_audit(result), rows, [result["note"]])


def to_csv(result: AuditResult, names: ColumnTitles) -> str:
    rows = []
    for row in result["rows"]:
        cells = [row[name] for name in SETTINGS]
        for value in list_figure_values(row["attacks"], names, KINDS):
            cells.append(format_csv_number(value, 6))
        rows.append(cells)
    header = [*SETTINGS, *list_figure_columns(names, KINDS)]
    return render_csv_text(header, rows)


def write_audit(result: AuditResult, names: ColumnTitles, folder: Path) -> Path:
    """scores-DATA.md and .csv in a folder; the name without its ending."""
    data = Path(result["data"]).stem
    return write_tables(folder, f"scores-{data}", to_markdown(result, names), to_csv(result, names))
