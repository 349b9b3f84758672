"""What a page says of several runs together: one chart, one table, and whether they may be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacita.report import charts
from tacita.report.charts import Series, SeriesStyle
from tacita.report.elements import Figure, PageTable, RunComparison, TableCell, cells
from tacita.report.formats import format_bytes, format_metric, format_score
from tacita.report.labels import label_by_fields
from tacita.report.one_run import CONTROL_STYLES, describe_series
from tacita.report.run_data import ControlResult, RunData
from tacita.report.seeds import CONTINUAL, SeedGroup, format_interval, group_seeds, list_metrics

MOST_LINES = 16  # runs in one chart
NOT_COMPARABLE = "These runs differ in data, split, mask or metric: compare only those that agree in these."
NO_COMMON_METRIC = "The runs report no metric in common, so there is no common chart."


def label_runs(runs: Sequence[RunData]) -> list[str]:
    """The shortest names that tell the runs apart: method, and what else differs; at last the folder."""
    fields = [
        [run.method for run in runs],
        [run.backbone for run in runs],
        [charts.shorten_text(run.data, 30) for run in runs],
        [f"seed {run.seed}" for run in runs],
        [f"split {run.split_seed}" for run in runs],
    ]
    return label_by_fields(fields, [run.folder for run in runs])


def compare_runs(runs: Sequence[RunData], labels: Sequence[str]) -> RunComparison:
    protocols = {run.protocol for run in runs}
    is_fair = len(protocols) == 1
    metric = _find_common_metric(runs)
    warnings = []
    figures = []
    if not is_fair:
        warnings.append(NOT_COMPARABLE)
    if metric:
        figures = _draw_figures(runs, labels, metric, is_fair)
    else:
        warnings.append(NO_COMMON_METRIC)
    tables = [_build_means_table(runs, labels, is_fair)]
    tables += _build_seed_spread_table(runs)
    return RunComparison(" ".join(warnings), figures, tables)


def _find_common_metric(runs: Sequence[RunData]) -> str | None:
    """The first metric of the first run that all runs have."""
    for metric in runs[0].metrics:
        if all(metric in run.mean for run in runs):
            return metric
    return None


# Means


def _build_means_table(runs: Sequence[RunData], labels: Sequence[str], is_fair: bool) -> PageTable:
    metrics = list_metrics(run.metrics for run in runs)
    marked_columns = []
    for metric in metrics:
        means = [run.mean[metric] for run in runs]
        marked_columns.append(_mark_best(means, is_fair))
    for name in CONTINUAL:
        means = [run.continual[name] for run in runs]
        marked_columns.append(_mark_best(means, is_fair))
    rows = []
    for number, run in enumerate(runs):
        row = [TableCell(labels[number], note=run.folder)]
        row += [column[number] for column in marked_columns]
        row.append(TableCell(format_bytes(run.up)))
        row.append(TableCell(format_bytes(run.down)))
        row.append(_list_better_controls(run))
        rows.append(row)
    titles = [format_metric(metric) for metric in metrics]
    head = ["run", *titles, "LA", "RA", "HM", "up", "down", "controls that are better"]
    unit = _describe_exchange(runs)
    caption = f"Means over blocks 1 and later (LA, RA and HM: over all); bytes per client and {unit}"
    return PageTable(caption, cells(*head), rows)


def _mark_best(column: Sequence[float], is_fair: bool) -> list[TableCell]:
    """A column's scores; the best stand out where runs can be compared."""
    finite = [value for value in column if math.isfinite(value)]
    best = max(finite, default=math.nan)
    marked = []
    for value in column:
        kind = "strong" if is_fair and value == best else ""
        marked.append(TableCell(format_score(value), kind))
    return marked


def _list_better_controls(run: RunData) -> TableCell:
    names = [control.name for control in run.better_controls]
    if names:
        return TableCell(", ".join(names), "beats list")
    return TableCell("none" if run.controls else "not run")


def _describe_exchange(runs: Sequence[RunData]) -> str:
    """What bytes are counted per."""
    units = {run.exchange_unit for run in runs}
    if len(units) == 1:
        return units.pop()
    return "round, or block where that is one exchange"


