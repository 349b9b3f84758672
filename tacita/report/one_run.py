"""What a page says of one run: its numbers beside their controls, pictures, and where they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacita.report import charts
from tacita.report.charts import GREY, MOST_CELLS, Segment, Series, SeriesStyle
from tacita.report.elements import Fact, Figure, PageTable, RunBody, TableCell, Tile, cells, plain_table
from tacita.report.formats import format_bytes, format_change, format_metric, format_score
from tacita.report.judgement import judge_run
from tacita.report.run_data import Curve, RunData, control_name

METHOD_STYLE, UNKNOWN_STYLE = SeriesStyle(0), SeriesStyle(4, 1, 0)
CONTROL_STYLES = {
    "popular": SeriesStyle(1, 1, 1),
    "alone": SeriesStyle(3, 2, 2),
    "linear": SeriesStyle(2, 3, 3),
    "random": SeriesStyle(GREY, 2, 4),
}
MEANING = {
    "ndcg": "how high the held-out items stand in the list",
    "ndcg-k": "the same, as if as many items had been held out as the list is long",
    "recall": "share of a user's held-out items that made the list",
    "precision": "share of the list that was held out",
    "hr": "share of users with at least one hit",
    "mrr": "1 / rank of the first hit",
    "auc": "share of (wanted, other) pairs in the right order",
}
NOTES = {
    "replayed": ("Items replayed per returning client", "Falls as people's rankings move away from the last block's."),
    "gamma": ("Weight of an item's earlier row", "Mean over known items; near the upper end, items hardly move."),
}


def quality_series(run: RunData) -> list[Series]:
    """The method, then its controls, per block in the main metric."""
    out = [Series(run.method, [b.scores[run.main_metric] for b in run.blocks], METHOD_STYLE)]
    for c in run.controls:
        out.append(Series(c.name, [b[run.main_metric] for b in c.blocks], CONTROL_STYLES.get(c.key, UNKNOWN_STYLE)))
    return out


def _group_series(run: RunData) -> list[Series]:
    """New and returning users per block; a group with nobody in it has no value."""

    def values(group: str) -> list[float]:
        counted = [b.groups[group] for b in run.blocks]
        return [scores[run.main_metric] if users else math.nan for users, scores in counted]

    return [
        Series("new users", values("new"), SeriesStyle(1)),
        Series("returning users", values("returning"), SeriesStyle(0)),
    ]


def split_segments(run: RunData, values: Curve, mark_best: bool = True) -> list[Segment]:
    """A curve cut into blocks, rounds counted over the whole run."""
    out, start = [], 0
    for n, block in enumerate(run.blocks):
        points = sorted((start + r, v) for (b, r), v in values.items() if b == n and math.isfinite(v))
        end = start + max(block.rounds, 1)
        score = run.valid.get((n, block.best_round), block.valid)
        kept = mark_best and 0 < block.best_round <= block.rounds and math.isfinite(score)
        best = (start + block.best_round, score) if kept else None
        out.append(Segment(f"block {n}", start, end, [p for p in points if p[0] <= end], best))
        start = end
    return out


def describe_series(series: Sequence[Series]) -> str:
    """A chart for those who do not see it."""
    return "; ".join(f"{s.name}: {', '.join(map(format_score, s.values[:12]))}" for s in series)


def _tiles(run: RunData) -> list[Tile]:
    popular = run.popular.mean[run.main_metric] if run.popular else math.nan
    against = Tile(format_change(run.score, popular), "against most popular", f"which reaches {format_score(popular)}")
    return [
        Tile(format_score(run.score), format_metric(run.main_metric), run.mean_label),
        *([against] if run.popular else []),
        Tile(format_score(run.continual["la"]), "LA, learned", "mean on each block just after it"),
        Tile(format_score(run.continual["ra"]), "RA, retained", "mean on all blocks at the end"),
        Tile(format_score(run.continual["hm"]), "HM", "harmonic mean of LA and RA"),
        Tile(format_bytes(run.up), "up", f"per client and {run.exchange_unit}"),
        Tile(format_bytes(run.down), "down", f"per client and {run.exchange_unit}"),
    ]


def _quality_table(run: RunData, metric: str) -> PageTable:
    """One row a block, the method beside its controls; what beats the method is marked."""
    rows = []
    for n, block in enumerate(run.blocks):
        theirs = [c.blocks[n][metric] for c in run.controls]
        row = _quality_row(block.scores[metric], theirs, block.other_mask_scores[metric])
        rows.append([*cells(str(n), f"{block.users:,}"), *row])
    if len(run.blocks) > 1:
        second = [b.other_mask_scores[metric] for b in run.blocks[1:] if b.users] or [math.nan]
        row = _quality_row(run.mean[metric], [c.mean[metric] for c in run.controls], sum(second) / len(second))
        whole = 1 < len(second) == len(run.blocks) - 1
        rows.append([*cells(f"mean 1–{len(second)}" if whole else "mean", ""), *row])
    names = cells(*(c.name for c in run.controls), f"{run.method}, {run.other_mask} mask")
    head = [*cells("block", "users"), TableCell(run.method, "strong"), *names]
    return PageTable(f"{format_metric(metric)}: {MEANING.get(metric.partition('@')[0], '')}", head, rows)


def _quality_row(score: float, control_scores: Sequence[float], second: float) -> list[TableCell]:
    marked = [
        TableCell(f"▲ {format_score(v)}", "beats") if v > score else TableCell(format_score(v)) for v in control_scores
    ]
    return [TableCell(format_score(score), "strong"), *marked, TableCell(format_score(second))]


def _rounds_table(run: RunData) -> PageTable:
    new, back = (series.values for series in _group_series(run))
    rows = []
    for n, b in enumerate(run.blocks):
        groups = [f"{format_score(v[n])} ({b.groups[g][0]:,})" for v, g in ((new, "new"), (back, "returning"))]
        spent = [f"{b.rounds:,}", f"{b.best_round:,}", format_score(b.valid), format_bytes(b.up), format_bytes(b.down)]
        rows.append([str(n), *groups, *spent])
    head = ["block", "new (users)", "returning (users)", "rounds", "best round", "validation", "up", "down"]
    return plain_table(
        f"{format_metric(run.main_metric)} by kind of user; rounds; bytes per client and {run.exchange_unit}",
        head,
        rows,
    )


def _quality_figure(run: RunData) -> Figure:
    series, metric = quality_series(run), format_metric(run.main_metric)
    if len(run.blocks) == 1:
        return Figure(
            "Test quality", charts.draw_level_bars(series, metric, describe_series(series)), "Longer is better."
        )
    how = "Higher is better. A method worth having stands above the controls in every block."
    drawing = charts.draw_line_chart(series, run.block_names, metric, describe_series(series))
    return Figure("Test quality per block", drawing, how)


def _curve_figures(run: RunData) -> list[Figure]:
    found = split_segments(run, run.valid)
    if not any(s.points for s in found):
        return []
    best = ", ".join(f"block {n} round {b.best_round}" for n, b in enumerate(run.blocks[:12]))
    drawing = charts.draw_curve_chart(found, f"Validation over rounds; best: {best}")
    how = "The line should rise within a block. A ring marks the round that was kept and tested."
    return [Figure(f"Validation {format_metric(run.select_by)} over rounds", drawing, how)]


def _memory_figures(run: RunData) -> list[Figure]:
    if len(run.blocks) == 1:
        return []
    matrix = [b.on_blocks for b in run.blocks]
    last = ", ".join(map(format_score, matrix[-1][:12]))
    drawing = charts.draw_heat_map(matrix, f"Quality on each block after each block; after the last: {last}")
    how = f"Read down a column: {format_metric(run.select_by)} on one block's test as later blocks are learned, with "
    how += "the change since that block was new. Fainter further down means forgetting."
    if len(matrix) > MOST_CELLS:
        how += f" {MOST_CELLS} of {len(matrix)} blocks are shown."
    return [Figure("What is remembered", drawing, how)]


def _groups_figure(run: RunData) -> Figure:
    groups = _group_series(run)
    how = "New users are seen for the first time in the block. A dash: nobody of that kind was tested."
    return Figure(
        "New and returning users",
        charts.draw_bar_chart(groups, run.block_names, format_metric(run.main_metric), describe_series(groups)),
        how,
    )


def _notes_figures(run: RunData) -> list[Figure]:
    """What the method's parts noted in each round."""
    out = []
    for name, values in run.notes.items():
        title, how = NOTES.get(name, (name, "As noted by the method in each round."))
        drawing = charts.draw_curve_chart(split_segments(run, values, mark_best=False), f"{title} over rounds")
        out.append(Figure(title, drawing, how))
    return out


