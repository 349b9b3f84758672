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
from tacita.federation.evaluation import TrainedState, build_mask, build_rules, evaluate_devices
from tacita.federation.scoring import DeviceScorer
from tacita.kernels.hashing import hash_owners
from tacita.kernels.ranking import best_items
from tacita.round.plan import Federation

DECILES = 10
TRIES = 64  # draws of a matched item before any other will do
RESAMPLES = 1000
SAMPLED_ITEMS = 1000
TOP = 20
CHUNK = 256


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


def match_pairs(fed: Federation, gone: Ragged, owned: Ragged) -> MatchedPairs:
    """One other item for every withdrawn one: as popular among what remains, and never the user's."""
    stream = fed.stream
    users = np.flatnonzero(gone.counts() > 0).astype(np.int32)
    members = gone.take(users)
    left = stream.train_items(len(stream.blocks) - 1)
    count = np.bincount(left.ids, minlength=stream.n_items)
    order = np.lexsort((np.arange(len(count)), count))
    decile = np.empty(len(count), np.int64)
    decile[order] = np.arange(len(count)) * DECILES // len(count)
    by_decile = Ragged.from_pairs(decile, np.arange(len(count)), DECILES)
    person, item = users[members.rows()], members.ids.astype(np.int64)
    chosen = np.full(len(item), -1, np.int64)
    start, size = by_decile.ptr[decile[item]], by_decile.counts()[decile[item]]
    owner = hash_owners(fed.draws.public("matched-pairs"), stream.user_keys[person]) + item.astype(np.uint64)
    for attempt in range(TRIES):
        open_ = np.flatnonzero(chosen < 0)
        if attempt == TRIES // 2:  # a person may have all items that are as popular
            start, size = np.zeros_like(start), np.full_like(size, len(count))
        drawn = hash_owners(fed.draws.public("matched-try", attempt), owner[open_])
        other = by_decile.ids[start[open_] + (drawn % size[open_].astype(np.uint64)).astype(np.int64)]
        free = ~owned.holds(person[open_], other) & ~gone.holds(person[open_], other)
        chosen[open_[free]] = other[free]
    found = chosen >= 0
    return MatchedPairs(
        users, members.filter_entries(found), Ragged(members.filter_entries(found).ptr, chosen[found].astype(np.int32))
    )


def build_scorer(fed: Federation, learned: TrainedState) -> DeviceScorer:
    block = fed.stream.blocks[learned.server.block]
    past = fed.stream.history(block.index) if fed.backbone.reads_history else None
    down = learned.broadcast or fed.broadcast_serving(learned.server)
    return DeviceScorer(fed, learned.server, learned.clients, block, fed.stream.user_keys, down, "serve", past)


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


def score_pairs(fed: Federation, learned: TrainedState, pairs: MatchedPairs) -> PairScores:
    """Scores, ranks and lists of the people who withdrew something, nothing hidden but what they still have."""
    score, parts = build_scorer(fed, learned), []
    known = fed.stream.history(len(fed.stream.blocks))
    for lo in range(0, len(pairs.users), CHUNK):
        some = np.arange(lo, min(lo + CHUNK, len(pairs.users)))
        scores = score(pairs.users[some]).astype(np.float64)
        mine, other, have = pairs.members.take(some), pairs.others.take(some), known.take(pairs.users[some])
        at, beside = scores[mine.rows(), mine.ids], scores[other.rows(), other.ids]
        order = np.sort(scores, axis=1)
        below = np.array([np.searchsorted(order[r], s) for r, s in zip(mine.rows(), at, strict=True)], np.float64)
        scores[have.rows(), have.ids] = -np.inf
        top, _ = best_items(scores.astype(np.float32), min(TOP, scores.shape[1]))
        parts.append((at, beside, below / max(1, scores.shape[1] - 1), top))
    if not parts:
        none = np.zeros(0)
        return PairScores(none, none, none, Ragged.empty(0))
    members, others, rank = (np.concatenate([one[k] for one in parts]) for k in range(3))
    lists = np.concatenate([one[3] for one in parts])
    ptr = np.arange(len(lists) + 1, dtype=np.int64) * lists.shape[1]
    return PairScores(members, others, rank, Ragged(ptr, lists.reshape(-1).astype(np.int32)))


def compute_auc(members: Doubles, others: Doubles) -> float:
    """How often a member's score is above another's, ties half; groups of any size."""
    here, there = np.ones(len(members)), np.ones(len(others))
    return _weighted_auc(np.concatenate([members, others]), np.append(here, there * 0), np.append(here * 0, there))


def _weighted_auc(score: Doubles, positive: Doubles, negative: Doubles) -> float:
    order = np.argsort(score, kind="stable")
    s, p, n = score[order], positive[order], negative[order]
    edge = np.flatnonzero(np.concatenate([[True], np.diff(s) != 0]))
    pos, neg = np.add.reduceat(p, edge), np.add.reduceat(n, edge)
    below = np.cumsum(neg) - neg
    total = p.sum() * n.sum()
    return float((pos * (below + neg / 2)).sum() / total) if total > 0 else float("nan")


def pair_auc(seen: PairScores) -> float | None:
    """AUC of withdrawn pairs; None where none can be told from another, whatever the model knows."""
    return None if seen.is_tied else compute_auc(seen.members, seen.others)