# Seeds


def _build_seed_spread_table(runs: Sequence[RunData]) -> list[PageTable]:
    """Mean, interval and range where the same thing was run with several seeds or splits."""
    groups = group_seeds(runs)
    rows = []
    for group in groups:
        if len(group.runs) > 1:
            metrics = group.runs[0].metrics
            rows += [_make_seed_row(group, metric) for metric in metrics]
    if not rows:
        return []
    head = cells("what", "metric", "runs", "mean ± 95 %", "lowest", "highest")
    caption = (
        "Over seeds and splits: runs that differ in nothing else; after ± the half-width of the 95 % interval "
        "of the mean"
    )
    sentences = [caption]
    for group in groups:
        if group.note:
            sentences.append(f"{group.method}: {group.note}")
    return [PageTable(". ".join(sentences), head, rows)]


def _make_seed_row(group: SeedGroup, metric: str) -> list[TableCell]:
    mean, half = group.means[metric]
    values = [run.mean[metric] for run in group.runs]
    names = dict.fromkeys([group.method, group.backbone])
    name = " · ".join(names)
    title = TableCell(name, note=group.data)
    texts = [
        format_metric(metric),
        str(group.n_distinct),
        format_interval(mean, half),
        format_score(min(values)),
        format_score(max(values)),
    ]
    return [title, *cells(*texts)]


# Figures


def _draw_figures(runs: Sequence[RunData], labels: Sequence[str], metric: str, is_fair: bool) -> list[Figure]:
    """Quality per block, and on the mean, for all."""
    chosen = _choose_runs(runs, metric)
    n_blocks = max(len(runs[number].blocks) for number in chosen)
    series = []
    means = []
    for place, number in enumerate(chosen):
        run = runs[number]
        label = labels[number]
        style = SeriesStyle.nth(place)
        scores = _list_block_scores(run, metric, n_blocks)
        mean = run.mean[metric]
        series.append(Series(label, scores, style))
        means.append(Series(label, [mean], style))
    popular = runs[0].popular
    if is_fair and popular:
        scores = [block[metric] for block in popular.blocks]
        mean = popular.mean[metric]
        series.append(_build_popular_series(popular, scores))
        means.append(_build_popular_series(popular, [mean]))
    remark = ""
    if len(runs) > MOST_LINES:
        remark = f"The best {MOST_LINES} of {len(runs)} runs. "
    figures = [_draw_means(means, metric, remark)]
    if n_blocks > 1:
        figures.insert(0, _draw_blocks(series, metric, n_blocks, remark))
    return figures


def _list_block_scores(run: RunData, metric: str, n_blocks: int) -> list[float]:
    """The scores of a run's blocks; NaN for blocks that only other runs have."""
    scores = [block.scores[metric] for block in run.blocks]
    n_missing = n_blocks - len(scores)
    return scores + [math.nan] * n_missing


def _choose_runs(runs: Sequence[RunData], metric: str) -> list[int]:
    """The best runs, as many as a chart shows, in their order."""

    def negate_score(number: int) -> float:
        return -runs[number].mean[metric]

    best_first = sorted(range(len(runs)), key=negate_score)
    return sorted(best_first[:MOST_LINES])


def _build_popular_series(popular: ControlResult, values: list[float]) -> Series:
    return Series(popular.name, values, CONTROL_STYLES["random"])


def _draw_means(means: list[Series], metric: str, remark: str) -> Figure:
    means.sort(key=lambda series: -series.values[0])
    title = format_metric(metric)
    drawing = charts.draw_level_bars(means, title, describe_series(means))
    return Figure("Mean test quality", drawing, f"{remark}Longer is better.")


def _draw_blocks(series: Sequence[Series], metric: str, n_blocks: int, remark: str) -> Figure:
    names = [str(number) for number in range(n_blocks)]
    title = format_metric(metric)
    drawing = charts.draw_line_chart(series, names, title, describe_series(series))
    how = f"{remark}Higher is better. Blocks are comparable only between runs on the same data and split."
    return Figure("Test quality per block", drawing, how)
