"""What a page says of one run: its numbers beside their controls, pictures, and where they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacita.report import charts
from tacita.report.charts import GREY, MOST_CELLS, Look, Segment, Series
from tacita.report.data import Curve, RunData, control_name, human_bytes, nice, percent, shown, verdicts
from tacita.report.elements import Cell, Fact, Figure, RunBody, Table, Tile, cells, plain_table

METHOD, UNKNOWN = Look(0), Look(4, 1, 0)
LOOKS = {
    "popular": Look(1, 1, 1),
    "alone": Look(3, 2, 2),
    "linear": Look(2, 3, 3),
    "random": Look(GREY, 2, 4),
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


def segments(run: RunData, values: Curve, mark_best: bool = True) -> list[Segment]:
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


def in_words(series: Sequence[Series]) -> str:
    """A chart for those who do not see it."""
    return "; ".join(f"{s.name}: {', '.join(map(shown, s.values[:12]))}" for s in series)


def _tiles(run: RunData) -> list[Tile]:
    popular = run.popular.mean[run.main] if run.popular else math.nan
    against = Tile(percent(run.score, popular), "against most popular", f"which reaches {shown(popular)}")
    return [
        Tile(shown(run.score), nice(run.main), run.averaged),
        *([against] if run.popular else []),
        Tile(shown(run.continual["la"]), "LA, learned", "mean on each block just after it"),
        Tile(shown(run.continual["ra"]), "RA, retained", "mean on all blocks at the end"),
        Tile(shown(run.continual["hm"]), "HM", "harmonic mean of LA and RA"),
        Tile(human_bytes(run.up), "up", f"per client and {run.per}"),
        Tile(human_bytes(run.down), "down", f"per client and {run.per}"),
    ]


def _quality_table(run: RunData, metric: str) -> Table:
    """One row a block, the method beside its controls; what beats the method is marked."""
    rows = []
    for n, block in enumerate(run.blocks):
        theirs = [c.blocks[n][metric] for c in run.controls]
        row = _quality_row(block.scores[metric], theirs, block.second[metric])
        rows.append([*cells(str(n), f"{block.users:,}"), *row])
    if len(run.blocks) > 1:
        second = [b.second[metric] for b in run.blocks[1:] if b.users] or [math.nan]
        row = _quality_row(run.mean[metric], [c.mean[metric] for c in run.controls], sum(second) / len(second))
        whole = 1 < len(second) == len(run.blocks) - 1
        rows.append([*cells(f"mean 1–{len(second)}" if whole else "mean", ""), *row])
    names = cells(*(c.name for c in run.controls), f"{run.method}, {run.other_mask} mask")
    head = [*cells("block", "users"), Cell(run.method, "strong"), *names]
    return Table(f"{nice(metric)}: {MEANING.get(metric.partition('@')[0], '')}", head, rows)


def _quality_row(mine: float, theirs: Sequence[float], second: float) -> list[Cell]:
    marked = [Cell(f"▲ {shown(v)}", "beats") if v > mine else Cell(shown(v)) for v in theirs]
    return [Cell(shown(mine), "strong"), *marked, Cell(shown(second))]


def _rounds_table(run: RunData) -> Table:
    new, back = (series.values for series in _group_series(run))
    rows = []
    for n, b in enumerate(run.blocks):
        groups = [f"{shown(v[n])} ({b.groups[g][0]:,})" for v, g in ((new, "new"), (back, "returning"))]
        spent = [f"{b.rounds:,}", f"{b.best_round:,}", shown(b.valid), human_bytes(b.up), human_bytes(b.down)]
        rows.append([str(n), *groups, *spent])
    head = ["block", "new (users)", "returning (users)", "rounds", "best round", "validation", "up", "down"]
    return plain_table(f"{nice(run.main)} by kind of user; rounds; bytes per client and {run.per}", head, rows)


def _quality_figure(run: RunData) -> Figure:
    series, metric = quality_series(run), nice(run.main)
    if len(run.blocks) == 1:
        return Figure("Test quality", charts.level_bars(series, metric, in_words(series)), "Longer is better.")
    how = "Higher is better. A method worth having stands above the controls in every block."
    drawing = charts.lines(series, run.names, metric, in_words(series))
    return Figure("Test quality per block", drawing, how)


def _curve_figures(run: RunData) -> list[Figure]:
    found = segments(run, run.valid)
    if not any(s.points for s in found):
        return []
    best = ", ".join(f"block {n} round {b.best_round}" for n, b in enumerate(run.blocks[:12]))
    drawing = charts.curve(found, f"Validation over rounds; best: {best}")
    how = "The line should rise within a block. A ring marks the round that was kept and tested."
    return [Figure(f"Validation {nice(run.select_by)} over rounds", drawing, how)]


def _memory_figures(run: RunData) -> list[Figure]:
    if len(run.blocks) == 1:
        return []
    matrix = [b.on_blocks for b in run.blocks]
    last = ", ".join(map(shown, matrix[-1][:12]))
    drawing = charts.heat(matrix, f"Quality on each block after each block; after the last: {last}")
    how = f"Read down a column: {nice(run.select_by)} on one block's test as later blocks are learned, with "
    how += "the change since that block was new. Fainter further down means forgetting."
    if len(matrix) > MOST_CELLS:
        how += f" {MOST_CELLS} of {len(matrix)} blocks are shown."
    return [Figure("What is remembered", drawing, how)]


def _groups_figure(run: RunData) -> Figure:
    groups = _group_series(run)
    how = "New users are seen for the first time in the block. A dash: nobody of that kind was tested."
    return Figure("New and returning users", charts.bars(groups, run.names, nice(run.main), in_words(groups)), how)


def _notes_figures(run: RunData) -> list[Figure]:
    """What the method's parts noted in each round."""
    out = []
    for name, values in run.notes.items():
        title, how = NOTES.get(name, (name, "As noted by the method in each round."))
        drawing = charts.curve(segments(run, values, mark_best=False), f"{title} over rounds")
        out.append(Figure(title, drawing, how))
    return out


def size_of(run: RunData) -> str:
    n = len(run.blocks)
    return f"{run.users:,} users, {run.items:,} items, {n} block{'s' if n > 1 else ''}"


def _facts(run: RunData) -> list[Fact]:
    read = f", read '{run.read}'" if run.read else ""
    how = f"selected by {nice(run.select_by)} on validation, ranking {run.ranking}, mask '{run.mask}'{read}"
    return [
        Fact("data", run.data),
        Fact("size", size_of(run)),
        *([Fact("filtering", run.removed)] if run.removed else []),
        Fact("fingerprint", "of data and split together", code=run.fingerprint),
        Fact("protocol", how),
        *([Fact("privacy", " ".join(run.privacy))] if run.privacy else []),
        Fact("folder", run.folder),
    ]


def run_body(run: RunData, label: str = "") -> RunBody:
    note = f"Last column: the same model with the mask '{run.other_mask}' instead of '{run.mask}'. "
    note += "▲: the control beats the method. One run is one seed: small differences may be chance. "
    note += "".join(f"Not run: {control_name(key)} ({why}). " for key, why in run.skipped.items())
    figures = [_quality_figure(run), *_curve_figures(run), *_memory_figures(run), _groups_figure(run)]
    return RunBody(
        label=label,
        folder=run.folder,
        callouts=verdicts(run),
        tiles=_tiles(run),
        figures=[*figures, *_notes_figures(run)],
        tables=[_quality_table(run, metric) for metric in run.metrics],
        note=note,
        rounds=_rounds_table(run),
        facts=_facts(run),
        settings=run.settings,
    )