def describe_size(run: RunData) -> str:
    n = len(run.blocks)
    return f"{run.users:,} users, {run.items:,} items, {n} block{'s' if n > 1 else ''}"


def _facts(run: RunData) -> list[Fact]:
    read = f", read '{run.read}'" if run.read else ""
    how = f"selected by {format_metric(run.select_by)} on validation, ranking {run.ranking}, mask '{run.mask}'{read}"
    return [
        Fact("data", run.data),
        Fact("size", describe_size(run)),
        *([Fact("filtering", run.removed)] if run.removed else []),
        Fact("fingerprint", "of data and split together", code=run.fingerprint),
        Fact("protocol", how),
        *([Fact("privacy", " ".join(run.privacy))] if run.privacy else []),
        Fact("folder", run.folder),
    ]


def build_run_body(run: RunData, label: str = "") -> RunBody:
    note = f"Last column: the same model with the mask '{run.other_mask}' instead of '{run.mask}'. "
    note += "▲: the control beats the method. One run is one seed: small differences may be chance. "
    note += "".join(f"Not run: {control_name(key)} ({why}). " for key, why in run.skipped.items())
    figures = [_quality_figure(run), *_curve_figures(run), *_memory_figures(run), _groups_figure(run)]
    return RunBody(
        label=label,
        folder=run.folder,
        callouts=judge_run(run),
        tiles=_tiles(run),
        figures=[*figures, *_notes_figures(run)],
        tables=[_quality_table(run, metric) for metric in run.metrics],
        note=note,
        rounds=_rounds_table(run),
        facts=_facts(run),
        settings=run.settings,
    )
