"""The result of a block, from the replies of nodes: the run's own scores, its controls, and how budgets are spent."""

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
    allowed_names = set(metrics)
    for control in CONTROLS:
        allowed_names |= {control_score_name(control, metric) for metric in metrics}
    check_scores(reply, allowed_names)
    if len(reply.head.spent) not in (0, len(SPENT_BINS)):
        raise TacitaError("the node's reply tells of budgets in a way that was not asked for.")


def merge_results(replies: Mapping[int, Reply], config: RunConfig) -> dict[str, Any]:
    """Means over all users who were scored, and controls that were scored over the same users."""
    sums = add_scores(replies)
    metrics = _metric_names(config)
    own_sums = {name: value for name, value in sums.items() if name in metrics}
    controls = {}
    for control in CONTROLS:
        control_sums = _select_control(sums, own_sums, control)
        if control_sums and _has_same_users(control_sums, own_sums):
            controls[control] = _compute_means(control_sums)
    result: dict[str, Any] = {**_compute_means(own_sums)}
    result["users"] = max((n_users for _, n_users in own_sums.values()), default=0)
    result["controls"] = controls
    spent = [reply.head.spent for reply in replies.values() if reply.head.spent]
    if spent:
        totals = [sum(counts) for counts in zip(*spent)]
        result["spent"] = dict(zip(SPENT_BINS, totals))
    return result


def _select_control(sums: MetricSums, own_sums: MetricSums, control: str) -> MetricSums:
    """The sums of a control, by the names of the run's own metrics."""
    control_sums = {}
    for name in own_sums:
        control_name = control_score_name(control, name)
        if control_name in sums:
            control_sums[name] = sums[control_name]
    return control_sums


def _has_same_users(control_sums: MetricSums, own_sums: MetricSums) -> bool:
    return all(n_users == own_sums[name][1] for name, (_, n_users) in control_sums.items())


def add_scores(replies: Mapping[int, Reply]) -> MetricSums:
    """Sums over all nodes, added in the order of their numbers."""
    sums: MetricSums = {}
    for node in sorted(replies):
        for name, (total, n_users) in replies[node].head.sums.items():
            total_before, users_before = sums.get(name, (0.0, 0))
            sums[name] = (total_before + total, users_before + n_users)
    return sums


def _metric_names(config: RunConfig) -> set[str]:
    names = set()
    for metric in config.evaluate.metrics:
        for k in config.evaluate.k:
            names.add("auc" if metric == "auc" else f"{metric}@{k}")
    return names


def _compute_means(sums: MetricSums) -> dict[str, float]:
    return {name: total / n_users if n_users else 0.0 for name, (total, n_users) in sums.items()}
