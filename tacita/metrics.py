"""Ranking metrics as functions of ranks: full ranking by default, masks by name, ties broken by a seeded hash.

With `ties = "against"` an item that is not wanted comes before a wanted one of the same score, as some papers count.

A user counts if at least one wanted item is left after masking: what the mask hides cannot be asked for. With
`count_hidden` it is asked for all the same and never found, as where a published split has an item in two parts.
Definitions (k: cut-off, wanted: the user's held-out items): recall = hits / wanted, precision = hits / k, hr = any
hit, mrr = 1 / first rank if within k, ndcg with gain 1 / log2(rank + 1) and the ideal list cut at min(k, wanted),
ndcg-k with an ideal list of k hits however few are wanted, auc = share of (wanted, other candidate) pairs in the right
order, a pair of the same score counting half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import scipy.special

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Doubles, Floats, Ints, Keys, Longs, Ragged
from tacita.kernels.ranking import full_ranks, sampled_ranks
from tacita.kernels.sampling import draw_distinct, room_for_negatives
from tacita.models.scoring import CHUNK

ScoreUsers = Callable[[Ints], Floats]
"""Scores (users, items) of the given users; the result may be overwritten."""


@runtime_checkable
class PartialScorer(Protocol):
    """A scorer that need not score a whole catalogue."""

    def score_items(self, users: Ints, only: Ragged) -> Floats | None:
        """Scores of a list of items for each user, flat in their order; None: it cannot."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """Metric values per evaluated user, and their means."""

    users: Ints
    values: dict[str, Doubles]  # "ndcg@20" -> (users,)

    def mean(self, among: AnyArray | None = None) -> dict[str, float]:
        """Means over all evaluated users, or over those marked in `among` (indexed by user)."""
        keep = slice(None) if among is None else among[self.users]
        return {name: _mean(v[keep]) for name, v in self.values.items()}

    def sums(self) -> dict[str, tuple[float, int]]:
        """Sum over users and number of users, for adding up over groups that keep their users to themselves."""
        return {name: (float(v.sum()), len(v)) for name, v in self.values.items()}


def _mean(values: Doubles) -> float:
    return float(values.mean()) if len(values) else 0.0


def rank_wanted(
    score_users: ScoreUsers,
    wanted: Ragged,
    mask: Ragged,
    keys: Keys,
    draws: Draws,
    sampled: Ragged | None = None,
    ties: str = "hash",
) -> tuple[Ints, Ints, Longs, Ints, Doubles]:
    """Users with something wanted, then ranks (0: masked), their row borders, candidate counts and luck in ties."""
    users = np.flatnonzero(wanted.counts() > 0).astype(np.int32)
    want = wanted.take(users)
    ranks = np.zeros(len(want.ids), np.int32)
    candidates, luck = np.zeros(len(users), np.int32), np.zeros(len(users))
    tie_key, against = draws.public("ties"), ties == "against"
    for lo in range(0, len(users), CHUNK):
        chosen = users[lo : lo + CHUNK]
        scores = _score_candidates(score_users, chosen, wanted, sampled)
        if not np.isfinite(scores).all():
            raise TacitaError(
                "the model's scores are no longer finite: training diverged; lower backbone.lr (with pFedMe "
                "train.pfedme.inner_lr)."
            )
        part = want.take(np.arange(lo, lo + len(chosen)))
        span = slice(want.ptr[lo], want.ptr[lo + len(chosen)])
        if sampled is None:
            hide = mask.take(chosen)
            full_ranks(
                scores, part.ptr, part.ids, hide.ptr, hide.ids, tie_key, keys[chosen], against,
                ranks[span], candidates[lo : lo + len(chosen)], luck[lo : lo + len(chosen)],
            )  # fmt: skip
        else:
            other = sampled.take(chosen)
            hidden = mask.take(chosen).holds(part.rows(), part.ids)
            asked = Ragged.from_pairs(part.rows()[~hidden], part.ids[~hidden], len(chosen))
            found = np.zeros(len(asked.ids), np.int32)
            sampled_ranks(
                scores, asked.ptr, asked.ids, other.ptr, other.ids, tie_key, keys[chosen], against,
                found, candidates[lo : lo + len(chosen)], luck[lo : lo + len(chosen)],
            )  # fmt: skip
            ranks[span][~hidden] = found
    return users, ranks, want.ptr, candidates, luck


def _score_candidates(score_users: ScoreUsers, chosen: Ints, wanted: Ragged, sampled: Ragged | None) -> Floats:
    """Scores (users, items); where a scorer can, of candidates alone, and the rest are zeros that nobody looks at."""
    if sampled is not None and isinstance(score_users, PartialScorer):
        only = wanted.take(chosen).join_rows(sampled.take(chosen))
        found = score_users.score_items(chosen, only)
        if found is not None:
            out = np.zeros((len(chosen), 1 + int(only.ids.max(initial=0))), np.float32)
            out[only.rows(), only.ids] = found
            return out
    return np.ascontiguousarray(score_users(chosen), np.float32)


def _pair_numbers(lists: Ragged, n_items: int) -> Longs:
    """One number per (row, item)."""
    return lists.rows().astype(np.int64) * n_items + lists.ids


@dataclass(frozen=True)
class EvaluationRules:
    """What is counted of a ranking, and against what."""

    metrics: Sequence[str]
    cutoffs: Sequence[int]
    sampled: Ragged | None = None  # what each user's wanted items are ranked against; None: the whole catalogue
    count_hidden: bool = False  # a wanted item that the mask hides is asked for, and never found
    ties: str = "hash"


def evaluate(
    score_users: ScoreUsers, wanted: Ragged, mask: Ragged, keys: Keys, draws: Draws, rules: EvaluationRules
) -> Evaluation:
    """Rank every wanted item and turn ranks into metrics."""
    ranked = rank_wanted(score_users, wanted, mask, keys, draws, rules.sampled, rules.ties)
    users, ranks, ptr, candidates, luck = ranked
    row = np.repeat(np.arange(len(users)), np.diff(ptr))
    seen = ranks > 0
    asked = row if rules.count_hidden else row[seen]
    n_wanted = np.bincount(asked, minlength=len(users)).astype(np.float64)
    row, places = row[seen], ranks[seen].astype(np.float64)
    counted = n_wanted > 0
    values: dict[str, Doubles] = {}
    for metric in rules.metrics:
        if metric == "auc":
            values["auc"] = _auc(row, places, n_wanted, candidates.astype(np.float64), luck)[counted]
            continue
        for k in rules.cutoffs:
            values[f"{metric}@{k}"] = _metric_at_k(metric, row, places, n_wanted, k)[counted]
    return Evaluation(users[counted], values)


def _metric_at_k(metric: str, row: Longs, ranks: Doubles, n_wanted: Doubles, k: int) -> Doubles:
    n = len(n_wanted)
    within = ranks <= k
    hits = np.bincount(row[within], minlength=n).astype(np.float64)
    safe = np.maximum(n_wanted, 1)
    if metric == "recall":
        return np.asarray(hits / safe)
    if metric == "precision":
        return hits / k
    if metric == "hr":
        return (hits > 0).astype(np.float64)
    if metric == "mrr":
        best = np.full(n, np.inf)
        np.minimum.at(best, row, ranks)
        return np.where(best <= k, 1 / best, 0.0)
    gain = np.bincount(row[within], weights=1 / np.log2(ranks[within] + 1), minlength=n)
    ideal = np.cumsum(1 / np.log2(np.arange(k) + 2))
    if metric == "ndcg-k":
        return np.asarray(gain / ideal[-1])
    return np.asarray(gain / ideal[np.minimum(k, safe).astype(int) - 1])


def _auc(row: Longs, ranks: Doubles, n_wanted: Doubles, candidates: Doubles, luck: Doubles) -> Doubles:
    """Wrong pairs are others ranked above a wanted item: rank minus its place among the wanted.

    Of pairs that tie half are wrong, wherever chance put them. A hidden item that counts is below all others.
    """
    n = len(n_wanted)
    ranked = np.bincount(row, minlength=n).astype(np.float64)
    others = candidates - ranked
    wrong = np.bincount(row, weights=ranks, minlength=n) - ranked * (ranked + 1) / 2 + (n_wanted - ranked) * others
    wrong -= luck
    pairs = n_wanted * others
    return np.where(pairs > 0, 1 - wrong / np.maximum(pairs, 1), 0.5)


def sample_candidates(touched: Ragged, n: int, n_items: int, keys: Keys, draws: Draws, block: int) -> Ragged:
    """n items per user that the user never touched in any split, distinct; fewer where there are not enough."""
    room = room_for_negatives(touched.ptr, touched.ids, n_items)
    ptr = np.zeros(len(room) + 1, np.int64)
    np.cumsum(np.minimum(room, n), out=ptr[1:])
    item = np.empty(ptr[-1], np.int32)
    draw_distinct(draws.public("candidates", block), keys[: len(room)], touched.ptr, touched.ids, room, ptr, item)
    return Ragged(ptr, item)


def summarise_continual(matrix: list[list[float]], tested: Sequence[int]) -> dict[str, float]:
    """LA (mean of the diagonal), RA (mean of the last row), HM (their harmonic mean) of a_{t,s}.

    `tested` says how many users each block tested: one without any has no score and is left out; NaN where all are.
    """
    counted = np.array(tested) > 0
    if not counted.any():
        return dict.fromkeys(("la", "ra", "hm"), math.nan)
    diagonal = np.array([row[t] for t, row in enumerate(matrix)])
    learned, retained = float(diagonal[counted].mean()), float(np.array(matrix[-1])[counted].mean())
    both = learned + retained
    return {"la": learned, "ra": retained, "hm": 2 * learned * retained / both if both > 0 else 0.0}


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t-interval; of one value there is no interval, only NaN."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(scipy.special.stdtrit(len(values) - 1, 0.975)) * spread
