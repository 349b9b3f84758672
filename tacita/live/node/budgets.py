"""People's budgets on a node: what they declared, what they spent in other runs, and their account over all runs."""

from __future__ import annotations

import math

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Broadcast, Longs, ServerState
from tacita.federation.clients import build_user_view, store_part_state
from tacita.live.json_object import JsonObject
from tacita.live.node.erased_spending import NO_EVENT, load_run_accounts, read_erased_spending
from tacita.live.node.node import MOST_EPSILON, Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.row_index import find_user_rows, index_rows
from tacita.live.node.threat_model import RAISED, describe_uncovered, raises_spent_budget
from tacita.privacy.accounting import Event
from tacita.privacy.ledger import (
    ACCOUNT_ARRAYS,
    EARLIER_ROUNDS,
    EARLIER_RUNS,
    MICRO,
    NO_LIMIT,
    Ledger,
    add_losses,
    to_millionths,
)
from tacita.round.learner import Learner, find_ledger
from tacita.round.part import Part
from tacita.runs.ledger import NO_EPSILON, describe_account

NO_NOISE = "no epsilon: sums are sent without noise, so nothing bounds what could be worked out from them"

UNDECLARED = -1
UserAccounts = tuple[tuple[Ledger, Arrays], AnyArray]  # the accounts of a run, and whose they are


def list_charging_parts(node_run: NodeRun) -> list[Part | Learner]:
    """The parts of a run that count what releases cost, and its learner if it does."""
    federation = node_run.federation
    parts: tuple[Part | Learner, ...] = (*federation.parts, federation.learner)
    return [part for part in parts if find_ledger(part)]


def select_accounts(account: Arrays, rows: AnyArray) -> Arrays:
    """The accounts of some users."""
    return {name: value[rows] for name, value in account.items()}


# Spending in other runs


def carry_over_spending(node: Node, node_run: NodeRun) -> None:
    """Put what people spent in other runs on their accounts in this one: a new run is no new budget."""
    clients = node_run.devices.clients
    user_ids = node_run.federation.stream.user_ids[: clients.n_users]
    erased_spending = read_erased_spending(node.store, user_ids)
    charging_parts = []
    for part in list_charging_parts(node_run):
        ledger = find_ledger(part)
        if ledger is not None and EARLIER_RUNS in ledger.names:
            charging_parts.append((part, ledger))
    other_accounts = _load_other_accounts(node, node_run) if charging_parts else []
    for part, ledger in charging_parts:
        _carry_over_to_part(node_run, part, ledger, other_accounts, erased_spending)


def _load_other_accounts(node: Node, node_run: NodeRun) -> list[UserAccounts]:
    """The accounts of every other run that counts."""
    run = node_run.federation.stream.name
    other_accounts = []
    for other_run in node.store.list_runs():
        if other_run == run:
            continue
        accounts = load_run_accounts(node.store, other_run)
        if accounts is not None:
            other_accounts.append(accounts)
    return other_accounts


def _carry_over_to_part(
    node_run: NodeRun,
    part: Part | Learner,
    ledger: Ledger,
    other_accounts: list[UserAccounts],
    erased_spending: Longs,
) -> None:
    """Add what was spent elsewhere to one part's account."""
    clients = node_run.devices.clients
    row_of_user = index_rows(node_run.users[: clients.n_users])
    round_events = [event for event in ledger.events if event.what == EARLIER_ROUNDS]
    own_event: Event = round_events[0] if round_events else NO_EVENT
    losses = erased_spending.copy()
    rounds = np.zeros(clients.n_users, np.int64)
    for (other_ledger, account), users in other_accounts:
        row = find_user_rows(row_of_user, users)
        is_known = row >= 0
        known_rows = row[is_known]
        rounds_alike, sampled_losses = other_ledger.count_rounds_like(own_event, account)
        fixed_losses = other_ledger.sum_losses_except(EARLIER_RUNS, account)
        run_losses = add_losses(fixed_losses, sampled_losses)
        losses[known_rows] = add_losses(losses[known_rows], run_losses[is_known])
        rounds[known_rows] = add_losses(rounds[known_rows], rounds_alike[is_known])
    if not losses.any() and not rounds.any():
        return
    state = clients.parts[part.name]
    own_account = {name: state[name] for name in ACCOUNT_ARRAYS}
    own_rounds = rounds if round_events else None
    charged = ledger.with_earlier_spending(own_account, losses, own_rounds)
    all_rows = np.arange(clients.n_users, dtype=np.int32)
    store_part_state(clients, all_rows, {part.name: charged})


# Declared budgets


