"""The result of a block, from the replies of nodes: the run's own scores, its controls, and how budgets are spent."""

from __future__ import annotations

from collections.abc import Mapping

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.federation.evaluation import MetricSums
from tacita.live.json_object import JsonObject
from tacita.live.server.bounds import check_scores
from tacita.live.wire import CONTROLS, SPENT_BINS, Reply, control_score_name


def check_closing_reply(reply: Reply, config: RunConfig) -> None:
    """Refuse scores that were not asked for or that nobody can have."""
    metrics = _list_metric_names(config)
    allowed_names = set(metrics)
    for control in CONTROLS:
        allowed_names |= {control_score_name(control, metric) for metric in metrics}
    check_scores(reply, allowed_names)
    n_bins = len(reply.head.spent)
    if n_bins not in (0, len(SPENT_BINS)):
        raise TacitaError("the node's reply tells of budgets in a way that was not asked for.")


def merge_results(replies: Mapping[int, Reply], config: RunConfig) -> JsonObject:
    """Means over all users who were scored, and controls that were scored over the same users."""
    sums = sum_scores(replies)
    metrics = _list_metric_names(config)
    own_sums = {name: value for name, value in sums.items() if name in metrics}
    controls = {}
    for control in CONTROLS:
        control_sums = _select_control_sums(sums, own_sums, control)
        if control_sums and _has_same_users(control_sums, own_sums):
            controls[control] = _compute_means(control_sums)
    result: JsonObject = {**_compute_means(own_sums)}
    user_counts = [n_users for _, n_users in own_sums.values()]
    result["users"] = max(user_counts, default=0)
    result["controls"] = controls
    spent = _sum_spent_bins(replies)
    if spent:
        result["spent"] = spent
    return result


def _sum_spent_bins(replies: Mapping[int, Reply]) -> dict[str, int]:
    """How many people spent how much of their budgets, over all nodes that say so."""
    counts_by_node = []
    for reply in replies.values():
        if reply.head.spent:
            counts_by_node.append(reply.head.spent)
    totals = [sum(counts) for counts in zip(*counts_by_node)]
    return dict(zip(SPENT_BINS, totals))


def _select_control_sums(sums: MetricSums, own_sums: MetricSums, control: str) -> MetricSums:
    """The sums of a control, by the names of the run's own metrics."""
    control_sums = {}
    for name in own_sums:
        name_control = control_score_name(control, name)
        if name_control in sums:
            control_sums[name] = sums[name_control]
    return control_sums


def _has_same_users(control_sums: MetricSums, own_sums: MetricSums) -> bool:
    for name, (_, n_users) in control_sums.items():
        _, n_own_users = own_sums[name]
        if n_users != n_own_users:
            return False
    return True


def sum_scores(replies: Mapping[int, Reply]) -> MetricSums:
    """Sums over all nodes, added in the order of their numbers."""
    sums: MetricSums = {}
    for node in sorted(replies):
        node_sums = replies[node].head.sums
        for name, (total, n_users) in node_sums.items():
            total_before, users_before = sums.get(name, (0.0, 0))
            sums[name] = (total_before + total, users_before + n_users)
    return sums


def _list_metric_names(config: RunConfig) -> set[str]:
    names = set()
    for metric in config.evaluate.metrics:
        for k in config.evaluate.k:
            names.add("auc" if metric == "auc" else f"{metric}@{k}")
    return names


def _compute_means(sums: MetricSums) -> dict[str, float]:
    means = {}
    for name, (total, n_users) in sums.items():
        means[name] = total / n_users if n_users else 0.0
    return means
