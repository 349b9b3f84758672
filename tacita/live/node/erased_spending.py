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

from tacita.core.config import RunConfig, validate_model
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Longs
from tacita.live.node.store import NodeStore
from tacita.live.per_client_arrays import derive_run_secret
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import EARLIER_RUNS, Ledger, add_losses
from tacita.round.device_state import PARTS
from tacita.runs.assembly import build_plan
from tacita.runs.ledger import join_accounts

log = logging.getLogger(__name__)

SPENT_PREFIX = "spent/"
NO_EVENT = Event("nothing that chance decides", "unknown")


def load_accounts(store: NodeStore, run: str) -> tuple[tuple[Ledger, Arrays], AnyArray] | None:
    """The accounts of the people here in a run, and whose they are; None: it counts nothing."""
    model, held = store.model(run), store.devices(run)
    if model is None or held is None:
        return None
    config = validate_model(RunConfig, json.loads(model[0]["config"]), "the settings the server sent")
    plan = build_plan(config, derive_run_secret(store.secret, run))
    counted = join_accounts((*plan.parts, plan.learner), nest_parts(held[1], PARTS))
    return None if counted is None else (counted, held[1]["users"])


def collect_spending(store: NodeStore, user: int | None) -> dict[str, int]:
    """What an erasure of somebody (None: of everybody) leaves: digest -> units of mu^2, of drawn rounds a bound.

    An erasure goes before: a run whose accounts cannot be read leaves nothing.
    """
    ids, raws = store.users()
    units = dict.fromkeys(ids.tolist() if user is None else [user], 0)
    for run in store.runs():
        try:
            found = load_accounts(store, run)
        except Exception as error:
            log.warning("what was spent in run '%s' is not kept: %s", run, str(error)[:500])
            continue
        if found is None:
            continue
        (ledger, account), users = found
        here = add_losses(
            ledger.sum_losses_except(EARLIER_RUNS, account), ledger.count_rounds_like(NO_EVENT, account)[1]
        )
        for one, more in zip(users.tolist(), here.tolist(), strict=True):
            if one in units:
                units[one] = int(add_losses(np.array([units[one]]), np.array([more]))[0])
    raw_of = dict(zip(ids.tolist(), raws, strict=True))
    before = store.read_notes(SPENT_PREFIX)
    made = {_spending_key(store.secret, raw_of[one]): spent for one, spent in units.items()}
    total = {
        key: int(add_losses(np.array([spent]), np.array([int(before.get(key, 0))]))[0]) for key, spent in made.items()
    }
    return {key: spent for key, spent in total.items() if spent}


def read_spending(store: NodeStore, raws: Sequence[str]) -> Longs:
    """What each of these spent before they were erased, in units of mu^2."""
    kept = store.read_notes(SPENT_PREFIX)
    if not kept:
        return np.zeros(len(raws), np.int64)
    return np.array([int(kept.get(_spending_key(store.secret, raw), 0)) for raw in raws], np.int64)


def _spending_key(secret: str, raw: str) -> str:
    return SPENT_PREFIX + hmac.new(f"spent {secret}".encode(), raw.encode(), hashlib.sha256).hexdigest()
