"""One HTML file from finished run folders, or from a table of a paper.

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
from tacita.report.drawing import COLOURS
from tacita.report.formats import format_metric
from tacita.report.many_runs import compare_runs, label_runs
from tacita.report.one_run import build_quality_series, build_run_body, describe_size, split_segments
from tacita.report.run_data import RunData, exchanges_once
from tacita.report.seeds import SeedGroup, group_seeds, label_groups

PICTURES = (".pdf", ".png", ".svg")
PAGES = (".html", ".htm")


@cache
def _load_templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("tacita.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals["colours"] = COLOURS
    return templates


def render(template: str, **shown: Any) -> bytes:
    """A whole page; a value that a template wants and does not get is an error."""
    text = _load_templates().get_template(template).render(**shown)
    return text.encode("utf-8", "replace")


def _render_run(run: RunData) -> bytes:
    size = describe_size(run)
    return render(
        "run.html",
        title=f"{run.method} on {run.data}",
        about=f"backbone {run.backbone} · seed {run.seed} · {size}",
        version=run.version,
        run=build_run_body(run),
    )


def _render_comparison(runs: list[RunData]) -> bytes:
    labels = label_runs(runs)
    return render(
        "comparison.html",
        title=f"{len(runs)} runs compared",
        about=_list_datasets(runs),
        version=runs[0].version,
        together=compare_runs(runs, labels),
        runs=[build_run_body(run, label) for run, label in zip(runs, labels, strict=True)],
    )


def _list_datasets(runs: list[RunData]) -> str:
    distinct = dict.fromkeys(run.data for run in runs)
    return ", ".join(distinct)


def _draw_run_picture(run: RunData, kind: str) -> bytes:
    model = "" if run.method == run.backbone else f"backbone {run.backbone} · "
    picture = Picture(
        title=f"{run.method} · {model}{run.data} · seed {run.seed}",
        metric=format_metric(run.main_metric),
        valid_metric=format_metric(run.select_by),
        names=run.block_names,
        series=build_quality_series(run),
        segments=split_segments(run, run.valid),
        tries=exchanges_once(run.backbone),
    )
    return draw_picture(picture, kind)


def _draw_means_picture(runs: list[RunData], kind: str) -> bytes:
    """Mean quality, with intervals where runs differ in nothing but the seed."""
    groups = group_seeds(runs)
    metric = _find_common_metric(runs[0].metrics, groups)
    dots = []
    for label, group in zip(label_groups(groups), groups, strict=True):
        mean, half = group.means[metric]
        dots.append(Dot(label, mean, half, None))
    title = f"{format_metric(metric)} on {_list_datasets(runs)}"
    return draw_dot_picture(dots, title, kind)


def _find_common_metric(metrics: list[str], groups: list[SeedGroup]) -> str:
    """The first of some metrics that all groups have."""
    for metric in metrics:
        if all(metric in group.means for group in groups):
            return metric
    raise TacitaError("the runs report no metric in common, so there is no picture of them; draw each by itself.")


def write_report(folders: list[Path], out: Path) -> None:
    """One self-contained page from one or many finished run folders; or their picture, a .pdf, .png or .svg file."""
    if out.suffix.lower() not in PAGES + PICTURES:
        raise TacitaError(f"cannot write a page to {out}; choose an ending of .html, .pdf, .png or .svg.")
    if not folders:
        raise TacitaError("no run folder given; name one or more, as in `tacita report runs/x`.")
    runs = [read_run(folder) for folder in folders]
    suffix = out.suffix.lower()
    if suffix in PICTURES:
        page = _draw_any_picture(runs, suffix[1:])
    elif len(runs) == 1:
        page = _render_run(runs[0])
    else:
        page = _render_comparison(runs)
    write_bytes(out, page)


def _draw_any_picture(runs: list[RunData], kind: str) -> bytes:
    if len(runs) == 1:
        return _draw_run_picture(runs[0], kind)
    return _draw_means_picture(runs, kind)
