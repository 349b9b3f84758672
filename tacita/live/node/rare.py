"""What few of a node's people have is left out of what it tells: the row of an item with one consumer is theirs."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, Longs, Ragged, ServerState
from tacita.fields import Total
from tacita.live.node.standing import Refusal, Standing
from tacita.round.device_state import PARTS
from tacita.round.parts import overrides
from tacita.round.plan import Federation

_COUNTED = ("touched", "counts")  # sums that say how many people have each item


def left_out(standing: Standing, whole: Total, least: int, server: ServerState) -> Total:
    """A statistic without its rare items. Under a budget that goes by noised counts, and nothing exact is looked at."""
    fed = standing.fed
    if not any(name in whole.sums for name in _COUNTED):
        return whole
    if fed.ledgers:
        return without_rare(whole, least, server.heads.get("inputs"))
    if fed.learner.takes_back and "touched" in whole.sums:
        _untell(standing, np.flatnonzero(whole["touched"] < least))
    if fed.backbone.reads_order and (whole["touched"] < least)[whole["touched"] > 0].any():
        _check_plain(fed)
        return _told_of_the_rest(standing, whole, len(server.items))
    return without_rare(whole, least, server.heads.get("inputs"))


def _untell(standing: Standing, rare: Longs) -> None:
    """What was left out of a statistic was not told, so it is not to be taken back."""
    clients, name = standing.here.clients, f"{PARTS}{standing.fed.learner.name}/told"
    everybody = np.arange(clients.n_users)
    log = clients.list_of(name, everybody)
    clients.put(everybody, {name: log.where((log.values["block"] != standing.block) | ~np.isin(log.ids, rare))})


def _check_plain(fed: Federation) -> None:
    """A statistic that is made again has nothing of what parts did to the first one."""
    for part in fed.parts:
        if any(overrides(part, hook) for hook in ("encode", "encode_sum", "weight")):
            raise Refusal(
                f"part '{part.name}' changes what people tell of order, which a node tells anew without items that "
                "fewer than its min_contributors people have; leave the part out."
            )


def _told_of_the_rest(standing: Standing, whole: Total, n_items: int) -> Total:
    """The statistic of what devices remember as told: who leaves an item out of a line moves the others together."""
    fed, clients = standing.fed, standing.here.clients
    log = clients.list_of(f"{PARTS}{fed.learner.name}/told", np.arange(clients.n_users))
    now = Ragged(log.ptr, log.ids).where(log.values["block"] == standing.block)
    before = Ragged(log.ptr, log.ids).where(log.values["block"] < standing.block)
    return whole.with_sums(fed.backbone.statistic_of(now, before, n_items).sums)


def without_rare(total: Total, least: int, inputs: AnyArray | None) -> Total:
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
