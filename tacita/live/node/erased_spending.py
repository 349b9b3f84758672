"""What people spent, for as long as a node exists: also of users who were erased, and without their name.

Who is erased and imported again would have a whole new budget for the same data, against the same server. So an
erasure leaves one number: what was spent in runs that count, under a digest of the person's id that only this node's
secret makes. Whoever has the node's file has the secret too, and can check whether an id that they know is in it.
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


def load_run_accounts(store: NodeStore, run: str) -> tuple[tuple[Ledger, Arrays], AnyArray] | None:
    """The accounts of the people here in a run, and whose they are; None: it counts nothing."""
    model = store.load_model(run)
    devices = store.load_devices(run)
    if model is None or devices is None:
        return None
    note, _ = model
    _, arrays = devices
    config = validate_model(RunConfig, json.loads(note["config"]), "the settings the server sent")
    plan = build_plan(config, derive_run_secret(store.secret, run))
    states = nest_parts(arrays, PARTS)
    accounts = join_accounts((*plan.parts, plan.learner), states)
    if accounts is None:
        return None
    return accounts, arrays["users"]


# Erasure


def collect_spending_by_digest(store: NodeStore, user: int | None) -> dict[str, int]:
    """What an erasure of somebody (None: of everybody) leaves: digest -> units of mu^2, of drawn rounds a bound."""
    user_ids, raw_ids = store.list_users()
    raw_id_of = dict(zip(user_ids.tolist(), raw_ids, strict=True))
    erased_users = user_ids.tolist() if user is None else [user]
    losses = dict.fromkeys(erased_users, 0)
    for run in store.list_runs():
        for spender, run_loss in _read_run_losses(store, run):
            if spender in losses:
                losses[spender] = _add_loss(losses[spender], run_loss)
    earlier = store.read_notes(SPENT_PREFIX)
    notes = {}
    for spender, loss in losses.items():
        key = _digest_user(store.secret, raw_id_of[spender])
        total_loss = _add_loss(loss, int(earlier.get(key, 0)))
        if total_loss:
            notes[key] = total_loss
    return notes


def _read_run_losses(store: NodeStore, run: str) -> list[tuple[int, int]]:
    """What each user spent in a run.

    An erasure goes before: a run whose accounts cannot be read leaves nothing.
    """
    try:
        accounts = load_run_accounts(store, run)
    except Exception as error:
        log.warning("what was spent in run '%s' is not kept: %s", run, str(error)[:500])
        return []
    if accounts is None:
        return []
    (ledger, account), users = accounts
    own_losses = ledger.sum_losses_except(EARLIER_RUNS, account)
    _, sampled_losses = ledger.count_rounds_like(NO_EVENT, account)
    losses = add_losses(own_losses, sampled_losses)
    return list(zip(users.tolist(), losses.tolist(), strict=True))


def _add_loss(loss: int, more: int) -> int:
    total = add_losses(np.array([loss]), np.array([more]))
    return int(total[0])


def read_erased_spending(store: NodeStore, raw_ids: Sequence[str]) -> Longs:
    """What each of these users spent before they were erased, in units of mu^2."""
    notes = store.read_notes(SPENT_PREFIX)
    if not notes:
        return np.zeros(len(raw_ids), np.int64)
    keys = [_digest_user(store.secret, raw_id) for raw_id in raw_ids]
    spent = [int(notes.get(key, 0)) for key in keys]
    return np.array(spent, np.int64)


def _digest_user(secret: str, raw_id: str) -> str:
    key = f"spent {secret}".encode()
    digest = hmac.new(key, raw_id.encode(), hashlib.sha256)
    return SPENT_PREFIX + digest.hexdigest()
