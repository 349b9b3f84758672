"""Statistics leave out items that few of a node's people have: the row of an item with one consumer is theirs."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, Longs, Ragged, ServerState
from tacita.learn.statistic import CONTRIBUTION_LOG
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.messages import Total
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import PARTS
from tacita.round.part import implements
from tacita.round.plan import Federation

_COUNT_SUMS = ("touched", "counts")  # sums that say how many people have each item


def drop_rare_entries(node_run: NodeRun, total: Total, min_contributors: int, server: ServerState) -> Total:
    """A statistic without its rare items. Under a budget only noised counts decide which items are rare."""
    federation = node_run.federation
    input_items = server.heads.get("inputs")
    if not any(name in total.sums for name in _COUNT_SUMS):
        return total
    if federation.ledgers:
        return zero_rare_items(total, min_contributors, input_items)
    if federation.learner.unlearning is not None and "touched" in total.sums:
        _drop_from_contribution_log(node_run, np.flatnonzero(total["touched"] < min_contributors))
    if federation.backbone.reads_order and _has_rare_items(total, min_contributors):
        _refuse_encoders(federation)
        return _rebuild_statistic(node_run, total, server)
    return zero_rare_items(total, min_contributors, input_items)


def _has_rare_items(total: Total, min_contributors: int) -> bool:
    """Whether somebody has an item that fewer than `min_contributors` people have."""
    touched = total["touched"]
    is_rare = touched < min_contributors
    return bool(is_rare[touched > 0].any())


def _drop_from_contribution_log(node_run: NodeRun, rare_items: Longs) -> None:
    """Items that a statistic leaves out were not contributed, so nobody can take them back."""
    clients = node_run.devices.clients
    name = _find_log_name(node_run.federation)
    users = np.arange(clients.n_users)
    log = clients.read_list(name, users)
    is_earlier = log.values["block"] != node_run.block
    is_common = ~np.isin(log.ids, rare_items)
    clients.put(users, {name: log.filter_entries(is_earlier | is_common)})


def _find_log_name(federation: Federation) -> str:
    return f"{PARTS}{federation.learner.name}/{CONTRIBUTION_LOG}"


def _refuse_encoders(federation: Federation) -> None:
    """A rebuilt statistic holds nothing of what parts did to the first one."""
    for part in federation.parts:
        if any(implements(part, hook) for hook in ("encode", "noise_sum", "weigh")):
            raise Refusal(
                f"part '{part.name}' changes what people tell of order, which a node tells anew without items that "
                "fewer than its min_contributors people have; leave the part out."
            )


def _rebuild_statistic(node_run: NodeRun, total: Total, server: ServerState) -> Total:
    """The statistic of the contribution logs: leaving an item out of a sequence moves the others together."""
    federation = node_run.federation
    clients = node_run.devices.clients
    users = np.arange(clients.n_users)
    log = clients.read_list(_find_log_name(federation), users)
    block = log.values["block"]
    items = Ragged(log.ptr, log.ids)
    current = items.filter_entries(block == node_run.block)
    earlier = items.filter_entries(block < node_run.block)
    model = federation.backbone
    assert isinstance(model, StatisticModel)
    statistic = model.sum_statistics_of_lists(server, current, earlier)
    return total.with_sums(statistic.sums)


def zero_rare_items(total: Total, min_contributors: int, input_items: AnyArray | None) -> Total:
    """A statistic without items that fewer people have: the row of an item with one consumer is their history."""
    count_name = "touched" if "touched" in total.sums else "counts"
    counts = total[count_name]
    is_rare = counts < min_contributors
    is_rare_input = is_rare
    if input_items is not None and len(input_items):
        is_rare_input = is_rare[input_items]
    sums = {count_name: np.where(is_rare, 0.0, counts)}
    for name, value in total.sums.items():
        if value.ndim == 2:
            matrix = value.copy()
            matrix[is_rare_input] = 0.0
            matrix[:, is_rare] = 0.0
            sums[name] = matrix
    return total.with_sums(sums)
