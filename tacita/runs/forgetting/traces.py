"""What a model still shows of withdrawn data (sharing spec D.4): pairs against matched ones, ranks, distances.

Every score is the one that a person's own device would compute from what the person still has, so that a model is
asked about an item that its user does not hold any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacita.core.types import AnyArray, Doubles, Floats, Ints, Longs, Ragged
from tacita.federation.evaluation import TrainedState, build_evaluation_rules, build_ranking_mask, evaluate_devices
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.hashing import hash_owners
from tacita.kernels.ranking import find_best_items
from tacita.round.plan import Federation

DECILES = 10
TRIES = 64  # draws of a matched item before any other will do
RESAMPLES = 1000
SAMPLED_ITEMS = 1000
TOP = 20
CHUNK = 256


# Matched pairs


@dataclass(frozen=True)
class MatchedPairs:
    """Withdrawn pairs, and for each another pair of the same user with an item as popular that the user never had."""

    users: Ints  # (people,)
    members: Ragged  # (people) withdrawn items
    others: Ragged  # (people) an item beside each of them

    @property
    def owner(self) -> Longs:
        """The person, counted from 0, of every pair."""
        return self.members.rows().astype(np.int64)


def match_pairs(federation: Federation, withdrawn: Ragged, owned: Ragged) -> MatchedPairs:
    """One other item for every withdrawn one: as popular among what remains, and never the user's."""
    stream = federation.stream
    users = np.flatnonzero(withdrawn.counts() > 0).astype(np.int32)
    members = withdrawn.take(users)
    person = users[members.rows()]
    item = members.ids.astype(np.int64)
    decile = _rank_deciles(federation)
    by_decile = Ragged.from_pairs(decile, np.arange(len(decile)), DECILES)
    start = by_decile.ptr[decile[item]]
    size = by_decile.counts()[decile[item]]
    user_hash = hash_owners(federation.draws.public("matched-pairs"), stream.user_keys[person])
    pair_hash = user_hash + item.astype(np.uint64)
    chosen = np.full(len(item), -1, np.int64)
    for attempt in range(TRIES):
        open_pairs = np.flatnonzero(chosen < 0)
        if attempt == TRIES // 2:  # a person may have all items that are as popular
            start = np.zeros_like(start)
            size = np.full_like(size, len(decile))
        draws = hash_owners(federation.draws.public("matched-try", attempt), pair_hash[open_pairs])
        offset = (draws % size[open_pairs].astype(np.uint64)).astype(np.int64)
        candidate = by_decile.ids[start[open_pairs] + offset]
        is_free = ~owned.holds(person[open_pairs], candidate) & ~withdrawn.holds(person[open_pairs], candidate)
        chosen[open_pairs[is_free]] = candidate[is_free]
    is_matched = chosen >= 0
    members = members.filter_entries(is_matched)
    others = Ragged(members.ptr, chosen[is_matched].astype(np.int32))
    return MatchedPairs(users, members, others)


def _rank_deciles(federation: Federation) -> Longs:
    """(items,) the tenth of the catalogue that an item is in, by how many of the remaining users have it."""
    stream = federation.stream
    remaining = stream.collect_train_items(len(stream.blocks) - 1)
    counts = np.bincount(remaining.ids, minlength=stream.n_items)
    n_items = len(counts)
    order = np.lexsort((np.arange(n_items), counts))
    decile = np.empty(n_items, np.int64)
    decile[order] = np.arange(n_items) * DECILES // n_items
    return decile


# Scores of pairs


def build_scorer(federation: Federation, learned: TrainedState) -> DeviceScorer:
    stream = federation.stream
    block = stream.blocks[learned.server.block]
    past = stream.collect_history(block.index) if federation.backbone.reads_history else None
    broadcast = learned.broadcast or federation.broadcast_serving(learned.server)
    return DeviceScorer(federation, learned.server, learned.clients, block, stream.user_keys, broadcast, "serve", past)


@dataclass(frozen=True)
class PairScores:
    """What one model says of withdrawn pairs."""

    members: Doubles  # (pairs,) scores
    others: Doubles
    rank: Doubles  # (pairs,) share of the catalogue that the user likes less
    top: Ragged  # (people) the best items of each

    @property
    def is_tied(self) -> bool:
        """Every withdrawn item has the score of the one beside it, as where a device has nothing left to score with."""
        return bool(np.array_equal(self.members, self.others))

    @property
    def mean_rank(self) -> float | None:
        return None if self.is_tied else float(self.rank.mean())


@dataclass(frozen=True)
class ScoredChunk:
    """Scores of the pairs of some people."""

    members: Doubles
    others: Doubles
    rank: Doubles
    top: AnyArray  # (people, k)


