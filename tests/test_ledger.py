"""The ledger: equal to dp-accounting and near Opacus, whole numbers that never overspend, traps that are refused."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from scipy.special import log_ndtr

from tacita.core.errors import TacitaError
from tacita.privacy.accounting import Event, calibrate_sampled_noise, compute_epsilon, find_max_releases
from tacita.privacy.calibration import bound_mu_of_pure
from tacita.privacy.ledger import EARLIER_ROUNDS, EARLIER_RUNS, NO_LIMIT, UNIT, Ledger, add_losses, join_ledgers

ROWS = Event("rows", "gaussian")


def poisson(noise: float, rate: float, what: str = "round") -> Event:
    return Event(what, "gaussian", 1.0, noise, "person", "central", rate, "poisson")


# P1: right


def test_account_equals_the_known_value() -> None:
    ledger = Ledger((ROWS,), 1e-5)
    account = ledger.open_accounts(2, 10.0)
    for sigma in (5.0, 7.0, 9.0):
        account, goes = ledger.charge(account, "rows", 1 / sigma, np.array([True, False]))
        assert goes.tolist() == [True, False]
    assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(1.00688, abs=1e-4)
    assert ledger.compute_spent_epsilon(account)[1] == 0  # not asked, not charged
    assert ledger.compute_tight_epsilon(account, 0) <= ledger.compute_spent_epsilon(account)[0]
    assert account["times"].tolist() == [[3], [0]]


def test_200_gaussian_histories_cost_what_dp_accounting_says() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        delta = 10 ** rng.uniform(-9, -3)
        ledger = Ledger((ROWS,), delta)
        sigmas = np.exp(rng.uniform(-1, 4, rng.integers(1, 40)))
        account = ledger.open_accounts(1)
        for sigma in sigmas:
            account, _ = ledger.charge(account, "rows", 1 / sigma)
        right = dp_accounting.get_epsilon_gaussian(1 / math.sqrt((sigmas**-2.0).sum()), delta)
        assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(right, rel=1e-3, abs=1e-9)


def sampled_settings(n: int, seed: int) -> list[tuple[float, float, int, float]]:
    rng = np.random.default_rng(seed)
    return [
        (10 ** rng.uniform(-2, -0.3), rng.uniform(1, 4), int(10 ** rng.uniform(0.5, 2.3)), 10 ** rng.uniform(-7, -4))
        for _ in range(n)
    ]


def check_sampled(rate: float, noise: float, releases: int, delta: float) -> None:
    from opacus.accountants import PRVAccountant

    ledger = Ledger((poisson(noise, rate),), delta)
    account = ledger.open_accounts(1)
    account = {**account, "spent": np.array([[releases]]), "times": np.array([[releases]], np.int32)}
    ours = ledger.compute_spent_epsilon(account)[0]
    p_l_d_accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    p_l_d_accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), releases)
    assert ours == pytest.approx(p_l_d_accountant.get_epsilon(delta), rel=1e-3)
    opacus = PRVAccountant()
    opacus.history = [(noise, rate, releases)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound = opacus.get_epsilon(delta, eps_error=0.004 * ours)
    assert ours == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize("setting", sampled_settings(6, 2))
def test_sampled_releases_cost_what_dp_accounting_and_opacus_say(setting: tuple[float, float, int, float]) -> None:
    check_sampled(*setting)


@pytest.mark.slow
def test_200_sampled_settings_cost_what_dp_accounting_and_opacus_say() -> None:
    for setting in sampled_settings(200, 3):
        check_sampled(*setting)


def test_more_rounds_a_higher_rate_and_less_noise_cost_more() -> None:
    base = compute_epsilon([(poisson(1.0, 0.1), 50)], 1e-5)
    assert base == pytest.approx(5.148, abs=0.01)
    assert compute_epsilon([(poisson(1.0, 0.1), 60)], 1e-5) > base
    assert compute_epsilon([(poisson(1.0, 0.2), 50)], 1e-5) > base
    assert compute_epsilon([(poisson(0.9, 0.1), 50)], 1e-5) > base
    assert compute_epsilon([(poisson(1.0, 0.1), 50)], 1e-5, "rdp") == pytest.approx(5.885, abs=0.01)
    assert compute_epsilon([], 1e-5) == 0


def test_noise_for_a_plan_of_sampled_releases_fits_it_exactly() -> None:
    noise = calibrate_sampled_noise(1.0, 1e-5, 0.1, 50)
    assert noise == pytest.approx(2.93, abs=0.01)
    assert find_max_releases(poisson(noise, 0.1), 1.0, 1e-5) == 50


def test_a_mixed_history_is_composed() -> None:
    ledger = Ledger((ROWS, poisson(1.0, 0.1)), 1e-5)
    account, _ = ledger.charge(ledger.open_accounts(1), "round")
    account, _ = ledger.charge(account, "rows", 0.2)
    right = compute_epsilon([(poisson(1.0, 0.1), 1), (Event("rows", "gaussian", 1.0, 5.0), 1)], 1e-5)
    assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(right, rel=1e-3)
    adaptive = Ledger(ledger.events, 1e-5, adaptive=True)
    assert adaptive.compute_spent_epsilon(account)[0] > right  # a filter for what is chosen on the way costs more


def test_pure_releases_add_up_plainly() -> None:
    noise = Event("table", "laplace", 2.0, 4.0)
    ledger = Ledger((noise, ROWS), 1e-5)
    account, _ = ledger.charge(ledger.open_accounts(1, 3.0), "table")
    assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(0.5, abs=1e-9)  # 2 C1 / b
    account, _ = ledger.charge(account, "rows", 0.2)
    alone = dp_accounting.get_epsilon_gaussian(5.0, 1e-5)
    assert ledger.compute_spent_epsilon(account)[0] == pytest.approx(0.5 + alone, rel=1e-6)
    assert ledger.compute_tight_epsilon(account, 0) < ledger.compute_spent_epsilon(account)[0]


# stopping


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 20), st.integers(1, 400), st.sampled_from([1e-4, 1e-5, 1e-7]))
def test_a_plan_of_k_releases_holds_exactly_k(epsilon: float, k: int, delta: float) -> None:
    ledger = Ledger((ROWS,), delta)
    loss = 1 / ledger.compute_sigma_to_fit(epsilon, k)
    account = ledger.open_accounts(1, epsilon)
    for _ in range(k):
        account, goes = ledger.charge(account, "rows", loss)
        assert goes[0]
    before = {name: value.copy() for name, value in account.items()}
    account, goes = ledger.charge(account, "rows", loss)
    assert not goes[0]
    assert all((account[name] == before[name]).all() for name in before)  # who is refused pays nothing
    assert ledger.compute_spent_epsilon(account)[0] <= epsilon
    assert ledger.is_exhausted(account)[0]


def test_unknown_releases_have_no_epsilon_and_no_budget_allows_them() -> None:
    ledger = Ledger((ROWS, Event("scores", "unknown")), 1e-5)
    account, goes = ledger.charge(ledger.open_accounts(2, 100.0), "scores")
    assert not goes.any()
    account, goes = ledger.charge(ledger.open_accounts(2), "scores", participants=np.array([True, False]))
    assert goes.tolist() == [True, False]
    assert ledger.compute_spent_epsilon(account).tolist() == [math.inf, 0.0]
    account, goes = ledger.charge(ledger.open_accounts(1), "rows", math.inf)  # no noise at all
    assert ledger.compute_spent_epsilon(account)[0] == math.inf
    assert not ledger.charge(ledger.open_accounts(1, 100.0), "rows", math.inf)[1][0]


def test_uncountable_releases_are_refused() -> None:
    ledger = Ledger((ROWS,), 1e-5)
    for loss in (math.nan, -1.0):
        with pytest.raises(TacitaError, match="loss"):
            ledger.charge(ledger.open_accounts(1, 1.0), "rows", loss)
    with pytest.raises(TacitaError, match="no release 'other'"):
        ledger.charge(ledger.open_accounts(1, 1.0), "other")
    for epsilon in (math.nan, -1.0, math.inf):
        with pytest.raises(TacitaError, match="budget"):
            ledger.open_accounts(1, epsilon)
    with pytest.raises(TacitaError):
        Event("rows", "gaussian", 1.0, 0.0)


def test_the_traps_of_sampling_are_refused() -> None:
    with pytest.raises(TacitaError, match="hides nobody"):
        Event("rows", "gaussian", 1.0, 1.0, threat="local", rate=0.1, cohort="poisson")
    for cohort in ("fixed", "asked"):
        with pytest.raises(TacitaError, match="drawn by itself"):
            Event("rows", "gaussian", 1.0, 1.0, threat="central", rate=0.1, cohort=cohort)  # type: ignore[arg-type]


def test_units_are_rounded_against_the_person_who_spends() -> None:
    ledger = Ledger((ROWS,), 1e-5)
    account, _ = ledger.charge(ledger.open_accounts(1), "rows", math.sqrt(1.5 * UNIT))
    assert account["spent"][0, 0] == 2
    assert (ledger.open_accounts(1, 0.9999999)["budget"] == 999_999).all()
    assert (ledger.open_accounts(1)["budget"] == NO_LIMIT).all()


def test_a_millionth_that_pure_releases_begin_is_spent() -> None:
    ledger = Ledger((Event("table", "laplace", 1.0, 1 / 0.3333334), ROWS), 1e-5)
    account, went = ledger.open_accounts(1, 1.0), []
    for _ in range(3):
        account, goes = ledger.charge(account, "table")
        went.append(bool(goes[0]))
    assert went == [True, True, False]  # the third would make it 1.0000002


def test_gaussian_losses_beside_sampled_ones_are_rounded_up() -> None:
    drawn = Event("round", "gaussian", 1.0, 2.0, "person", "central", 0.1, "poisson")
    ledger = Ledger((drawn, ROWS), 1e-5)
    account, _ = ledger.charge(ledger.open_accounts(1), "round")
    account, _ = ledger.charge(account, "rows", math.sqrt(0.1234999))
    right = compute_epsilon([(drawn, 1), (Event("rows", "gaussian", 1.0, 1 / math.sqrt(0.1234999)), 1)], 1e-5)
    assert right <= ledger.compute_spent_epsilon(account)[0] <= right * 1.001


def test_ledgers_of_several_parts_are_one() -> None:
    first, second = Ledger((ROWS,), 1e-5), Ledger((ROWS, Event("count", "laplace", 1.0, 10.0)), 1e-6)
    a, _ = first.charge(first.open_accounts(1, 1.0), "rows", 0.1)
    b, _ = second.charge(second.open_accounts(1, 2.0), "rows", 0.1)
    b, _ = second.charge(b, "count")
    both, account = join_ledgers([("a", first, a), ("b", second, b)])
    assert [event.what for event in both.events] == ["a: rows", "b: rows", "b: count"]
    assert both.compute_spent_epsilon(account)[0] == pytest.approx(
        0.1 + dp_accounting.get_epsilon_gaussian(1 / math.sqrt(0.02), 1e-6), rel=1e-6
    )


# P2: nobody overspends, whatever happens


class Schedules(RuleBasedStateMachine):
    """Joins, leaves, edits of budgets and crashes, against an oracle that adds up what really left.

    A rule draws few numbers, each of which decides about everybody: what hypothesis draws is most of what it costs.
    """

    delta = 1e-5
    seen: ClassVar[Counter[str]] = Counter()  # what came up in all schedules together

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger((ROWS, Event("count", "laplace", 1.0, 20.0)), self.delta)
        self.account = self.ledger.open_accounts(0, 1.0)
        self.saved = self.account
        self.left: list[
            list[float]
        ] = []  # of each person: the sum of mu^2 and of pure epsilons, and releases that left
        self.gone = 0  # bits of people who are away

    @property
    def people(self) -> int:
        return len(self.left)

    @initialize(epsilon=st.floats(0.2, 3), n=st.integers(1, 4))
    def begin(self, epsilon: float, n: int) -> None:
        self.join(epsilon, n)

    @rule(epsilon=st.floats(0, 3), n=st.integers(1, 3))
    def join(self, epsilon: float, n: int) -> None:
        new = self.ledger.open_accounts(n, epsilon)
        self.account = {k: np.concatenate([v, new[k]]) for k, v in self.account.items()}
        self.left += [[0.0, 0.0, 0.0] for _ in range(n)]
        self.saved = self.account

    @rule(who=st.integers(0, 255))
    def leave_or_come_back(self, who: int) -> None:
        self.gone ^= 1 << who % self.people

    @rule(who=st.integers(0, 255), epsilon=st.floats(0, 5))
    def edit_a_budget(self, who: int, epsilon: float) -> None:
        self.account = self.ledger.with_budget(self.account, epsilon, np.arange(self.people) == who % self.people)
        self.saved = self.account
        self.seen["edits"] += 1

    @rule(
        asked=st.integers(0, 2**12 - 1),
        mu=st.floats(0.01, 0.6),
        how=st.sampled_from(["rows", "rows, before", "rows, after", "count", "count, before", "count, after"]),
        times=st.integers(1, 6),
    )
    def release(self, asked: int, mu: float, how: str, times: int) -> None:
        """Charge, save, send, some rounds of it; the last may crash, and after the save the charge is not lost."""
        what, _, crash = how.partition(", ")
        who = np.array(
            [bool((asked & ~self.gone) >> k % 12 & 1) and not self.gone >> k & 1 for k in range(self.people)]
        )
        for n in range(times):
            account, goes = self.ledger.charge(self.account, what, mu if what == "rows" else None, who)
            assert not (goes & ~who).any()
            self.seen["refused"] += int((who & ~goes).sum())
            if crash and n == times - 1:
                self.seen["crashes"] += 1
                # before it was saved nothing has left; after it the value is lost, and not the charge
                self.account = self.saved if crash == "before" else account
                self.saved = self.account
                break
            self.account = self.saved = account
            for k in np.flatnonzero(goes):
                self._leaves(k, what, mu)

    def _leaves(self, k: int, what: str, mu: float) -> None:
        remainder = self.left[k]
        remainder[0 if what == "rows" else 1] += mu**2 if what == "rows" else 0.05
        remainder[2] += 1
        self.seen["releases"] += 1
        assert within(remainder[0], remainder[1], self.account["budget"][k] * 1e-6, self.delta)

    @invariant()
    def what_is_charged_covers_what_left(self) -> None:
        times, spent = self.account["times"].sum(axis=1), self.account["spent"] * UNIT
        for k, (squares, pure, n) in enumerate(self.left):
            assert times[k] >= n
            assert spent[k, 0] >= squares * (1 - 1e-9)
            assert spent[k, 1] >= pure * (1 - 1e-9)


def within(squares: float, pure: float, budget: float, delta: float) -> bool:
    """Whether so much left within a budget: by the privacy profile of a Gaussian, written here once more."""
    epsilon, mu = budget * (1 + 1e-9) + 1e-9 - pure, math.sqrt(squares)
    if epsilon < 0 or not mu:
        return epsilon >= 0
    first, second = (math.erfc(-(sign * mu / 2 - epsilon / mu) / math.sqrt(2)) / 2 for sign in (1, -1))
    return first - math.exp(min(epsilon, 700.0)) * second <= delta * (1 + 1e-6)


def test_the_oracle_of_schedules_is_that_of_dp_accounting() -> None:
    rng = np.random.default_rng(4)
    for mu, pure in zip(np.exp(rng.uniform(-4, 1, 40)), rng.uniform(0, 2, 40)):
        spent = pure + dp_accounting.get_epsilon_gaussian(1 / mu, 1e-5)
        assert within(mu**2, pure, spent * 1.001, 1e-5)
        assert not within(mu**2, pure, spent * 0.999 - 1e-6, 1e-5)


def played(schedules: int, steps: int, machine: type[Schedules] = Schedules) -> Counter[str]:
    """What came up; nothing is kept of earlier runs, and what is found is not made smaller: that takes long."""
    machine.seen.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=schedules,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.seen


def test_no_user_overspends_in_random_schedules() -> None:
    observations = played(60, 12)
    assert min(observations[what] for what in ("releases", "refused", "crashes", "edits")) > 10  # or nothing was tried


def test_schedules_detect_undercharging_and_refunds_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Ledger._compute_cost
    with monkeypatch.context() as planted:
        planted.setattr(Ledger, "_compute_cost", lambda self, *rest: cost(self, *rest) * 9 // 10)
        with pytest.raises(AssertionError):
            played(60, 12)

    class Forgetful(Schedules):
        def _leaves(self, k: int, what: str, mu: float) -> None:
            super()._leaves(k, what, mu)
            self.account = {**self.account, "spent": self.account["spent"] // 2}

    with pytest.raises(AssertionError):
        played(60, 12, Forgetful)


@pytest.mark.slow
def test_no_user_overspends_in_10_000_schedules() -> None:
    observations = played(10_000, 20)
    assert observations["releases"] > 50_000
    assert min(observations[what] for what in ("refused", "crashes", "edits")) > 5_000


def test_carried_over_spending_is_never_negative() -> None:
    """Sums of whole numbers wrap: nine quarters of what they hold would be less than nothing."""
    ledger = Ledger((*(Event(name, "gaussian") for name in "abc"), Event(EARLIER_RUNS, "gaussian", once=True)), 1e-5)
    account = ledger.open_accounts(1)
    for name in "abc":
        for _ in range(4):
            account, _ = ledger.charge(account, name, 1e6)
    assert ledger.compute_spent_epsilon(account).tolist() == [math.inf]
    for budget in (0.5, 999_999.0):
        poor = ledger.with_budget(account, budget)
        assert ledger.charge(poor, "a", 0.1)[1].tolist() == [False]
        assert ledger.is_exhausted(poor).tolist() == [True]
    units = np.zeros(1, np.int64)
    for _ in range(9):
        units = add_losses(units, ledger.sum_losses_except(EARLIER_RUNS, account))
    assert units[0] > 0
    assert ledger.charge(ledger.with_earlier_spending(ledger.open_accounts(1, 999_999.0), units), "a", 0.1)[
        1
    ].tolist() == [False]
    pure = Ledger(tuple(Event(name, "laplace") for name in "abcdefghi"), 1e-5)
    much = {**pure.open_accounts(1), "spent": np.full((1, 9), 2**60)}
    assert pure.compute_spent_epsilon(much).tolist() == [math.inf]
    assert pure.charge(pure.with_budget(much, 1.0), "a")[1].tolist() == [False]
    sampled = Ledger((poisson(1e-6, 0.5),), 1e-5)
    times = {**sampled.open_accounts(1), "spent": np.full((1, 1), 2**40)}
    assert sampled.count_rounds_like(Event("x", "unknown"), times)[1][0] > 0


def test_a_large_pure_epsilon_has_a_finite_loss() -> None:
    """1 / (1 + e^-37) is 1 in double precision, and no Gaussian has that much."""
    for epsilon in (0.1, 1.0, 10.0, 45.0, 1e3):  # the corner of randomised response: both errors 1 / (1 + e^epsilon)
        assert log_ndtr(-bound_mu_of_pure(epsilon) / 2) == pytest.approx(-np.logaddexp(0.0, epsilon), rel=1e-9)
    losses = [bound_mu_of_pure(epsilon) for epsilon in (30.0, 37.0, 45.0, 1e3, 1e6)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses)
    ledger = Ledger((Event("upload", "laplace", 1.0, 1 / 45),), 1e-5)
    account, _ = ledger.charge(ledger.open_accounts(2), "upload")
    assert (ledger.sum_losses_except(EARLIER_RUNS, account) > 0).all()


def test_carried_over_spending_of_tiny_noise_is_never_negative() -> None:
    event = Event("round", "gaussian", 1.0, 1e-3)
    before = (replace(event, what=EARLIER_ROUNDS, once=True), replace(event, what=EARLIER_RUNS, once=True))
    ledger = Ledger((event, *before), 1e-5)
    account = ledger.open_accounts(1, 900_000.0)
    assert ledger.charge(account, "round")[1].all()
    state = ledger.with_earlier_spending(account, np.zeros(1, np.int64), np.array([10]))
    assert state["spent"][0, 1] > ledger.charge(account, "round")[0]["spent"][0, 0]
    assert not ledger.charge(state, "round")[1].any()
