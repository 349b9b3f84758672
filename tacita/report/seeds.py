"""Runs that differ in nothing but seeds, of the run or of its split, as one group: each mean and how sure it is.

The interval is over these runs. It shows how much chance moves the mean: in the start, in the draws and, where splits
differ, in what is held out of whom. It says nothing of other people or other data. Runs that have the same numbers
throughout drew nothing apart, and count once.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.metrics import compute_confidence_interval
from tacita.report.data import read_run
from tacita.report.formats import format_metric, format_score
from tacita.report.labels import label_by_fields
from tacita.report.run_data import RunData
from tacita.report.text_tables import render_markdown_table

CONTINUAL = ("la", "ra", "hm")
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class SeedGroup:
    """One recipe, run with one seed or several, of the run or of its split."""

    runs: list[RunData]
    n_distinct: int  # how many of them have numbers of their own: what the intervals are over
    means: dict[str, tuple[float, float]]  # metric -> mean, half-width of its 95 % interval (NaN of one run)

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def backbone(self) -> str:
        return self.runs[0].backbone

    @property
    def data(self) -> str:
        return self.runs[0].data

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def splits(self) -> list[int]:
        distinct = dict.fromkeys(run.split_seed for run in self.runs)
        return list(distinct)

    @property
    def read(self) -> str:
        return self.runs[0].read or ""

    @property
    def protocol(self) -> tuple[Any, ...]:
        """Of every run: groups are compared where they have the same splits."""
        protocols = {run.protocol for run in self.runs}
        return tuple(sorted(protocols))

    @property
    def note(self) -> str:
        """Where some runs are no second try: which, and what would be."""
        n_runs = len(self.runs)
        n_repeats = n_runs - self.n_distinct
        if n_repeats == 0:
            return ""
        can_vary_split = len(self.splits) < n_runs
        remedy = "vary split.seed" if can_vary_split else "nothing in them is drawn"
        if self.n_distinct == 1:
            return f"these {n_runs} runs are the same numbers: {remedy}"
        return f"{n_repeats} of these {n_runs} runs have the numbers of another and count once: {remedy}"

    def interval(self, metric: str) -> tuple[float, float]:
        """Mean and half-width; NaN where the metric was not measured."""
        return self.means.get(metric, (math.nan, math.nan))


def group_seeds(runs: Sequence[RunData]) -> list[SeedGroup]:
    """The runs by recipe, in the order in which recipes come; what is there twice counts once."""
    recipes: dict[str, dict[tuple[int, int], RunData]] = {}
    for run in runs:
        by_seed = recipes.setdefault(run.recipe, {})
        seeds = (run.seed, run.split_seed)
        by_seed.setdefault(seeds, run)
    groups = []
    for by_seed in recipes.values():
        same = list(by_seed.values())
        groups.append(_make_group(same))
    return groups


def _make_group(runs: list[RunData]) -> SeedGroup:
    """One recipe; intervals are over runs with numbers of their own."""
    by_numbers = {run.numbers: run for run in runs}
    distinct = list(by_numbers.values())
    means = {}
    for metric in runs[0].metrics:
        values = [run.mean[metric] for run in distinct]
        means[metric] = compute_confidence_interval(values)
    for name in CONTINUAL:
        values = [run.continual[name] for run in distinct]
        means[name] = compute_confidence_interval(values)
    return SeedGroup(runs, len(distinct), means)


def format_interval(mean: float, half: float) -> str:
    if not math.isfinite(half):
        return format_score(mean)
    return f"{format_score(mean)} ± {half:.4f}"


def list_metrics(metrics: Iterable[Iterable[str]]) -> list[str]:
    """The metrics of several runs or groups, each once, in the order in which they come."""
    distinct: dict[str, None] = {}
    for names in metrics:
        distinct |= dict.fromkeys(names)
    return list(distinct)


def label_groups(groups: Sequence[SeedGroup]) -> list[str]:
    """The shortest names that tell recipes apart: the method, and what else differs; at last a folder."""
    fields = [
        [group.method for group in groups],
        [group.backbone for group in groups],
        [group.data for group in groups],
    ]
    folders = [group.runs[0].folder for group in groups]
    return label_by_fields(fields, folders)


def make_rows(groups: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """A row for each recipe: what it is, its seeds, and every mean with the half-width of its interval.

    `name` tells recipes apart that have a method in common: by backbone or data, at last by a folder.
    Rows of one `protocol` share data, splits, mask and metric, and can be compared. `read`: what of a block was read in
    tests, where the model reads histories. `runs`: those with numbers of their own; `note` is about the others.
    """
    metrics = list_metrics(group.means for group in groups)
    protocols = list(dict.fromkeys(group.protocol for group in groups))
    rows = []
    for name, group in zip(label_groups(groups), groups, strict=True):
        row: dict[str, Any] = {
            "name": name,
            "method": group.method,
            "backbone": group.backbone,
            "data": group.data,
            "read": group.read,
            "seeds": " ".join(map(str, group.seeds)),
            "splits": " ".join(map(str, group.splits)),
            "runs": group.n_distinct,
        }
        for metric in metrics:
            mean, half = group.interval(metric)
            row[metric] = _finite_or_none(mean)
            row[f"{metric} half-width 95"] = _finite_or_none(half)
        epsilons = [run.epsilon for run in group.runs if run.epsilon is not None]
        row["epsilon"] = max(epsilons, default=None)
        row["protocol"] = protocols.index(group.protocol)
        row["note"] = group.note
        rows.append(row)
    return rows


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render_csv(groups: Sequence[SeedGroup]) -> str:
    rows = make_rows(groups)
    text = io.StringIO()
    columns = list(rows[0])
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def render_markdown(groups: Sequence[SeedGroup]) -> str:
    """A table of Markdown: mean and 95 % interval of every metric, a row for each recipe."""
    metrics = list_metrics(group.means for group in groups)
    rows = []
    for label, group in zip(label_groups(groups), groups, strict=True):
        row = {"run": label.replace("|", "\\|"), "seeds": str(group.n_distinct)}
        for metric in metrics:
            row[metric] = format_interval(*group.means[metric]) if metric in group.means else ""
        rows.append(row)
    return "\n".join(render_markdown_table(rows)) + "\n"


def render_latex(groups: Sequence[SeedGroup]) -> str:
    """A tabular with the rules of booktabs; the best of a column is bold where all rows can be compared."""
    all_metrics = list_metrics(group.means for group in groups)
    metrics = [metric for metric in all_metrics if metric not in CONTINUAL]
    protocols = {group.protocol for group in groups}
    is_comparable = len(protocols) == 1
    has_reading = any(group.read for group in groups)
    best: dict[str, float] = {}
    if is_comparable and len(groups) > 1:
        best = {metric: _find_best_mean(groups, metric) for metric in metrics}
    labels = label_groups(groups)
    lines = _render_latex_head(groups, labels, metrics, is_comparable, has_reading)
    for label, group in zip(labels, groups, strict=True):
        row = [escape_latex(label)]
        if has_reading:
            row.append(group.read or "--")
        row.append(str(group.n_distinct))
        row += [_render_latex_interval(group, metric, best) for metric in metrics]
        lines.append(_join_latex_row(row))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _find_best_mean(groups: Sequence[SeedGroup], metric: str) -> float:
    means = []
    for group in groups:
        if metric in group.means:
            mean, _ = group.means[metric]
            means.append(mean)
    return max(means, default=math.nan)


def _render_latex_head(
    groups: Sequence[SeedGroup], labels: Sequence[str], metrics: Sequence[str], is_comparable: bool, has_reading: bool
) -> list[str]:
    """Comments, columns and their titles."""
    warning = "" if is_comparable else "; not all comparable"
    lines = [f"% means over runs; after ± the half-width of the 95 % interval{warning}"]
    for label, group in zip(labels, groups, strict=True):
        if group.note:
            one_line = " ".join(label.split())
            lines.append(f"% {one_line}: {group.note}")
    texts = "ll" if has_reading else "l"
    numbers = "r" * (len(metrics) + 1)
    titles = ["", "read", "runs"] if has_reading else ["", "runs"]
    titles += [escape_latex(format_metric(metric)) for metric in metrics]
    lines += [
        rf"\begin{{tabular}}{{{texts}{numbers}}}",
        r"\toprule",
        _join_latex_row(titles),
        r"\midrule",
    ]
    return lines


def _render_latex_interval(group: SeedGroup, metric: str, best: dict[str, float]) -> str:
    """A mean, bold where it is the best, and the half-width of its interval."""
    mean, half = group.interval(metric)
    words = format_score(mean).replace("–", "--")
    if mean == best.get(metric):
        words = rf"\textbf{{{words}}}"
    if math.isfinite(half):
        words += rf" $\pm$ {half:.4f}"
    return words


def _join_latex_row(row: Sequence[str]) -> str:
    return " & ".join(row) + r" \\"


def escape_latex(text: str) -> str:
    """A name that LaTeX prints as it is."""
    plain = text.replace("·", "-")
    return "".join(_LATEX.get(letter, letter) for letter in plain)


def read_groups(folders: Sequence[Path]) -> list[SeedGroup]:
    if not folders:
        raise TacitaError("no run folder given; name one or more.")
    return group_seeds([read_run(folder) for folder in folders])


def write_tables(folders: Sequence[Path], as_text: dict[Path, str]) -> None:
    """The table of some runs as files: path -> "csv", "latex" or "markdown"."""
    groups = read_groups(folders)
    for path, kind in as_text.items():
        text = TABLE_RENDERERS[kind](groups)
        write_bytes(path, text.encode())


TABLE_RENDERERS = {"csv": render_csv, "latex": render_latex, "markdown": render_markdown}
