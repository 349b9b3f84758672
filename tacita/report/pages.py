"""One HTML file from finished run folders, or from what a table of a paper says.

A page loads nothing and runs nothing. Templates escape every text: names come from data.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tacita.core.errors import TacitaError
from tacita.core.files import write_bytes
from tacita.report.charts import Dot, Picture, draw_dot_picture, draw_picture
from tacita.report.data import read_run
from tacita.report.formats import format_metric
from tacita.report.run_data import RunData
from tacita.report.drawing import COLOURS
from tacita.report.many_runs import compare_runs, label_runs
from tacita.report.one_run import build_run_body, describe_size, quality_series, split_segments
from tacita.report.seeds import group_seeds, label_groups

PICTURES = (".png", ".svg")


@cache
def _templates() -> Environment:
    loader = PackageLoader("tacita.report", "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals["colours"] = COLOURS
    return found


def render(template: str, **shown: Any) -> bytes:
    """A whole page; a value that a template wants and does not get is an error."""
    text = _templates().get_template(template).render(**shown)
    return text.encode("utf-8", "replace")


def _render_run(run: RunData) -> bytes:
    about = f"backbone {run.backbone} · seed {run.seed} · {describe_size(run)}"
    title = f"{run.method} on {run.data}"
    return render("run.html", title=title, about=about, version=run.version, run=build_run_body(run))


def _render_comparison(runs: list[RunData]) -> bytes:
    labels = label_runs(runs)
    return render(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        about=", ".join(dict.fromkeys(r.data for r in runs)),
        version=runs[0].version,
        together=compare_runs(runs, labels),
        runs=[build_run_body(run, label) for run, label in zip(runs, labels, strict=True)],
    )


def _draw_run_picture(run: RunData, kind: str) -> bytes:
    title = f"{run.method} · backbone {run.backbone} · {run.data} · seed {run.seed}"
    valid = split_segments(run, run.valid)
    return draw_picture(
        Picture(
            title,
            format_metric(run.main_metric),
            format_metric(run.select_by),
            run.block_names,
            quality_series(run),
            valid,
        ),
        kind,
    )


def _draw_means_picture(runs: list[RunData], kind: str) -> bytes:
    """Mean quality, with intervals where runs differ in nothing but the seed."""
    groups = group_seeds(runs)
    metric = next((m for m in runs[0].metrics if all(m in one.means for one in groups)), None)
    if metric is None:
        raise TacitaError("the runs report no metric in common, so there is no picture of them; draw each by itself.")
    rows = [Dot(label, *one.means[metric], None) for label, one in zip(label_groups(groups), groups, strict=True)]
    on = ", ".join(dict.fromkeys(r.data for r in runs))
    return draw_dot_picture(rows, f"{format_metric(metric)} on {on}", kind)


def write_report(folders: list[Path], out: Path) -> None:
    """One self-contained page from one or many finished run folders; or their picture, a .png or .svg file."""
    if not folders:
        raise TacitaError("no run folder given; name one or more, as in `tacita report runs/x`.")
    kind = out.suffix.lower()
    runs = [read_run(folder) for folder in folders]
    if kind in PICTURES:
        page = _draw_run_picture(runs[0], kind[1:]) if len(runs) == 1 else _draw_means_picture(runs, kind[1:])
    else:
        page = _render_run(runs[0]) if len(runs) == 1 else _render_comparison(runs)
    write_bytes(out, page)
