"""What no epsilon of a run on a node is about, in words: what is public, what leaves beside the noise, raises."""

from __future__ import annotations

import json
from sqlite3 import Connection

from tacita.live.node.admission import EPSILON_SETTINGS, list_planned_epsilons
from tacita.live.node.node import Node
from tacita.live.node.request_queue import BUDGET
from tacita.live.node.user_run import load_plan
from tacita.privacy.ledger import MICRO, to_millionths
from tacita.round.plan import Plan

PUBLIC = (
    "Taken as public: settings, models and the catalogue, that at least min_users people are enrolled on a node, and "
    "requests, under made-up names, with their times."
)
OF_SUMS = (
    "The server is not told how many people are in a sum, who can pay, or who has something new; refusals and waiting "
    "do not depend on it. A retraction tells that the people whom the server names asked for one."
)
OF_LOCAL_ROUNDS = (
    "Outside of the epsilon: how many people take part in each round, how many of them have which tier, and how many "
    "have stopped. A device that takes part is seen to do so."
)
OF_CENTRAL_ROUNDS = (
    "The server is trusted: this epsilon protects against whoever sees the models. Outside of it: how many people take "
    "part in each round, which the server is told."
)
OF_EVERY_RUN = (
    "Outside of the epsilon: how long an answer takes, when this node is online, and whatever runs without an epsilon "
    "tell of the same people."
)
RAISED = (
    "The budget was raised after something was released. All of it is counted, but the bound is proven for a budget "
    "that stood from the beginning, or was raised without a look at what was released: an odometer, not a filter."
)
_LIMITS = EPSILON_SETTINGS - {"activity_epsilon"}  # of which people have one, unless they declare another


def list_uncovered_sentences(plan: Plan) -> list[str]:
    """Sentences on a run that counts epsilon; none on another, which promises nothing."""
    if not plan.ledgers:
        return []
    lines = [PUBLIC]
    threats = set[str]()
    for ledger in plan.ledgers:
        threats |= {event.threat for event in ledger.events}
    if plan.learner.ledger() is not None:
        lines.append(OF_SUMS)
    elif "local" in threats:
        lines.append(OF_LOCAL_ROUNDS)
    else:
        lines.append(OF_CENTRAL_ROUNDS)
    return [*lines, OF_EVERY_RUN]


def describe_uncovered(node: Node, run: str, user: int | None = None) -> list[str]:
    """The same of a run that has come here, and whether a person's budget was raised in it."""
    plan = load_plan(node, run)
    if plan is None:
        return []
    lines = list_uncovered_sentences(plan)
    if lines and user is not None and count_budget_raises(node, plan, run, user):
        lines.append(RAISED)
    return lines


def count_budget_raises(node: Node, plan: Plan, run: str, user: int) -> int:
    """How often a person declared more than before, after something of theirs was released in a run."""
    planned = min(list_planned_epsilons(plan.config, _LIMITS), default=node.config.max_epsilon)
    limit = to_millionths(min(planned, node.config.max_epsilon))

    def count(db: Connection) -> int:
        first_cost = "SELECT min(l.time) FROM costs c JOIN ledger l ON l.id = c.release WHERE c.user = ? AND l.run = ?"
        (first_release,) = db.execute(first_cost, (user, run)).fetchone()
        if first_release is None:
            return 0
        sql = "SELECT payload, created FROM requests WHERE kind = ? AND user = ? AND run IN ('', ?) ORDER BY id"
        in_force = limit
        n_raises = 0
        for payload, created in db.execute(sql, (BUDGET, user, run)):
            declared = int(json.loads(payload)["millionths"])
            n_raises += created > first_release and declared > in_force
            in_force = declared
        return n_raises

    return node.store.run_query(count)


def raises_spent_budget(node: Node, user: int, epsilon: float) -> bool:
    """Whether a budget of so much raises one from which something was spent already, in some run."""
    declared = node.store.read_declared_budgets("").get(user)
    is_more = declared is not None and epsilon > declared * MICRO
    sql = "SELECT 1 FROM costs WHERE user = ?"
    has_released = node.store.run_query(lambda db: db.execute(sql, (user,)).fetchone()) is not None
    return has_released and (is_more or declared is None)
