"""What releases have cost: for operators how many people spent how much, for a person their own account in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Doubles
from tacita.federation.state_arrays import read_server
from tacita.learn.statistic import CONTRIBUTION_LOG, StatisticLearner
from tacita.privacy.ledger import ACCOUNT_ARRAYS, MICRO, NO_LIMIT, Ledger, join_ledgers
from tacita.report.promises import AGAINST
from tacita.report.threat_model import list_uncovered_sentences
from tacita.round.device_state import PARTS, unflatten_devices
from tacita.round.learner import Learner, find_ledger
from tacita.round.part import Part
from tacita.round.plan import Plan
from tacita.round.release_rules import covers_mean
from tacita.runs.assembly import build_plan
from tacita.runs.run_folder import SavedRun, open_saved

CountedParts = Sequence[Part | Learner]
PartArrays = dict[str, Arrays]  # part -> its arrays
JoinedLedger = tuple[Ledger, Arrays]
LedgerSummary = dict[str, Any]
"""A ledger, an account or an event of one for display: JSON by name."""

NO_EPSILON = "no epsilon: nothing that leaves devices in this run is both bounded and noised, so no bound can be stated"
NOT_COUNTED = (
    "Not in it: {requests}, who takes part and who has stopped, scores on validation and test items{selection}."
)
NOT_COUNTED_LIVE = "Not in it: {requests}{participation}. No scores leave in this run."
SUM_PREFIX = "statistic: "  # what releases of a private sum are called in a ledger; validation chooses nothing there
NOT_ADDITIVE = (
    "These do not add up to what is spent: Gaussian losses add as squares, so together they cost less than their sum."
)


def join_accounts(parts: CountedParts, arrays: PartArrays) -> JoinedLedger | None:
    """The ledgers of a run's parts and learner as one, with the devices' accounts; None: nothing is counted."""
    accounts = []
    for part in parts:
        ledger = find_ledger(part)
        own_arrays = arrays.get(part.name, {})
        has_account = all(name in own_arrays for name in ACCOUNT_ARRAYS)
        if ledger is not None and has_account:
            account = {name: own_arrays[name] for name in ACCOUNT_ARRAYS}
            accounts.append((part.name, ledger, account))
    return join_ledgers(accounts) if accounts else None


def summarise_spending(ledger: Ledger, account: Arrays) -> LedgerSummary:
    """What an operator may see: how spending is spread over people, and nobody's own."""
    has_released = account["times"].any(axis=1)
    spent = ledger.compute_spent_epsilon(account)
    remaining = ledger.compute_remaining_budget(account)
    exhausted = ledger.is_exhausted(account)
    return {
        "delta": ledger.delta,
        "people": len(spent),
        "released_something": int(has_released.sum()),
        "silent_by_budget": int(exhausted.sum()),
        "budget": _find_budget_range(account["budget"]),
        "epsilon": _compute_quantiles(spent[has_released]),
        "left": _compute_quantiles(remaining[has_released]),
        "events": _summarise_events(ledger, account["times"]),
    }


def _summarise_events(ledger: Ledger, times: AnyArray) -> dict[str, LedgerSummary]:
    """How many people made each kind of release, and how often; `times` is (people, kinds)."""
    summaries = {}
    for column, event in enumerate(ledger.events):
        counts = times[:, column]
        if event.once and not counts.any():
            continue
        summaries[event.what] = {
            "unit": event.unit,
            "threat": event.threat,
            "mechanism": event.mechanism,
            "people": int((counts > 0).sum()),
            "releases": int(counts.sum()),
        }
    return summaries


def _find_budget_range(budget: AnyArray) -> dict[str, float | None]:
    """The smallest and the largest budget; None: no limit."""
    limits = budget[budget != NO_LIMIT] * MICRO
    if not len(limits):
        return {}
    everybody_limited = len(limits) == len(budget)
    most = float(limits.max()) if everybody_limited else None
    return {"least": float(limits.min()), "most": most}


def _compute_quantiles(values: Doubles) -> dict[str, float | None]:
    """None: infinite, which no JSON file can hold; of an epsilon, that none can be stated."""
    if not len(values):
        return {}
    quantiles = {}
    for name, share in _QUANTILES.items():
        quantile = float(np.quantile(values, share, method="higher"))
        quantiles[name] = _finite_or_none(quantile)
    return quantiles


_QUANTILES = {"least": 0.0, "median": 0.5, "nine in ten at most": 0.9, "most": 1.0}