def score_pairs(federation: Federation, learned: TrainedState, pairs: MatchedPairs) -> PairScores:
    """Scores, ranks and lists of the people who withdrew something, nothing hidden but what they still have."""
    scorer = build_scorer(federation, learned)
    history = federation.stream.collect_history(len(federation.stream.blocks))
    n_people = len(pairs.users)
    chunks = []
    for start in range(0, n_people, CHUNK):
        people = np.arange(start, min(start + CHUNK, n_people))
        chunks.append(_score_chunk(scorer, pairs, history, people))
    if not chunks:
        none = np.zeros(0)
        return PairScores(none, none, none, Ragged.empty(0))
    members = np.concatenate([chunk.members for chunk in chunks])
    others = np.concatenate([chunk.others for chunk in chunks])
    rank = np.concatenate([chunk.rank for chunk in chunks])
    top = np.concatenate([chunk.top for chunk in chunks])
    ptr = np.arange(len(top) + 1, dtype=np.int64) * top.shape[1]
    return PairScores(members, others, rank, Ragged(ptr, top.reshape(-1).astype(np.int32)))


def _score_chunk(scorer: DeviceScorer, pairs: MatchedPairs, history: Ragged, people: Longs) -> ScoredChunk:
    users = pairs.users[people]
    scores = scorer(users).astype(np.float64)
    n_items = scores.shape[1]
    members = pairs.members.take(people)
    others = pairs.others.take(people)
    member_scores = scores[members.rows(), members.ids]
    other_scores = scores[others.rows(), others.ids]
    order = np.sort(scores, axis=1)
    n_below = [np.searchsorted(order[row], score) for row, score in zip(members.rows(), member_scores, strict=True)]
    rank = np.array(n_below, np.float64) / max(1, n_items - 1)
    owned = history.take(users)
    scores[owned.rows(), owned.ids] = -np.inf
    top, _ = find_best_items(scores.astype(np.float32), min(TOP, n_items))
    return ScoredChunk(member_scores, other_scores, rank, top)


# AUC


def compute_auc(members: Doubles, others: Doubles) -> float:
    """How often a member's score is above another's, ties half; groups of any size."""
    scores = np.concatenate([members, others])
    is_member = np.append(np.ones(len(members)), np.zeros(len(others)))
    return _compute_weighted_auc(scores, is_member, 1.0 - is_member)


def _compute_weighted_auc(score: Doubles, positive: Doubles, negative: Doubles) -> float:
    order = np.argsort(score, kind="stable")
    scores = score[order]
    positives = positive[order]
    negatives = negative[order]
    is_edge = np.concatenate([[True], np.diff(scores) != 0])
    edges = np.flatnonzero(is_edge)
    positive_weight = np.add.reduceat(positives, edges)
    negative_weight = np.add.reduceat(negatives, edges)
    below = np.cumsum(negative_weight) - negative_weight
    total = positives.sum() * negatives.sum()
    if total <= 0:
        return float("nan")
    won = positive_weight * (below + negative_weight / 2)
    return float(won.sum() / total)


def compute_pair_auc(scores: PairScores) -> float | None:
    """AUC of withdrawn pairs; None where none can be told from another, whatever the model knows."""
    return None if scores.is_tied else compute_auc(scores.members, scores.others)


def compute_pair_interval(scores: PairScores, owner: Longs, seed: int) -> list[float] | None:
    return None if scores.is_tied else compute_auc_interval(scores.members, scores.others, owner, seed)


def count_wins(members: Doubles, others: Doubles, owner: Longs) -> Doubles:
    """(people, people) how often a member of the one is above another of the other, ties half.

    With it the AUC of resampled people is a product: nothing has to be sorted again.
    """
    n_people = _count_people(owner)
    lists = Ragged.from_pairs(owner, np.arange(len(owner)), n_people)
    wins = np.zeros((n_people, n_people))
    for person in range(n_people):
        other_scores = np.sort(others[lists.row(person)])
        n_below = np.searchsorted(other_scores, members, "left")
        n_not_above = np.searchsorted(other_scores, members, "right")
        wins[:, person] = np.bincount(owner, weights=(n_below + n_not_above) / 2, minlength=n_people)
    return wins


def _count_people(owner: Longs) -> int:
    return int(owner.max(initial=-1)) + 1


def resample_aucs(scores: tuple[Doubles, Doubles], owner: Longs, seed: int) -> Doubles:
    """The AUC of (members, others) for people drawn again and again; the same draws for the same seed."""
    n_people = _count_people(owner)
    generator = np.random.default_rng([seed, n_people])
    samples = []
    for _ in range(RESAMPLES):
        people = generator.integers(0, n_people, n_people)
        samples.append(np.bincount(people, minlength=n_people))
    times = np.array(samples)
    n_pairs = times @ np.bincount(owner, minlength=n_people)
    won = ((times @ count_wins(*scores, owner)) * times).sum(axis=1)
    return np.asarray(won / np.maximum(n_pairs.astype(np.float64), 1) ** 2)