def apply_declared_budgets(node: Node, node_run: NodeRun, server: ServerState) -> None:
    """Put what people are willing to spend on their accounts in this run, before anything is charged.

    Who declared nothing spends what the run plans, and no more than the node's owner allows (`max_epsilon`).
    """
    declared_by_user = node.store.read_declared_budgets(node_run.federation.stream.name)
    users = node_run.users[: node_run.devices.clients.n_users]
    budgets = [declared_by_user.get(user, UNDECLARED) for user in users.tolist()]
    declared = np.array(budgets, np.int64)
    node_limit = to_millionths(node.config.max_epsilon)
    for part in list_charging_parts(node_run):
        _declare_to_part(node_run, server, part, declared, node_limit)


def _declare_to_part(
    node_run: NodeRun, server: ServerState, part: Part | Learner, declared: Longs, node_limit: int
) -> None:
    """Set the budgets of one part's accounts; `UNDECLARED`: the person declared nothing."""
    federation = node_run.federation
    clients = node_run.devices.clients
    exceeds_limit = clients.parts[part.name]["budget"] > node_limit
    is_limited_by_node = (declared < 0) & exceeds_limit
    wanted = np.where(is_limited_by_node, node_limit, declared)
    budget = np.minimum(wanted, to_millionths(MOST_EPSILON))
    rows = np.flatnonzero(budget >= 0)
    block = federation.stream.blocks[server.block]
    view = build_user_view(clients, server, block, rows, federation.stream.user_keys, Broadcast())
    owner = part.privacy if isinstance(part, Part) else part
    assert owner is not None
    account = owner.declare_budget(view, budget[rows] * MICRO)
    store_part_state(clients, view.user, {part.name: account})


def set_budget(node: Node, user: str, epsilon: float, run: str | None = None) -> JsonObject:
    """From the next answer on, nothing spends more than this of a person; what is spent stays spent."""
    is_epsilon = 0 <= epsilon < math.inf
    if not is_epsilon or epsilon > MOST_EPSILON:
        raise TacitaError(f"a budget is an epsilon from 0 to {MOST_EPSILON:g}; more would promise nothing.")
    note = RAISED if raises_spent_budget(node, node.store.find_user(user), epsilon) else ""
    millionths = to_millionths(epsilon)
    node.store.declare_budget(user, millionths, run)
    return {"user": user, "epsilon": epsilon, "run": run, "note": note}


def read_declared_budget(node: Node, user: str) -> float | None:
    """What a person declared last for every run; None: they left that to the runs."""
    number = node.store.find_user(user)
    millionths = node.store.read_declared_budgets("").get(number)
    return None if millionths is None else millionths * MICRO


# Accounts in words


def describe_spent_epsilon(node: Node, user: str | None = None) -> str:
    """What the run that is served from has cost a person here, or at most anybody; or that there is no epsilon."""
    run = node.store.find_latest_run()
    accounts = None if run is None else load_run_accounts(node.store, run)
    if accounts is None:
        return NO_NOISE
    (ledger, account), users = accounts
    if user is None:
        rows = np.arange(len(users))
    else:
        number = node.store.find_user(user)
        rows = np.flatnonzero(users == number)
    if not len(rows):
        return f"nothing: run '{run}' has heard nothing of user '{user}'"
    own_account = select_accounts(account, rows)
    spent = float(ledger.compute_spent_epsilon(own_account).max())
    if not math.isfinite(spent):
        return NO_NOISE
    until_now = f"at delta {ledger.delta:g} so far, in run '{run}'"
    if user is None:
        return f"at most epsilon {spent:.4g} {until_now}"
    return f"epsilon {spent:.4g}{_describe_budget_limit(own_account)} {until_now}"


def _describe_budget_limit(account: Arrays) -> str:
    budget = account["budget"]
    limit = budget[budget != NO_LIMIT] * MICRO
    return f" of a budget of {limit.max():g}" if len(limit) else ""


def read_user_accounts(node: Node, user: str) -> JsonObject:
    """One person's account in every run that this node knows."""
    store = node.store
    number = store.find_user(user)
    account_by_run: JsonObject = {}
    for run in store.list_runs():
        devices = store.load_devices(run)
        if devices is None:
            continue
        users = devices[1]["users"]
        if number not in users:
            continue
        row = int(np.flatnonzero(users == number)[0])
        accounts = load_run_accounts(store, run)
        if accounts is None:
            account_by_run[run] = {"no_epsilon": NO_EPSILON}
        else:
            (ledger, account), _ = accounts
            outside = describe_uncovered(node, run, number)
            account_by_run[run] = {**describe_account(ledger, account, row), "outside": outside}
    return {"user": user, "runs": account_by_run}
