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
right even where the next release, its noise or the budget depends on earlier releases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Longs
from tacita.privacy.accounting import Event, compute_epsilon, find_max_releases
from tacita.privacy.calibration import epsilon_of_mu, mu_of, mu_of_pure

ACCOUNT_ARRAYS = ("budget", "spent", "times")  # the arrays of an account
EARLIER_RUNS = "earlier runs"  # an event of this name holds the spending of other runs
EARLIER_ROUNDS = "earlier rounds"  # an event of this name counts the sampled rounds of other runs
UNIT = 1e-12  # of mu^2, and of a pure epsilon
MICRO = 1e-6  # budgets are whole numbers of it
MOST_BUDGET = 10**12 - 1  # the largest budget a user may set, in millionths: less than a million
NO_LIMIT = np.iinfo(np.int64).max  # no budget is set: everything is counted, nothing is refused
_MAX_ROUNDS = 2**30  # counted rounds of other runs
_MAX_LOSS = 2**60  # what one release may cost at most, in units: sums of a few never overflow
_MICRO_UNITS = round(MICRO / UNIT)  # units in a millionth
_ROUND_UP = 1 + 1e-12  # noise is rounded up by this, so that it costs no more than planned


@dataclass(frozen=True)
class Ledger:
    """The kinds of releases of a run, and how they are counted. It holds no accounts."""

    events: tuple[Event, ...]
    delta: float = 1e-5
    adaptive: bool = False  # sampled releases are chosen in the light of earlier ones: count them by Renyi losses

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise TacitaError("two kinds of releases of a ledger have the same name.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(event.what for event in self.events)

    def open_accounts(self, people: int, epsilon: float | Doubles | None = None) -> Arrays:
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

    def with_budget(self, account: Arrays, epsilon: float | Doubles, who: Bools | None = None) -> Arrays:
        """Accounts with another budget, rounded down; what is spent stays spent."""
        old_budget = account["budget"]
        epsilons = np.asarray(epsilon, np.float64)
        epsilons = np.broadcast_to(epsilons, old_budget.shape)
        is_valid = np.isfinite(epsilons) & (epsilons >= 0) & (epsilons < 1e6)
        if not is_valid.all():
            raise TacitaError("a budget is an epsilon from 0 to a million.")
        budget = np.floor(epsilons / MICRO * (1 + 1e-15)).astype(np.int64)
        if who is not None:
            budget = np.where(who, budget, old_budget)
        return {**account, "budget": budget}

    def charge(
        self, account: Arrays, what: str, loss: float | Doubles | None = None, participants: Bools | None = None
    ) -> tuple[Arrays, Bools]:
        """Spend on one release: the new accounts, and who may release it. Users without budget or part pay nothing.

        `loss`: mu of a gaussian, epsilon of a pure release, alike or for each; else the event's own.
        """
        column = self._find_column(what)
        spent = account["spent"].copy()
        cost = self._cost(column, loss, len(spent))
        spent[:, column] = spent[:, column] + np.minimum(cost, _MAX_LOSS)
        admitted = self._fits(spent, account["budget"])
        admitted &= spent[:, column] < NO_LIMIT // 2
        if participants is not None:
            admitted &= participants
        spent = np.where(admitted[:, None], spent, account["spent"])
        times = account["times"].copy()
        times[admitted, column] += 1
        return {**account, "spent": spent, "times": times}, admitted

    def epsilon(self, account: Arrays) -> Doubles:
        """What each user has spent, by the same sums that refuse; infinite: no epsilon can be stated."""
        return self._compute_epsilons(account["spent"])

    def tight_epsilon(self, account: Arrays, person: int) -> float:
        """The same of one user with all releases composed by dp-accounting: at most as much, and slower."""
        spent = account["spent"][person]
        times = account["times"][person]
        events = []
        for column, event in enumerate(self.events):
            n = times[column]
            if n:
                loss = _mean_loss(event, spent[column], n)
                mean_event = replace(event, sensitivity=1.0, noise=1.0 / loss)
                events.append((mean_event, int(n)))
        plain = self._compute_epsilons(account["spent"][[person]])
        composed = compute_epsilon(events, self.delta)
        return min(float(plain[0]), composed)

    def remaining_budget(self, account: Arrays) -> Doubles:
        """What each user's budget still holds; infinite: no limit was set."""
        micro = account["budget"]
        budget = np.where(micro == NO_LIMIT, np.inf, micro * MICRO)
        spent = np.minimum(self.epsilon(account), budget)
        remaining = np.maximum(0.0, budget - spent)
        return np.asarray(np.where(np.isinf(budget), np.inf, remaining))

    def is_exhausted(self, account: Arrays) -> Bools:
        """Who has released something and could not once more, at the mean price of their releases so far."""
        spent = account["spent"]
        times = np.maximum(account["times"], 1)
        mean_price = -(-spent // times)
        happens_once = [event.once for event in self.events]
        price = np.where(happens_once, 0, mean_price)
        fits = self._fits(add_losses(spent, price), account["budget"])
        has_price = (price > 0).any(axis=1)
        return np.asarray(has_price & ~fits)

    def with_earlier_spending(self, account: Arrays, units: Longs, rounds: Longs | None = None) -> Arrays:
        """Accounts that also hold the spending of other runs: units of mu^2, and rounds like its own; it only grows."""
        spent = account["spent"].copy()
        times = account["times"].copy()
        column = self._find_column(EARLIER_RUNS)
        bounded_units = np.minimum(units, _MAX_LOSS)
        spent[:, column] = np.maximum(spent[:, column], bounded_units)
        times[:, column] = spent[:, column] > 0
        if rounds is not None:
            column = self._find_column(EARLIER_ROUNDS)
            bounded_rounds = np.minimum(rounds, _MAX_ROUNDS)
            times[:, column] = np.maximum(times[:, column], bounded_rounds)
            price = max(1, int(self._cost(column, None, 1)[0]))
            loss = _multiply_losses(times[:, column].astype(np.int64), price)
            spent[:, column] = np.maximum(spent[:, column], loss)
        return {**account, "spent": spent, "times": times}

    def count_rounds_like(self, event: Event, account: Arrays) -> tuple[Longs, Longs]:
        """Sampled releases of this ledger: how many cost at most what `event` does, and a bound on the rest in mu^2.

        A release of less noise, or that includes users more often, counts as if every user had been in it.
        """
        spent = account["spent"]
        n_like = np.zeros(len(spent), np.int64)
        other_loss = np.zeros(len(spent), np.int64)
        for column in self._find_columns_by_law("sampled"):
            if self._short_name(column) == EARLIER_ROUNDS:
                continue
            own_event = self.events[column]
            counts = spent[:, column]
            is_milder = own_event.rate <= event.rate and own_event.loss <= event.loss
            if event.law != "unknown" and is_milder:
                n_like = add_losses(n_like, counts)
            else:
                price = min(_MAX_LOSS, math.ceil(own_event.loss**2 / UNIT))
                other_loss = add_losses(other_loss, _multiply_losses(counts, price))
        return n_like, other_loss

    def sum_losses_except(self, what: str, account: Arrays) -> Longs:
        """The spending but for one kind of release, in units of mu^2; pure ones by a bound, sampled ones not at all.

        `count_rounds_like` has those. Rounds of earlier runs are left out, too.
        """
        columns = []
        for column in self._find_columns_by_law("gaussian"):
            if self._short_name(column) not in (what, EARLIER_ROUNDS):
                columns.append(column)
        mu2 = sum_spent(account, columns)
        pure = sum_spent(account, self._find_columns_by_law("pure"))
        distinct, place = np.unique(pure, return_inverse=True)
        bounds = []
        for units in distinct:
            mu = mu_of_pure(float(units) * UNIT)
            bounds.append(min(_MAX_LOSS, math.ceil(mu**2 / UNIT)))
        pure_mu2 = np.array(bounds, np.int64)[place.ravel()]
        return add_losses(mu2, pure_mu2)

    def sigma_to_fit(self, epsilon: float, releases: int) -> float:
        """The deviation, for sensitivity 1, at which a budget holds exactly so many gaussian releases."""
        if releases < 1:
            raise TacitaError(f"a plan has at least one release, not {releases}.")
        limit = _budget_limit(to_millionths(epsilon), self.delta)
        share = limit // releases
        if share < 1:
            raise TacitaError(f"an epsilon of {epsilon} cannot be cut into {releases} releases; plan fewer.")
        return _ROUND_UP / math.sqrt(share * UNIT)

    # Which column counts what

    def _short_name(self, column: int) -> str:
        """The name of a release without that of its ledger, where several were joined."""
        return self.names[column].rpartition(": ")[2]

    def _find_column(self, what: str) -> int:
        for column, event in enumerate(self.events):
            if event.what == what:
                return column
        raise TacitaError(f"this ledger knows no release '{what}'; name it among its events.")

    def _find_columns_by_law(self, law: str) -> list[int]:
        return [column for column, event in enumerate(self.events) if event.law == law]

    def _select_by_law(self, spent: Longs, law: str) -> Longs:
        return spent[:, self._find_columns_by_law(law)]

    def _has_unknown(self, spent: Longs) -> Bools:
        """Who has spent on a release without a known bound."""
        unknown = self._select_by_law(spent, "unknown")
        return np.asarray((unknown > 0).any(axis=1))

    # How it is counted

    def _cost(self, column: int, loss: float | Doubles | None, people: int) -> Longs:
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
        if np.isnan(losses).any() or (losses < 0).any():
            raise TacitaError(f"the loss of the release '{event.what}' must be a number that is not negative.")
        if event.law == "gaussian":
            losses = losses**2
        units = np.minimum(losses / UNIT, float(_MAX_LOSS))
        return np.ceil(units).astype(np.int64)

    def _fits(self, spent: Longs, budget: Longs) -> Bools:
        """Whether spending lies within the budgets; compares whole numbers where it can."""
        is_unlimited = budget == NO_LIMIT
        pure = _sum_losses(self._select_by_law(spent, "pure"))
        mu2 = _sum_losses(self._select_by_law(spent, "gaussian"))
        sampled = self._select_by_law(spent, "sampled")
        pure_micro = -(-pure // _MICRO_UNITS)
        remaining = budget - pure_micro
        remaining[is_unlimited] = 0
        if sampled.shape[1]:
            fits = self._fits_mixed(remaining, mu2, sampled)
        else:
            fits = mu2 <= _budget_limits(remaining, self.delta)
        fits &= remaining >= 0
        fits &= ~self._has_unknown(spent)
        return np.asarray(fits | is_unlimited)

    def _fits_mixed(self, remaining: Longs, mu2: Longs, sampled: Longs) -> Bools:
        """Whether budgets in millionths hold gaussian and sampled releases; equal accounts are computed once."""
        accounts = np.column_stack([remaining, mu2, sampled])
        distinct, place = np.unique(accounts, axis=0, return_inverse=True)
        fits = []
        for row in distinct:
            fits.append(self._holds(int(row[0]), int(row[1]), row[2:]))
        return np.array(fits, bool)[place.ravel()]

    def _holds(self, micro: int, mu2: int, counts: AnyArray) -> bool:
        """Whether a budget in millionths holds gaussian and sampled releases; one kind alone is looked up."""
        is_unspent = mu2 == 0 and not counts.any()
        if is_unspent:
            return micro >= 0
        if micro <= 0:
            return False
        epsilon = micro * MICRO
        releases = self._count_by_law(counts)
        is_one_kind = mu2 == 0 and len(releases) == 1
        if is_one_kind and not self.adaptive:
            ((event, n),) = releases.items()
            return n <= find_max_releases(event, epsilon, self.delta)
        return self._compose_mixed(mu2, counts) <= epsilon

    def _count_by_law(self, counts: AnyArray) -> dict[Event, int]:
        """Sampled releases with those of the same law counted together, under any name."""
        totals: dict[Event, int] = {}
        for column, n in zip(self._find_columns_by_law("sampled"), counts):
            if n:
                event = replace(self.events[column], what="sampled", once=False)
                totals[event] = totals.get(event, 0) + int(n)
        return totals

    def _compute_epsilons(self, spent: Longs) -> Doubles:
        pure = _sum_losses(self._select_by_law(spent, "pure"))
        mu2 = _sum_losses(self._select_by_law(spent, "gaussian"))
        sampled = self._select_by_law(spent, "sampled")
        accounts = np.column_stack([mu2, sampled])
        distinct, place = np.unique(accounts, axis=0, return_inverse=True)
        if sampled.any():
            epsilons = np.array([self._compose_mixed(int(row[0]), row[1:]) for row in distinct])
        else:
            distinct_mu2 = distinct[:, 0]
            is_unbounded = distinct_mu2 >= _MAX_LOSS
            mu = np.sqrt(np.where(is_unbounded, np.inf, distinct_mu2 * UNIT))
            epsilons = epsilon_of_mu(mu, self.delta)
        total = epsilons[place.ravel()] + pure * UNIT
        is_infinite = self._has_unknown(spent) | (pure >= _MAX_LOSS)
        return np.asarray(np.where(is_infinite, np.inf, total))

    def _compose_mixed(self, mu2: int, counts: AnyArray) -> float:
        """Gaussian and sampled releases together; mu^2 is rounded up to four digits."""
        if mu2 >= _MAX_LOSS:
            return math.inf
        events = list(self._count_by_law(counts).items())
        if mu2:
            n_digits = len(str(mu2))
            step = 10 ** max(0, n_digits - 4)
            rounded = -(-mu2 // step) * step
            mu = math.sqrt(rounded * UNIT)
            event = Event("all gaussian releases", "gaussian", 1.0, 1 / mu)
            events.append((event, 1))
        if self.adaptive:
            return compute_epsilon(events, self.delta, "rdp")
        return compute_epsilon(events, self.delta, "pld")


def to_millionths(epsilon: float) -> int:
    """A budget as a whole number, rounded down."""
    return math.floor(epsilon / MICRO * (1 + 1e-15))


def join_ledgers(ledgers: Sequence[tuple[str, Ledger, Arrays]]) -> tuple[Ledger, Arrays]:
    """Several ledgers of the same users as one, at the smallest delta; a user's budget is the largest, not the sum."""
    events = []
    for name, ledger, _ in ledgers:
        for event in ledger.events:
            events.append(replace(event, what=f"{name}: {event.what}"))
    delta = min(ledger.delta for _, ledger, _ in ledgers)
    adaptive = any(ledger.adaptive for _, ledger, _ in ledgers)
    budgets = [account["budget"] for _, _, account in ledgers]
    spent = [account["spent"] for _, _, account in ledgers]
    times = [account["times"] for _, _, account in ledgers]
    joined_account: Arrays = {
        "budget": np.max(budgets, axis=0),
        "spent": np.concatenate(spent, axis=1),
        "times": np.concatenate(times, axis=1),
    }
    return Ledger(tuple(events), delta, adaptive), joined_account


def sum_spent(account: Arrays, columns: list[int]) -> Longs:
    """What was spent on some kinds of releases together."""
    return _sum_losses(account["spent"][:, columns])


def add_losses(first: Longs, second: Longs) -> Longs:
    """Two losses together; from `_MAX_LOSS` on sums stay there, and no budget holds them."""
    bounded_first = np.minimum(first, _MAX_LOSS)
    bounded_second = np.minimum(second, _MAX_LOSS)
    return np.asarray(bounded_first + bounded_second).clip(max=_MAX_LOSS)


def _multiply_losses(counts: Longs, price: int) -> Longs:
    """The loss of so many releases at a price, at most `_MAX_LOSS`."""
    is_unbounded = counts.astype(np.float64) * price >= _MAX_LOSS
    exact = np.minimum(counts, _MAX_LOSS // price) * price
    return np.asarray(np.where(is_unbounded, _MAX_LOSS, exact))


def _sum_losses(spent: Longs) -> Longs:
    """Over kinds of releases, a row per user; never past `_MAX_LOSS`, so that whole numbers do not overflow."""
    n_kinds = spent.shape[1]
    if n_kinds == 0:
        return np.zeros(len(spent), np.int64)
    if n_kinds == 1:
        return np.minimum(spent[:, 0], _MAX_LOSS)
    is_unbounded = spent.sum(axis=1, dtype=np.float64) >= _MAX_LOSS
    return np.where(is_unbounded, _MAX_LOSS, spent.sum(axis=1))


def _mean_loss(event: Event, spent: int, times: int) -> float:
    """The loss of each of some releases, as if all had cost the same; for gaussians their sum stays exact."""
    if event.law == "gaussian":
        return math.sqrt(spent * UNIT / times)
    if event.law == "pure":
        return spent * UNIT / times
    return event.loss


def _budget_limits(micro: Longs, delta: float) -> Longs:
    """What budgets are worth in units of mu^2, rounded down; few different budgets are usual."""
    if len(micro) and (micro == micro[0]).all():
        limit = _budget_limit(int(micro[0]), delta)
        return np.full(len(micro), limit, np.int64)
    distinct, place = np.unique(micro, return_inverse=True)
    limits = [_budget_limit(int(budget), delta) for budget in distinct]
    return np.array(limits, np.int64)[place]


@lru_cache(maxsize=65536)
def _budget_limit(micro: int, delta: float) -> int:
    """Below `_MAX_LOSS`, since losses from there on are no longer counted exactly."""
    if micro <= 0:
        return 0
    mu = mu_of(micro * MICRO, delta)
    return min(_MAX_LOSS - 1, math.floor(mu**2 / UNIT))
