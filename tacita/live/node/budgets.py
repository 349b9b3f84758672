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
from tacita.lab.assembling import planned
from tacita.lab.ledger import ACCOUNT, NO_EPSILON, accounts_of, one_account
from tacita.live.letters import secret_of
from tacita.live.node.answers import NO_EPSILON as NONE_STATED
from tacita.live.node.node import Node
from tacita.live.node.standing import Standing
from tacita.round.device_state import PARTS


def cost_of_all(standing: Standing) -> str:
    """What a release has cost the people here so far, for the node's log: the most that anybody has spent."""
    found = accounts_of(standing.fed.parts, standing.here.clients.parts)
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


def own_ledger(node: Node, user: str) -> dict[str, Any]:
    """One person's account in every run that was heard of here."""
    store = node.store
    number, found = store.user(user), {}
    for run in store.runs():
        model, held = store.model(run), store.devices(run)
        if model is None or held is None or number not in held[1]["users"]:
            continue
        config = validated(RunConfig, json.loads(model[0]["config"]), "the settings the server sent")
        parts = planned(config, secret_of(store.secret, run)).parts
        counted = accounts_of(parts, nested(held[1], PARTS))
        row = int(np.flatnonzero(held[1]["users"] == number)[0])
        found[run] = {"no_epsilon": NO_EPSILON} if counted is None else one_account(*counted, row)
    return {"user": user, "runs": found}
