"""The F3CRec paper's analyses of who forgets and which items move (spec D.2 and D.3).

Both evaluations of an old block hide that block's own known items. The released code hides the current block's
instead, which by itself looks like forgetting, so it stands in a column of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacita.core.types import Arrays, Doubles, Floats, Longs, Ragged
from tacita.federation.evaluation import TrainedState, build_evaluation_rules, build_ranking_mask, evaluate_devices
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, run_round
from tacita.kernels.ranking import compute_list_ranks
from tacita.methods.continual.f3crec import Replay
from tacita.models.scoring import score_catalogue
from tacita.research.experiments.experiment_spec import load_settings
from tacita.research.experiments.shared_base import adopt_base, ignore_round, with_parts
from tacita.round.plan import Federation

GROUP_SHARE = 0.2  # the paper's static and dynamic fifths


def find_extreme_fifths(order_by: Doubles) -> tuple[Longs, Longs]:
    """Positions of the lowest and the highest fifth, ties by position."""
    n = int(len(order_by) * GROUP_SHARE)
    order = np.argsort(order_by, kind="stable")
    lowest = order[:n]
    highest = order[len(order) - n :]
    return lowest, highest


def measure_preference_shift(federation: Federation, base: Progress) -> tuple[Longs, Longs]:
    """Users of both block 0 and block 1, and how far their remembered items moved in one round of block 1."""
    grouping = _build_grouping(federation)
    progress = adopt_base(grouping, base)
    begin_block(grouping, progress, 1)
    block = grouping.stream.blocks[1]
    progress.server, _ = run_round(grouping, progress.server, progress.devices)
    server = progress.server
    replay_arrays = progress.clients.parts[Replay.name]
    lists = replay_arrays["list"]
    is_active = block.train.counts() > 0
    has_list = lists[:, 0] >= 0
    users = np.flatnonzero(is_active & has_list)
    private = progress.clients.private[users]
    scores = score_catalogue(grouping.scorer, private, server.heads, server.items)
    length = lists.shape[1]
    ptr = _find_even_bounds(len(users), length)
    listed = lists[users].reshape(-1)
    ranks = compute_list_ranks(scores, ptr, np.ascontiguousarray(listed))
    ranks = ranks.reshape(-1, length)
    old_ranks = np.arange(1, length + 1)
    shifts = np.abs(ranks - old_ranks)
    return users, shifts.sum(1)


def _find_even_bounds(n_lists: int, length: int) -> Longs:
    """Where lists of the same length begin and end."""
    return np.arange(n_lists + 1, dtype=np.int64) * length


def _build_grouping(federation: Federation) -> Federation:
    """F3CRec as tuned: it makes one grouping of users, whatever method is looked at."""
    settings = load_settings("f3crec")
    backbones = settings.chosen.get(federation.stream.name, {})
    methods = backbones.get(federation.backbone.name, {})
    options = methods["f3crec"].options if "f3crec" in methods else {}
    parts = []
    for name in ("replay", "temporal-mean"):
        parts.append({"name": name, **options.get(name, {})})
    config = federation.config.model_copy(update={"method": "fedavg", "parts": parts})
    return with_parts(federation, config)


def measure_forgetting(federation: Federation, base: Progress) -> dict[str, Any]:
    """Tables 4 and 5: block-0 quality before and after block 1, for users whose taste moved little and much."""
    users, shift = measure_preference_shift(federation, base)
    first_block, second_block = federation.stream.blocks[:2]
    own_mask = build_ranking_mask(federation, first_block, "test", "block")
    released_mask = build_ranking_mask(federation, second_block, "test", "block")
    progress = adopt_base(federation, base)
    before = _score_users(federation, progress, own_mask)
    begin_block(federation, progress, 1)
    run_block(federation, progress, ignore_round)
    end_block(federation, progress)
    after = _score_users(federation, progress, own_mask)
    released = _score_users(federation, progress, released_mask)
    activity = second_block.train.counts()
    is_scored = ~np.isnan(before + after + released)  # Last.fm: a mask may hide all of a user's test
    degradation = []
    released_degradation = []
    quality = []
    released_quality = []
    groups = {}
    fifths = find_extreme_fifths(shift.astype(np.float64))
    for name, positions in zip(("static", "dynamic"), fifths, strict=True):
        group = users[positions]
        group = group[is_scored[group]]
        mean_before = float(np.mean(before[group]))
        mean_after = float(np.mean(after[group]))
        mean_released = float(np.mean(released[group]))
        degradation.append(_measure_degradation(mean_before, mean_after))
        released_degradation.append(_measure_degradation(mean_before, mean_released))
        quality.append(round(mean_after, 6))
        released_quality.append(round(mean_released, 6))
        mean_activity = float(activity[group].mean())
        groups[name] = {
            "users": len(group),
            "a00": round(mean_before, 6),
            "activity": mean_activity,
        }
    values = {
        "degradation": degradation,
        "degradation, released mask": released_degradation,
        "ndcg@20 on block 0": quality,
        "ndcg@20 on block 0, released mask": released_quality,
    }
    return {"values": values, "groups": groups}


def _measure_degradation(before: float, after: float) -> float:
    """The share of quality that is lost."""
    return round(1 - after / before, 6) if before > 0 else 0.0


def _score_users(federation: Federation, progress: Progress, mask: Ragged) -> Doubles:
    """NDCG@20 on block 0's test items per user; nan where a user has none."""
    block = federation.stream.blocks[0]
    trained = TrainedState(progress.server, progress.clients)
    rules = build_evaluation_rules(federation, block, ["ndcg"], [20])
    evaluation = evaluate_devices(federation, trained, block, "test", mask, rules)
    scores = np.full(federation.stream.n_users, np.nan)
    scores[evaluation.users] = evaluation.values["ndcg@20"]
    return scores