def compute_auc_interval(members: Doubles, others: Doubles, owner: Longs, seed: int) -> list[float]:
    """A 95 % interval of the AUC, people resampled."""
    if _count_people(owner) < 2:
        return [float("nan"), float("nan")]
    return _compute_central_interval(resample_aucs((members, others), owner, seed))


def compute_difference_interval(first: PairScores, second: PairScores, owner: Longs, seed: int) -> list[float]:
    """A 95 % interval of the difference of two models' AUCs, the same people resampled for both."""
    if _count_people(owner) < 2:
        return [float("nan"), float("nan")]
    first_aucs = resample_aucs((first.members, first.others), owner, seed)
    second_aucs = resample_aucs((second.members, second.others), owner, seed)
    return _compute_central_interval(first_aucs - second_aucs)


def _compute_central_interval(values: Doubles) -> list[float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def compute_difference_auc(before: PairScores, after: PairScores) -> float | None:
    """How well who has both models tells withdrawn pairs from others: by how much a score fell."""
    if before.is_tied and after.is_tied:
        return None
    return compute_auc(before.members - after.members, before.others - after.others)


def compute_list_overlap(first: PairScores, second: PairScores) -> float:
    """Overlap of two models' best lists, mean over people."""
    n_people = len(second.top)
    if not n_people:
        return 1.0
    rows = second.top.rows()
    in_both = first.top.holds(rows, second.top.ids)
    common = np.bincount(rows[in_both], minlength=n_people)
    union = first.top.counts() + second.top.counts() - common
    return float((common / np.maximum(1, union)).mean())


# Distances of models


def build_item_table(federation: Federation, learned: TrainedState) -> Floats:
    """The item rows that devices score with."""
    return build_scorer(federation, learned).build_item_table()


def flatten_model(federation: Federation, learned: TrainedState) -> Doubles:
    """All numbers of a model that everybody scores with."""
    heads = learned.server.heads
    numbers = [build_item_table(federation, learned).ravel()]
    numbers += [heads[name].ravel() for name in sorted(heads)]
    return np.concatenate(numbers).astype(float)


def measure_model_distance(federation: Federation, first: TrainedState, second: TrainedState) -> float | None:
    """Length of the difference of two models; None where they have not the same numbers."""
    first_numbers = flatten_model(federation, first)
    second_numbers = flatten_model(federation, second)
    if first_numbers.shape != second_numbers.shape:
        return None
    return float(np.linalg.norm(first_numbers - second_numbers))


def measure_gram_distance(first: Floats, second: Floats, items: Sequence[int] | Longs) -> float | None:
    """Mean absolute difference of the cosines of item rows, which no rotation changes; None without rows."""
    if first.shape[1] == 0 or first.shape != second.shape:
        return None
    rows = np.asarray(items)
    difference = _compute_cosines(first[rows]) - _compute_cosines(second[rows])
    return float(np.abs(difference).mean())


def _compute_cosines(rows: Floats) -> Doubles:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.maximum(lengths, 1e-8)
    return np.asarray(unit.astype(np.float64) @ unit.T.astype(np.float64))


def sample_items(federation: Federation) -> Longs:
    draws = hash_owners(federation.draws.public("gram-items"), federation.stream.item_keys)
    sampled = np.argsort(draws)[:SAMPLED_ITEMS]
    return np.sort(sampled)


# Utility


def measure_utility(
    federation: Federation, remaining: Federation, learned: TrainedState, requesters: AnyArray
) -> dict[str, Any]:
    """HR and NDCG at 20 for everybody, for those who asked and for the others; what was withdrawn stays hidden."""
    number = learned.server.block
    block = remaining.stream.blocks[number]
    mask = build_ranking_mask(federation, federation.stream.blocks[number], "test", "history")
    rules = build_evaluation_rules(remaining, block, ["hr", "ndcg"], [min(TOP, block.n_items)])
    evaluation = evaluate_devices(remaining, learned, block, "test", mask, rules)
    is_requester = np.zeros(remaining.stream.n_users, bool)
    is_requester[requesters] = True
    groups = {"all": None, "remaining": ~is_requester, "requesters": is_requester}
    utility = {}
    for group, users in groups.items():
        means = evaluation.compute_means(users)
        utility[group] = {metric.replace("@", ""): value for metric, value in means.items()}
    return utility
