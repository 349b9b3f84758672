"""What a page says of one run: its numbers and those of its controls, pictures, and where they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacita.report import charts
from tacita.report.charts import GREY, MOST_CELLS, Segment, Series, SeriesStyle
from tacita.report.data import describe_read_mode
from tacita.report.elements import Fact, Figure, PageTable, RunBody, TableCell, Tile, build_plain_table, cells
from tacita.report.formats import format_bytes, format_change, format_metric, format_score
from tacita.report.judgement import judge_run
from tacita.report.run_data import Curve, RunData, exchanges_once, name_control

METHOD_STYLE = SeriesStyle(0)
UNKNOWN_STYLE = SeriesStyle(4, 1, 0)
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
MOST_DESCRIBED = 12  # numbers of a chart that are read out
NOTES = {
    "replayed": ("Items replayed per returning client", "Falls as people's rankings move away from the last block's."),
    "gamma": ("Weight of an item's earlier row", "Mean over known items; near the upper end, items hardly move."),
}


def build_quality_series(run: RunData) -> list[Series]:
    """The method, then its controls, per block in the main metric."""
    metric = run.main_metric
    own_scores = [block.scores[metric] for block in run.blocks]
    series = [Series(run.method, own_scores, METHOD_STYLE)]
    for control in run.controls:
        scores = [block[metric] for block in control.blocks]
        style = CONTROL_STYLES.get(control.key, UNKNOWN_STYLE)
        control_series = Series(control.name, scores, style)
        series.append(control_series)
    return series


def _group_scores(run: RunData, group: str) -> list[float]:
    """New or returning users per block; a group with nobody in it has no value."""
    values = []
    for block in run.blocks:
        users, scores = block.groups[group]
        score = scores[run.main_metric]
        values.append(score if users else math.nan)
    return values


def split_segments(run: RunData, values: Curve, mark_best: bool = True) -> list[Segment]:
    """A curve cut into blocks, rounds counted over the whole run."""
    ordered = sorted(values.items())
    segments = []
    start = 0
    for number, block in enumerate(run.blocks):
        end = start + max(block.rounds, 1)
        points = []
        for (in_block, in_round), value in ordered:
            place = start + in_round
            is_inside = in_block == number and place <= end
            if is_inside and math.isfinite(value):
                points.append((place, value))
        best = _find_best(run, number, start) if mark_best else None
        segment = Segment(f"block {number}", start, end, points, best)
        segments.append(segment)
        start = end
    return segments


def _find_best(run: RunData, number: int, start: int) -> tuple[int, float] | None:
    """The best round of a block and its score, if it was reached and measured."""
    block = run.blocks[number]
    place = (number, block.best_round)
    score = run.valid.get(place, block.valid)
    was_reached = 0 < block.best_round <= block.rounds
    if not was_reached or not math.isfinite(score):
        return None
    return start + block.best_round, score


def describe_series(series: Sequence[Series]) -> str:
    """A chart for those who do not see it."""
    descriptions = []
    for line in series:
        values = line.values[:MOST_DESCRIBED]
        scores = ", ".join(map(format_score, values))
        descriptions.append(f"{line.name}: {scores}")
    return "; ".join(descriptions)


# Numbers


def _build_tiles(run: RunData) -> list[Tile]:
    exchange = f"per client and {run.exchange_unit}"
    metric = run.main_metric
    tiles = [Tile(format_score(run.score), format_metric(metric), run.mean_label)]
    if run.popular:
        popular = run.popular.mean[metric]
        change = format_change(run.score, popular)
        note = f"which reaches {format_score(popular)}"
        tiles.append(Tile(change, "against most popular", note))
    if len(run.blocks) > 1:
        tiles += [
            Tile(format_score(run.continual["la"]), "LA, learned", "mean on each block just after it"),
            Tile(format_score(run.continual["ra"]), "RA, retained", "mean on all blocks at the end"),
            Tile(format_score(run.continual["hm"]), "HM", "harmonic mean of LA and RA"),
        ]
    tiles += [
        Tile(format_bytes(run.up), "up", exchange),
        Tile(format_bytes(run.down), "down", exchange),
    ]
    return tiles


def _build_quality_table(run: RunData, metric: str) -> PageTable:
    """One row a block, the method and its controls; what beats the method is marked."""
    rows = []
    for number, block in enumerate(run.blocks):
        control_scores = [control.blocks[number][metric] for control in run.controls]
        score = block.scores[metric]
        other_score = block.other_mask_scores[metric]
        row = cells(str(number), f"{block.users:,}")
        row += _build_quality_row(score, control_scores, other_score)
        rows.append(row)
    if len(run.blocks) > 1:
        rows.append(_build_mean_row(run, metric))
    head = cells("block", "users")
    head.append(TableCell(run.method, "strong"))
    for control in run.controls:
        head.append(TableCell(control.name))
    head.append(TableCell(f"{run.method}, {run.other_mask} mask"))
    kind, _, _ = metric.partition("@")
    meaning = MEANING.get(kind, "")
    caption = f"{format_metric(metric)}: {meaning}"
    return PageTable(caption, head, rows)


def _build_mean_row(run: RunData, metric: str) -> list[TableCell]:
    """Means over blocks after the first in which somebody was tested."""
    later_blocks = run.blocks[1:]
    tested_blocks = [block for block in later_blocks if block.users]
    other_scores = [block.other_mask_scores[metric] for block in tested_blocks]
    if not other_scores:
        other_scores = [math.nan]
    n_scores = len(other_scores)
    other_mean = sum(other_scores) / n_scores
    control_means = [control.mean[metric] for control in run.controls]
    name = "mean"
    is_over_all = n_scores == len(later_blocks)
    if is_over_all and n_scores > 1:
        name = f"mean 1–{n_scores}"
    row = cells(name, "")
    row += _build_quality_row(run.mean[metric], control_means, other_mean)
    return row


def _build_quality_row(score: float, control_scores: Sequence[float], other_mask_score: float) -> list[TableCell]:
    row = [TableCell(format_score(score), "strong")]
    for control_score in control_scores:
        text = format_score(control_score)
        if control_score > score:
            row.append(TableCell(f"▲ {text}", "beats"))
        else:
            row.append(TableCell(text))
    row.append(TableCell(format_score(other_mask_score)))
    return row


def _build_rounds_table(run: RunData) -> PageTable:
    new_scores = _group_scores(run, "new")
    returning_scores = _group_scores(run, "returning")
    rows = []
    for number, block in enumerate(run.blocks):
        n_new, _ = block.groups["new"]
        n_returning, _ = block.groups["returning"]
        row = [
            str(number),
            f"{format_score(new_scores[number])} ({n_new:,})",
            f"{format_score(returning_scores[number])} ({n_returning:,})",
            f"{block.rounds:,}",
            f"{block.best_round:,}",
            format_score(block.valid),
            format_bytes(block.up),
            format_bytes(block.down),
        ]
        rows.append(row)
    head = ["block", "new (users)", "returning (users)", "rounds", "best round", "validation", "up", "down"]
    metric = format_metric(run.main_metric)
    caption = f"{metric} by kind of user; rounds; bytes per client and {run.exchange_unit}"
    return build_plain_table(caption, head, rows)


# Figures


def _draw_quality(run: RunData) -> Figure:
    series = build_quality_series(run)
    metric = format_metric(run.main_metric)
    description = describe_series(series)
    if len(run.blocks) == 1:
        drawing = charts.draw_level_bars(series, metric, description)
        return Figure("Test quality", drawing, "Longer is better.")
    drawing = charts.draw_line_chart(series, run.block_names, metric, description)
    how = "Higher is better. A method worth having stands above the controls in every block."
    return Figure("Test quality per block", drawing, how)


def _draw_curves(run: RunData) -> list[Figure]:
    segments = split_segments(run, run.valid)
    if not any(segment.points for segment in segments):
        return []
    best_rounds = []
    described_blocks = run.blocks[:MOST_DESCRIBED]
    for number, block in enumerate(described_blocks):
        best_rounds.append(f"block {number} round {block.best_round}")
    all_best = ", ".join(best_rounds)
    drawing = charts.draw_curve_chart(segments, f"Validation over rounds; best: {all_best}")
    title = f"Validation {format_metric(run.select_by)} over rounds"
    if exchanges_once(run.backbone):
        title = f"Validation {format_metric(run.select_by)} of each setting tried"
        how = "Each point is a setting that was tried on the same sums: their order means nothing, and no rise is "
        how += "expected. A ring marks the setting that was kept and tested."
    else:
        how = "Rounds teach the model: the line should rise within a block, and then level off. A ring marks the round "
        how += "that was kept and tested."
    return [Figure(title, drawing, how)]


def _draw_memory(run: RunData) -> list[Figure]:
    if len(run.blocks) == 1:
        return []
    matrix = [block.on_blocks for block in run.blocks]
    last_row = matrix[-1]
    last_scores = ", ".join(map(format_score, last_row[:MOST_DESCRIBED]))
    alt = f"Quality on each block after each block; after the last: {last_scores}"
    drawing = charts.draw_heat_map(matrix, alt)
    how = f"Read down a column: {format_metric(run.select_by)} on one block's test as later blocks are learned, with "
    how += "the change since that block was new. Fainter further down means forgetting."
    if len(matrix) > MOST_CELLS:
        how += f" {MOST_CELLS} of {len(matrix)} blocks are shown."
    return [Figure("What is remembered", drawing, how)]


def _draw_groups(run: RunData) -> list[Figure]:
    """New users beside returning ones; in a single block all are new."""
    if len(run.blocks) == 1:
        return []
    groups = [
        Series("new users", _group_scores(run, "new"), SeriesStyle(1)),
        Series("returning users", _group_scores(run, "returning"), SeriesStyle(0)),
    ]
    metric = format_metric(run.main_metric)
    description = describe_series(groups)
    drawing = charts.draw_bar_chart(groups, run.block_names, metric, description)
    how = "New users are seen for the first time in the block. A dash: nobody of that kind was tested."
    return [Figure("New and returning users", drawing, how)]


def _draw_notes(run: RunData) -> list[Figure]:
    """What the method's parts noted in each round."""
    figures = []
    for name, values in run.notes.items():
        unknown = (name, "As noted by the method in each round.")
        title, how = NOTES.get(name, unknown)
        segments = split_segments(run, values, mark_best=False)
        drawing = charts.draw_curve_chart(segments, f"{title} over rounds")
        figures.append(Figure(title, drawing, how))
    return figures


