"""Runs that differ in nothing but seeds, of the run or of its split, taken together: each mean and how sure it is.

The interval is over these runs: how much chance in the start, in the draws and, where splits differ, in who is asked
for what moves the mean. It says nothing of other people or other data. Runs that have the same numbers throughout
drew nothing apart, and count once.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.metrics import confidence_interval
from tacita.report.data import read_run
from tacita.report.formats import format_metric, format_score
from tacita.report.run_data import RunData

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
        return list(dict.fromkeys(run.split_seed for run in self.runs))

    @property
    def read(self) -> str:
        return self.runs[0].read or ""

    @property
    def protocol(self) -> tuple[Any, ...]:
        """Of every run: groups are compared where they have the same splits."""
        return tuple(sorted({run.protocol for run in self.runs}))

    @property
    def note(self) -> str:
        """Where some runs are no second try: which, and what would be."""
        n = len(self.runs)
        if self.n_distinct == n:
            return ""
        remedy = "vary split.seed" if len(self.splits) < n else "nothing in them is drawn"
        if self.n_distinct == 1:
            return f"these {n} runs are the same numbers: {remedy}"
        return f"{n - self.n_distinct} of these {n} runs have the numbers of another and count once: {remedy}"


def group_seeds(runs: Sequence[RunData]) -> list[SeedGroup]:
    """The runs by recipe, in the order in which recipes come; what is there twice counts once."""
    groups: dict[str, dict[tuple[int, int], RunData]] = {}
    for run in runs:
        groups.setdefault(run.recipe, {}).setdefault((run.seed, run.split_seed), run)
    out = []
    for by_seed in groups.values():
        same = list(by_seed.values())
        tries = list({run.numbers: run for run in same}.values())
        means = {metric: confidence_interval([run.mean[metric] for run in tries]) for metric in same[0].metrics}
        means |= {name: confidence_interval([run.continual[name] for run in tries]) for name in CONTINUAL}
        out.append(SeedGroup(same, len(tries), means))
    return out


def format_interval(mean: float, half: float) -> str:
    return f"{format_score(mean)} ± {half:.4f}" if math.isfinite(half) else format_score(mean)


def label_groups(groups: Sequence[SeedGroup]) -> list[str]:
    """The shortest names that tell recipes apart: the method, and what else differs; at last a folder."""
    fields = [[one.method for one in groups], [one.backbone for one in groups], [one.data for one in groups]]
    used = [field for n, field in enumerate(fields) if n == 0 or len(set(field)) > 1]
    labels = [" · ".join(dict.fromkeys(said)) for said in zip(*used, strict=True)]
    return [x if labels.count(x) == 1 else f"{x} · {one.runs[0].folder}" for x, one in zip(labels, groups, strict=True)]


def make_rows(groups: Sequence[SeedGroup]) -> list[dict[str, Any]]:
    """A row for each recipe: what it is, its seeds, and every mean with the half-width of its interval.

    `name` tells recipes apart that have a method in common: by backbone or data, at last by a folder.
    Rows of one `protocol` share data, splits, mask and metric, and can be compared. `read`: what of a block was read in
    tests, where the model reads histories. `runs`: those with numbers of their own; `note` is about the others.
    """
    metrics = list(dict.fromkeys(metric for one in groups for metric in one.means))
    protocols = list(dict.fromkeys(one.protocol for one in groups))
    rows = []
    for name, one in zip(label_groups(groups), groups, strict=True):
        row: dict[str, Any] = {"name": name, "method": one.method, "backbone": one.backbone, "data": one.data}
        row |= {"read": one.read, "seeds": " ".join(map(str, one.seeds)), "splits": " ".join(map(str, one.splits))}
        row["runs"] = one.n_distinct
        for metric in metrics:
            mean, half = one.means.get(metric, (math.nan, math.nan))
            row |= {metric: _finite_or_none(mean), f"{metric} half-width 95": _finite_or_none(half)}
        stated = [run.epsilon for run in one.runs if run.epsilon is not None]
        row |= {"epsilon": max(stated, default=None), "protocol": protocols.index(one.protocol)}
        rows.append(row | {"note": one.note})
    return rows


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_csv(groups: Sequence[SeedGroup]) -> str:
    rows, out = make_rows(groups), io.StringIO()
    written = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    written.writeheader()
    written.writerows(rows)
    return out.getvalue()


def as_latex(groups: Sequence[SeedGroup]) -> str:
    """A tabular with the rules of booktabs; the best of a column is bold where all rows can be compared."""
    metrics = [m for m in dict.fromkeys(m for one in groups for m in one.means) if m not in CONTINUAL]
    alike = len({one.protocol for one in groups}) == 1
    fair, reading = alike and len(groups) > 1, any(one.read for one in groups)
    best = {m: max((one.means[m][0] for one in groups if m in one.means), default=math.nan) for m in metrics}
    labels = label_groups(groups)
    heads = ["", *(["read"] if reading else []), "runs", *(escape_latex(format_metric(m)) for m in metrics)]
    lines = [
        f"% means over runs; after ± the half-width of the 95 % interval{'' if alike else '; not all comparable'}",
        *(f"% {_join_lines(label)}: {one.note}" for label, one in zip(labels, groups, strict=True) if one.note),
        rf"\begin{{tabular}}{{l{'l' * reading}{'r' * (len(metrics) + 1)}}}",
        r"\toprule",
        " & ".join(heads) + r" \\",
        r"\midrule",
    ]
    for label, one in zip(labels, groups, strict=True):
        cells = [escape_latex(label), *([one.read or "--"] if reading else []), str(one.n_distinct)]
        for metric in metrics:
            mean, half = one.means.get(metric, (math.nan, math.nan))
            words = format_score(mean).replace("–", "--")
            words = rf"\textbf{{{words}}}" if fair and mean == best[metric] else words
            cells.append(words + (rf" $\pm$ {half:.4f}" if math.isfinite(half) else ""))
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def escape_latex(text: str) -> str:
    """A name that LaTeX prints as it is."""
    return "".join(_LATEX.get(letter, letter) for letter in text.replace("·", "-"))


def read_groups(folders: Sequence[Path]) -> list[SeedGroup]:
    if not folders:
        raise TacitaError("no run folder given; name one or more.")
    return group_seeds([read_run(folder) for folder in folders])


def write_tables(folders: Sequence[Path], as_text: dict[Path, str]) -> None:
    """The table of some runs as files: path -> "csv" or "latex"."""
    groups = read_groups(folders)
    for path, kind in as_text.items():
        write_bytes(path, (as_csv if kind == "csv" else as_latex)(groups).encode())
