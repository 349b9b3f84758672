"""A table of a paper in Markdown: ours, the published values, paired tests and what else was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.research.experiments.comparisons import PairedComparison
from tacita.research.experiments.experiment_spec import Experiment
from tacita.research.experiments.tables import (
    Entries,
    Labels,
    TableEntry,
    explain_reading,
    format_entry,
    label_variants,
)

Rows = Sequence[Sequence[str]]
TextRows = list[list[str]]
EntryRow = dict[str, TableEntry]
"""Entries by variant, or by metric."""

TEST_HEAD = ["dataset", "backbone", "method", "best other", "relative difference", "p", "pairs"]
STREAM_HEAD = ["dataset", "backbone", "method", "history mask", "new users", "returning users", "LA", "RA", "HM"]
STREAM_TITLE = (
    "**Beside it** (ndcg@20): all known items hidden; users by kind; learning (LA), retention (RA, every block's "
    "test after the last block, own masks) and their harmonic mean"
)


def to_markdown(
    experiment: Experiment,
    entries: Entries,
    tests: list[PairedComparison],
    failures: Sequence[str] = (),
    streams: Rows = (),
    differences: Rows = (),
) -> str:
    """Tables per dataset, backbone and metric; ours above, the paper's value and verdict below."""
    labels = label_variants(experiment)
    reading = explain_reading(experiment, entries, "in brackets")
    text = [f"### {experiment.title}", "", reading, ""]
    for note in [*experiment.notes, *failures]:
        text.append(f"- {note}")
    text.append("")
    if experiment.rows == "methods":
        text += _build_method_tables(experiment, entries, labels)
    else:
        text += _build_block_tables(experiment, entries, labels)
    text += _format_differences(experiment, differences)
    text += _format_tests(experiment, tests, labels)
    text += _format_streams(streams)
    return "\n".join(text).rstrip() + "\n"


def _format_grid(head: Sequence[str], rows: Rows) -> list[str]:
    """A table in Markdown, a line each row, with an empty line below."""
    ruler = "|" + "---|" * len(head)
    lines = [_format_line(head), ruler]
    lines += [_format_line(row) for row in rows]
    lines.append("")
    return lines


def _format_line(cells: Sequence[str]) -> str:
    line = "|"
    for cell in cells:
        line += f" {cell} |" if cell else " |"
    return line


# Ours and the published values


def _build_block_tables(experiment: Experiment, entries: Entries, labels: Labels) -> list[str]:
    """A table for each metric and backbone: a row for each dataset and block, a column for each variant."""
    backbones = dict.fromkeys(entry.backbone for entry in entries)
    block_title = "" if experiment.kind in ("once", "choose") else "block"
    text = []
    for metric in experiment.metrics:
        measured = [entry for entry in entries if entry.metric == metric]
        for backbone in backbones:
            own = [entry for entry in measured if entry.backbone == backbone]
            if own:
                text += [f"**{metric}, {backbone}**", ""]
                text += _build_block_table(own, labels, block_title)
    return text


def _build_block_table(entries: Entries, labels: Labels, block_title: str) -> list[str]:
    measured = {entry.variant for entry in entries}
    variants = [name for name in labels if name in measured]
    head = ["dataset", block_title]
    head += [labels[name] for name in variants]
    return _format_grid(head, _build_block_rows(entries, variants))


def _build_block_rows(entries: Entries, variants: list[str]) -> TextRows:
    """A row for each dataset and block: ours, and the published value below it."""
    table: dict[tuple[str, str], EntryRow] = {}
    for entry in entries:
        row = table.setdefault((entry.dataset, entry.column), {})
        row[entry.variant] = entry
    rows: TextRows = []
    for (dataset, column), row in table.items():
        cells = [_format_block_cell(row.get(name)) for name in variants]
        rows.append([dataset, column, *cells])
    return rows


def _format_block_cell(entry: TableEntry | None) -> str:
    if entry is None:
        return "–"
    return format_entry(entry) + _format_published(entry)


def _format_published(entry: TableEntry) -> str:
    if entry.published is None:
        return ""
    return f"<br>({entry.published:.4f} {entry.verdict})"


def _build_method_tables(experiment: Experiment, entries: Entries, labels: Labels) -> list[str]:
    """A table for each dataset and backbone: methods below each other, their metrics side by side."""
    places: dict[tuple[str, str], Entries] = {}
    for entry in entries:
        own = places.setdefault((entry.dataset, entry.backbone), [])
        own.append(entry)
    text = []
    for (dataset, backbone), own in places.items():
        measured = {entry.metric for entry in own}
        metrics = [metric for metric in experiment.metrics if metric in measured]
        head = ["method", *metrics, "seeds"]
        text += [f"**{dataset}, {backbone}**", ""]
        text += _format_grid(head, _build_method_rows(own, metrics, labels))
    return text


def _build_method_rows(entries: Entries, metrics: list[str], labels: Labels) -> TextRows:
    variants: dict[str, EntryRow] = {}
    for entry in entries:
        own = variants.setdefault(entry.variant, {})
        own[entry.metric] = entry
    rows = []
    for name, by_metric in variants.items():
        row = [labels[name]]
        for metric in metrics:
            cell = format_cell(by_metric[metric]) if metric in by_metric else "–"
            row.append(cell)
        seeds = max(entry.seeds for entry in by_metric.values())
        row.append(str(seeds))
        rows.append(row)
    return rows


def format_cell(entry: TableEntry) -> str:
    """A cell with as many digits as mean something beside large numbers, and the published value."""
    size = abs(entry.mean)
    if size < 10:
        digits = 4
    else:
        digits = 1 if size < 1000 else 0
    text = f"{entry.mean:,.{digits}f}"
    if not np.isnan(entry.half):
        text += f" ± {entry.half:,.{digits}f}"
    return text + _format_published(entry)


# What else was measured


def _format_differences(experiment: Experiment, rows: Rows) -> list[str]:
    if not rows:
        return []
    name = experiment.variants[experiment.baseline].label
    metric = experiment.metrics[0]
    measure = f"mean {metric} of blocks 1.." if experiment.kind == "stream" else metric
    title = f"**Against {name}, seed by seed** ({measure}, 95 % interval of the paired difference)"
    head = ["dataset", "backbone", "method", f"minus {name}", ""]
    grid = _format_grid(head, rows)
    return [title, "", *grid]


def _format_streams(rows: Rows) -> list[str]:
    if not rows:
        return []
    return [STREAM_TITLE, "", *_format_grid(STREAM_HEAD, rows)]


def title_paired_table(experiment: Experiment) -> str:
    people = "users of blocks 1.." if experiment.kind == "stream" else "users"
    return f"Paired test per user ({experiment.metrics[0]}; pairs are {people}, averaged over seeds; two-sided t)"


def format_test(test: PairedComparison, labels: Labels) -> list[str]:
    """A paired test as a row below `TEST_HEAD`."""
    return [
        test.dataset,
        test.backbone,
        labels[test.variant],
        test.describe_other(labels),
        f"{test.gain:+.1%}",
        f"{test.p:.3g}",
        str(test.pairs),
    ]


def _format_tests(experiment: Experiment, tests: list[PairedComparison], labels: Labels) -> list[str]:
    if not tests:
        return []
    name, details = title_paired_table(experiment).split(" (")
    rows = [format_test(test, labels) for test in tests]
    grid = _format_grid(TEST_HEAD, rows)
    return [f"**{name}** ({details}", "", *grid]