# The whole


def describe_size(run: RunData) -> str:
    n_blocks = len(run.blocks)
    plural = "s" if n_blocks > 1 else ""
    blocks = f"{n_blocks} block{plural}"
    return f"{run.users:,} users, {run.items:,} items, {blocks}"


def _list_facts(run: RunData) -> list[Fact]:
    metric = format_metric(run.select_by)
    protocol = f"selected by {metric} on validation, ranking {run.ranking}, mask '{run.mask}'"
    if run.read:
        protocol += f", {describe_read_mode(run.read)} (read '{run.read}')"
    facts = [Fact("data", run.data)]
    facts.append(Fact("size", describe_size(run)))
    if run.removed:
        facts.append(Fact("filtering", run.removed))
    facts.append(Fact("fingerprint", "of data and split together", code=run.fingerprint))
    facts.append(Fact("protocol", protocol))
    if run.privacy:
        sentences = " ".join(run.privacy)
        facts.append(Fact("privacy", sentences))
    facts.append(Fact("folder", run.folder))
    return facts


def _describe_tables(run: RunData) -> str:
    note = f"Last column: the same model with the mask '{run.other_mask}' instead of '{run.mask}'. "
    note += "▲: the control beats the method. One run is one seed: small differences may be chance. "
    for key, reason in run.skipped.items():
        note += f"Not run: {name_control(key)} ({reason}). "
    return note


def build_run_body(run: RunData, label: str = "") -> RunBody:
    figures = [
        _draw_quality(run),
        *_draw_curves(run),
        *_draw_memory(run),
        *_draw_groups(run),
        *_draw_notes(run),
    ]
    return RunBody(
        label=label,
        folder=run.folder,
        callouts=judge_run(run),
        tiles=_build_tiles(run),
        figures=figures,
        tables=[_build_quality_table(run, metric) for metric in run.metrics],
        note=_describe_tables(run),
        rounds=_build_rounds_table(run),
        facts=_list_facts(run),
        settings=run.settings,
    )
