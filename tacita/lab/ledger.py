"""What releases have cost: for operators how many people spent how much, for a person their own account in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.files import nested
from tacita.core.types import AnyArray, Arrays, Doubles
from tacita.federation.state_arrays import read_server
from tacita.lab.assembling import planned
from tacita.lab.run_folder import Saved, open_saved
from tacita.learn.statistic import TOLD, StatisticLearner
from tacita.privacy.ledger import ACCOUNT, MICRO, NO_LIMIT, Ledger, joined
from tacita.report.promises import AGAINST
from tacita.round.device_state import PARTS, read_devices
from tacita.round.learner import Learner
from tacita.round.parts import Part
from tacita.round.plan import Plan

NO_EPSILON = "no epsilon: nothing that leaves devices in this run is both bounded and noised, so no bound can be stated"
OUTSIDE = "Not in it: {wishes}, who takes part and who has stopped, scores on validation and test items{chosen}."
OUTSIDE_LIVE = (
    "Not in it: {wishes}, who takes part and who has stopped, and how many people here spent how much, in rounded "
    "numbers. No scores leave in this run."
)
OF_SUMS = "statistic: "  # what releases of a private sum are called in a ledger; validation chooses nothing there
REHEARSAL = (
    "A lab run is a rehearsal: noise follows the seed in config.toml. Files of the run tell more outside of the "
    "budget: how many were drawn in each round (events.jsonl) and a digest of the data (result.json)."
)
APART = (
    "These do not add up to what is spent: Gaussian losses add as squares, so together they cost less than their sum."
)


def accounts_of(parts: Sequence[Part | Learner], held: dict[str, Arrays]) -> tuple[Ledger, Arrays] | None:
    """The ledgers of a run's parts, and of what travels, as one, with what devices hold; None: nothing is counted."""
    found = []
    for part in parts:
        ledger, mine = part.ledger(), held.get(part.name, {})
        if ledger is not None and all(name in mine for name in ACCOUNT):
            found.append((part.name, ledger, {name: mine[name] for name in ACCOUNT}))
    return joined(found) if found else None


def spread(ledger: Ledger, account: Arrays) -> dict[str, Any]:
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
        "silent_by_budget": int(ledger.silent(account).sum()),
        "budget": _budgets(account["budget"]),
        "epsilon": _quantiles(spent[told]),
        "left": _quantiles(ledger.left(account)[told]),
        "events": events,
    }


def _budgets(budget: AnyArray) -> dict[str, float | None]:
    """The smallest and the largest that anybody has; None: no limit."""
    some = budget[budget != NO_LIMIT] * MICRO
    if not len(some):
        return {}
    return {"least": float(some.min()), "most": float(some.max()) if len(some) == len(budget) else None}


