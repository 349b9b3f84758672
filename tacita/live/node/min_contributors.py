"""What few of a node's people have is left out of what it tells: the row of an item with one consumer is theirs."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, Longs, Ragged, ServerState
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.messages import Total
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import PARTS
from tacita.round.part import implements
from tacita.round.plan import Federation

_COUNT_SUMS = ("touched", "counts")  # sums that say how many people have each item


def drop_rare_entries(standing: NodeRun, whole: Total, least: int, server: ServerState) -> Total:
    """A statistic without its rare items. Under a budget that goes by noised counts, and nothing exact is looked at."""
    fed = standing.federation
    if not any(name in whole.sums for name in _COUNT_SUMS):
        return whole
    if fed.ledgers:
        return zero_rare_items(whole, least, server.heads.get("inputs"))
    if fed.learner.unlearning is not None and "touched" in whole.sums:
        _unlog_items(standing, np.flatnonzero(whole["touched"] < least))
    if fed.backbone.reads_order and (whole["touched"] < least)[whole["touched"] > 0].any():
        _check_no_encoders(fed)
        return _rebuild_statistic(standing, whole, server)
    return zero_rare_items(whole, least, server.heads.get("inputs"))


def _unlog_items(standing: NodeRun, rare: Longs) -> None:
    """What was left out of a statistic was not told, so it is not to be taken back."""
    clients, name = standing.devices.clients, f"{PARTS}{standing.federation.learner.name}/told"
    everybody = np.arange(clients.n_users)
    log = clients.read_list(name, everybody)
    clients.put(
        everybody, {name: log.filter_entries((log.values["block"] != standing.block) | ~np.isin(log.ids, rare))}
    )


def _check_no_encoders(fed: Federation) -> None:
    """A statistic that is made again has nothing of what parts did to the first one."""
    for part in fed.parts:
        if any(implements(part, hook) for hook in ("encode", "encode_sum", "weight")):
            raise Refusal(
                f"part '{part.name}' changes what people tell of order, which a node tells anew without items that "
                "fewer than its min_contributors people have; leave the part out."
            )


def _rebuild_statistic(standing: NodeRun, whole: Total, server: ServerState) -> Total:
    """The statistic of what devices remember as told: who leaves an item out of a line moves the others together."""
    fed, clients = standing.federation, standing.devices.clients
    log = clients.read_list(f"{PARTS}{fed.learner.name}/told", np.arange(clients.n_users))
    now = Ragged(log.ptr, log.ids).filter_entries(log.values["block"] == standing.block)
    before = Ragged(log.ptr, log.ids).filter_entries(log.values["block"] < standing.block)
    assert isinstance(fed.backbone, StatisticModel)
    return whole.with_sums(fed.backbone.sum_lists(server, now, before).sums)


def zero_rare_items(total: Total, least: int, inputs: AnyArray | None) -> Total:
    """A statistic without items that fewer people have: the row of an item with one consumer is that one's history."""
    name = "touched" if "touched" in total.sums else "counts"
    rare = total[name] < least
    changed = {name: np.where(rare, 0.0, total[name])}
    first = rare if inputs is None or len(inputs) == 0 else rare[inputs]
    for square, value in total.sums.items():
        if value.ndim == 2:
            changed[square] = value.copy()
            changed[square][first] = 0.0
            changed[square][:, rare] = 0.0
    return total.with_sums(changed)
