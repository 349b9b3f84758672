"""People's budgets on a node: what was charged before answers left, and a person's own account over all runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Broadcast, Longs, ServerState
from tacita.federation.clients import build_user_view, store_part_state
from tacita.live.node.answers import NO_EPSILON as NONE_STATED
from tacita.live.node.erased_spending import NO_EVENT, load_accounts, read_spending
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.privacy.ledger import (
    ACCOUNT_ARRAYS,
    EARLIER_ROUNDS,
    EARLIER_RUNS,
    MICRO,
    MOST_BUDGET,
    NO_LIMIT,
    Ledger,
    add_losses,
    to_millionths,
)
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner
from tacita.round.part import Part
from tacita.runs.ledger import NO_EPSILON, describe_account, join_accounts

NO_NOISE = "no epsilon: sums are sent without noise, so nothing bounds what could be worked out from them"


Accounts = tuple[Ledger, Arrays] | None  # how a run counts, and the accounts of the people here; None: it does not
UserCost = tuple[int, float | None, float | None]  # whose, what a release cost them, what they had spent then


def read_accounts(standing: NodeRun) -> Accounts:
    """The accounts of the people here as they are now."""
    return join_accounts((*standing.federation.parts, standing.federation.learner), standing.devices.clients.parts)


def describe_highest_cost(after: Accounts) -> str:
    """What a release has cost the people here so far, for the node's log: the most that anybody has spent."""
    if after is None:
        return NONE_STATED
    most = float(after[0].epsilon(after[1]).max(initial=0.0))
    return f"at most {most:.4g} a person so far" if math.isfinite(most) else NONE_STATED


def compute_costs(users: Longs, before: Accounts, after: Accounts) -> list[UserCost]:
    """What a release cost each person who was charged for it; what all of them cost adds up to what is spent.

    None: no epsilon can be stated.
    """
    if before is None or after is None:
        return []
    n = len(before[1]["times"])
    paid = np.flatnonzero((after[1]["times"][:n] != before[1]["times"]).any(axis=1))
    spent, earlier = (
        found[0].epsilon({name: value[paid] for name, value in found[1].items()}) for found in (after, before)
    )
    cost = np.subtract(spent, earlier, out=np.full(len(paid), np.inf), where=np.isfinite(spent))
    told = ([value if math.isfinite(value) else None for value in one.tolist()] for one in (cost, spent))
    return list(zip(users[paid].tolist(), *told, strict=True))