def pair_interval(seen: PairScores, owner: Longs, seed: int) -> list[float] | None:
    return None if seen.is_tied else auc_interval(seen.members, seen.others, owner, seed)


def count_wins(members: Doubles, others: Doubles, owner: Longs) -> Doubles:
    """(people, people) how often a member of the one is above another of the other, ties half.

    With it the AUC of resampled people is a product: nothing has to be sorted again.
    """
    people = int(owner.max(initial=-1)) + 1
    lists = Ragged.from_pairs(owner, np.arange(len(owner)), people)
    out = np.zeros((people, people))
    for v in range(people):
        theirs = np.sort(others[lists.row(v)])
        above = (np.searchsorted(theirs, members, "left") + np.searchsorted(theirs, members, "right")) / 2
        out[:, v] = np.bincount(owner, weights=above, minlength=people)
    return out


def resample_aucs(seen: tuple[Doubles, Doubles], owner: Longs, seed: int) -> Doubles:
    """The AUC of (members, others) for people drawn again and again; the same draws for the same seed."""
    people = int(owner.max(initial=-1)) + 1
    draws = np.random.default_rng([seed, people])
    times = np.array([np.bincount(draws.integers(0, people, people), minlength=people) for _ in range(RESAMPLES)])
    pairs = times @ np.bincount(owner, minlength=people)
    won = ((times @ count_wins(*seen, owner)) * times).sum(axis=1)
    return np.asarray(won / np.maximum(pairs.astype(np.float64), 1) ** 2)


def auc_interval(members: Doubles, others: Doubles, owner: Longs, seed: int) -> list[float]:
    """A 95 % interval of the AUC, people resampled."""
    if int(owner.max(initial=-1)) < 1:
        return [float("nan"), float("nan")]
    return [float(x) for x in np.percentile(resample_aucs((members, others), owner, seed), [2.5, 97.5])]


def paired_interval(a: PairScores, b: PairScores, owner: Longs, seed: int) -> list[float]:
    """A 95 % interval of the difference of two models' AUCs, the same people resampled for both."""
    if int(owner.max(initial=-1)) < 1:
        return [float("nan"), float("nan")]
    one, other = (resample_aucs((x.members, x.others), owner, seed) for x in (a, b))
    return [float(x) for x in np.percentile(one - other, [2.5, 97.5])]


def difference_auc(before: PairScores, after: PairScores) -> float | None:
    """How well who has both models tells withdrawn pairs from others: by how much a score fell."""
    if before.is_tied and after.is_tied:
        return None
    return compute_auc(before.members - after.members, before.others - after.others)


def jaccard(a: PairScores, b: PairScores) -> float:
    """Overlap of two models' best lists, mean over people."""
    both = a.top.holds(b.top.rows(), b.top.ids)
    common = np.bincount(b.top.rows()[both], minlength=len(b.top))
    return float((common / np.maximum(1, a.top.counts() + b.top.counts() - common)).mean()) if len(b.top) else 1.0


def item_table(fed: Federation, learned: TrainedState) -> Floats:
    """The item rows that devices score with."""
    return build_scorer(fed, learned).item_table()


def flatten_model(fed: Federation, learned: TrainedState) -> Doubles:
    """All numbers of a model that everybody scores with."""
    heads = learned.server.heads
    return np.concatenate([item_table(fed, learned).ravel(), *(heads[k].ravel() for k in sorted(heads))]).astype(float)


def model_distance(fed: Federation, a: TrainedState, b: TrainedState) -> float | None:
    """Length of the difference of two models; None where they have not the same numbers."""
    one, other = flatten_model(fed, a), flatten_model(fed, b)
    return float(np.linalg.norm(one - other)) if one.shape == other.shape else None


def gram_distance(a: Floats, b: Floats, items: Sequence[int] | Longs) -> float | None:
    """Mean absolute difference of the cosines of item rows, which no rotation changes; None without rows."""
    if a.shape[1] == 0 or a.shape != b.shape:
        return None
    cosines = [_cosines(one[np.asarray(items)]) for one in (a, b)]
    return float(np.abs(cosines[0] - cosines[1]).mean())


def _cosines(rows: Floats) -> Doubles:
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
    return np.asarray(unit.astype(np.float64) @ unit.T.astype(np.float64))


def sample_items(fed: Federation) -> Longs:
    drawn = hash_owners(fed.draws.public("gram-items"), fed.stream.item_keys)
    return np.sort(np.argsort(drawn)[:SAMPLED_ITEMS])


def measure_utility(fed: Federation, remaining: Federation, learned: TrainedState, askers: AnyArray) -> dict[str, Any]:
    """HR and NDCG at 20 for everybody, for those who asked and for the others; what was withdrawn stays hidden."""
    block = remaining.stream.blocks[learned.server.block]
    k = min(TOP, block.n_items)
    mask = build_mask(fed, fed.stream.blocks[learned.server.block], "test", "history")
    found = evaluate_devices(
        remaining, learned, block, "test", mask, build_rules(remaining, block, ["hr", "ndcg"], [k])
    )
    asked = np.zeros(remaining.stream.n_users, bool)
    asked[askers] = True
    groups = {"all": None, "remaining": ~asked, "requesters": asked}
    return {name: {m.replace("@", ""): v for m, v in found.mean(who).items()} for name, who in groups.items()}
