"""What people spent, for as long as a node is there: also of who was erased, and without their name.

Who is erased and imported again would have a whole new budget for the same data, against the same server. So an
erasure leaves one number: what was spent in runs that count, under a digest of the person's id that only this node's
secret makes. Whoever has the node's file has the secret too, and can ask of an id that they know whether it is there.
Of somebody who never spent anything nothing stays.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Sequence

import numpy as np

from tacita.core.config import RunConfig, validated
from tacita.core.files import nested
from tacita.core.types import AnyArray, Arrays, Longs
from tacita.lab.assembling import planned
from tacita.lab.ledger import accounts_of
from tacita.live.letters import secret_of
from tacita.live.node.store import NodeStore
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import EARLIER, Ledger, added
from tacita.round.device_state import PARTS

log = logging.getLogger(__name__)

SPENT = "spent/"
NOTHING = Event("nothing that chance decides", "unknown")


def accounts_in(store: NodeStore, run: str) -> tuple[tuple[Ledger, Arrays], AnyArray] | None:
    """The accounts of the people here in a run, and whose they are; None: it counts nothing."""
    model, held = store.model(run), store.devices(run)
    if model is None or held is None:
        return None
    config = validated(RunConfig, json.loads(model[0]["config"]), "the settings the server sent")
    plan = planned(config, secret_of(store.secret, run))
    counted = accounts_of((*plan.parts, plan.learner), nested(held[1], PARTS))
    return None if counted is None else (counted, held[1]["users"])


def to_keep(store: NodeStore, user: int | None) -> dict[str, int]:
    """What an erasure of somebody (None: of everybody) leaves: digest -> units of mu^2, of drawn rounds a bound.

    An erasure goes before: a run whose accounts cannot be read leaves nothing.
    """
    ids, raws = store.users()
    units = dict.fromkeys(ids.tolist() if user is None else [user], 0)
    for run in store.runs():
        try:
            found = accounts_in(store, run)
        except Exception as error:
            log.warning("what was spent in run '%s' is not kept: %s", run, str(error)[:500])
            continue
        if found is None:
            continue
        (ledger, account), users = found
        here = added(ledger.without(EARLIER, account), ledger.rounds_like(NOTHING, account)[1])
        for one, more in zip(users.tolist(), here.tolist(), strict=True):
            if one in units:
                units[one] = int(added(np.array([units[one]]), np.array([more]))[0])
    raw_of = dict(zip(ids.tolist(), raws, strict=True))
    before = store.notes(SPENT)
    made = {_digest(store.secret, raw_of[one]): spent for one, spent in units.items()}
    total = {key: int(added(np.array([spent]), np.array([int(before.get(key, 0))]))[0]) for key, spent in made.items()}
    return {key: spent for key, spent in total.items() if spent}


def spent_before(store: NodeStore, raws: Sequence[str]) -> Longs:
    """What each of these spent before they were erased, in units of mu^2."""
    kept = store.notes(SPENT)
    if not kept:
        return np.zeros(len(raws), np.int64)
    return np.array([int(kept.get(_digest(store.secret, raw), 0)) for raw in raws], np.int64)


def _digest(secret: str, raw: str) -> str:
    return SPENT + hmac.new(f"spent {secret}".encode(), raw.encode(), hashlib.sha256).hexdigest()
