"""What releases have cost: for operators how many people spent how much, for a person their own account in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.files import nest_parts
from tacita.core.types import AnyArray, Arrays, Doubles
from tacita.federation.state_arrays import read_server
from tacita.learn.statistic import CONTRIBUTION_LOG, StatisticLearner
from tacita.privacy.ledger import ACCOUNT_ARRAYS, MICRO, NO_LIMIT, Ledger, join_ledgers
from tacita.report.promises import AGAINST
from tacita.round.device_state import PARTS, read_devices
from tacita.round.learner import Learner, ledger_of
from tacita.round.part import Part
from tacita.round.plan import Plan
from tacita.runs.assembly import build_plan
from tacita.runs.run_folder import SavedRun, open_saved

NO_EPSILON = "no epsilon: nothing that leaves devices in this run is both bounded and noised, so no bound can be stated"
NOT_COUNTED = "Not in it: {wishes}, who takes part and who has stopped, scores on validation and test items{chosen}."
NOT_COUNTED_LIVE = (
    "Not in it: {wishes}, who takes part and who has stopped, and how many people here spent how much, in rounded "
    "numbers. No scores leave in this run."
)
SUM_PREFIX = "statistic: "  # what releases of a private sum are called in a ledger; validation chooses nothing there
REHEARSAL = (
    "A lab run is a rehearsal: noise follows the seed in config.toml. Files of the run tell more outside of the "
    "budget: how many were drawn in each round (events.jsonl) and a digest of the data (result.json)."
)
NOT_ADDITIVE = (
    "These do not add up to what is spent: Gaussian losses add as squares, so together they cost less than their sum."
)


def join_accounts(parts: Sequence[Part | Learner], held: dict[str, Arrays]) -> tuple[Ledger, Arrays] | None:
    """The ledgers of a run's parts, and of what travels, as one, with what devices hold; None: nothing is counted."""
    found = []
    for part in parts:
        ledger, mine = ledger_of(part), held.get(part.name, {})
        if ledger is not None and all(name in mine for name in ACCOUNT_ARRAYS):
            found.append((part.name, ledger, {name: mine[name] for name in ACCOUNT_ARRAYS}))
    return join_ledgers(found) if found else None


def summarise_spending(ledger: Ledger, account: Arrays) -> dict[str, Any]:
    """What an operator may see: how spending is spread over people, and nobody's own."""
    told = account["times"].any(axis=1)
    spent = ledger.epsilon(account)
    events = {
        event.what: {
            "unit": event.unit,
            "threat": event.threat,
            "mechanism": event.mechanism,
            "people": int((account["times"][:, k] > 0).sum()),
            "releases": int(account["times"][:, k].sum()),
        }
        for k, event in enumerate(ledger.events)
        if account["times"][:, k].any() or not event.once
    }
    return {
        "delta": ledger.delta,
        "people": len(spent),
        "released_something": int(told.sum()),
        "silent_by_budget": int(ledger.is_exhausted(account).sum()),
        "budget": _budget_range(account["budget"]),
        "epsilon": _compute_quantiles(spent[told]),
        "left": _compute_quantiles(ledger.remaining_budget(account)[told]),
        "events": events,
    }


def _budget_range(budget: AnyArray) -> dict[str, float | None]:
    """The smallest and the largest that anybody has; None: no limit."""
    some = budget[budget != NO_LIMIT] * MICRO
    if not len(some):
        return {}
    return {"least": float(some.min()), "most": float(some.max()) if len(some) == len(budget) else None}