def count_budget_use(node: Node, standing: NodeRun) -> list[int]:
    """How many people here have spent how much of their budgets (`SPENT`), each number a multiple of `min_users`.

    Rounded down: no number stands for fewer people, and who moves alone from one to the other mostly does not show.
    That is a mitigation: who knows what all others spent can wait for the number that turns.
    """
    found = read_accounts(standing)
    if found is None:
        return []
    ledger, account = found
    told = account["times"][:, [not event.once for event in ledger.events]].any(axis=1)
    own = {name: value[told] for name, value in account.items()}
    limited = own["budget"] != NO_LIMIT
    share = ledger.epsilon(own)[limited] / np.maximum(own["budget"][limited] * MICRO, MICRO)
    counts = np.histogram(np.clip(share, 0.0, 1.0), [0.0, *np.nextafter([0.25, 0.5, 0.75], 1.0), 1.0])[0]
    least = 1 if node.config.insecure_single_user_uploads else node.config.min_users
    return [int(n) // least * least for n in (*counts, (~limited).sum())]


@contextlib.contextmanager
def suspend_charges(standing: NodeRun) -> Iterator[None]:
    """Where nothing leaves the node, nobody pays, and nothing is told that could be taken back."""
    clients, everybody = standing.devices.clients, np.arange(standing.devices.clients.n_users)
    arrays, told = clients.arrays, [name for name in clients.lists if name.endswith("/told")]
    lists = {name: clients.read_list(name, everybody) for name in told}
    before = copy_spent(standing)
    try:
        yield
    finally:
        for name, kept in before.items():
            arrays[name][:] = kept
        clients.put(everybody, lists)


def copy_spent(standing: NodeRun) -> Arrays:
    """A copy of what everybody has spent."""
    fed, arrays = standing.federation, standing.devices.clients.arrays
    everybody: tuple[Part | Learner, ...] = (*fed.parts, fed.learner)
    counting = [one.name for one in everybody if one.ledger()]
    return {
        name: arrays[name].copy() for part in counting for one in ACCOUNT_ARRAYS if (name := f"{PARTS}{part}/{one}")
    }


def carry_over_spending(node: Node, standing: NodeRun) -> None:
    """Put what people spent in other runs on their accounts in this one: a new run is no new budget."""
    clients, run = standing.devices.clients, standing.federation.stream.name
    place = {int(one): n for n, one in enumerate(standing.users[: clients.n_users])}
    everybody: tuple[Part | Learner, ...] = (*standing.federation.parts, standing.federation.learner)
    counting = [one for one in everybody if (kept := one.ledger()) and EARLIER_RUNS in kept.names]
    others = [one for one in node.store.runs() if one != run] if counting else []
    gone = read_spending(node.store, standing.federation.stream.user_ids[: clients.n_users])
    found = [one for other in others if (one := load_accounts(node.store, other)) is not None]
    for part in counting:
        counted, mine = part.ledger(), clients.parts[part.name]
        assert counted is not None
        own = [event for event in counted.events if event.what == EARLIER_ROUNDS]
        units, rounds = gone.copy(), np.zeros(clients.n_users, np.int64)
        for (ledger, account), users in found:
            rows = np.array([place.get(int(one), -1) for one in users], np.int64)
            here = rows >= 0
            like, more = ledger.count_rounds_like(own[0] if own else NO_EVENT, account)
            units[rows[here]] = add_losses(
                units[rows[here]], add_losses(ledger.sum_losses_except(EARLIER_RUNS, account), more)[here]
            )
            rounds[rows[here]] = add_losses(rounds[rows[here]], like[here])
        if units.any() or rounds.any():
            made = counted.with_earlier_spending(
                {name: mine[name] for name in ACCOUNT_ARRAYS}, units, rounds if own else None
            )
            store_part_state(clients, np.arange(clients.n_users, dtype=np.int32), {part.name: made})


def apply_declared_budgets(node: Node, standing: NodeRun, server: ServerState) -> None:
    """Put what people are willing to spend on their accounts in this run, before anything is charged.

    Who said nothing spends what the run plans, and no more than the node's owner allows (`max_epsilon`).
    """
    fed, clients, most = standing.federation, standing.devices.clients, node.config.max_epsilon
    said = node.store.declared_budgets(fed.stream.name)
    wanted = np.array([said.get(one, -1) for one in standing.users[: clients.n_users].tolist()], np.int64)
    counting: tuple[Part | Learner, ...] = (*fed.parts, fed.learner)
    for one in counting if said or most is not None else ():
        if one.ledger() is None:
            continue
        limit = NO_LIMIT if most is None else to_millionths(most)
        quiet = (wanted < 0) & (clients.parts[one.name]["budget"] > limit)
        mine = np.minimum(np.where(quiet, limit, wanted), MOST_BUDGET)
        users = np.flatnonzero(mine >= 0)
        block = fed.stream.blocks[server.block]
        view = build_user_view(clients, server, block, users, fed.stream.user_keys, Broadcast())
        store_part_state(clients, view.user, {one.name: one.declare(view, mine[users] * MICRO)})


def set_budget(node: Node, user: str, epsilon: float, run: str | None = None) -> dict[str, Any]:
    """From the next answer on nobody spends more than this of a person; what is spent stays spent."""
    if not 0 <= epsilon < math.inf or (made := to_millionths(epsilon)) > MOST_BUDGET:
        raise TacitaError("a budget is an epsilon from 0 to less than a million.")
    node.store.declare_budget(user, made, run)
    return {"user": user, "epsilon": epsilon, "run": run}


def declared_budget(node: Node, user: str) -> float | None:
    """What a person said last that they are willing to spend in every run; None: they left that to the runs."""
    said = node.store.declared_budgets("").get(node.store.find_user(user))
    return None if said is None else said * MICRO


def describe_epsilon(node: Node, user: str | None = None) -> str:
    """What the run that is served from has cost a person here, or at most anybody; or that there is no epsilon."""
    run = node.store.latest_run()
    found = None if run is None else load_accounts(node.store, run)
    if found is None:
        return NO_NOISE
    (ledger, account), users = found
    rows = np.arange(len(users)) if user is None else np.flatnonzero(users == node.store.find_user(user))
    if not len(rows):
        return f"nothing: run '{run}' has heard nothing of user '{user}'"
    own = {name: value[rows] for name, value in account.items()}
    spent = float(ledger.epsilon(own).max())
    if not math.isfinite(spent):
        return NO_NOISE
    limit = own["budget"][own["budget"] != NO_LIMIT] * MICRO
    most = f" of a budget of {limit.max():g}" if user is not None and len(limit) else ""
    whose = "" if user is not None else "at most "
    return f"{whose}epsilon {spent:.4g}{most} at delta {ledger.delta:g} so far, in run '{run}'"


def read_user_accounts(node: Node, user: str) -> dict[str, Any]:
    """One person's account in every run that was heard of here."""
    number, found = node.store.find_user(user), {}
    for run in node.store.runs():
        held = node.store.devices(run)
        if held is None or number not in held[1]["users"]:
            continue
        counted = load_accounts(node.store, run)
        row = int(np.flatnonzero(held[1]["users"] == number)[0])
        found[run] = {"no_epsilon": NO_EPSILON} if counted is None else describe_account(*counted[0], row)
    return {"user": user, "runs": found}
