"""The ledger: what every release costs each user, stored with the user, spent before anything leaves.

How a part uses one:

    ledger = Ledger((Event("popularity", "gaussian", 1.0, sigma, threat="central"), ...), delta=1e-5)
    account = ledger.open_accounts(n_people, epsilon=2.0)        # plain arrays, a row per user: `device_arrays`
    account, admitted = ledger.charge(account, "popularity")     # before the value leaves; others send nothing
    account, admitted = ledger.charge(account, "rows", mu, participants)  # where each user has a loss of their own
    ledger.epsilon(account)                                      # (people,) spent so far; inf: "no epsilon"

An account is a value. Store it where no rollback restores an earlier one (`Part.lasting`), and save it before the value
is sent. Then a crash may cost a user budget, but never returns any. Users who do not take part are not charged.

Numbers are whole: gaussian losses in 10^-12 of mu^2, pure ones in 10^-12 of epsilon, both rounded up, sampled ones
as counts. Together a user has spent epsilon(gaussian and sampled losses, delta) + the pure epsilons. The ledger is a
Renyi filter: it stops by the sum of mu^2, or of Renyi losses where releases are sampled and `adaptive` is set. That is
right even where the next release or its noise depends on earlier ones. A budget raised after releases is an odometer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Longs
from tacita.privacy.accounting import Event, compute_epsilon, find_max_releases
from tacita.privacy.calibration import bound_mu_of_pure, compute_epsilon_of_mu
from tacita.privacy.losses import (
    MAX_LOSS,
    MICRO,
    MICRO_UNITS,
    UNIT,
    add_losses,
    compute_budget_limit,
    compute_budget_limits,
    compute_mean_loss,
    compute_once_each,
    multiply_losses,
    raise_column,
    sum_losses,
    to_millionths,
    to_mu2_units,
)

__all__ = [
    "ACCOUNT_ARRAYS",
    "EARLIER_ROUNDS",
    "EARLIER_RUNS",
    "MICRO",
    "MOST_BUDGET",
    "NO_LIMIT",
    "UNIT",
    "Ledger",
    "add_losses",
    "join_ledgers",
    "sum_spent",
    "to_millionths",
]


ACCOUNT_ARRAYS = ("budget", "spent", "times")  # the arrays of an account
EARLIER_RUNS = "earlier runs"  # an event of this name holds the spending of other runs
EARLIER_ROUNDS = "earlier rounds"  # an event of this name counts the sampled rounds of other runs
MOST_BUDGET = 10**12 - 1  # the largest budget a user may set, in millionths: less than a million
NO_LIMIT = np.iinfo(np.int64).max  # no budget is set: everything is counted, nothing is refused
_MAX_ROUNDS = 2**30  # counted rounds of other runs
_ROUND_UP = 1 + 1e-12  # noise is rounded up by this, so that it costs no more than planned


Value = float | Doubles
"""One number for all users, or one for each."""


class _LossesByLaw(NamedTuple):
    """What each user spent, summed by the law that counts it."""

    pure: Longs
    mu2: Longs
    sampled: Longs  # (people, kinds) counts
    has_unknown: Bools


@dataclass(frozen=True)
class Ledger:
    """The kinds of releases of a run, and how they are counted. It holds no accounts."""

    events: tuple[Event, ...]
    delta: float = 1e-5
    adaptive: bool = False  # sampled releases are chosen in the light of earlier ones: count them by Renyi losses

    def __post_init__(self) -> None:
        distinct_names = set(self.names)
        if len(distinct_names) < len(self.names):
            raise TacitaError("two kinds of releases of a ledger have the same name.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(event.what for event in self.events)

    def open_accounts(self, people: int, epsilon: Value | None = None) -> Arrays:
        """Accounts on which nothing is spent; without an epsilon nothing will be refused."""
        shape = (people, len(self.events))
        account: Arrays = {
            "budget": np.full(people, NO_LIMIT, np.int64),
            "spent": np.zeros(shape, np.int64),
            "times": np.zeros(shape, np.int32),
        }
        if epsilon is None:
            return account
        return self.with_budget(account, epsilon)

    def with_budget(self, account: Arrays, epsilon: Value, who: Bools | None = None) -> Arrays:
        """Accounts with another budget, rounded down; what is spent stays spent."""
        old_budget = account["budget"]
        epsilons = np.asarray(epsilon, np.float64)
        epsilons = np.broadcast_to(epsilons, old_budget.shape)
        is_in_range = (epsilons >= 0) & (epsilons < 1e6)
        if not is_in_range.all():
            raise TacitaError("a budget is an epsilon from 0 to a million.")
        millionths = epsilons / MICRO * (1 + 1e-15)
        budget = np.floor(millionths).astype(np.int64)
        if who is not None:
            budget = np.where(who, budget, old_budget)
        return {**account, "budget": budget}

    def charge(
        self, account: Arrays, what: str, loss: Value | None = None, participants: Bools | None = None
    ) -> tuple[Arrays, Bools]:
        """Spend on one release: the new accounts, and who may release it. Users without budget or part pay nothing.

        `loss`: mu of a gaussian, epsilon of a pure release, alike or for each; else the event's own.
        """
        column = self._find_column(what)
        old_spent = account["spent"]
        new_spent = old_spent.copy()
        cost = self._compute_cost(column, loss, len(new_spent))
        bounded_cost = np.minimum(cost, MAX_LOSS)
        new_spent[:, column] += bounded_cost
        admitted = self._is_within_budget(new_spent, account["budget"])
        is_countable = new_spent[:, column] < NO_LIMIT // 2
        admitted &= is_countable
        if participants is not None:
            admitted &= participants
        new_times = account["times"].copy()
        new_times[admitted, column] += 1
        charged = dict(account)
        is_charged = admitted[:, None]
        charged["spent"] = np.where(is_charged, new_spent, old_spent)
        charged["times"] = new_times
        return charged, admitted

    def compute_spent_epsilon(self, account: Arrays) -> Doubles:
        """What each user has spent, by the same sums that refuse; infinite: no epsilon can be stated."""
        return self._compute_epsilons(account["spent"])

    def compute_tight_epsilon(self, account: Arrays, person: int) -> float:
        """The same of one user with all releases composed by dp-accounting: at most as much, and slower."""
        spent = account["spent"][person]
        times = account["times"][person]
        events = []
        for column, event in enumerate(self.events):
            n = times[column]
            if n:
                loss = compute_mean_loss(event, spent[column], n)
                mean_event = replace(event, sensitivity=1.0, noise=1.0 / loss)
                events.append((mean_event, int(n)))
        composed = compute_epsilon(events, self.delta)
        plain = self._compute_epsilons(spent[None])
        return min(float(plain[0]), composed)

    def compute_remaining_budget(self, account: Arrays) -> Doubles:
        """What each user's budget still holds; infinite: no limit was set."""
        micro = account["budget"]
        is_unlimited = micro == NO_LIMIT
        budget = micro * MICRO
        budget[is_unlimited] = np.inf
        spent = self.compute_spent_epsilon(account)
        spent = np.minimum(spent, budget)
        remaining = np.maximum(0.0, budget - spent)
        remaining[is_unlimited] = np.inf
        return remaining

    def is_exhausted(self, account: Arrays) -> Bools:
        """Who has released something and could not once more, at the mean price of their releases so far."""
        spent = account["spent"]
        times = np.maximum(account["times"], 1)
        mean_price = -(-spent // times)
        happens_once = [event.once for event in self.events]
        price = np.where(happens_once, 0, mean_price)
        next_spent = add_losses(spent, price)
        fits = self._is_within_budget(next_spent, account["budget"])
        has_price = (price > 0).any(axis=1)
        return np.asarray(has_price & ~fits)

    def with_earlier_spending(self, account: Arrays, units: Longs, rounds: Longs | None = None) -> Arrays:
        """Accounts that also hold the spending of other runs: units of mu^2, and rounds like its own; it only grows."""
        spent = account["spent"].copy()
        times = account["times"].copy()
        column = self._find_column(EARLIER_RUNS)
        earlier_loss = np.minimum(units, MAX_LOSS)
        raise_column(spent, column, earlier_loss)
        times[:, column] = spent[:, column] > 0
        if rounds is not None:
            column = self._find_column(EARLIER_ROUNDS)
            earlier_rounds = np.minimum(rounds, _MAX_ROUNDS)
            raise_column(times, column, earlier_rounds)
            cost = self._compute_cost(column, None, 1)
            price = max(1, int(cost[0]))
            counts = times[:, column].astype(np.int64)
            raise_column(spent, column, multiply_losses(counts, price))
        return {**account, "spent": spent, "times": times}

    def count_rounds_like(self, event: Event, account: Arrays) -> tuple[Longs, Longs]:
        """Sampled releases of this ledger: how many cost at most what `event` does, and a bound on the rest in mu^2.

        A release of less noise, or that includes users more often, counts as if every user had been in it.
        """
        spent = account["spent"]
        people = len(spent)
        n_like = np.zeros(people, np.int64)
        other_loss = np.zeros(people, np.int64)
        for column in self._find_columns_by_law("sampled"):
            if self._shorten_name(column) == EARLIER_ROUNDS:
                continue
            own_event = self.events[column]
            counts = spent[:, column]
            if own_event.costs_at_most(event):
                n_like = add_losses(n_like, counts)
            else:
                price = to_mu2_units(own_event.loss)
                loss = multiply_losses(counts, price)
                other_loss = add_losses(other_loss, loss)
        return n_like, other_loss

    def sum_losses_except(self, what: str, account: Arrays) -> Longs:
        """The spending but for one kind of release, in units of mu^2; pure ones by a bound, sampled ones not at all.

        `count_rounds_like` has those. Rounds of earlier runs are left out, too.
        """
        columns = []
        for column in self._find_columns_by_law("gaussian"):
            if self._shorten_name(column) not in (what, EARLIER_ROUNDS):
                columns.append(column)
        mu2 = sum_spent(account, columns)
        pure = sum_spent(account, self._find_columns_by_law("pure"))

        def bound_mu2(units: AnyArray) -> int:
            epsilon = float(units[0]) * UNIT
            mu = bound_mu_of_pure(epsilon)
            return to_mu2_units(mu)

        pure_mu2 = compute_once_each(pure[:, None], bound_mu2, np.int64)
        return add_losses(mu2, pure_mu2)

    def compute_sigma_to_fit(self, epsilon: float, releases: int) -> float:
        """The deviation, for sensitivity 1, at which a budget holds exactly so many gaussian releases."""
        if releases < 1:
            raise TacitaError(f"a plan has at least one release, not {releases}.")
        limit = compute_budget_limit(to_millionths(epsilon), self.delta)
        share = limit // releases
        if share < 1:
            raise TacitaError(f"an epsilon of {epsilon} cannot be cut into {releases} releases; plan fewer.")
        return _ROUND_UP / math.sqrt(share * UNIT)

    # Which column counts what

    def _shorten_name(self, column: int) -> str:
        """The name of a release without that of its ledger, where several were joined."""
        return self.names[column].rpartition(": ")[2]

    def _find_column(self, what: str) -> int:
        for column, event in enumerate(self.events):
            if event.what == what:
                return column
        raise TacitaError(f"this ledger knows no release '{what}'; name it among its events.")

    def _find_columns_by_law(self, law: str) -> list[int]:
        columns = []
        for column, event in enumerate(self.events):
            if event.law == law:
                columns.append(column)
        return columns

    def _split_by_law(self, spent: Longs) -> _LossesByLaw:
        pure = self._find_columns_by_law("pure")
        gaussian = self._find_columns_by_law("gaussian")
        sampled = self._find_columns_by_law("sampled")
        unknown = self._find_columns_by_law("unknown")
        is_unknown = spent[:, unknown] > 0
        return _LossesByLaw(
            pure=sum_losses(spent[:, pure]),
            mu2=sum_losses(spent[:, gaussian]),
            sampled=spent[:, sampled],
            has_unknown=np.asarray(is_unknown.any(axis=1)),
        )

    # How it is counted

    def _compute_cost(self, column: int, loss: Value | None, people: int) -> Longs:
        """In whole units, rounded up."""
        event = self.events[column]
        if event.law in ("sampled", "unknown"):
            if loss is not None:
                raise TacitaError(f"the release '{event.what}' costs everybody the same; leave out its loss.")
            return np.ones(people, np.int64)
        if loss is None:
            loss = event.loss
        losses = np.asarray(loss, np.float64)
        losses = np.broadcast_to(losses, (people,))
        is_valid = losses >= 0  # false where one is no number
        if not is_valid.all():
            raise TacitaError(f"the loss of the release '{event.what}' must be a number that is not negative.")
        if event.law == "gaussian":
            losses = losses**2
        units = losses / UNIT
        bounded_units = np.minimum(units, float(MAX_LOSS))
        return np.ceil(bounded_units).astype(np.int64)

    def _is_within_budget(self, spent: Longs, budget: Longs) -> Bools:
        """Whether spending lies within the budgets; compares whole numbers where it can."""
        losses = self._split_by_law(spent)
        pure_micro = -(-losses.pure // MICRO_UNITS)
        remaining = budget - pure_micro
        is_unlimited = budget == NO_LIMIT
        remaining[is_unlimited] = 0
        if losses.sampled.shape[1]:
            accounts = np.column_stack([remaining, losses.mu2, losses.sampled])
            fits = compute_once_each(accounts, self._covers_account, np.bool_)
        else:
            limits = compute_budget_limits(remaining, self.delta)
            fits = losses.mu2 <= limits
        fits &= remaining >= 0
        fits &= ~losses.has_unknown
        fits |= is_unlimited
        return fits

    def _covers_account(self, account: AnyArray) -> bool:
        """Whether a budget in millionths holds gaussian and sampled releases; one kind alone is looked up."""
        micro = int(account[0])
        mu2 = int(account[1])
        counts = account[2:]
        is_unspent = mu2 == 0 and not counts.any()
        if is_unspent:
            return micro >= 0
        if micro <= 0:
            return False
        epsilon = micro * MICRO
        if mu2 == 0 and not self.adaptive:
            releases = list(self._count_by_law(counts).items())
            if len(releases) == 1:
                event, n = releases[0]
                return n <= find_max_releases(event, epsilon, self.delta)
        return self._compose_mixed(mu2, counts) <= epsilon

    def _count_by_law(self, counts: AnyArray) -> dict[Event, int]:
        """Sampled releases with those of the same law counted together, under any name."""
        totals: Counter[Event] = Counter()
        columns = self._find_columns_by_law("sampled")
        for column, n in zip(columns, counts):
            if n:
                event = self.events[column]
                law = replace(event, what="sampled", once=False)
                totals[law] += int(n)
        return totals

    def _compute_epsilons(self, spent: Longs) -> Doubles:
        losses = self._split_by_law(spent)
        if losses.sampled.any():
            accounts = np.column_stack([losses.mu2, losses.sampled])

            def compose(account: AnyArray) -> float:
                mu2 = int(account[0])
                counts = account[1:]
                return self._compose_mixed(mu2, counts)

            epsilons = compute_once_each(accounts, compose, np.float64)
        else:
            epsilons = self._compute_gaussian_epsilons(losses.mu2)
        total = epsilons + losses.pure * UNIT
        total[losses.has_unknown] = np.inf
        total[losses.pure >= MAX_LOSS] = np.inf
        return np.asarray(total)

    def _compute_gaussian_epsilons(self, mu2: Longs) -> Doubles:
        distinct, place = np.unique(mu2, return_inverse=True)
        is_unbounded = distinct >= MAX_LOSS
        squared_mu = distinct * UNIT
        squared_mu[is_unbounded] = np.inf
        mu = np.sqrt(squared_mu)
        epsilons = compute_epsilon_of_mu(mu, self.delta)
        return epsilons[place]

    def _compose_mixed(self, mu2: int, counts: AnyArray) -> float:
        """Gaussian and sampled releases together; mu^2 is rounded up to four digits."""
        if mu2 >= MAX_LOSS:
            return math.inf
        events = list(self._count_by_law(counts).items())
        if mu2:
            n_digits = len(str(mu2))
            step = 10 ** max(0, n_digits - 4)
            n_steps = -(-mu2 // step)
            rounded = n_steps * step
            mu = math.sqrt(rounded * UNIT)
            event = Event("all gaussian releases", "gaussian", 1.0, 1 / mu)
            events.append((event, 1))
        if self.adaptive:
            return compute_epsilon(events, self.delta, "rdp")
        return compute_epsilon(events, self.delta, "pld")


NamedAccounts = tuple[str, Ledger, Arrays]
"""A name, a ledger and the accounts that it counts."""


def join_ledgers(ledgers: Sequence[NamedAccounts]) -> tuple[Ledger, Arrays]:
    """Several ledgers of the same users as one, at the smallest delta; a user's budget is the largest, not the sum."""
    events = []
    deltas = []
    budgets = []
    spent = []
    times = []
    is_adaptive = False
    for name, ledger, account in ledgers:
        for event in ledger.events:
            full_name = f"{name}: {event.what}"
            events.append(replace(event, what=full_name))
        deltas.append(ledger.delta)
        budgets.append(account["budget"])
        spent.append(account["spent"])
        times.append(account["times"])
        is_adaptive |= ledger.adaptive
    joined_ledger = Ledger(tuple(events), min(deltas), is_adaptive)
    joined_account: Arrays = {
        "budget": np.max(budgets, axis=0),
        "spent": np.concatenate(spent, axis=1),
        "times": np.concatenate(times, axis=1),
    }
    return joined_ledger, joined_account


def sum_spent(account: Arrays, columns: list[int]) -> Longs:
    """What was spent on some kinds of releases together."""
    spent = account["spent"]
    return sum_losses(spent[:, columns])
