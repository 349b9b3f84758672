"""People's budgets on a node: what was charged before answers left, and a person's own account over all runs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, validated
from tacita.core.files import nested
from tacita.core.types import AnyArray, Arrays
from tacita.federation.clients import put_parts
from tacita.lab.assembling import planned
from tacita.lab.ledger import ACCOUNT, NO_EPSILON, accounts_of, one_account
from tacita.live.letters import secret_of
from tacita.live.node.answers import NO_EPSILON as NONE_STATED
from tacita.live.node.node import Node
from tacita.live.node.standing import Standing
from tacita.privacy.ledger import EARLIER, Ledger
from tacita.round.device_state import PARTS


def cost_of_all(standing: Standing) -> str:
    """What a release has cost the people here so far, for the node's log: the most that anybody has spent."""
    found = accounts_of((*standing.fed.parts, standing.fed.learner), standing.here.clients.parts)
    if found is None:
        return NONE_STATED
    most = float(found[0].epsilon(found[1]).max(initial=0.0))
    return f"at most {most:.4g} a person so far" if math.isfinite(most) else NONE_STATED


@contextlib.contextmanager
def nothing_charged(standing: Standing) -> Iterator[None]:
    """Where nothing leaves the node, nobody pays."""
    arrays = standing.here.clients.arrays
    names = [f"{PARTS}{part.name}/{one}" for part in standing.fed.parts if part.ledger() for one in ACCOUNT]
    before = {name: arrays[name].copy() for name in names}
    yield
    for name, kept in before.items():
        arrays[name][:] = kept


def carry(node: Node, standing: Standing) -> None:
    """Put what people spent in other runs on their accounts in this one: a new run is no new budget."""
    clients, run = standing.here.clients, standing.fed.stream.name
    counting = [part for part in standing.fed.parts if (kept := part.ledger()) and EARLIER in kept.names]
    others = [one for one in node.store.runs() if one != run] if counting else []
    elsewhere = np.zeros(clients.n_users, np.int64)
    for other in others:
        found = _accounts(node, other)
        if found is None:
            continue
        (ledger, account), users = found
        place = {int(one): n for n, one in enumerate(standing.users[: clients.n_users])}
        rows = np.array([place.get(int(one), -1) for one in users], np.int64)
        elsewhere[rows[rows >= 0]] += ledger.without(EARLIER, account)[rows >= 0]
    for part in counting if elsewhere.any() else ():
        counted, mine = part.ledger(), clients.parts[part.name]
        assert counted is not None
        made = counted.with_earlier({name: mine[name] for name in ACCOUNT}, elsewhere)
        put_parts(clients, np.arange(clients.n_users, dtype=np.int32), {part.name: made})


def _accounts(node: Node, run: str) -> tuple[tuple[Ledger, Arrays], AnyArray] | None:
    """The accounts of the people here in a run, and whose they are; None: it counts nothing."""
    store = node.store
    model, held = store.model(run), store.devices(run)
    if model is None or held is None:
        return None
    config = validated(RunConfig, json.loads(model[0]["config"]), "the settings the server sent")
    plan = planned(config, secret_of(store.secret, run))
    counted = accounts_of((*plan.parts, plan.learner), nested(held[1], PARTS))
    return None if counted is None else (counted, held[1]["users"])


def own_ledger(node: Node, user: str) -> dict[str, Any]:
    """One person's account in every run that was heard of here."""
    number, found = node.store.user(user), {}
    for run in node.store.runs():
        held = node.store.devices(run)
        if held is None or number not in held[1]["users"]:
            continue
        counted = _accounts(node, run)
        row = int(np.flatnonzero(held[1]["users"] == number)[0])
        found[run] = {"no_epsilon": NO_EPSILON} if counted is None else one_account(*counted[0], row)
    return {"user": user, "runs": found}
