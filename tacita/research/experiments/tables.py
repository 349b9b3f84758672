"""From finished cells to a table: mean, interval over seeds, the published value, a verdict for every cell."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from tacita.metrics import confidence_interval, summarise_continual
from tacita.report import elements
from tacita.report.charts import Dot, draw_dot_chart
from tacita.report.elements import Figure, PageTable
from tacita.research.experiments.experiment_spec import Experiment, ExperimentCell
from tacita.research.experiments.single_block import Line, unpack_scores


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


@dataclass(frozen=True)
class PairedComparison:
    """A paired test per user of one variant against the best of the others."""

    dataset: str
    backbone: str
    variant: str
    against: str
    gain: float  # relative difference of the means
    p: float
    pairs: int
    its_backbone: str  # of what it is compared with

    def describe_other(self, labels: dict[str, str]) -> str:
        """What it is compared with, in words."""
        return labels[self.against] + ("" if self.its_backbone == self.backbone else f" ({self.its_backbone})")


def judge_agreement(mean: float, half: float, published: float | None, tolerance: float) -> str:
    """Agreement: the published value lies in our interval, or within the tolerance of our mean.

    An interval wider than the tolerance, or a single seed, cannot tell agreement from chance: unclear.
    """
    if published is None:
        return ""
    if np.isnan(half):
        return "unclear"
    if abs(mean - published) > half and abs(mean - published) > tolerance * published:
        return "higher" if mean > published else "lower"
    return "agrees" if half <= tolerance * published else "unclear"


def _group_lines(
    what: str, cells: list[ExperimentCell], lines: dict[str, Line]
) -> dict[tuple[str, str, str], list[Line]]:
    """(dataset, backbone, variant) -> the lines of its finished seeds that tell this."""
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for cell in cells:
        if what in lines.get(cell.key, {}):
            groups.setdefault((cell.dataset, cell.backbone, cell.variant), []).append(lines[cell.key])
    return groups


def build_entries(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> list[TableEntry]:
    """Every (dataset, backbone, metric, variant, block) with all finished seeds, and the mean over blocks."""
    out = []
    for (dataset, backbone, variant), found in _group_lines("values", cells, lines).items():
        for metric in experiment.metrics:
            rows = [line["values"][metric] for line in found if metric in line["values"]]
            if not rows:  # a central model sends nothing
                continue
            paper = experiment.published.get(dataset, {}).get(backbone, {}).get(metric, {}).get(variant, [])
            for name, told, values in _split_columns(experiment, paper, rows):
                mean, half = confidence_interval(values)
                mark = judge_agreement(mean, half, told, experiment.tolerance)
                out.append(TableEntry(dataset, backbone, metric, variant, name, mean, half, len(values), told, mark))
    return out


def _split_columns(
    experiment: Experiment, paper: list[float | None], rows: list[list[float]]
) -> list[tuple[str, float | None, list[float]]]:
    """Name, published value and our values over seeds of each column; a stream's last value is its mean."""
    names = list(experiment.published_columns)
    told = [*paper, *[None] * len(names)][: len(names)]
    if experiment.kind == "stream" and names == ["mean"]:
        return [("mean", told[0], [row[-1] for row in rows])]
    if experiment.kind == "stream":
        known = [p for p in told if p is not None]
        names.append("mean")
        told.append(round(float(np.mean(known)), 4) if len(known) == len(told) else None)
    if names[0].startswith("round "):
        at = {name: int(name.removeprefix("round ")) for name in names}
        found = [
            (name, told[n], [row[at[name] - 1] for row in rows if len(row) >= at[name]]) for n, name in enumerate(names)
        ]
        return [one for one in found if one[2]]
    return [(name, told[n], [row[n] for row in rows]) for n, name in enumerate(names)]


def compare_variants(
    experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]
) -> list[PairedComparison]:
    """Pairs are (block, user), each averaged over the seeds first: seeds are not new people.

    Where seeds tested different people, as when hidden items leave somebody nothing to ask for, there are no pairs.
    """
    scores: dict[str, dict[tuple[str, str], list[Any]]] = {}
    for cell in cells:
        if cell.key in lines and "users" in lines[cell.key]:
            place = scores.setdefault(cell.dataset, {})
            place.setdefault((cell.backbone, cell.variant), []).append(unpack_scores(lines[cell.key]["users"]))
    out = []
    for dataset, found in scores.items():
        if len({len(run) for runs in found.values() for run in runs}) > 1:
            continue
        means = {place: np.mean(runs, axis=0) for place, runs in found.items()}
        for backbone, variant in means:
            if variant not in experiment.compare:
                continue
            others = {p: m for p, m in means.items() if p[1] != variant and (p[0] != backbone) == experiment.across}
            if not others:
                continue
            best = max(others, key=lambda place: float(others[place].mean()))
            mine, theirs = means[backbone, variant], others[best]
            p = float(stats.ttest_rel(mine, theirs).pvalue) if not np.array_equal(mine, theirs) else 1.0
            gain = float(mine.mean() / theirs.mean() - 1)
            out.append(PairedComparison(dataset, backbone, variant, best[1], gain, p, len(mine), best[0]))
    return out


