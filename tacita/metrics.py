"""Ranking metrics as functions of ranks: full ranking by default, masks by name, ties broken by a seeded hash.

With `ties = "against"` an item that is not wanted comes before a wanted one of the same score, as some papers count.

A user counts if at least one wanted item remains after masking. With `count_hidden` a masked item stays wanted and is
never recommended, as where a published split has an item in two parts.

Definitions (k: cut-off, wanted: the user's held-out items): recall = hits / wanted, precision = hits / k, hr = any
hit, mrr = 1 / first rank if within k, ndcg with gain 1 / log2(rank + 1) and the ideal list cut at min(k, wanted),
ndcg-k with an ideal list of k hits however few are wanted, auc = share of (wanted, other candidate) pairs in the right
order, a pair of the same score counting half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy.special

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Doubles, Floats, Ints, Keys, Longs, Ragged
from tacita.kernels.ranking import write_full_ranks, write_sampled_ranks
from tacita.kernels.sampling import count_possible_negatives, draw_distinct_items
from tacita.models.scoring import CHUNK

ScoreUsers = Callable[[Ints], Floats]
"""Scores (users, items) of some users; the result may be overwritten."""


@runtime_checkable
class PartialScorer(Protocol):
    """A scorer that need not score a whole catalogue."""

    def score_listed_items(self, users: Ints, only: Ragged) -> Floats | None:
        """Scores of a list of items for each user, flat in their order; None: it cannot."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """Metric values per evaluated user, and their means."""

    users: Ints
    values: dict[str, Doubles]  # "ndcg@20" -> (users,)

    def compute_means(self, among: AnyArray | None = None) -> dict[str, float]:
        """Means over all evaluated users, or over those marked in `among` (indexed by user)."""
        means = {}
        for name, values in self.values.items():
            if among is not None:
                is_among = among[self.users]
                values = values[is_among]
            means[name] = 0.0
            if len(values):
                means[name] = float(values.mean())
        return means

    def compute_sums(self) -> dict[str, tuple[float, int]]:
        """Sum over users and number of users, to add up over groups that do not share their users."""
        sums = {}
        for name, values in self.values.items():
            total = float(values.sum())
            sums[name] = (total, len(values))
        return sums


class WantedRanks(NamedTuple):
    """The ranks of wanted items, by user."""

    users: Ints  # that want something
    ranks: Ints  # of all wanted items; 0: masked
    ptr: Longs  # where each user's ranks begin and end
    candidates: Ints  # how many items each user's wanted ones are ranked among
    luck: Doubles  # pairs that the order of ties made wrong, less half of all that tie


def rank_wanted(
    score_users: ScoreUsers,
    wanted: Ragged,
    mask: Ragged,
    keys: Keys,
    draws: Draws,
    sampled: Ragged | None = None,
    ties: str = "hash",
) -> WantedRanks:
    """Rank every user's wanted items among the whole catalogue, or among sampled items."""
    has_wanted = wanted.counts() > 0
    wanting = np.flatnonzero(has_wanted)
    users = wanting.astype(np.int32)
    lists = wanted.take(users)
    n_wanted = len(lists.ids)
    ranks = np.zeros(n_wanted, np.int32)
    n_users = len(users)
    candidates = np.zeros(n_users, np.int32)
    luck = np.zeros(n_users)
    tie_key = draws.public("ties")
    against = ties == "against"
    for start in range(0, n_users, CHUNK):
        end = min(start + CHUNK, n_users)
        chunk = users[start:end]
        scores = _score_candidates(score_users, chunk, wanted, sampled)
        _require_finite(scores)
        rows = np.arange(start, end)
        part = lists.take(rows)
        hidden = mask.take(chunk)
        first_rank = lists.ptr[start]
        last_rank = lists.ptr[end]
        part_ranks = ranks[first_rank:last_rank]
        part_ties = (tie_key, keys[chunk], against)
        part_candidates = candidates[start:end]
        part_luck = luck[start:end]
        tallies = (part_candidates, part_luck)
        if sampled is None:
            write_full_ranks(scores, part.ptr, part.ids, hidden.ptr, hidden.ids, *part_ties, part_ranks, *tallies)
            continue
        is_hidden = hidden.holds(part.rows(), part.ids)
        is_visible = ~is_hidden
        visible = part.filter_entries(is_visible)
        visible_ranks = np.zeros(len(visible.ids), np.int32)
        others = sampled.take(chunk)
        write_sampled_ranks(
            scores, visible.ptr, visible.ids, others.ptr, others.ids, *part_ties, visible_ranks, *tallies
        )
        part_ranks[is_visible] = visible_ranks
    return WantedRanks(users, ranks, lists.ptr, candidates, luck)


