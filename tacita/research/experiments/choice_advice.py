"""The answer to "Which should I use?": a line for each need, with the method that fits it best on each dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tacita.research.experiments.choice_rows import (
    POPULAR,
    QUALITY,
    UP,
    ChoiceRow,
    format_epsilon,
    format_forgetting,
)
from tacita.runs.server_view import SHARES, SUM_ALONE

WEAK_ODDS = 100.0  # an epsilon that lets odds grow more times than this bounds little

DatasetRows = dict[str, list[ChoiceRow]]
"""Dataset -> its rows, best first."""


@dataclass(frozen=True)
class Need:
    """What a reader may need, and how the best method for it is found and described."""

    condition: str
    fits: Callable[[ChoiceRow, float], bool]  # called with the row and the quality of most popular items
    describe: Callable[[ChoiceRow], str]
    least: str = ""  # the measure of which the method should have least; none: the best quality


def list_advice_lines(tables: DatasetRows, aside: set[str]) -> list[str]:
    """One line for each need, from all rows but those that are there to be compared with."""
    excluded = {POPULAR, *aside}
    lines = []
    for need in NEEDS:
        lines += _answer_need(need, tables, excluded)
    for dataset, rows in tables.items():
        lines += _list_below_popular(dataset, rows, aside)
    return lines


def _answer_need(need: Need, tables: DatasetRows, excluded: set[str]) -> list[str]:
    """The sentence for a need; none where no method fits."""
    answers = []
    for dataset, rows in tables.items():
        popular = _read_popular_quality(rows)
        candidates = [row for row in rows if row.name not in excluded]
        fitting = [row for row in candidates if need.fits(row, popular)]
        if not fitting:
            continue
        best = fitting[0]
        if need.least:
            best = min(fitting, key=lambda row: row.compute_mean(need.least))
        quality = best.format_interval()
        description = need.describe(best)
        answers.append(f"on {dataset} **{best.label}** (NDCG@10 {quality}, {description})")
    if not answers:
        return []
    listed = "; ".join(answers)
    return [f"{need.condition}: {listed}."]


def _read_popular_quality(rows: list[ChoiceRow]) -> float:
    """The quality of most popular items; 0 where that was not measured."""
    for row in rows:
        if row.name == POPULAR:
            return row.compute_mean(QUALITY)
    return 0.0


def _list_below_popular(dataset: str, rows: list[ChoiceRow], aside: set[str]) -> list[str]:
    """The methods that are worse than most popular items, where those were measured."""
    measured = [row for row in rows if row.name == POPULAR]
    if not measured:
        return []
    popular = measured[0]
    floor = popular.compute_mean(QUALITY)
    below = []
    for row in rows:
        if row.compute_mean(QUALITY) < floor and row.name not in aside:
            below.append(row.label)
    names = "; ".join(below) or "none"
    return [f"Below most popular ({popular.format_interval()}) on {dataset}: {names}."]


def _describe_forgetting(row: ChoiceRow) -> str:
    return f"forgetting one person: {format_forgetting(row)}"


def _describe_upload(row: ChoiceRow) -> str:
    return f"{row.format_median(UP)} KB up"


def _describe_odds(row: ChoiceRow) -> str:
    """An epsilon with what it bounds, so that nobody takes a large one for a protection; odds are about a person."""
    epsilon = format_epsilon(row)
    if not row.find_word("promise").startswith("a person"):
        return f"epsilon {epsilon}"
    growth = float(np.exp(row.compute_mean("epsilon")))
    certainty = growth / (growth + 99)  # of somebody who began with odds of 1 to 99
    guess = f"whoever thought it 1 % likely that somebody took part may be {certainty:.0%} sure after"
    caveat = ", a weak promise ([privacy.md](privacy.md))" if growth > WEAK_ODDS else ""
    return f"epsilon {epsilon}: {guess}{caveat}"


NEEDS = (
    Need(
        "If whoever gets the model may know the histories",
        lambda row, popular: True,
        _describe_forgetting,
    ),
    Need(
        "If you need an epsilon below 10",
        lambda row, popular: row.compute_mean("epsilon") < 10,
        _describe_odds,
    ),
    Need(
        "If people must be forgotten exactly and at once",
        lambda row, popular: row.is_exact and not row.is_retrained,
        _describe_forgetting,
    ),
    Need(
        "If no update may be seen by itself, and no budget is needed",
        lambda row, popular: row.find_word("sees").startswith(SUM_ALONE),
        _describe_upload,
    ),
    Need(
        "If people choose what they share and take it back",
        lambda row, popular: row.find_word("sees").startswith(SHARES),
        _describe_forgetting,
    ),
    Need(
        "If little may be sent, and more than most popular is wanted",
        lambda row, popular: row.compute_mean(QUALITY) > popular,
        _describe_upload,
        least=UP,
    ),
)