def measure_rank_changes(federation: Federation, base: Progress) -> dict[str, Any]:
    """Table 7: how much rankings of absent users change for items that moved little and much."""
    progress = adopt_base(federation, base)
    static: list[float] = []
    dynamic: list[float] = []
    for number in range(1, len(federation.stream.blocks)):
        before = progress.server
        begin_block(federation, progress, number)
        run_block(federation, progress, ignore_round)
        end_block(federation, progress)
        after = progress.server
        n_known = len(before.items)
        known_items = after.items[:n_known]
        absent = _find_absent(federation, number)
        private = progress.clients.private[absent]
        squares = (known_items - before.items) ** 2
        width = before.items.shape[1]
        moved = squares.sum(1) / np.sqrt(width)
        least_moved, most_moved = find_extreme_fifths(moved.astype(np.float64))
        for items, changes in ((least_moved, static), (most_moved, dynamic)):
            old = _rank_listed_items(federation, private, before.heads, before.items, items)
            new = _rank_listed_items(federation, private, after.heads, known_items, items)
            distance = np.abs(old - new)
            relative_change = distance / old
            changes.append(float(relative_change.mean()))
    static_mean = float(np.mean(static))
    dynamic_mean = float(np.mean(dynamic))
    difference = dynamic_mean - static_mean
    rounded = [round(mean, 6) for mean in (static_mean, dynamic_mean, difference)]
    return {"values": {"rank change": rounded}}


def _find_absent(federation: Federation, number: int) -> Longs:
    """Users who were active in the block before and are not in this one."""
    blocks = federation.stream.blocks
    was_active = blocks[number - 1].train.counts() > 0
    is_active = blocks[number].train.counts() > 0
    n_before = len(was_active)
    is_absent = was_active & ~is_active[:n_before]
    return np.flatnonzero(is_absent)


def _rank_listed_items(federation: Federation, private: Floats, heads: Arrays, items: Floats, listed: Longs) -> Doubles:
    """The ranks of the same items for every user."""
    n_users = len(private)
    items = np.ascontiguousarray(items)
    scores = score_catalogue(federation.scorer, private, heads, items)
    ptr = _find_even_bounds(n_users, len(listed))
    items_of_users = np.tile(listed.astype(np.int32), n_users)
    ranks = compute_list_ranks(scores, ptr, items_of_users)
    return ranks.astype(np.float64)
