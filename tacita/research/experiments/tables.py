"""From finished cells to entries of a table: mean, interval over seeds, the published value, a verdict for each."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace

import numpy as np

from tacita.metrics import compute_confidence_interval
from tacita.research.experiments.cell_status import EARLIER
from tacita.research.experiments.experiment_cell import Cells, Place
from tacita.research.experiments.experiment_spec import Experiment, PublishedRow
from tacita.research.experiments.single_block import CellLines, Line

VERDICTS = ("agrees", "higher", "lower", "unclear")
ROUND_PREFIX = "round "  # of columns that are rounds of a run

Labels = dict[str, str]
"""Variant -> its name in tables."""

SeedRows = list[list[float]]
"""The values of a metric, a list for each seed."""

PlaceLines = dict[Place, list[Line]]
"""Place -> the lines of its finished seeds."""


@dataclass(frozen=True)
class TableEntry:
    """One cell of the table."""

    dataset: str
    backbone: str
    metric: str
    variant: str
    column: str
    mean: float
    half: float  # half-width of the 95 % interval over seeds; nan with one seed
    seeds: int
    published: float | None
    verdict: str  # agrees, higher, lower, or "" where nothing was published
    earlier: int = 0  # of the seeds, those that earlier code made


Entries = list[TableEntry]


@dataclass(frozen=True)
class Column:
    """A column of a variant: its published value, and ours over seeds."""

    name: str
    published: float | None
    values: list[float]


def judge_agreement(mean: float, half: float, published: float | None, tolerance: float) -> str:
    """Agreement: the published value lies in our interval, or within the tolerance of our mean.

    An interval wider than the tolerance, or a single seed, cannot tell agreement from chance: unclear.
    """
    if published is None:
        return ""
    if np.isnan(half):
        return "unclear"
    difference = abs(mean - published)
    margin = tolerance * published
    if difference > half and difference > margin:
        return "higher" if mean > published else "lower"
    return "agrees" if half <= margin else "unclear"


def label_variants(experiment: Experiment) -> Labels:
    return {name: variant.label for name, variant in experiment.variants.items()}


def group_lines_by_place(field: str, cells: Cells, lines: CellLines) -> PlaceLines:
    """The lines of finished seeds that have a field, by place."""
    groups: PlaceLines = {}
    for cell in cells:
        line = lines.get(cell.key, {})
        if field in line:
            place = (cell.dataset, cell.backbone, cell.variant)
            groups.setdefault(place, []).append(line)
    return groups


def build_entries(experiment: Experiment, cells: Cells, lines: CellLines) -> Entries:
    """Every (dataset, backbone, metric, variant, block) with all finished seeds, and the mean over blocks."""
    entries = []
    for place, finished in group_lines_by_place("values", cells, lines).items():
        for metric in experiment.metrics:
            values = [line["values"] for line in finished]
            rows = [own[metric] for own in values if metric in own]
            if rows:  # a central model sends nothing
                n_earlier = sum(EARLIER in line for line in finished)
                own_entries = _build_variant_entries(experiment, place, metric, rows)
                entries += [replace(entry, earlier=n_earlier) for entry in own_entries]
    return entries


def _build_variant_entries(experiment: Experiment, place: Place, metric: str, rows: SeedRows) -> Entries:
    """The entries of a variant for a metric."""
    dataset, backbone, variant = place
    published_metrics = experiment.published.get(dataset, {}).get(backbone, {})
    published_row = published_metrics.get(metric, {}).get(variant, [])
    entries = []
    for column in _split_columns(experiment, published_row, rows):
        mean, half = compute_confidence_interval(column.values)
        entry = TableEntry(
            dataset=dataset,
            backbone=backbone,
            metric=metric,
            variant=variant,
            column=column.name,
            mean=mean,
            half=half,
            seeds=len(column.values),
            published=column.published,
            verdict=judge_agreement(mean, half, column.published, experiment.tolerance),
        )
        entries.append(entry)
    return entries


def _split_columns(experiment: Experiment, published_row: PublishedRow, rows: SeedRows) -> list[Column]:
    """The columns of a variant; a stream's last value is its mean."""
    names = list(experiment.published_columns)
    padded = [*published_row, *[None] * len(names)]
    published = padded[: len(names)]
    if experiment.kind == "stream":
        if names == ["mean"]:
            means = [row[-1] for row in rows]
            return [Column("mean", published[0], means)]
        names.append("mean")
        published.append(_average_published(published))
    if names[0].startswith(ROUND_PREFIX):
        return _split_rounds(names, published, rows)
    columns = []
    for number, name in enumerate(names):
        values = [row[number] for row in rows]
        columns.append(Column(name, published[number], values))
    return columns


