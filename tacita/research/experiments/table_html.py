"""A table of a paper as a page, with pictures of means and intervals beside the published values."""

from __future__ import annotations

from collections.abc import Sequence

from tacita.report import elements
from tacita.report.charts import Dot, draw_dot_chart
from tacita.report.elements import Figure, PageTable, TableCell
from tacita.research.experiments.comparisons import PairedComparison
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.table_markdown import TEST_HEAD, format_test, title_paired_table
from tacita.research.experiments.tables import (
    Entries,
    Labels,
    TableEntry,
    count_verdicts,
    explain_reading,
    format_entry,
    label_variants,
)

FigurePlace = tuple[str, str, str, str]
"""Metric, dataset, backbone and column."""

VariantRows = dict[str, dict[str, TableEntry]]
"""Variant -> column -> entry."""


def render_html(
    experiment: Experiment, entries: Entries, tests: list[PairedComparison], earlier: Sequence[str] = ()
) -> str:
    from tacita.report.pages import render

    labels = label_variants(experiment)
    verdicts = count_verdicts(entries)
    counts = []
    for verdict, count in verdicts.items():
        if count:
            counts.append(f"{verdict} {count}")
    about = ""
    reading = explain_reading(experiment, entries, "below it")
    if counts:
        n_published = sum(verdicts.values())
        about = f"Against {n_published} published values: {', '.join(counts)}"
    else:
        reading = reading.partition(";")[0] + "."
    page_tables = _build_value_tables(experiment, entries, labels)
    page_tables += _build_test_tables(experiment, tests, labels)
    page = render(
        "paper.html",
        title=experiment.title,
        about=about,
        version="",
        how=reading,
        notes=[*experiment.notes, *earlier],
        drawn=_draw_figures(experiment, entries, labels),
        tables=page_tables,
    )
    return page.decode()


def _draw_figures(experiment: Experiment, entries: Entries, labels: Labels) -> list[Figure]:
    """Per metric, dataset, backbone and column (of a stream: the mean) every variant as a dot."""
    places: dict[FigurePlace, Entries] = {}
    for entry in entries:
        if _is_drawn(experiment, entry):
            place = (entry.metric, entry.dataset, entry.backbone, entry.column)
            places.setdefault(place, []).append(entry)
    figures = []
    for metric in experiment.metrics:
        for place, rows in places.items():
            if place[0] == metric:
                figures.append(_draw_figure(place, rows, labels))
    return figures


def _is_drawn(experiment: Experiment, entry: TableEntry) -> bool:
    """Of many metrics the first two are drawn, and of a stream the means."""
    main_metrics = experiment.metrics[:2]
    if experiment.rows == "methods" and entry.metric not in main_metrics:
        return False
    return experiment.kind != "stream" or entry.column == "mean"


def _draw_figure(place: FigurePlace, entries: Entries, labels: Labels) -> Figure:
    metric, dataset, backbone, column = place
    title = f"{dataset}, {backbone}: {metric}, {column}"
    dots = []
    words = []
    for entry in entries:
        label = labels[entry.variant]
        dot = Dot(label, entry.mean, entry.half, entry.published)
        dots.append(dot)
        words.append(f"{label}: {format_entry(entry)}")
    drawing = draw_dot_chart(dots, f"{title}. {'; '.join(words)}")
    caption = "Dot and line: ours with its 95 % interval."
    if any(entry.published is not None for entry in entries):
        caption += " Diamond: published."
    return Figure(title, drawing, caption)


def _build_value_tables(experiment: Experiment, entries: Entries, labels: Labels) -> list[PageTable]:
    """Rows are variants; a dataset has a table of its own, unless it fills one column only."""
    is_split = len({entry.column for entry in entries}) > 1
    places: dict[tuple[str, str, str], VariantRows] = {}
    for entry in entries:
        dataset = entry.dataset if is_split else ""
        column = entry.column if is_split else entry.dataset
        variants = places.setdefault((entry.metric, entry.backbone, dataset), {})
        variants.setdefault(entry.variant, {})[column] = entry
    page_tables = []
    for metric in experiment.metrics:
        for place, variants in places.items():
            if place[0] == metric:
                title = ", ".join(filter(None, place))
                page_tables.append(_build_table(title, variants, labels))
    return page_tables


def _build_table(title: str, variants: VariantRows, labels: Labels) -> PageTable:
    """A table with a row for each variant, in the order of the experiment."""
    columns: dict[str, None] = {}
    for row in variants.values():
        columns |= dict.fromkeys(row)
    rows = []
    for name, label in labels.items():
        if name not in variants:
            continue
        row = variants[name]
        cells = [_build_cell(row.get(column)) for column in columns]
        rows.append([TableCell(label), *cells])
    return PageTable(title, elements.cells("", *columns), rows)


def _build_cell(entry: TableEntry | None) -> TableCell:
    if entry is None:
        return TableCell("–")
    note = ""
    if entry.published is not None:
        note = f"{entry.published:.4f} {entry.verdict}"
    return TableCell(format_entry(entry), note=note, note_kind=entry.verdict)


def _build_test_tables(experiment: Experiment, tests: list[PairedComparison], labels: Labels) -> list[PageTable]:
    if not tests:
        return []
    rows = [format_test(test, labels) for test in tests]
    return [elements.build_plain_table(title_paired_table(experiment), TEST_HEAD, rows)]