def _require_finite(scores: Floats) -> None:
    if not np.isfinite(scores).all():
        raise TacitaError(
            "the model's scores are no longer finite: training diverged; lower backbone.lr (with pFedMe "
            "train.pfedme.inner_lr)."
        )


def _score_candidates(score_users: ScoreUsers, users: Ints, wanted: Ragged, sampled: Ragged | None) -> Floats:
    """Scores (users, items); of candidates alone where a scorer can, the rest are zeros that no metric reads."""
    if sampled is not None and isinstance(score_users, PartialScorer):
        candidates = wanted.take(users)
        candidates = candidates.join_rows(sampled.take(users))
        partial_scores = score_users.score_listed_items(users, candidates)
        if partial_scores is not None:
            last_item = int(candidates.ids.max(initial=0))
            shape = (len(users), last_item + 1)
            scores = np.zeros(shape, np.float32)
            scores[candidates.rows(), candidates.ids] = partial_scores
            return scores
    all_scores = score_users(users)
    return np.ascontiguousarray(all_scores, np.float32)


@dataclass(frozen=True)
class EvaluationRules:
    """Which metrics of a ranking are computed, and among which candidates."""

    metrics: Sequence[str]
    cutoffs: Sequence[int]
    sampled: Ragged | None = None  # the items that each user's wanted ones are ranked among; None: the whole catalogue
    count_hidden: bool = False  # a wanted item that the mask hides counts as missed
    ties: str = "hash"


def evaluate_ranking(
    score_users: ScoreUsers, wanted: Ragged, mask: Ragged, keys: Keys, draws: Draws, rules: EvaluationRules
) -> Evaluation:
    """Rank every wanted item and turn ranks into metrics."""
    ranked = rank_wanted(score_users, wanted, mask, keys, draws, rules.sampled, rules.ties)
    n_users = len(ranked.users)
    users = np.arange(n_users)
    per_user = np.diff(ranked.ptr)
    row = np.repeat(users, per_user)
    is_visible = ranked.ranks > 0
    visible_row = row[is_visible]
    wanted_row = row if rules.count_hidden else visible_row
    n_wanted = _count_by_row(wanted_row, n_users)
    visible_ranks = ranked.ranks[is_visible]
    ranks = visible_ranks.astype(np.float64)
    is_counted = n_wanted > 0
    values: dict[str, Doubles] = {}
    for metric in rules.metrics:
        if metric == "auc":
            candidates = ranked.candidates.astype(np.float64)
            auc = _compute_auc(visible_row, ranks, n_wanted, candidates, ranked.luck)
            values["auc"] = auc[is_counted]
            continue
        for k in rules.cutoffs:
            at_k = _compute_metric_at_k(metric, visible_row, ranks, n_wanted, k)
            name = f"{metric}@{k}"
            values[name] = at_k[is_counted]
    return Evaluation(ranked.users[is_counted], values)


def _count_by_row(row: Longs, n_rows: int) -> Doubles:
    counts = np.bincount(row, minlength=n_rows)
    return counts.astype(np.float64)