def _average_published(published: PublishedRow) -> float | None:
    """The mean of the published values, if all were published."""
    known = [value for value in published if value is not None]
    if len(known) < len(published):
        return None
    return round(float(np.mean(known)), 4)


def _split_rounds(names: list[str], published: PublishedRow, rows: SeedRows) -> list[Column]:
    """Columns that are rounds of a run; a round that no seed reached is left out."""
    columns = []
    for name, value in zip(names, published, strict=True):
        number = int(name.removeprefix(ROUND_PREFIX))
        reached = [row for row in rows if len(row) >= number]
        values = [row[number - 1] for row in reached]
        if values:
            columns.append(Column(name, value, values))
    return columns


def list_failed_cells(cells: Cells, lines: CellLines) -> list[str]:
    """One sentence per run that could not be finished."""
    sentences = []
    for cell in cells:
        line = lines.get(cell.key, {})
        if "failed" in line:
            place = f"{cell.dataset}, {cell.backbone}, {cell.variant}"
            reason = line["failed"]
            sentences.append(f"{place}, seed {cell.seed}: {reason}")
    return sentences


def format_entry(entry: TableEntry) -> str:
    """Four decimals, or none where a loss has left all bounds; with a mark where earlier code made it."""
    number_format = ".4f" if abs(entry.mean) < 1000 else ",.0f"
    mean = format(entry.mean, number_format)
    mark = " †" if entry.earlier else ""
    if np.isnan(entry.half):
        return mean + mark
    half = format(entry.half, number_format)
    return f"{mean} ± {half}{mark}"


def explain_reading(experiment: Experiment, entries: Entries, where: str) -> str:
    """How to read a cell."""
    seeds = max((entry.seeds for entry in entries), default=0)
    unclear = "our interval is wider than that" if seeds > 1 else "one seed has no interval"
    return (
        f"Mean ± half-width of the 95 % interval over {seeds} seed(s); {where} the published value and what we "
        f"say of it (agrees: inside our interval or within "
        f"{experiment.tolerance:.0%}; higher or lower: ours is; unclear: {unclear})."
    )


def count_verdicts(entries: Entries) -> dict[str, int]:
    """How many cells with a published value agree, are higher, are lower."""
    verdicts = [entry.verdict for entry in entries]
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


CSV_COLUMNS = (
    "dataset",
    "backbone",
    "metric",
    "variant",
    "block",
    "mean",
    "half_width_95",
    "seeds",
    "published",
    "verdict",
)
EARLIER_COLUMN = "earlier_code"  # seeds that earlier code made; only where there are any


def to_csv(entries: Entries) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    has_earlier = any(entry.earlier for entry in entries)
    head = [*CSV_COLUMNS, EARLIER_COLUMN] if has_earlier else CSV_COLUMNS
    writer.writerow(head)
    for entry in entries:
        row = [
            entry.dataset,
            entry.backbone,
            entry.metric,
            entry.variant,
            entry.column,
            f"{entry.mean:.6f}",
            "" if np.isnan(entry.half) else f"{entry.half:.6f}",
            entry.seeds,
            "" if entry.published is None else entry.published,
            entry.verdict,
        ]
        if has_earlier:
            row.append(entry.earlier)
        writer.writerow(row)
    return out.getvalue()