def describe_account(ledger: Ledger, account: Arrays, row: int) -> LedgerSummary:
    """A person's own account; only their own device may show it."""
    own = _take_rows(account, [row])
    spent = float(ledger.compute_spent_epsilon(own)[0])
    remaining = float(ledger.compute_remaining_budget(own)[0])
    budget = own["budget"][0]
    is_limited = budget != NO_LIMIT
    times = own["times"][0]
    units = set()
    for column, event in enumerate(ledger.events):
        if times[column]:
            units.add(event.unit)
    return {
        "delta": ledger.delta,
        "spent": _finite_or_none(spent),
        "spent_composed": _finite_or_none(ledger.compute_tight_epsilon(own, 0)),
        "budget": float(budget) * 1e-6 if is_limited else None,
        "left": remaining if is_limited else None,
        "silent": bool(ledger.is_exhausted(own)[0]),
        "units": sorted(units),
        "events": _price_events(ledger, own),
    }


def _price_events(ledger: Ledger, own: Arrays) -> dict[str, LedgerSummary]:
    """How often a person made each kind of release, and what it would have cost by itself."""
    times = own["times"][0]
    prices = {}
    for column, event in enumerate(ledger.events):
        if event.once and not times[column]:
            continue
        count = int(times[column])
        epsilon = _price_release(ledger, own, column)
        prices[event.what] = {"times": count, "epsilon": epsilon}
    return prices


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _price_release(ledger: Ledger, own: Arrays, column: int) -> float | None:
    """What one kind of release would have cost by itself; together they cost less than the sum of these."""
    is_other = np.arange(len(ledger.events)) != column
    spent: AnyArray = np.where(is_other, 0, own["spent"])
    epsilon = ledger.compute_spent_epsilon({**own, "spent": spent})
    return _finite_or_none(float(epsilon[0]))


def describe_request_cost(parts: CountedParts, before: PartArrays, after: PartArrays, rows: AnyArray) -> str:
    """What a request cost those who asked, and their spending after it, in a sentence; empty if it was free."""
    joined_before = join_accounts(parts, before)
    joined_after = join_accounts(parts, after)
    if joined_before is None or joined_after is None:
        return ""
    ledger_before, account_before = joined_before
    ledger_after, account_after = joined_after
    own = _take_rows(account_after, rows)
    spent_before = ledger_before.compute_spent_epsilon(_take_rows(account_before, rows))
    spent_after = ledger_after.compute_spent_epsilon(own)
    costs = spent_after - spent_before
    if not (spent_after > spent_before).any():
        return ""
    cost = _format_epsilon(float(costs.max()), "epsilon")
    spent = _format_epsilon(float(spent_after.max()), "epsilon").removeprefix("epsilon ")
    budget = _find_budget_range(own["budget"]).get("most")
    limit = "" if budget is None else f" of {budget:g}"
    if len(rows) == 1:
        return f"This costs you {cost}; you have then spent {spent}{limit}."
    return f"This costs each of them at most {cost}; they have then spent at most {spent}{limit}."


def _take_rows(account: Arrays, rows: AnyArray | list[int]) -> Arrays:
    """The accounts of the people of some rows."""
    selected = {}
    for name, array in account.items():
        selected[name] = array[rows]
    return selected


def read_run_ledger(folder: Path, user: str | None = None) -> LedgerSummary:
    """Of a run folder: the spread, or one person's account, for which the clients' own file is opened."""
    saved = open_saved(folder)
    plan = build_plan(saved.config)
    counted: CountedParts = (*plan.parts, plan.learner)
    joined = join_accounts(counted, nest_parts(saved.client_arrays, PARTS))
    row = None
    if user is not None:
        row = int(saved.find_user_numbers([user])[0])  # an unknown user is refused even if nothing is counted
    if joined is None:
        return {"no_epsilon": NO_EPSILON}
    ledger, account = joined
    outside = describe_uncovered(saved.config, plan)
    if row is None:
        return {**summarise_spending(ledger, account), "lab": True, "outside": outside}
    description = describe_account(ledger, account, row)
    projection = _project_withdrawal(saved, plan, row)
    return {"user": user, "lab": True, "outside": outside, **description, **projection}


def describe_uncovered(config: RunConfig, plan: Plan) -> list[str]:
    """What no epsilon of a lab run is about, in sentences."""
    is_sum = plan.learner.ledger() is not None
    has_mean = any(covers_mean(part) for part in plan.parts)
    return list_uncovered_sentences(config, is_sum, has_mean)


def _project_withdrawal(saved: SavedRun, plan: Plan, row: int) -> dict[str, float]:
    """The spending of a person after a withdrawal; empty where a withdrawal costs nothing."""
    learner = plan.learner
    ledger = learner.ledger()
    if not isinstance(learner, StatisticLearner):
        return {}
    if ledger is None:
        return {}
    contribution_log = f"{PARTS}{learner.name}/{CONTRIBUTION_LOG}"
    devices = unflatten_devices(saved.client_arrays, "")
    contributions = devices.read_list(contribution_log, np.array([row]))
    if not len(contributions.ids):
        return {}
    arrays = nest_parts(saved.client_arrays, PARTS)[learner.name]
    account = {name: arrays[name] for name in ACCOUNT_ARRAYS}
    own = _take_rows(account, [row])
    server = read_server(saved.server_arrays, saved.server_note)
    withdraws = np.ones(1, bool)
    after, _ = learner.charge_retraction(server.heads, own, withdraws)
    epsilon = float(ledger.compute_spent_epsilon(after)[0])
    return {"if_taken_back": epsilon}


