"""What a release costs the people of a node: their accounts before it, what it charges, and what the log says of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Arrays, Doubles, Longs, ServerState
from tacita.learn.statistic import CONTRIBUTION_LOG
from tacita.live.node.answers import NO_EPSILON, UserCost
from tacita.live.node.budgets import (
    apply_declared_budgets,
    carry_over_spending,
    list_charging_parts,
    select_accounts,
)
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.privacy.ledger import ACCOUNT_ARRAYS, MICRO, NO_LIMIT, Ledger
from tacita.round.device_state import PARTS
from tacita.runs.ledger import join_accounts

Accounts = tuple[Ledger, Arrays] | None  # how a run counts, and the accounts of the people here; None: it does not


@dataclass(frozen=True)
class OpenAccounts:
    """Accounts as they are before a release is computed."""

    accounts: Accounts
    spent: Arrays  # a copy, by name in the device state


def open_accounts(node: Node, node_run: NodeRun, server: ServerState) -> OpenAccounts:
    """Put earlier spending and declared budgets on every account before anything is computed or charged."""
    carry_over_spending(node, node_run)
    apply_declared_budgets(node, node_run, server)
    return OpenAccounts(read_accounts(node_run), copy_spent(node_run))


def read_accounts(node_run: NodeRun) -> Accounts:
    """The accounts of the people here as they are now."""
    federation = node_run.federation
    states = node_run.devices.clients.parts
    return join_accounts((*federation.parts, federation.learner), states)


def copy_spent(node_run: NodeRun) -> Arrays:
    """A copy of what all users have spent."""
    arrays = node_run.devices.clients.arrays
    spent: Arrays = {}
    for part in list_charging_parts(node_run):
        for account_array in ACCOUNT_ARRAYS:
            name = f"{PARTS}{part.name}/{account_array}"
            spent[name] = arrays[name].copy()
    return spent


def restore_spent(node_run: NodeRun, spent: Arrays) -> None:
    """Undo all charges since `spent` was copied."""
    arrays = node_run.devices.clients.arrays
    for name, value in spent.items():
        arrays[name][:] = value


@contextlib.contextmanager
def suspend_charges(node_run: NodeRun) -> Iterator[None]:
    """Where nothing leaves the node, nobody pays, and no contribution is logged."""
    clients = node_run.devices.clients
    users = np.arange(clients.n_users)
    log_name = f"{PARTS}{node_run.federation.learner.name}/{CONTRIBUTION_LOG}"
    logs = [log_name] if log_name in clients.lists else []
    logged = {name: clients.read_list(name, users) for name in logs}
    spent = copy_spent(node_run)
    try:
        yield
    finally:
        restore_spent(node_run, spent)
        clients.put(users, logged)


def describe_highest_cost(after: Accounts) -> str:
    """What releases have cost so far, for the node's log: the most that anybody has spent."""
    if after is None:
        return NO_EPSILON
    ledger, account = after
    highest = float(ledger.compute_spent_epsilon(account).max(initial=0.0))
    if not math.isfinite(highest):
        return NO_EPSILON
    return f"at most {highest:.4g} a person so far"


def compute_user_costs(users: Longs, before: Accounts, after: Accounts) -> list[UserCost]:
    """What a release cost each person who was charged for it; all costs add up to what is spent.

    None: no epsilon can be stated.
    """
    if before is None or after is None:
        return []
    times_before = before[1]["times"]
    times_after = after[1]["times"][: len(times_before)]
    is_charged = (times_after != times_before).any(axis=1)
    charged = np.flatnonzero(is_charged)
    spent = _compute_row_epsilons(after, charged)
    earlier = _compute_row_epsilons(before, charged)
    unstated = np.full(len(charged), np.inf)
    cost = np.subtract(spent, earlier, out=unstated, where=np.isfinite(spent))
    charged_users = users[charged].tolist()
    costs = _finite_or_none(cost)
    totals = _finite_or_none(spent)
    return list(zip(charged_users, costs, totals, strict=True))


def _compute_row_epsilons(accounts: tuple[Ledger, Arrays], rows: Longs) -> Doubles:
    ledger, account = accounts
    return ledger.compute_spent_epsilon(select_accounts(account, rows))


def _finite_or_none(values: Doubles) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def count_budget_use(node_run: NodeRun) -> list[int]:
    """How many people here have spent how much of their budgets (`SPENT_BINS`).

    Exact numbers, which no epsilon covers: only a node whose owner allows single uploads sends them.
    """
    accounts = read_accounts(node_run)
    if accounts is None:
        return []
    ledger, account = accounts
    repeated_events = [not event.once for event in ledger.events]
    has_released = np.asarray(account["times"][:, repeated_events].any(axis=1))
    released = select_accounts(account, has_released)
    budget = released["budget"]
    is_limited = budget != NO_LIMIT
    limit = np.maximum(budget[is_limited] * MICRO, MICRO)
    used_share = ledger.compute_spent_epsilon(released)[is_limited] / limit
    bin_edges = [0.0, *np.nextafter([0.25, 0.5, 0.75], 1.0), 1.0]
    counts, _ = np.histogram(np.clip(used_share, 0.0, 1.0), bin_edges)
    n_unlimited = (~is_limited).sum()
    return [int(n_users) for n_users in (*counts, n_unlimited)]
