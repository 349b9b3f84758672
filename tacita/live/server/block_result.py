"""What nodes tell when a block ends, as one result: the run's own scores, its controls, and how budgets are spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.federation.evaluation import MetricSums
from tacita.live.server.bounds import check_scores
from tacita.live.wire import CONTROLS, SPENT_BINS, Reply, control_score_name


def check_closing_reply(reply: Reply, config: RunConfig) -> None:
    """Refuse scores that were not asked for or that nobody can have."""
    metrics = _metric_names(config)
    check_scores(reply, metrics | {control_score_name(one, metric) for one in CONTROLS for metric in metrics})
    if len(reply.head.spent) not in (0, len(SPENT_BINS)):
        raise TacitaError("the node's reply tells of budgets in a way that was not asked for.")


def merge_results(replies: Mapping[int, Reply], config: RunConfig) -> dict[str, Any]:
    """Means over everybody who was scored. A control stands beside them if it was scored over the same people."""
    sums, metrics = add_scores(replies), _metric_names(config)
    own = {name: value for name, value in sums.items() if name in metrics}
    controls = {}
    for control in CONTROLS:
        found = {
            name: sums[control_score_name(control, name)] for name in own if control_score_name(control, name) in sums
        }
        if found and all(n == own[name][1] for name, (_, n) in found.items()):
            controls[control] = _compute_means(found)
    told = [one.head.spent for one in replies.values() if one.head.spent]
    spent = {"spent": dict(zip(SPENT_BINS, map(sum, zip(*told))))} if told else {}
    return {**_compute_means(own), "users": max((n for _, n in own.values()), default=0), "controls": controls, **spent}


def add_scores(replies: Mapping[int, Reply]) -> MetricSums:
    sums: MetricSums = {}
    for node in sorted(replies):
        for name, (total, n) in replies[node].head.sums.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + n)
    return sums


def _metric_names(config: RunConfig) -> set[str]:
    cfg = config.evaluate
    return {"auc" if metric == "auc" else f"{metric}@{k}" for metric in cfg.metrics for k in cfg.k}


def _compute_means(sums: MetricSums) -> dict[str, float]:
    return {name: total / n if n else 0.0 for name, (total, n) in sums.items()}