def _format_entry(entry: TableEntry) -> str:
    """Four decimals, or none where a loss has left all bounds."""
    form = ".4f" if abs(entry.mean) < 1000 else ",.0f"
    half = "" if np.isnan(entry.half) else f" ± {entry.half:{form}}"
    return f"{entry.mean:{form}}{half}"


def _explain_reading(experiment: Experiment, found: list[TableEntry], where: str) -> str:
    """How to read a cell."""
    seeds = max((e.seeds for e in found), default=0)
    unclear = "our interval is wider than that" if seeds > 1 else "one seed has no interval"
    return (
        f"Mean ± half-width of the 95 % interval over {seeds} seed(s); {where} the published value and what we "
        f"say of it (agrees: inside our interval or within "
        f"{experiment.tolerance:.0%}; higher or lower: ours is; unclear: {unclear})."
    )


def summarise_streams(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> list[list[str]]:
    """What a stream's cells also tell, as rows: means over blocks 1.. and seeds, and LA, RA, HM over all blocks."""
    rows = []
    for (dataset, backbone, variant), found in _group_lines("blocks", cells, lines).items():
        later = [b for line in found for b in line["blocks"][1:]]
        means = [float(np.mean([b[k] for b in later])) for k in ("mask_history", "new", "returning")]
        kept = [
            summarise_continual([b["on_blocks"] for b in line["blocks"]], [b["users"] for b in line["blocks"]])
            for line in found
        ]
        means += [float(np.mean([k[name] for k in kept])) for name in ("la", "ra", "hm")]
        rows.append([dataset, backbone, experiment.variants[variant].label, *(f"{m:.4f}" for m in means)])
    return rows


def seed_differences(experiment: Experiment, cells: list[ExperimentCell], lines: dict[str, Line]) -> list[list[str]]:
    """The first metric (of a stream: its mean) minus the baseline's of the same seed, as rows: a seed is a split."""
    scores: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for cell in cells:
        told = lines.get(cell.key, {}).get("values", {}).get(experiment.metrics[0])
        if told:
            place = scores.setdefault((cell.dataset, cell.backbone), {})
            place.setdefault(cell.variant, {})[cell.seed] = told[-1]
    rows = []
    for (dataset, backbone), found in scores.items():
        for variant in experiment.variants:
            both = sorted(found.get(variant, {}).keys() & found.get(experiment.baseline, {}).keys())
            if variant == experiment.baseline or len(both) < 2:
                continue
            mean, half = confidence_interval([found[variant][s] - found[experiment.baseline][s] for s in both])
            said = "above" if mean > half else "below" if mean < -half else "no clear difference"
            rows.append([dataset, backbone, experiment.variants[variant].label, f"{mean:+.4f} ± {half:.4f}", said])
    return rows


def _format_grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown, a line each row."""
    return [_format_line(head), "|" + "---|" * len(head), *map(_format_line, rows)]


def _format_line(cells: list[str]) -> str:
    return "|" + "|".join(f" {one} " if one else " " for one in cells) + "|"


def _differences_markdown(experiment: Experiment, rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    name = experiment.variants[experiment.baseline].label
    what = f"mean {experiment.metrics[0]} of blocks 1.." if experiment.kind == "stream" else experiment.metrics[0]
    said = f"**Against {name}, seed by seed** ({what}, 95 % interval of the paired difference)"
    return [said, "", *_format_grid(["dataset", "backbone", "method", f"minus {name}", ""], rows), ""]


def _streams_markdown(rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    head = ["dataset", "backbone", "method", "history mask", "new users", "returning users", "LA", "RA", "HM"]
    said = (
        "**Beside it** (ndcg@20): all known items hidden; users by kind; learning (LA), retention (RA, every block's "
        "test after the last block, own masks) and their harmonic mean"
    )
    return [said, "", *_format_grid(head, rows), ""]


def failed_cells(cells: list[ExperimentCell], lines: dict[str, Line]) -> list[str]:
    """One sentence per run that could not be finished."""
    return [
        f"{c.dataset}, {c.backbone}, {c.variant}, seed {c.seed}: {lines[c.key]['failed']}"
        for c in cells
        if "failed" in lines.get(c.key, {})
    ]


def to_markdown(
    experiment: Experiment,
    entries: list[TableEntry],
    tests: list[PairedComparison],
    failures: list[str] | None = None,
    also: list[list[str]] | None = None,
    differences: list[list[str]] | None = None,
) -> str:
    """Tables per dataset, backbone and metric; ours above, the paper's value and verdict below."""
    failures = failures or []
    labels = {name: v.label for name, v in experiment.variants.items()}
    text = [f"### {experiment.title}", ""]
    text.append(_explain_reading(experiment, entries, "in brackets"))
    text += ["", *(f"- {note}" for note in [*experiment.notes, *failures]), ""]
    text += _method_tables(experiment, entries, labels) if experiment.rows == "methods" else []
    for metric in experiment.metrics if experiment.rows == "blocks" else ():
        for backbone in dict.fromkeys(e.backbone for e in entries):
            rows = [e for e in entries if e.metric == metric and e.backbone == backbone]
            variants = [v for v in experiment.variants if any(e.variant == v for e in rows)]
            if not variants:
                continue
            text += [f"**{metric}, {backbone}**", ""]
            head = ["dataset", "" if experiment.kind in ("once", "choose") else "block", *(labels[v] for v in variants)]
            text += [*_format_grid(head, _build_block_rows(rows, variants)), ""]
    text += _differences_markdown(experiment, differences or [])
    text += _tests_markdown(experiment, tests, labels) + _streams_markdown(also or [])
    return "\n".join(text).rstrip() + "\n"


def _method_tables(experiment: Experiment, found: list[TableEntry], labels: dict[str, str]) -> list[str]:
    """A table for each dataset and backbone: methods below each other, their metrics side by side."""
    text = []
    for dataset, backbone in dict.fromkeys((e.dataset, e.backbone) for e in found):
        here = {(e.variant, e.metric): e for e in found if (e.dataset, e.backbone) == (dataset, backbone)}
        metrics = [m for m in experiment.metrics if any(metric == m for _, metric in here)]
        rows = []
        for name in dict.fromkeys(variant for variant, _ in here):
            cells = [_format_cell(here[name, m]) if (name, m) in here else "–" for m in metrics]
            seeds = max(e.seeds for (variant, _), e in here.items() if variant == name)
            rows.append([labels[name], *cells, str(seeds)])
        text += [f"**{dataset}, {backbone}**", "", *_format_grid(["method", *metrics, "seeds"], rows), ""]
    return text


def _format_cell(e: TableEntry) -> str:
    """A cell with as many digits as mean something beside large numbers, and the published value."""
    digits = 4 if abs(e.mean) < 10 else 1 if abs(e.mean) < 1000 else 0
    half = "" if np.isnan(e.half) else f" ± {e.half:,.{digits}f}"
    told = f"<br>({e.published:.4f} {e.verdict})" if e.published is not None else ""
    return f"{e.mean:,.{digits}f}{half}{told}"


def _build_block_rows(rows: list[TableEntry], variants: list[str]) -> list[list[str]]:
    """A row for each dataset and block: ours, and the published value below it."""
    out = []
    for dataset, column in dict.fromkeys((e.dataset, e.column) for e in rows):
        here = {e.variant: e for e in rows if e.dataset == dataset and e.column == column}
        cells = []
        for v in variants:
            e = here.get(v)
            told = f"<br>({e.published:.4f} {e.verdict})" if e and e.published is not None else ""
            cells.append(f"{_format_entry(e)}{told}" if e else "–")
        out.append([dataset, column, *cells])
    return out


def _paired_title(experiment: Experiment) -> str:
    whom = "users of blocks 1.." if experiment.kind == "stream" else "users"
    return f"Paired test per user ({experiment.metrics[0]}; pairs are {whom}, averaged over seeds; two-sided t)"


def _test_row(t: PairedComparison, labels: dict[str, str]) -> list[str]:
    told = [f"{t.gain:+.1%}", f"{t.p:.3g}", str(t.pairs)]
    return [t.dataset, t.backbone, labels[t.variant], t.describe_other(labels), *told]


def _tests_markdown(experiment: Experiment, tests: list[PairedComparison], labels: dict[str, str]) -> list[str]:
    if not tests:
        return []
    name, how = _paired_title(experiment).split(" (")
    head = ["dataset", "backbone", "method", "best other", "relative difference", "p", "pairs"]
    return [f"**{name}** ({how}", "", *_format_grid(head, [_test_row(t, labels) for t in tests]), ""]


def count_verdicts(entries: list[TableEntry]) -> dict[str, int]:
    """How many cells with a published value agree, are higher, are lower."""
    marks = [e.verdict for e in entries if e.verdict]
    return {m: marks.count(m) for m in ("agrees", "higher", "lower", "unclear")}


def to_csv(entries: list[TableEntry]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["dataset", "backbone", "metric", "variant", "block", "mean", "half_width_95", "seeds", "published", "verdict"]
    )
    for e in entries:
        half = "" if np.isnan(e.half) else f"{e.half:.6f}"
        told = "" if e.published is None else e.published
        writer.writerow(
            [e.dataset, e.backbone, e.metric, e.variant, e.column, f"{e.mean:.6f}", half, e.seeds, told, e.verdict]
        )
    return out.getvalue()


def to_html(experiment: Experiment, entries: list[TableEntry], tests: list[PairedComparison]) -> str:
    """The same as a page, with pictures of means and intervals beside the published values."""
    from tacita.report.pages import render

    labels = {name: v.label for name, v in experiment.variants.items()}
    marks = count_verdicts(entries)
    told = [f"{mark} {n}" for mark, n in marks.items() if n]
    how = _explain_reading(experiment, entries, "below it")
    page = render(
        "paper.html",
        title=experiment.title,
        about=f"Against {sum(marks.values())} published values: {', '.join(told)}" if told else "",
        version="",
        how=how if told else how.partition(";")[0] + ".",
        notes=experiment.notes,
        drawn=_draw_figures(experiment, entries, labels),
        tables=[*_value_tables(experiment, entries, labels), *_test_tables(experiment, tests, labels)],
    )
    return page.decode()


def _draw_figures(experiment: Experiment, found: list[TableEntry], labels: dict[str, str]) -> list[Figure]:
    """Per metric, dataset, backbone and column (of a stream: the mean) every variant as a dot."""
    places: dict[tuple[str, str, str, str], list[TableEntry]] = {}
    for e in found:
        drawn = experiment.rows == "blocks" or e.metric in experiment.metrics[:2]  # of many metrics the first
        if drawn and (experiment.kind != "stream" or e.column == "mean"):
            places.setdefault((e.metric, e.dataset, e.backbone, e.column), []).append(e)
    out = []
    for place, rows in sorted(places.items(), key=lambda one: experiment.metrics.index(one[0][0])):
        metric, dataset, backbone, column = place
        title = f"{dataset}, {backbone}: {metric}, {column}"
        words = "; ".join(f"{labels[e.variant]}: {_format_entry(e)}" for e in rows)
        drawing = draw_dot_chart(
            [Dot(labels[e.variant], e.mean, e.half, e.published) for e in rows], f"{title}. {words}"
        )
        how = "Dot and line: ours with its 95 % interval."
        out.append(Figure(title, drawing, how + " Diamond: published." * any(e.published is not None for e in rows)))
    return out


def _value_tables(experiment: Experiment, found: list[TableEntry], labels: dict[str, str]) -> list[PageTable]:
    """Rows are variants; a dataset has a table of its own, unless it fills one column only."""
    apart = len({e.column for e in found}) > 1
    places: dict[tuple[str, str, str], dict[str, dict[str, TableEntry]]] = {}
    for e in found:
        table = places.setdefault((e.metric, e.backbone, e.dataset if apart else ""), {})
        table.setdefault(e.variant, {})[e.column if apart else e.dataset] = e
    out = []
    for place, rows in sorted(places.items(), key=lambda one: experiment.metrics.index(one[0][0])):
        columns = list(dict.fromkeys(name for row in rows.values() for name in row))
        told = [
            [elements.TableCell(labels[name]), *(_build_cell(rows[name].get(column)) for column in columns)]
            for name in experiment.variants
            if name in rows
        ]
        out.append(PageTable(", ".join(filter(None, place)), elements.cells("", *columns), told))
    return out


def _build_cell(entry: TableEntry | None) -> elements.TableCell:
    if entry is None:
        return elements.TableCell("–")
    told = "" if entry.published is None else f"{entry.published:.4f} {entry.verdict}"
    return elements.TableCell(_format_entry(entry), note=told, note_kind=entry.verdict)


def _test_tables(experiment: Experiment, tests: list[PairedComparison], labels: dict[str, str]) -> list[PageTable]:
    if not tests:
        return []
    head = ["dataset", "backbone", "method", "best other", "relative difference", "p", "pairs"]
    return [elements.plain_table(_paired_title(experiment), head, [_test_row(t, labels) for t in tests])]
