"""The F3CRec paper's analyses of who forgets and which items move (spec D.2 and D.3).

Both evaluations of an old block hide that block's own known items; the released code hides the current block's
instead, which by itself looks like forgetting, so it stands in a column of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacita.core.types import Doubles, Longs
from tacita.federation.evaluation import TrainedState, build_mask, build_rules, evaluate_devices
from tacita.federation.rounds import Progress, begin_block, end_block, run_block, run_round
from tacita.kernels.ranking import list_ranks
from tacita.methods.continual.f3crec import Replay
from tacita.models.scoring import score_all
from tacita.research.experiments.experiment_spec import load_settings
from tacita.research.experiments.shared_base import adopt_base, ignore_round, with_parts
from tacita.round.plan import Federation

GROUP_SHARE = 0.2  # the paper's static and dynamic fifths


def split_fifths(order_by: Doubles) -> tuple[Longs, Longs]:
    """Positions of the lowest and the highest fifth, ties by position."""
    n = int(len(order_by) * GROUP_SHARE)
    order = np.argsort(order_by, kind="stable")
    return order[:n], order[len(order) - n :]


def measure_preference_shift(fed: Federation, base: Progress) -> tuple[Longs, Longs]:
    """Users of both block 0 and block 1, and how far their remembered items moved in one round of block 1."""
    tuned = load_settings("f3crec").chosen.get(fed.stream.name, {}).get(fed.backbone.name, {})
    options = tuned["f3crec"].options if "f3crec" in tuned else {}
    parts = [{"name": name, **options.get(name, {})} for name in ("replay", "temporal-mean")]
    config = fed.config.model_copy(update={"method": "fedavg", "parts": parts})
    grouping = with_parts(fed, config)  # one grouping, from F3CRec as tuned, whatever method is looked at
    progress = adopt_base(grouping, base)
    begin_block(grouping, progress, 1)
    block = grouping.stream.blocks[1]
    progress.server, _ = run_round(grouping, progress.server, progress.devices)
    server = progress.server
    lists = progress.clients.parts[Replay.name]["list"]
    both = np.flatnonzero((block.train.counts() > 0) & (lists[:, 0] >= 0))
    scores = score_all(grouping.scorer, progress.clients.private[both], server.heads, server.items)
    n = lists.shape[1]
    ptr = np.arange(len(both) + 1, dtype=np.int64) * n
    ranks = list_ranks(scores, ptr, np.ascontiguousarray(lists[both].reshape(-1))).reshape(-1, n)
    return both, np.abs(ranks - np.arange(1, n + 1)).sum(1)


def measure_forgetting(fed: Federation, base: Progress) -> dict[str, Any]:
    """Tables 4 and 5: block-0 quality before and after block 1, for users whose taste moved little and much."""
    both, shift = measure_preference_shift(fed, base)
    progress = adopt_base(fed, base)
    first = fed.stream.blocks[0]
    own = build_mask(fed, first, "test", "block")
    before = _score_users(fed, progress, own)
    begin_block(fed, progress, 1)
    run_block(fed, progress, ignore_round)
    end_block(fed, progress)
    after = _score_users(fed, progress, own)
    released = _score_users(fed, progress, build_mask(fed, fed.stream.blocks[1], "test", "block"))
    activity = fed.stream.blocks[1].train.counts()
    told = ~np.isnan(before) & ~np.isnan(after) & ~np.isnan(released)  # Last.fm: a mask may hide all of a user's test
    rate, quality, rate_released, quality_released = [], [], [], []
    groups = {}
    for name, positions in zip(("static", "dynamic"), split_fifths(shift.astype(np.float64)), strict=True):
        users = both[positions]
        users = users[told[users]]
        a00, a10, a10_released = (float(np.mean(v[users])) for v in (before, after, released))
        rate.append(round(1 - a10 / a00, 6) if a00 > 0 else 0.0)
        rate_released.append(round(1 - a10_released / a00, 6) if a00 > 0 else 0.0)
        quality.append(round(a10, 6))
        quality_released.append(round(a10_released, 6))
        groups[name] = {"users": len(users), "a00": round(a00, 6), "activity": float(activity[users].mean())}
    values = {
        "degradation": rate,
        "degradation, released mask": rate_released,
        "ndcg@20 on block 0": quality,
        "ndcg@20 on block 0, released mask": quality_released,
    }
    return {"values": values, "groups": groups}


def _score_users(fed: Federation, progress: Progress, mask: Any) -> Doubles:
    """NDCG@20 on block 0's test items per user; nan where a user has none."""
    block, learned = fed.stream.blocks[0], TrainedState(progress.server, progress.clients)
    found = evaluate_devices(fed, learned, block, "test", mask, build_rules(fed, block, ["ndcg"], [20]))
    out = np.full(fed.stream.n_users, np.nan)
    out[found.users] = found.values["ndcg@20"]
    return out


def measure_rank_changes(fed: Federation, base: Progress) -> dict[str, Any]:
    """Table 7: how much rankings of absent users change for items that moved little and much."""
    progress = adopt_base(fed, base)
    static: list[float] = []
    dynamic: list[float] = []
    for t in range(1, len(fed.stream.blocks)):
        before = progress.server
        begin_block(fed, progress, t)
        run_block(fed, progress, ignore_round)
        end_block(fed, progress)
        known = len(before.items)
        moved = ((progress.server.items[:known] - before.items) ** 2).sum(1) / np.sqrt(before.items.shape[1])
        earlier, now = fed.stream.blocks[t - 1].train.counts() > 0, fed.stream.blocks[t].train.counts() > 0
        absent = np.flatnonzero(earlier & ~now[: len(earlier)])
        private = progress.clients.private[absent]
        low, high = split_fifths(moved.astype(np.float64))
        for items, kept in ((low, static), (high, dynamic)):
            old = _rank_listed(fed, private, before.heads, before.items, items)
            new = _rank_listed(fed, private, progress.server.heads, progress.server.items[:known], items)
            kept.append(float((np.abs(old - new) / old).mean()))
    calm, lively = float(np.mean(static)), float(np.mean(dynamic))
    return {"values": {"rank change": [round(calm, 6), round(lively, 6), round(lively - calm, 6)]}}


def _rank_listed(fed: Federation, private: Any, heads: Any, items: Any, listed: Longs) -> Doubles:
    scores = score_all(fed.scorer, private, heads, np.ascontiguousarray(items))
    ptr = np.arange(len(private) + 1, dtype=np.int64) * len(listed)
    return list_ranks(scores, ptr, np.tile(listed.astype(np.int32), len(private))).astype(np.float64)