def _compute_quantiles(values: Doubles) -> dict[str, float | None]:
    """None: infinite, which no JSON file can hold; of an epsilon, that none can be stated."""
    if not len(values):
        return {}
    found = {name: float(np.quantile(values, q, method="higher")) for name, q in _QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


_QUANTILES = {"least": 0.0, "median": 0.5, "nine in ten at most": 0.9, "most": 1.0}


def describe_account(ledger: Ledger, account: Arrays, row: int) -> dict[str, Any]:
    """A person's own account; only their own device may show it."""
    own = {name: value[[row]] for name, value in account.items()}
    spent, left = float(ledger.epsilon(own)[0]), float(ledger.remaining_budget(own)[0])
    limited = own["budget"][0] != NO_LIMIT
    return {
        "delta": ledger.delta,
        "spent": spent if math.isfinite(spent) else None,
        "spent_composed": _finite_or_none(ledger.tight_epsilon(own, 0)),
        "budget": float(own["budget"][0]) * 1e-6 if limited else None,
        "left": left if limited else None,
        "silent": bool(ledger.is_exhausted(own)[0]),
        "units": sorted({event.unit for k, event in enumerate(ledger.events) if own["times"][0, k]}),
        "events": {
            event.what: {"times": int(own["times"][0, k]), "epsilon": _price_release(ledger, own, k)}
            for k, event in enumerate(ledger.events)
            if own["times"][0, k] or not event.once
        },
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _price_release(ledger: Ledger, own: Arrays, column: int) -> float | None:
    """What one kind of release would have cost by itself; together they cost less than the sum of these."""
    others = np.arange(len(ledger.events)) != column
    spent: AnyArray = np.where(others, 0, own["spent"])
    return _finite_or_none(float(ledger.epsilon({**own, "spent": spent})[0]))


def describe_cost(
    parts: Sequence[Part | Learner], before: dict[str, Arrays], after: dict[str, Arrays], rows: AnyArray
) -> str:
    """What a request cost those who asked, and what they have spent then, in a sentence; nothing where it was free."""
    was, now = join_accounts(parts, before), join_accounts(parts, after)
    if was is None or now is None:
        return ""
    had, have = (kept.epsilon({name: value[rows] for name, value in account.items()}) for kept, account in (was, now))
    if not (have > had).any():
        return ""
    budget = _budget_range(now[1]["budget"][rows]).get("most")
    limit = "" if budget is None else f" of {budget:g}"
    whom, who, most = ("you", "you have", "") if len(rows) == 1 else ("each of them", "they have", "at most ")
    cost, spent = (_format_epsilon(float(one.max()), "epsilon") for one in (have - had, have))
    return f"This costs {whom} {most}{cost}; {who} then spent {most}{spent.removeprefix('epsilon ')}{limit}."


def read_run_ledger(folder: Path, user: str | None = None) -> dict[str, Any]:
    """Of a run folder: the spread, or one person's account, for which the clients' own file is opened."""
    saved = open_saved(folder)
    plan = build_plan(saved.config)
    found = join_accounts((*plan.parts, plan.learner), nest_parts(saved.client_arrays, PARTS))
    number = (
        None if user is None else int(saved.user_numbers([user])[0])
    )  # who is not known is told so, whatever is counted
    if found is None:
        return {"no_epsilon": NO_EPSILON}
    if number is None:
        return {**summarise_spending(*found), "lab": True}
    told = {"user": user, "lab": True, **describe_account(*found, number)}
    return {**told, **_project_withdrawal(saved, plan, number)}


def _project_withdrawal(saved: SavedRun, plan: Plan, row: int) -> dict[str, float]:
    """What a person will have spent who takes something back now: told before they do, where it costs something."""
    learner = plan.learner
    ledger = learner.ledger()
    if not isinstance(learner, StatisticLearner) or ledger is None or not learner.takes_back:
        return {}
    held = nest_parts(saved.client_arrays, PARTS)[learner.name]
    own = {name: held[name][[row]] for name in ACCOUNT_ARRAYS}
    if not len(
        read_devices(saved.client_arrays, "")
        .read_list(f"{PARTS}{learner.name}/{CONTRIBUTION_LOG}", np.array([row]))
        .ids
    ):
        return {}  # nothing that was told is left to take back
    heads = read_server(saved.server_arrays, saved.server_note).heads
    after, _ = learner.charge_retraction(heads, own, np.ones(1, bool))
    return {"if_taken_back": float(ledger.epsilon(after)[0])}


def describe_ledger(ledger: dict[str, Any]) -> list[str]:
    """A ledger as sentences."""
    if "no_epsilon" in ledger:
        return [f"{ledger['no_epsilon'][:1].upper()}{ledger['no_epsilon'][1:]}."]
    return _describe_person(ledger) if "spent" in ledger else _describe_spread(ledger)


def _describe_spread(told: dict[str, Any]) -> list[str]:
    lines = [
        f"{told['released_something']:,} of {told['people']:,} people have released something; "
        f"{told['silent_by_budget']:,} of them have no budget left for more, and go on being served."
    ]
    for name, one in told["events"].items():
        if not one["releases"]:
            continue
        n = f"{one['releases']:,} release{'s' * (one['releases'] != 1)}"
        lines.append(
            f"{name}: {n} ({one['mechanism']} noise); protects a {one['unit']} against {AGAINST[one['threat']]}."
        )
    budget = told.get("budget")
    if budget:
        least, most = _format_epsilon(budget["least"], "left"), _format_epsilon(budget["most"], "left")
        lines.append(f"Budget of each person: {least if least == most else f'{least} to {most}'}.")
    for what in ("epsilon", "left"):
        if told[what]:
            said = ", ".join(f"{name} {_format_epsilon(value, what)}" for name, value in told[what].items())
            lines.append(f"{'Spent' if what == 'epsilon' else 'Left'} at delta {told['delta']:g}: {said}.")
    return [*lines, *_describe_exclusions(told)]


def _describe_person(told: dict[str, Any]) -> list[str]:
    spent, budget = _format_epsilon(told["spent"], "epsilon"), told["budget"]
    limit = (
        "no limit was set"
        if budget is None
        else f"of a budget of {budget:g}, {_drop_rounding(told['left']):.4g} is left"
    )
    lines = [f"Spent so far: {spent} at delta {told['delta']:g}; {limit}."]
    made = {name: one for name, one in told["events"].items() if one["times"]}
    for name, one in made.items():
        times = "once" if one["times"] == 1 else f"{one['times']:,} times"
        lines.append(f"{name}: {times}, by itself {_format_epsilon(one['epsilon'], 'epsilon')}.")
    if len(made) > 1:
        lines.append(NOT_ADDITIVE)
    if "if_taken_back" in told:
        more = told["if_taken_back"] - told["spent"]
        lines.append(
            f"To take something back costs {_format_epsilon(more, 'epsilon')} more, "
            f"{told['if_taken_back']:.4g} in all, "
            "however much it is; it is never refused."
        )
    if told["silent"]:
        lines.append("What is left does not pay for another release: the device stays silent and goes on serving you.")
    return [*lines, *_describe_exclusions(told)]


def _format_epsilon(value: float | None, what: str) -> str:
    if value is None:
        return "no epsilon" if what == "epsilon" else "no limit"
    return f"epsilon {_drop_rounding(value):.4g}"


def _drop_rounding(value: float) -> float:
    """What is below the units of a budget is rounding."""
    return 0.0 if abs(value) < MICRO else value


def _describe_exclusions(told: dict[str, Any]) -> list[str]:
    """What no budget is about, and what else a lab run tells."""
    sums = any(name.startswith(SUM_PREFIX) for name in told["events"])
    wishes = "that somebody asked to take something back" if sums else "what people share or withdraw by request"
    if not told.get("lab"):
        return [NOT_COUNTED_LIVE.format(wishes=wishes)]
    chosen = "" if sums else ", and which round is the best, which is chosen on private validation items"
    return [NOT_COUNTED.format(wishes=wishes, chosen=chosen), REHEARSAL]
