"""One HTML page from finished run folders: numbers beside their controls, pictures, where they came from.

The page is a single file that loads nothing and runs nothing. Every text is escaped: names come from data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tacita.errors import TacitaError
from tacita.files import write_bytes
from tacita.report_charts import (
    GREY,
    MOST_CELLS,
    PAGE_CSS,
    Look,
    Segment,
    Series,
    bars,
    curve,
    draw_picture,
    heat,
    legend,
    level_bars,
    lines,
    palette_css,
)
from tacita.report_data import Curve, RunData, control_name, human_bytes, nice, percent, read_run, shown, verdicts

MOST_LINES = 16  # runs in one chart
METHOD, UNKNOWN = Look(0), Look(4, 1, 0)
LOOKS = {
    "popular": Look(1, 1, 1),
    "alone": Look(3, 2, 2),
    "linear": Look(2, 3, 3),
    "random": Look(GREY, 2, 4),
}
MEANING = {
    "ndcg": "how high the held-out items stand in the list",
    "recall": "share of a user's held-out items that made the list",
    "precision": "share of the list that was held out",
    "hr": "share of users with at least one hit",
    "mrr": "1 / rank of the first hit",
    "auc": "share of (wanted, other) pairs in the right order",
}


def _series(run: RunData) -> list[Series]:
    """The method, then its controls, per block in the main metric."""
    out = [Series(run.method, [b.scores[run.main] for b in run.blocks], METHOD)]
    for c in run.controls:
        out.append(Series(c.name, [b[run.main] for b in c.blocks], LOOKS.get(c.key, UNKNOWN)))
    return out


def _group_series(run: RunData) -> list[Series]:
    """New and returning users per block; a group with nobody in it has no value."""

    def values(group: str) -> list[float]:
        counted = [b.groups[group] for b in run.blocks]
        return [scores[run.main] if users else math.nan for users, scores in counted]

    return [
        Series("new users", values("new"), Look(1)),
        Series("returning users", values("returning"), Look(0)),
    ]


def _segments(run: RunData, values: Curve, mark_best: bool = True) -> list[Segment]:
    out, start = [], 0
    for n, block in enumerate(run.blocks):
        points = sorted((start + r, v) for (b, r), v in values.items() if b == n and math.isfinite(v))
        end = start + max(block.rounds, 1)
        score = run.valid.get((n, block.best_round), block.valid)
        best = (start + block.best_round, score) if mark_best and math.isfinite(score) else None
        out.append(Segment(f"block {n}", start, end, [p for p in points if p[0] <= end], best))
        start = end
    return out


def _alt(series: Sequence[Series]) -> str:
    return "; ".join(f"{s.name}: {', '.join(map(shown, s.values[:12]))}" for s in series)


def _figure(title: str, drawing: str, how: str, key: str = "") -> str:
    return f"<figure><h3>{escape(title)}</h3>{key}{drawing}<figcaption>{escape(how)}</figcaption></figure>"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the first of each row names it."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{c}</td>" for c in row[1:])}</tr>' for row in rows)
    return (
        f'<section class="card"><h4>{escape(caption)}</h4><div class="scroll" tabindex="0" role="group" '
        f'aria-label="{escape(caption)}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        "</section>"
    )


def _tiles(run: RunData) -> str:
    popular = run.popular.mean[run.main] if run.popular else math.nan
    tiles = [
        (shown(run.score), nice(run.main), run.averaged),
        (percent(run.score, popular), "against most popular", f"which reaches {shown(popular)}"),
        (shown(run.continual["la"]), "LA, learned", "mean on each block just after it"),
        (shown(run.continual["ra"]), "RA, retained", "mean on all blocks at the end"),
        (shown(run.continual["hm"]), "HM", "harmonic mean of LA and RA"),
        (human_bytes(run.up), "up", "per client and round"),
        (human_bytes(run.down), "down", "per client and round"),
    ]
    if not run.popular:
        del tiles[1]
    cells = (
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>"
        for value, name, note in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _quality_tables(run: RunData) -> str:
    """Per metric: one row a block, the method beside its controls; what beats the method is marked."""
    method = escape(run.method)
    head = ["block", "users", f"<b>{method}</b>", *(escape(c.name) for c in run.controls)]
    head.append(f"{method}, {run.other_mask} mask")
    out = []
    for metric in run.metrics:
        rows = []
        for n, block in enumerate(run.blocks):
            theirs = [c.blocks[n][metric] for c in run.controls]
            row = _quality_row(block.scores[metric], theirs, block.second[metric])
            rows.append([str(n), f"{block.users:,}", *row])
        if len(run.blocks) > 1:
            second = [b.second[metric] for b in run.blocks[1:] if b.users] or [math.nan]
            theirs = [c.mean[metric] for c in run.controls]
            row = _quality_row(run.mean[metric], theirs, sum(second) / len(second))
            whole = 1 < len(second) == len(run.blocks) - 1
            rows.append([f"mean 1–{len(second)}" if whole else "mean", "", *row])
        caption = f"{nice(metric)}: {MEANING.get(metric.partition('@')[0], '')}"
        out.append(_table(caption, head, rows))
    return "".join(out)


def _quality_row(mine: float, theirs: Sequence[float], second: float) -> list[str]:
    marked = [f'<span class="beats">▲ {shown(v)}</span>' if v > mine else shown(v) for v in theirs]
    return [f"<b>{shown(mine)}</b>", *marked, shown(second)]


def _rounds_table(run: RunData) -> str:
    new, back = (series.values for series in _group_series(run))
    rows = []
    for n, b in enumerate(run.blocks):
        groups = [f"{shown(v[n])} ({b.groups[g][0]:,})" for v, g in ((new, "new"), (back, "returning"))]
        spent = [f"{b.rounds:,}", f"{b.best_round:,}", shown(b.valid), human_bytes(b.up), human_bytes(b.down)]
        rows.append([str(n), *groups, *spent])
    head = ["block", "new (users)", "returning (users)", "rounds", "best round", "validation", "up", "down"]
    return _table(f"{nice(run.main)} by kind of user; rounds; bytes per client and round", head, rows)


def _quality_figure(run: RunData) -> str:
    series, metric = _series(run), nice(run.main)
    if len(run.blocks) == 1:
        return _figure("Test quality", level_bars(series, metric, _alt(series)), "Longer is better.")
    how = "Higher is better. A method worth having stands above the controls in every block."
    drawing = lines(series, run.names, metric, _alt(series))
    return _figure("Test quality per block", drawing, how, legend(series))


def _curve_figure(run: RunData) -> str:
    segments = _segments(run, run.valid)
    if not any(s.points for s in segments):
        return ""
    best = ", ".join(f"block {n} round {b.best_round}" for n, b in enumerate(run.blocks[:12]))
    drawing = curve(segments, f"Validation over rounds; best: {best}")
    how = "The line should rise within a block. A ring marks the round that was kept and tested."
    return _figure(f"Validation {nice(run.select_by)} over rounds", drawing, how)


NOTES = {
    "replayed": ("Items replayed per returning client", "Falls as people's rankings move away from the last block's."),
    "gamma": ("Weight of an item's earlier row", "Mean over known items; near the upper end, items hardly move."),
}


def _notes_figures(run: RunData) -> str:
    """What the method's parts noted in each round."""
    out = ""
    for name, values in run.notes.items():
        title, how = NOTES.get(name, (name, "As noted by the method in each round."))
        out += _figure(title, curve(_segments(run, values, mark_best=False), f"{title} over rounds"), how)
    return out