def _compute_metric_at_k(metric: str, row: Longs, ranks: Doubles, n_wanted: Doubles, k: int) -> Doubles:
    n = len(n_wanted)
    is_hit = ranks <= k
    hit_row = row[is_hit]
    hits = _count_by_row(hit_row, n)
    divisor = np.maximum(n_wanted, 1)
    if metric == "recall":
        return np.asarray(hits / divisor)
    if metric == "precision":
        return hits / k
    if metric == "hr":
        has_hit = hits > 0
        return has_hit.astype(np.float64)
    if metric == "mrr":
        best = np.full(n, np.inf)
        np.minimum.at(best, row, ranks)
        is_within = best <= k
        return np.where(is_within, 1 / best, 0.0)
    gains = _discount_ranks(ranks[is_hit])
    gain = np.bincount(hit_row, weights=gains, minlength=n)
    ideal_gains = _discount_ranks(np.arange(k) + 1)
    ideal = np.cumsum(ideal_gains)
    if metric == "ndcg-k":
        most_gain = ideal[-1]
        return np.asarray(gain / most_gain)
    list_length = np.minimum(k, divisor).astype(int)
    best_gain = ideal[list_length - 1]
    return np.asarray(gain / best_gain)


def _discount_ranks(ranks: AnyArray) -> Doubles:
    """What a hit at each rank gains."""
    discount: Doubles = np.log2(ranks + 1)
    return 1 / discount


def _compute_auc(row: Longs, ranks: Doubles, n_wanted: Doubles, candidates: Doubles, luck: Doubles) -> Doubles:
    """Wrong pairs are others ranked above a wanted item: rank minus its place among the wanted.

    Of pairs that tie half are wrong, wherever chance put them. A hidden item that counts is below all others.
    """
    n = len(n_wanted)
    ranked = _count_by_row(row, n)
    others = candidates - ranked
    rank_sums = np.bincount(row, weights=ranks, minlength=n)
    least_sums = ranked * (ranked + 1) / 2
    n_hidden = n_wanted - ranked
    hidden_pairs = n_hidden * others
    wrong = rank_sums - least_sums + hidden_pairs
    wrong -= luck
    pairs = n_wanted * others
    divisor = np.maximum(pairs, 1)
    share = 1 - wrong / divisor
    return np.where(pairs > 0, share, 0.5)


def sample_candidates(touched: Ragged, n: int, n_items: int, keys: Keys, draws: Draws, block: int) -> Ragged:
    """n items per user that the user never touched in any split, distinct; fewer where there are not enough."""
    room = count_possible_negatives(touched.ptr, touched.ids, n_items)
    n_users = len(room)
    counts = np.minimum(room, n)
    ptr = np.zeros(n_users + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    n_drawn = ptr[-1]
    item = np.empty(n_drawn, np.int32)
    key = draws.public("candidates", block)
    user_keys = keys[:n_users]
    draw_distinct_items(key, user_keys, touched.ptr, touched.ids, room, ptr, item)
    return Ragged(ptr, item)


def summarise_continual(matrix: list[list[float]], tested: Sequence[int]) -> dict[str, float]:
    """LA (mean of the diagonal), RA (mean of the last row), HM (their harmonic mean) of a_{t,s}.

    `tested` is the number of users that each block tested. A block without any is left out; NaN where all are.
    """
    has_users = np.array(tested) > 0
    if not has_users.any():
        return dict.fromkeys(("la", "ra", "hm"), math.nan)
    own_scores = []
    for block, row in enumerate(matrix):
        own_scores.append(row[block])
    diagonal = np.array(own_scores)
    last_row = np.array(matrix[-1])
    learned = float(diagonal[has_users].mean())
    retained = float(last_row[has_users].mean())
    total = learned + retained
    harmonic = 0.0
    if total > 0:
        harmonic = 2 * learned * retained / total
    return {"la": learned, "ra": retained, "hm": harmonic}


def compute_confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t-interval; of one value there is no interval, only NaN."""
    mean = float(np.mean(values))
    n = len(values)
    if n < 2:
        return mean, math.nan
    deviation = float(np.std(values, ddof=1))
    standard_error = deviation / math.sqrt(n)
    freedom = n - 1
    quantile = float(scipy.special.stdtrit(freedom, 0.975))
    return mean, quantile * standard_error