def describe_ledger(ledger: LedgerSummary) -> list[str]:
    """A ledger as sentences."""
    if "no_epsilon" in ledger:
        reason = ledger["no_epsilon"]
        initial = reason[:1].upper()
        return [f"{initial}{reason[1:]}."]
    return _describe_person(ledger) if "spent" in ledger else _describe_spread(ledger)


def _describe_spread(summary: LedgerSummary) -> list[str]:
    lines = [
        f"{summary['released_something']:,} of {summary['people']:,} people have released something; "
        f"{summary['silent_by_budget']:,} of them have no budget left for more, and go on being served."
    ]
    for name, event in summary["events"].items():
        if event["releases"]:
            lines.append(_describe_event(name, event))
    delta = summary["delta"]
    budget = summary.get("budget")
    if budget:
        least = _format_epsilon(budget["least"], "left")
        most = _format_epsilon(budget["most"], "left")
        span = least if least == most else f"{least} to {most}"
        lines.append(f"Budget of each person: {span}.")
    for key, word in (("epsilon", "Spent"), ("left", "Left")):
        quantiles = summary[key]
        if quantiles:
            listed = []
            for name, value in quantiles.items():
                epsilon = _format_epsilon(value, key)
                listed.append(f"{name} {epsilon}")
            spread = ", ".join(listed)
            lines.append(f"{word} at delta {delta:g}: {spread}.")
    return [*lines, *_describe_exclusions(summary)]


def _describe_event(name: str, event: LedgerSummary) -> str:
    count = event["releases"]
    plural = "" if count == 1 else "s"
    threat = AGAINST[event["threat"]]
    return (
        f"{name}: {count:,} release{plural} ({event['mechanism']} noise); protects a {event['unit']} against {threat}."
    )


def _describe_person(account: LedgerSummary) -> list[str]:
    lines = [_describe_spent(account)]
    n_kinds = 0
    for name, event in account["events"].items():
        count = event["times"]
        if not count:
            continue
        n_kinds += 1
        times = "once" if count == 1 else f"{count:,} times"
        cost = _format_epsilon(event["epsilon"], "epsilon")
        lines.append(f"{name}: {times}, by itself {cost}.")
    if n_kinds > 1:
        lines.append(NOT_ADDITIVE)
    if "if_taken_back" in account:
        total = account["if_taken_back"]
        more = _format_epsilon(total - account["spent"], "epsilon")
        lines.append(
            f"To take something back costs {more} more, {total:.4g} in all, however much it is; it is never refused."
        )
    if account["silent"]:
        lines.append("What is left does not pay for another release: the device stays silent and goes on serving you.")
    return [*lines, *_describe_exclusions(account)]


def _describe_spent(account: LedgerSummary) -> str:
    spent = _format_epsilon(account["spent"], "epsilon")
    budget = account["budget"]
    if budget is None:
        limit = "no limit was set"
    else:
        remaining = _drop_rounding(account["left"])
        limit = f"of a budget of {budget:g}, {remaining:.4g} is left"
    return f"Spent so far: {spent} at delta {account['delta']:g}; {limit}."


def _format_epsilon(value: float | None, key: str) -> str:
    if value is None:
        return "no epsilon" if key == "epsilon" else "no limit"
    return f"epsilon {_drop_rounding(value):.4g}"


def _drop_rounding(value: float) -> float:
    """What is below the units of a budget is rounding."""
    return 0.0 if abs(value) < MICRO else value


def _describe_exclusions(ledger: LedgerSummary) -> list[str]:
    """What no budget is about, and what else a lab run reveals."""
    event_names = list(ledger["events"])
    has_sums = any(name.startswith(SUM_PREFIX) for name in event_names)
    if has_sums:
        requests = "that somebody asked to take something back"
        selection = ""
    else:
        requests = "what people share or withdraw by request"
        selection = ", and which round is the best, which is chosen on private validation items"
    if not ledger.get("lab"):
        participation = "" if has_sums else ", who takes part and who has stopped"
        live_line = NOT_COUNTED_LIVE.format(requests=requests, participation=participation)
        return [live_line, *ledger.get("outside", ())]
    return [NOT_COUNTED.format(requests=requests, selection=selection), *ledger.get("outside", ())]