def _quantiles(values: Doubles) -> dict[str, float | None]:
    """None: infinite, which no JSON file can hold; of an epsilon, that none can be stated."""
    if not len(values):
        return {}
    found = {name: float(np.quantile(values, q, method="higher")) for name, q in _QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


_QUANTILES = {"least": 0.0, "median": 0.5, "nine in ten at most": 0.9, "most": 1.0}


def one_account(ledger: Ledger, account: Arrays, row: int) -> dict[str, Any]:
    """A person's own account; only their own device may show it."""
    own = {name: value[[row]] for name, value in account.items()}
    spent, left = float(ledger.epsilon(own)[0]), float(ledger.left(own)[0])
    limited = own["budget"][0] != NO_LIMIT
    return {
        "delta": ledger.delta,
        "spent": spent if math.isfinite(spent) else None,
        "spent_composed": _finite(ledger.tight_epsilon(own, 0)),
        "budget": float(own["budget"][0]) * 1e-6 if limited else None,
        "left": left if limited else None,
        "silent": bool(ledger.silent(own)[0]),
        "units": sorted({event.unit for k, event in enumerate(ledger.events) if own["times"][0, k]}),
        "events": {
            event.what: {"times": int(own["times"][0, k]), "epsilon": _alone(ledger, own, k)}
            for k, event in enumerate(ledger.events)
            if own["times"][0, k] or not event.once
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _alone(ledger: Ledger, own: Arrays, column: int) -> float | None:
    """What one kind of release would have cost by itself; together they cost less than the sum of these."""
    others = np.arange(len(ledger.events)) != column
    spent: AnyArray = np.where(others, 0, own["spent"])
    return _finite(float(ledger.epsilon({**own, "spent": spent})[0]))


def paid(parts: Sequence[Part | Learner], before: dict[str, Arrays], after: dict[str, Arrays], rows: AnyArray) -> str:
    """What a request cost those who asked, and what they have spent then, in a sentence; nothing where it was free."""
    was, now = accounts_of(parts, before), accounts_of(parts, after)
    if was is None or now is None:
        return ""
    had, have = (kept.epsilon({name: value[rows] for name, value in account.items()}) for kept, account in (was, now))
    if not (have > had).any():
        return ""
    budget = _budgets(now[1]["budget"][rows]).get("most")
    limit = "" if budget is None else f" of {budget:g}"
    whom, who, most = ("you", "you have", "") if len(rows) == 1 else ("each of them", "they have", "at most ")
    cost, spent = (_number(float(one.max()), "epsilon") for one in (have - had, have))
    return f"This costs {whom} {most}{cost}; {who} then spent {most}{spent.removeprefix('epsilon ')}{limit}."


def run_ledger(folder: Path, user: str | None = None) -> dict[str, Any]:
    """Of a run folder: the spread, or one person's account, for which the clients' own file is opened."""
    saved = open_saved(folder)
    plan = planned(saved.config)
    found = accounts_of((*plan.parts, plan.learner), nested(saved.held, PARTS))
    number = None if user is None else int(saved.numbers([user])[0])  # who is not known is told so, whatever is counted
    if found is None:
        return {"no_epsilon": NO_EPSILON}
    if number is None:
        return {**spread(*found), "lab": True}
    told = {"user": user, "lab": True, **one_account(*found, number)}
    return {**told, **_if_taken_back(saved, plan, number)}


def _if_taken_back(saved: Saved, plan: Plan, row: int) -> dict[str, float]:
    """What a person will have spent who takes something back now: told before they do, where it costs something."""
    learner = plan.learner
    ledger = learner.ledger()
    if not isinstance(learner, StatisticLearner) or ledger is None or not learner.takes_back:
        return {}
    held = nested(saved.held, PARTS)[learner.name]
    own = {name: held[name][[row]] for name in ACCOUNT}
    if not len(read_devices(saved.held, "").list_of(f"{PARTS}{learner.name}/{TOLD}", np.array([row])).ids):
        return {}  # nothing that was told is left to take back
    heads = read_server(saved.served, saved.note).heads
    after, _ = learner.after_taking_back(heads, own, np.ones(1, bool))
    return {"if_taken_back": float(ledger.epsilon(after)[0])}


def in_words(told: dict[str, Any]) -> list[str]:
    """A ledger as sentences."""
    if "no_epsilon" in told:
        return [f"{told['no_epsilon'][:1].upper()}{told['no_epsilon'][1:]}."]
    return _of_one(told) if "spent" in told else _of_all(told)


def _of_all(told: dict[str, Any]) -> list[str]:
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
        least, most = _number(budget["least"], "left"), _number(budget["most"], "left")
        lines.append(f"Budget of each person: {least if least == most else f'{least} to {most}'}.")
    for what in ("epsilon", "left"):
        if told[what]:
            said = ", ".join(f"{name} {_number(value, what)}" for name, value in told[what].items())
            lines.append(f"{'Spent' if what == 'epsilon' else 'Left'} at delta {told['delta']:g}: {said}.")
    return [*lines, *_outside(told)]


def _of_one(told: dict[str, Any]) -> list[str]:
    spent, budget = _number(told["spent"], "epsilon"), told["budget"]
    limit = "no limit was set" if budget is None else f"of a budget of {budget:g}, {_zero(told['left']):.4g} is left"
    lines = [f"Spent so far: {spent} at delta {told['delta']:g}; {limit}."]
    made = {name: one for name, one in told["events"].items() if one["times"]}
    for name, one in made.items():
        times = "once" if one["times"] == 1 else f"{one['times']:,} times"
        lines.append(f"{name}: {times}, by itself {_number(one['epsilon'], 'epsilon')}.")
    if len(made) > 1:
        lines.append(APART)
    if "if_taken_back" in told:
        more = told["if_taken_back"] - told["spent"]
        lines.append(
            f"To take something back costs {_number(more, 'epsilon')} more, {told['if_taken_back']:.4g} in all, "
            "however much it is; it is never refused."
        )
    if told["silent"]:
        lines.append("What is left does not pay for another release: the device stays silent and goes on serving you.")
    return [*lines, *_outside(told)]


def _number(value: float | None, what: str) -> str:
    if value is None:
        return "no epsilon" if what == "epsilon" else "no limit"
    return f"epsilon {_zero(value):.4g}"


def _zero(value: float) -> float:
    """What is below the units of a budget is rounding."""
    return 0.0 if abs(value) < MICRO else value


def _outside(told: dict[str, Any]) -> list[str]:
    """What no budget is about, and what else a lab run tells."""
    sums = any(name.startswith(OF_SUMS) for name in told["events"])
    wishes = "that somebody asked to take something back" if sums else "what people share or withdraw by request"
    if not told.get("lab"):
        return [OUTSIDE_LIVE.format(wishes=wishes)]
    chosen = "" if sums else ", and which round is the best, which is chosen on private validation items"
    return [OUTSIDE.format(wishes=wishes, chosen=chosen), REHEARSAL]
