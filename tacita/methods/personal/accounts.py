"""Privacy accounts that parts keep on devices: their specs, and who can pay for a release."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tacita.core.types import AnyArray, Arrays, Bools, CohortView
from tacita.methods.personal.releases import reduce_by_client
from tacita.privacy.ledger import ACCOUNT_ARRAYS, Ledger
from tacita.round.state import Role, StateSpec


def specify_accounts(ledger: Ledger, n_users: int, epsilon: float | None) -> list[StateSpec]:
    """Specs of new accounts with one budget for all; None: no limit. Going back to an earlier round refunds nothing."""
    specs = []
    accounts = ledger.open_accounts(n_users, epsilon)
    for name, array in accounts.items():
        spec = StateSpec(name, array, Role.ACCOUNT, persistent=True)
        specs.append(spec)
    return specs


def select_account(state: Mapping[str, AnyArray]) -> Arrays:
    """The arrays of a part's state that a ledger reads."""
    return {name: state[name] for name in ACCOUNT_ARRAYS}


def find_payers(view: CohortView, can_pay: AnyArray) -> Bools:
    """Clients all of whose users can pay."""
    all_can_pay = reduce_by_client(view, can_pay, np.logical_and)
    return all_can_pay.astype(bool)
