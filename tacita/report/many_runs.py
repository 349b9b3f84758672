"""What a page says of several runs together: one chart, one table, and whether they may be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tacita.report import charts
from tacita.report.charts import Series, SeriesStyle
from tacita.report.formats import format_bytes, format_metric, format_score
from tacita.report.run_data import RunData
from tacita.report.elements import Figure, PageTable, RunComparison, TableCell, cells
from tacita.report.one_run import CONTROL_STYLES, describe_series
from tacita.report.seeds import format_interval, group_seeds

MOST_LINES = 16  # runs in one chart
NOT_COMPARABLE = "These runs differ in data, split, mask or metric: compare only those that agree in these."
NO_COMMON_METRIC = "The runs report no metric in common, so there is no common chart."


def label_runs(runs: Sequence[RunData]) -> list[str]:
    """The shortest names that tell the runs apart: method, and what else differs; at last the folder."""
    fields: list[Callable[[RunData], str]] = [
        lambda r: r.method,
        lambda r: r.backbone,
        lambda r: charts.shorten_text(r.data, 30),
        lambda r: f"seed {r.seed}",
        lambda r: f"split {r.split_seed}",
    ]
    used = [f for n, f in enumerate(fields) if n == 0 or len({f(r) for r in runs}) > 1]
    labels = [" · ".join(dict.fromkeys(f(r) for f in used)) for r in runs]
    return [x if labels.count(x) == 1 else f"{x} · {r.folder}" for x, r in zip(labels, runs, strict=True)]


def compare_runs(runs: Sequence[RunData], labels: Sequence[str]) -> RunComparison:
    fair = len({r.protocol for r in runs}) == 1
    metric = next((m for m in runs[0].metrics if all(m in r.mean for r in runs)), None)
    figures = _figures(runs, labels, metric, fair) if metric else []
    warning = " ".join([*([] if fair else [NOT_COMPARABLE]), *([] if metric else [NO_COMMON_METRIC])])
    return RunComparison(warning, figures, [_means_table(runs, labels, fair), *_seed_tables(runs)])


def _means_table(runs: Sequence[RunData], labels: Sequence[str], fair: bool) -> PageTable:
    metrics = list(dict.fromkeys(m for r in runs for m in r.metrics))
    columns = [[r.mean[m] for r in runs] for m in metrics]
    columns += [[r.continual[k] for r in runs] for k in ("la", "ra", "hm")]
    best = [max((v for v in column if math.isfinite(v)), default=math.nan) for column in columns]
    rows = []
    for n, run in enumerate(runs):
        numbers = [(column[n], top) for column, top in zip(columns, best, strict=True)]
        told = [TableCell(format_score(v), "strong" if fair and v == top else "") for v, top in numbers]
        names = ", ".join(c.name for c in run.better_controls)
        flag = TableCell(names, "beats list") if names else TableCell("none" if run.controls else "not run")
        rows.append(
            [TableCell(labels[n], note=run.folder), *told, *cells(format_bytes(run.up), format_bytes(run.down)), flag]
        )
    head = ["run", *map(format_metric, metrics), "LA", "RA", "HM", "up", "down", "controls that are better"]
    per = {run.exchange_unit for run in runs}
    sent = per.pop() if len(per) == 1 else "round, or block where that is one exchange"
    said = f"Means over blocks 1 and later (LA, RA and HM: over all); bytes per client and {sent}"
    return PageTable(said, cells(*head), rows)


def _seed_tables(runs: Sequence[RunData]) -> list[PageTable]:
    """Mean, interval and range where the same thing was run with several seeds or splits."""
    rows, groups = [], group_seeds(runs)
    for one in groups:
        for metric in one.runs[0].metrics if len(one.runs) > 1 else ():
            mean, half = one.means[metric]
            values = [run.mean[metric] for run in one.runs]
            told = [format_interval(mean, half), *map(format_score, (min(values), max(values)))]
            named = TableCell(" · ".join(dict.fromkeys([one.method, one.backbone])), note=one.data)
            rows.append([named, *cells(format_metric(metric), str(one.n_distinct), *told)])
    head = cells("what", "metric", "runs", "mean ± 95 %", "lowest", "highest")
    said = "Over seeds and splits: runs that differ in nothing else; after ± the half-width of the 95 % interval"
    said = ". ".join([f"{said} of the mean", *(f"{one.method}: {one.note}" for one in groups if one.note)])
    return [PageTable(said, head, rows)] if rows else []


def _figures(runs: Sequence[RunData], labels: Sequence[str], metric: str, fair: bool) -> list[Figure]:
    """Quality per block, and on the mean, for all."""
    chosen = sorted(sorted(range(len(runs)), key=lambda n: -runs[n].mean[metric])[:MOST_LINES])
    longest = max(len(runs[n].blocks) for n in chosen)
    series = []
    for place, n in enumerate(chosen):
        values = [b.scores[metric] for b in runs[n].blocks]
        series.append(Series(labels[n], values + [math.nan] * (longest - len(values)), SeriesStyle.nth(place)))
    few = f"The best {MOST_LINES} of {len(runs)} runs. " if len(runs) > MOST_LINES else ""
    means = [Series(s.name, [runs[n].mean[metric]], s.style) for s, n in zip(series, chosen, strict=True)]
    if fair and (popular := runs[0].popular):
        series.append(Series("most popular", [b[metric] for b in popular.blocks], CONTROL_STYLES["random"]))
        means.append(Series("most popular", [popular.mean[metric]], CONTROL_STYLES["random"]))
    means.sort(key=lambda s: -s.values[0])
    level = charts.draw_level_bars(means, format_metric(metric), describe_series(means))
    out = [Figure("Mean test quality", level, f"{few}Longer is better.")]
    if longest > 1:
        how = f"{few}Higher is better. Blocks are comparable only between runs on the same data and split."
        drawing = charts.draw_line_chart(
            series, [str(n) for n in range(longest)], format_metric(metric), describe_series(series)
        )
        out.insert(0, Figure("Test quality per block", drawing, how))
    return out
