"""Tables as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tacita.core.files import disk_error, write_bytes

AuditResult = Mapping[str, Any]
"""An audit, or a row of it, as its JSON file has it."""
ColumnTitles = Mapping[str, str]
"""Key of a column -> its words in a table."""
TextRow = dict[str, str]
"""Title of a column -> text of the cell."""


def render_markdown_page(title: str, rows: Sequence[TextRow], notes: Iterable[str]) -> str:
    """A title, a table and notes."""
    lines = [title, "", *render_markdown_table(rows), "", *notes]
    return "\n".join(lines) + "\n"


def render_markdown_table(rows: Sequence[TextRow]) -> list[str]:
    """The lines of a table whose first row names its columns."""
    header = list(rows[0])
    rule = "|" + "---|" * len(header)
    lines = [_join_cells(header), rule]
    for row in rows:
        lines.append(_join_cells(row.values()))
    return lines


def _join_cells(cells: Iterable[str]) -> str:
    padded = [f" {cell} " for cell in cells]
    return "|" + "|".join(padded) + "|"


def render_csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_tables(folder: Path, name: str, markdown: str, csv_table: str) -> Path:
    """NAME.md and NAME.csv in a folder that may be new; the path without its ending."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from None
    write_text(folder / f"{name}.md", markdown)
    write_text(folder / f"{name}.csv", csv_table)
    return folder / name


def format_csv_number(value: Any, digits: int) -> Any:
    """Nothing for None, whole numbers as they are, others with so many digits."""
    if value is None:
        return ""
    if isinstance(value, int):
        return value
    return f"{value:.{digits}f}"


def list_figure_columns(names: Iterable[str], kinds: Sequence[str]) -> list[str]:
    """A column for every kind of number of every figure; what was found has the figure's own name."""
    columns = []
    for name in names:
        for kind in kinds:
            is_main = kind == "found"
            columns.append(name if is_main else f"{name}_{kind}")
    return columns


def list_figure_values(figures: AuditResult, names: Iterable[str], kinds: Sequence[str]) -> list[Any]:
    """The numbers of a row, in the order of `list_figure_columns`."""
    values = []
    for name in names:
        figure = figures[name]
        values += [figure[kind] for kind in kinds]
    return values