def _memory_figure(run: RunData) -> str:
    if len(run.blocks) == 1:
        return ""
    matrix = [b.on_blocks for b in run.blocks]
    last = ", ".join(map(shown, matrix[-1][:12]))
    drawing = heat(matrix, f"Quality on each block after each block; after the last: {last}")
    how = f"Read down a column: {nice(run.select_by)} on one block's test as later blocks are learned, with "
    how += "the change since that block was new. Fainter further down means forgetting."
    if len(matrix) > MOST_CELLS:
        how += f" {MOST_CELLS} of {len(matrix)} blocks are shown."
    return _figure("What is remembered", drawing, how)


def _groups_figure(run: RunData) -> str:
    groups = _group_series(run)
    how = "New users are seen for the first time in the block. A dash: nobody of that kind was tested."
    drawing = bars(groups, run.names, nice(run.main), _alt(groups))
    return _figure("New and returning users", drawing, how, legend(groups, lines=False))


def _size(run: RunData) -> str:
    n = len(run.blocks)
    return f"{run.users:,} users, {run.items:,} items, {n} block{'s' if n > 1 else ''}"


def _origin(run: RunData) -> str:
    facts = {
        "data": escape(run.data),
        "size": _size(run),
        **({"filtering": escape(run.removed)} if run.removed else {}),
        "fingerprint": f"<code>{escape(run.fingerprint)}</code> of data and split together",
        "protocol": f"selected by {escape(nice(run.select_by))} on validation, ranking {run.ranking}, "
        f"mask '{escape(run.mask)}'",
        "folder": escape(run.folder),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    return (
        f"<dl>{listed}</dl><details><summary>Effective settings (config.toml)</summary>"
        f"<pre>{escape(run.settings)}</pre></details>"
    )


def _about(run: RunData) -> str:
    return f"backbone {run.backbone} · {run.data} · seed {run.seed}"


def _run_body(run: RunData) -> str:
    callouts = "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in verdicts(run))
    figures = _quality_figure(run) + _curve_figure(run) + _memory_figure(run) + _groups_figure(run)
    figures += _notes_figures(run)
    notes = f"Last column: the same model with the mask '{run.other_mask}' instead of '{run.mask}'. "
    notes += "▲: the control beats the method. One run is one seed: small differences may be chance. "
    notes += "".join(f"Not run: {control_name(key)} ({why}). " for key, why in run.skipped.items())
    return (
        f'{callouts}{_tiles(run)}<div class="figures">{figures}</div><h3>Numbers</h3>{_quality_tables(run)}'
        f'<p class="how">{escape(notes)}</p>{_rounds_table(run)}<h3>Where this comes from</h3>{_origin(run)}'
    )


def _labels(runs: Sequence[RunData]) -> list[str]:
    """The shortest names that tell the runs apart: method, and what else differs; at last the folder."""
    fields: list[Callable[[RunData], str]] = [
        lambda r: r.method,
        lambda r: r.backbone,
        lambda r: r.data if len(r.data) <= 30 else r.data[:29] + "…",
        lambda r: f"seed {r.seed}",
    ]
    used = [f for n, f in enumerate(fields) if n == 0 or len({f(r) for r in runs}) > 1]
    labels = [" · ".join(dict.fromkeys(f(r) for f in used)) for r in runs]
    return [x if labels.count(x) == 1 else f"{x} · {r.folder}" for x, r in zip(labels, runs, strict=True)]


def _comparison(runs: Sequence[RunData], labels: Sequence[str], fair: bool) -> str:
    metrics = list(dict.fromkeys(m for r in runs for m in r.metrics))
    columns = [[r.mean[m] for r in runs] for m in metrics]
    columns += [[r.continual[k] for r in runs] for k in ("la", "ra", "hm")]
    best = [max((v for v in column if math.isfinite(v)), default=math.nan) for column in columns]
    rows = []
    for n, run in enumerate(runs):
        numbers = [(column[n], top) for column, top in zip(columns, best, strict=True)]
        cells = [f"<b>{shown(v)}</b>" if fair and v == top else shown(v) for v, top in numbers]
        names = escape(", ".join(c.name for c in run.better))
        flag = f'<span class="beats list">{names}</span>' if names else "none" if run.controls else "not run"
        name = f"{escape(labels[n])}<small>{escape(run.folder)}</small>"
        rows.append([name, *cells, human_bytes(run.up), human_bytes(run.down), flag])
    head = ["run", *map(nice, metrics), "LA", "RA", "HM", "up", "down", "controls that are better"]
    caption = "Means over blocks 1 and later; bytes per client and round"
    return _table(caption, [escape(h) for h in head], rows)


def _seeds_table(runs: Sequence[RunData]) -> str:
    """Mean and range where the same thing was run with several seeds."""
    groups: dict[tuple[Any, ...], list[RunData]] = {}
    for run in runs:
        groups.setdefault((run.method, run.backbone, run.data, run.main, run.protocol), []).append(run)
    rows = []
    for same in groups.values():
        if len({r.seed for r in same}) > 1:
            one, values = same[0], [r.score for r in same]
            spread = [shown(v) for v in (sum(values) / len(values), min(values), max(values))]
            named = " · ".join(dict.fromkeys([one.method, one.backbone]))
            what = f"{escape(named)}<small>{escape(one.data)}</small>"
            rows.append([what, escape(nice(one.main)), str(len(same)), *spread])
    return _table("Over seeds", ["what", "metric", "runs", "mean", "lowest", "highest"], rows) if rows else ""


def _together(runs: Sequence[RunData], labels: Sequence[str], fair: bool) -> str:
    """One chart of quality per block for all."""
    metric = next((m for m in runs[0].metrics if all(m in r.mean for r in runs)), None)
    if metric is None:
        return "<p>The runs report no metric in common, so there is no common chart.</p>"
    chosen = sorted(sorted(range(len(runs)), key=lambda n: -runs[n].mean[metric])[:MOST_LINES])
    longest = max(len(runs[n].blocks) for n in chosen)
    series = []
    for place, n in enumerate(chosen):
        values = [b.scores[metric] for b in runs[n].blocks]
        series.append(Series(labels[n], values + [math.nan] * (longest - len(values)), Look.number(place)))
    few = f"The best {MOST_LINES} of {len(runs)} runs. " if len(runs) > MOST_LINES else ""
    means = [Series(s.name, [runs[n].mean[metric]], s.look) for s, n in zip(series, chosen, strict=True)]
    if fair and (popular := runs[0].popular):
        series.append(Series("most popular", [b[metric] for b in popular.blocks], LOOKS["random"]))
        means.append(Series("most popular", [popular.mean[metric]], LOOKS["random"]))
    means.sort(key=lambda s: -s.values[0])
    out = _figure("Mean test quality", level_bars(means, nice(metric), _alt(means)), f"{few}Longer is better.")
    if longest > 1:
        how = f"{few}Higher is better. Blocks are comparable only between runs on the same data and split."
        drawing = lines(series, [str(n) for n in range(longest)], nice(metric), _alt(series))
        out = _figure("Test quality per block", drawing, how, legend(series)) + out
    return f'<div class="figures">{out}</div>'


def _many_body(runs: Sequence[RunData]) -> str:
    labels, fair = _labels(runs), len({r.protocol for r in runs}) == 1
    warning = "These runs differ in data, split, mask or metric: compare only those that agree in these."
    each = "".join(
        f'<details class="run"><summary>{escape(label)} <small>{escape(run.folder)}</small></summary>'
        f"{_run_body(run)}</details>"
        for label, run in zip(labels, runs, strict=True)
    )
    return (
        ("" if fair else f'<p class="note">{warning}</p>')
        + _together(runs, labels, fair)
        + _comparison(runs, labels, fair)
        + f"{_seeds_table(runs)}<h2>Each run</h2>{each}"
    )


def _page(title: str, about: str, body: str, version: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · tacita</title><style>{palette_css()}{PAGE_CSS}</style></head><body>"
        f'<header><p class="brand">tacita report</p><h1>{escape(title)}</h1><p>{escape(about)}</p></header>'
        f"<main>{body}</main><footer>tacita {escape(version)}. "
        "This page is one file: it loads nothing and runs nothing.</footer></body></html>\n"
    )


def write_report(folders: list[Path], out: Path) -> None:
    """One self-contained HTML page from one or many finished run folders."""
    if not folders:
        raise TacitaError("no run folder given; name one or more, as in `tacita report runs/x`.")
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    if len(runs) == 1:
        about = f"backbone {first.backbone} · seed {first.seed} · {_size(first)}"
        page = _page(f"{first.method} on {first.data}", about, _run_body(first), first.version)
    else:
        data = ", ".join(dict.fromkeys(r.data for r in runs))
        page = _page(f"{len(runs)} runs compared", data, _many_body(runs), first.version)
    write_bytes(out, page.encode("utf-8", "replace"))


def picture(folder: Path, out: Path) -> None:
    """Quality per block beside the controls and the validation curve, as a PNG or SVG file."""
    if out.suffix.lower() not in (".png", ".svg"):
        raise TacitaError(f"cannot draw {out.name}: a picture is a .png or .svg file.")
    run = read_run(folder)
    title = f"{run.method} · {_about(run)}"
    draw_picture(title, nice(run.main), nice(run.select_by), run.names, _series(run), _segments(run, run.valid), out)
