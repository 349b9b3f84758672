"""The ledger: what every release costs each person, kept with the person, spent before anything leaves.

How a part, or anybody else, keeps one:

    ledger = Ledger((Event("popularity", "gaussian", 1.0, sigma, threat="central"), ...), delta=1e-5)
    account = ledger.opened(n_people, epsilon=2.0)              # plain arrays, a row per person: `device_arrays`
    account, goes = ledger.charge(account, "popularity")        # before the value leaves; who may not go sends nothing
    account, goes = ledger.charge(account, "rows", mu, asked)   # where each person has a loss of their own
    ledger.epsilon(account)                                     # (people,) spent so far; inf: "no epsilon"

An account is a value: put it where nothing brings an earlier one back (`Part.lasting`), and save it before the value
is sent; then a crash costs a person budget, and never gives any back. Whoever is not asked is not charged.

Numbers are whole: gaussian losses in 10^-12 of mu^2, pure ones in 10^-12 of epsilon, both rounded up, sampled ones
as counts. Together a person has spent epsilon(gaussian and sampled losses, delta) + the pure epsilons. To stop by the
sum of mu^2 (of Renyi losses, where releases are sampled and `adaptive` is said) is right even where the next release,
its noise or the budget depends on what came before: the ledger is a Renyi filter.
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
EARLIER_RUNS = "earlier runs"  # an event of this name holds what was spent elsewhere
EARLIER_ROUNDS = "earlier rounds"  # and one of this name rounds elsewhere that chance decided, as often as they came
UNIT = 1e-12  # of mu^2, and of a pure epsilon
MICRO = 1e-6  # budgets are whole numbers of it
MOST_BUDGET = 10**12 - 1  # what somebody may set, in millionths: less than a million
NO_LIMIT = np.iinfo(np.int64).max  # somebody who set no budget: everything is counted, nothing is refused
_MAX_ROUNDS = 2**30  # rounds elsewhere, as they are counted
_MAX_LOSS = 2**60  # what one release may cost at most, in units: sums of a few never overflow
_ROUND_UP = 1 + 1e-12  # noise is rounded up by this, so that what it costs does not exceed what was planned


@dataclass(frozen=True)
class Ledger:
    """The kinds of releases of a run, and how they are counted. Holds nobody's account."""

    events: tuple[Event, ...]
    delta: float = 1e-5
    adaptive: bool = False  # sampled releases are chosen in the light of earlier ones: count them by Renyi losses

    def __post_init__(self) -> None:
        names = [event.what for event in self.events]
        if len(set(names)) < len(names):
            raise TacitaError("two kinds of releases of a ledger have the same name.")

    def open_accounts(self, people: int, epsilon: float | Doubles | None = None) -> Arrays:
        """Accounts on which nothing is spent; without an epsilon nothing will be refused."""
        budget = np.full(people, NO_LIMIT if epsilon is None else 0, np.int64)
        account: Arrays = {
            "budget": budget,
            "spent": np.zeros((people, len(self.events)), np.int64),
            "times": np.zeros((people, len(self.events)), np.int32),
        }
        return account if epsilon is None else self.with_budget(account, epsilon)

    def with_budget(self, account: Arrays, epsilon: float | Doubles, who: Bools | None = None) -> Arrays:
        """Accounts with another budget, rounded down; what is spent stays spent."""
        given = np.broadcast_to(np.asarray(epsilon, np.float64), account["budget"].shape)
        if not (np.isfinite(given) & (given >= 0) & (given < 1e6)).all():
            raise TacitaError("a budget is an epsilon from 0 to a million.")
        micro = np.floor(given / MICRO * (1 + 1e-15)).astype(np.int64)
        return {**account, "budget": micro if who is None else np.where(who, micro, account["budget"])}

    def charge(
        self, account: Arrays, what: str, loss: float | Doubles | None = None, participants: Bools | None = None
    ) -> tuple[Arrays, Bools]:
        """Spend on one release: the new accounts, and who may release it. Who may not, or is not asked, pays nothing.

        `loss`: mu of a gaussian, epsilon of a pure release, alike or for each; else the event's own.
        """
        column = self._find_column(what)
        cost = self._cost(column, loss, len(account["budget"]))
        spent = account["spent"].copy()
        spent[:, column] = spent[:, column] + np.minimum(cost, _MAX_LOSS)
        goes = self._fits(spent, account["budget"]) & (spent[:, column] < NO_LIMIT // 2)
        if participants is not None:
            goes &= participants
        times = account["times"].copy()
        times[goes, column] += 1
        return {**account, "spent": np.where(goes[:, None], spent, account["spent"]), "times": times}, goes

    def epsilon(self, account: Arrays) -> Doubles:
        """What each person has spent, by the same sums that refuse; infinite: no epsilon can be stated."""
        return self._compute_epsilons(account["spent"])

    def tight_epsilon(self, account: Arrays, person: int) -> float:
        """The same of one person with all releases composed by dp-accounting: at most as much, and slower."""
        spent, times = account["spent"][person], account["times"][person]
        events = [
            (replace(event, sensitivity=1.0, noise=1.0 / _mean_loss(event, spent[k], times[k])), int(times[k]))
            for k, event in enumerate(self.events)
            if times[k]
        ]
        return min(float(self._compute_epsilons(account["spent"][[person]])[0]), compute_epsilon(events, self.delta))

    def remaining_budget(self, account: Arrays) -> Doubles:
        """What each person's budget still holds; infinite: no limit was set."""
        budget = np.where(account["budget"] == NO_LIMIT, np.inf, account["budget"] * MICRO)
        spent = self.epsilon(account)
        return np.asarray(np.where(np.isinf(budget), np.inf, np.maximum(0.0, budget - np.minimum(spent, budget))))

    def is_exhausted(self, account: Arrays) -> Bools:
        """Who has released something and could not once more, at the mean price of what they released so far."""
        times, spent = account["times"], account["spent"]
        again = np.where([event.once for event in self.events], 0, -(-spent // np.maximum(times, 1)))
        return np.asarray((again > 0).any(axis=1) & ~self._fits(add_losses(spent, again), account["budget"]))

    def with_earlier_spending(self, account: Arrays, units: Longs, rounds: Longs | None = None) -> Arrays:
        """Accounts that also hold what was spent elsewhere: units of mu^2, and rounds like its own; it only grows."""
        column = self._find_column(EARLIER_RUNS)
        spent, times = account["spent"].copy(), account["times"].copy()
        spent[:, column] = np.maximum(spent[:, column], np.minimum(units, _MAX_LOSS))
        times[:, column] = spent[:, column] > 0
        if rounds is not None:
            column = self._find_column(EARLIER_ROUNDS)
            each = int(self._cost(column, None, 1)[0])
            times[:, column] = np.maximum(times[:, column], np.minimum(rounds, _MAX_ROUNDS))
            spent[:, column] = np.maximum(
                spent[:, column], _multiply_losses(times[:, column].astype(np.int64), max(1, each))
            )
        return {**account, "spent": spent, "times": times}

    def count_rounds_like(self, event: Event, account: Arrays) -> tuple[Longs, Longs]:
        """Releases here that chance decided: how many cost at most what `event` does, and a bound on the rest in mu^2.

        A release of less noise, or that includes people more often, counts as if everybody had been in it.
        """
        like, more = np.zeros(len(account["spent"]), np.int64), np.zeros(len(account["spent"]), np.int64)
        for k in self._find_columns_by_law("sampled"):
            one, times = self.events[k], account["spent"][:, k]
            if self.names[k].rpartition(": ")[2] == EARLIER_ROUNDS:
                continue
            if event.law != "unknown" and one.rate <= event.rate and one.loss <= event.loss:
                like = add_losses(like, times)
            else:
                more = add_losses(more, _multiply_losses(times, min(_MAX_LOSS, math.ceil(one.loss**2 / UNIT))))
        return like, more

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(event.what for event in self.events)

    def sum_losses_except(self, what: str, account: Arrays) -> Longs:
        """What was spent but for one kind of release, in units of mu^2; pure ones by a bound, sampled ones not at all.

        `rounds_like` has those. Rounds of earlier runs are left out, too.
        """
        told = [name.rpartition(": ")[2] for name in self.names]
        other = [k for k in self._find_columns_by_law("gaussian") if told[k] not in (what, EARLIER_ROUNDS)]
        mu2 = sum_spent(account, other)
        pure = sum_spent(account, self._find_columns_by_law("pure"))
        kinds, place = np.unique(pure, return_inverse=True)
        bound = [min(_MAX_LOSS, math.ceil(mu_of_pure(float(one) * UNIT) ** 2 / UNIT)) for one in kinds]
        return add_losses(mu2, np.array(bound, np.int64)[place.ravel()])

    def sigma_to_fit(self, epsilon: float, releases: int) -> float:
        """The deviation, for sensitivity 1, at which a budget holds exactly so many gaussian releases."""
        if releases < 1:
            raise TacitaError(f"a plan has at least one release, not {releases}.")
        share = _budget_limit(to_millionths(epsilon), self.delta) // releases
        if share < 1:
            raise TacitaError(f"an epsilon of {epsilon} cannot be cut into {releases} releases; plan fewer.")
        return _ROUND_UP / math.sqrt(share * UNIT)

    # how it is counted

    def _find_column(self, what: str) -> int:
        for column, event in enumerate(self.events):
            if event.what == what:
                return column
        raise TacitaError(f"this ledger knows no release '{what}'; name it among its events.")

    def _cost(self, column: int, loss: float | Doubles | None, people: int) -> Longs:
        """In whole units, rounded up."""
        event = self.events[column]
        if event.law in ("sampled", "unknown"):
            if loss is not None:
                raise TacitaError(f"the release '{event.what}' costs everybody the same; leave out its loss.")
            return np.ones(people, np.int64)
        given = np.broadcast_to(np.asarray(event.loss if loss is None else loss, np.float64), (people,))
        if np.isnan(given).any() or (given < 0).any():
            raise TacitaError(f"the loss of the release '{event.what}' must be a number that is not negative.")
        units = (given**2 if event.law == "gaussian" else given) / UNIT
        return np.ceil(np.minimum(units, float(_MAX_LOSS))).astype(np.int64)

    def _find_columns_by_law(self, law: str) -> list[int]:
        return [k for k, event in enumerate(self.events) if event.law == law]

    def _fits(self, spent: Longs, budget: Longs) -> Bools:
        """Whether what would be spent lies within the budgets; compares whole numbers where it can."""
        free = budget == NO_LIMIT
        sampled, unknown = self._find_columns_by_law("sampled"), self._find_columns_by_law("unknown")
        pure, mu2 = (_sum_losses(spent[:, self._find_columns_by_law(law)]) for law in ("pure", "gaussian"))
        left = budget - -(-pure // round(MICRO / UNIT))
        left[free] = 0
        if sampled:
            kinds, place = np.unique(np.column_stack([left, mu2, spent[:, sampled]]), axis=0, return_inverse=True)
            inside = np.array([self._holds(int(row[0]), int(row[1]), row[2:]) for row in kinds], bool)[place.ravel()]
        else:
            inside = mu2 <= _budget_limits(left, self.delta)
        inside &= left >= 0
        if unknown:
            inside &= ~(spent[:, unknown] > 0).any(axis=1)
        return np.asarray(inside | free)

    def _holds(self, left: int, mu2: int, counts: AnyArray) -> bool:
        """Whether a budget in millionths holds gaussian and sampled releases; one kind alone is looked up."""
        if left <= 0 or (mu2 == 0 and not counts.any()):
            return left >= 0 and mu2 == 0 and not counts.any()
        used = self._count_by_law(counts)
        if mu2 == 0 and len(used) == 1 and not self.adaptive:
            ((event, n),) = used.items()
            return n <= find_max_releases(event, left * MICRO, self.delta)
        return self._compose_mixed(mu2, counts) <= left * MICRO

    def _count_by_law(self, counts: AnyArray) -> dict[Event, int]:
        """Sampled releases with those of the same law counted together, whatever they are called."""
        found: dict[Event, int] = {}
        for k, n in zip(self._find_columns_by_law("sampled"), counts):
            event = replace(self.events[k], what="sampled", once=False)
            if n:
                found[event] = found.get(event, 0) + int(n)
        return found

    def _compute_epsilons(self, spent: Longs) -> Doubles:
        pure, mu2 = (_sum_losses(spent[:, self._find_columns_by_law(law)]) for law in ("pure", "gaussian"))
        sampled = spent[:, self._find_columns_by_law("sampled")]
        kinds, place = np.unique(np.column_stack([mu2, sampled]), axis=0, return_inverse=True)
        if sampled.any():
            each = np.array([self._compose_mixed(int(row[0]), row[1:]) for row in kinds])
        else:
            mu = np.sqrt(np.where(kinds[:, 0] >= _MAX_LOSS, np.inf, kinds[:, 0] * UNIT))
            each = epsilon_of_mu(mu, self.delta)
        unknown = (spent[:, self._find_columns_by_law("unknown")] > 0).any(axis=1)
        return np.asarray(np.where(unknown | (pure >= _MAX_LOSS), np.inf, each[place.ravel()] + pure * UNIT))

    def _compose_mixed(self, mu2: int, counts: AnyArray) -> float:
        """Gaussian and sampled releases together; of mu^2 four digits are told apart, rounded up."""
        events = list(self._count_by_law(counts).items())
        if mu2 >= _MAX_LOSS:
            return math.inf
        if mu2:
            digits = 10 ** max(0, len(str(mu2)) - 4)
            mu = math.sqrt(-(-mu2 // digits) * digits * UNIT)
            events.append((Event("all gaussian releases", "gaussian", 1.0, 1 / mu), 1))
        return compute_epsilon(events, self.delta, "rdp" if self.adaptive else "pld")


def to_millionths(epsilon: float) -> int:
    """A budget as a whole number, rounded down."""
    return math.floor(epsilon / MICRO * (1 + 1e-15))


def join_ledgers(ledgers: Sequence[tuple[str, Ledger, Arrays]]) -> tuple[Ledger, Arrays]:
    """Several ledgers of the same people as one, at the smallest delta; nobody's budget is the sum of several."""
    events = tuple(replace(one, what=f"{name}: {one.what}") for name, kept, _ in ledgers for one in kept.events)
    account = {name: np.concatenate([a[name] for _, _, a in ledgers], axis=1) for name in ("spent", "times")}
    budget = np.max([a["budget"] for _, _, a in ledgers], axis=0)
    smallest = min(kept.delta for _, kept, _ in ledgers)
    return Ledger(events, smallest, any(kept.adaptive for _, kept, _ in ledgers)), {"budget": budget, **account}


def sum_spent(account: Arrays, columns: list[int]) -> Longs:
    """What was spent on some kinds of releases together."""
    return _sum_losses(account["spent"][:, columns])


def add_losses(one: Longs, other: Longs) -> Longs:
    """What was spent here and there; from `_MOST` on it is no longer told how much, and no budget holds it."""
    return np.asarray(np.minimum(one, _MAX_LOSS) + np.minimum(other, _MAX_LOSS)).clip(max=_MAX_LOSS)


def _multiply_losses(one: Longs, price: int) -> Longs:
    return np.asarray(
        np.where(one.astype(np.float64) * price >= _MAX_LOSS, _MAX_LOSS, np.minimum(one, _MAX_LOSS // price) * price)
    )


def _sum_losses(spent: Longs) -> Longs:
    """Over kinds of releases, a row per person; never past `_MOST`, where whole numbers would begin anew below 0."""
    if spent.shape[1] < 2:
        return np.minimum(spent[:, 0], _MAX_LOSS) if spent.shape[1] else np.zeros(len(spent), np.int64)
    return np.where(spent.sum(axis=1, dtype=np.float64) >= _MAX_LOSS, _MAX_LOSS, spent.sum(axis=1))


def _mean_loss(event: Event, spent: int, times: int) -> float:
    """The loss of each of some releases, as if all had cost the same; gaussians add up so exactly."""
    if event.law == "gaussian":
        return math.sqrt(spent * UNIT / times)
    return spent * UNIT / times if event.law == "pure" else event.loss


def _budget_limits(micro: Longs, delta: float) -> Longs:
    """What budgets are worth in units of mu^2, rounded down; few different budgets are usual."""
    if len(micro) and (micro == micro[0]).all():
        return np.full(len(micro), _budget_limit(int(micro[0]), delta), np.int64)
    kinds, place = np.unique(micro, return_inverse=True)
    return np.array([_budget_limit(int(one), delta) for one in kinds], np.int64)[place]


@lru_cache(maxsize=65536)
def _budget_limit(micro: int, delta: float) -> int:
    """Below `_MOST`: what cannot be told apart from more is within no budget."""
    return min(_MAX_LOSS - 1, math.floor(mu_of(micro * MICRO, delta) ** 2 / UNIT)) if micro > 0 else 0
