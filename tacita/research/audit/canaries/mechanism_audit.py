"""Every mechanism that claims an epsilon, and what canaries show of it: the bounds, the claim, and planted bugs.

A bound above its claim says that a promise is broken. The bugs are the control: if canaries missed them, a bound below
the claim would say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tacita.core.errors import TacitaError
from tacita.research.audit.audit_progress import AuditTable, OnStep, StepCounter
from tacita.research.audit.canaries import items, rounds, streams, sums
from tacita.research.audit.canaries.bounds import Claim, Trials, bound_one_run, bound_within_law
from tacita.research.audit.canaries.transcript_scenarios import list_transcript_audits

HALF_NOISE_BUG = "half the noise"
NO_CLIP_BUG = "no clip"
UNNOISED_SCALARS_BUG = "no noise on it"
COMMON_BUGS: tuple[str, ...] = (HALF_NOISE_BUG, NO_CLIP_BUG)
MIN_CANARIES = 20
_DPPS_ONE_RELEASE = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1, "between": 0.0}
_DPPS_TWO_TIERS = {"name": "dpps", "tiers": [1.0, 5.0], "shares": [1.0, 1.0], "releases": 2, "threat": "central"}
_DPPS_DEFAULT = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1}  # a length goes along with each update
_FEDAVG = {"name": "dp-fedavg", "epsilon": 2.0}
_LAPLACE = {"name": "laplace-noise", "mode": "ldp", "epsilon": 2.0}

RunTrials = Callable[[int, int, str | None], Trials]  # canaries, seed, bug


@dataclass(frozen=True)
class MechanismAudit:
    """One row: a claim, who makes it of whom, and how to play it."""

    name: str
    unit: str
    against: str
    make_claim: Callable[[], Claim]  # called when a row is made: to calibrate noise of sampled rounds takes seconds
    run_trials: RunTrials
    canaries: int
    bugs: tuple[str, ...] = COMMON_BUGS

    @cached_property
    def claim(self) -> Claim:
        return self.make_claim()

    def measure_row(self, seed: int, share: float) -> AuditTable:
        """What canaries show of it, and half as many of it with a bug."""
        start = time.perf_counter()
        n_canaries = int(share * self.canaries)
        n_bug_canaries = max(MIN_CANARIES, n_canaries // 2)
        trials = self.run_trials(max(MIN_CANARIES, n_canaries), seed, None)
        one_run = bound_one_run(trials, self.claim)
        within_law = bound_within_law(trials, self.claim)
        bug_bounds = {}
        bug_epsilons = {}
        for bug in self.bugs:
            bug_trials = self.run_trials(n_bug_canaries, seed, bug)
            bug_bounds[bug] = _find_largest_bound(bug_trials, self.claim)
            bug_epsilons[bug] = self._read_stated_epsilon(bug_trials)
        return {
            "mechanism": self.name,
            "unit": self.unit,
            "against": self.against,
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "canaries": len(trials),
            "one_run": one_run,
            "within_law": within_law,
            "bugs": bug_bounds,
            "said_with_bugs": bug_epsilons,
            "holds": max(one_run, within_law) <= self._read_stated_epsilon(trials),
            "caught": all(bug_bounds[bug] > bug_epsilons[bug] for bug in self.bugs),
            "seconds": time.perf_counter() - start,
        }

    def _read_stated_epsilon(self, trials: Trials) -> float:
        """The epsilon on the devices' ledgers, where they have some, and never more than claimed."""
        if trials.ledger_epsilon is None:
            return self.claim.epsilon
        return min(self.claim.epsilon, trials.ledger_epsilon)


def _find_largest_bound(trials: Trials, claim: Claim) -> float:
    one_run = bound_one_run(trials, claim)
    within_law = bound_within_law(trials, claim)
    return max(one_run, within_law)


def _make_round_audit(setting: rounds.RoundScenario, canaries: int) -> MechanismAudit:
    def run_trials(n: int, seed: int, bug: str | None) -> Trials:
        return rounds.run_trials(setting, n, seed, bug)

    reads_rows = setting.reads == "rows"
    return MechanismAudit(
        name=setting.name,
        unit=setting.unit,
        against="who sees models" if setting.threat == "central" else "the server",
        make_claim=setting.build_claim,
        run_trials=run_trials,
        canaries=canaries,
        bugs=COMMON_BUGS if reads_rows else (UNNOISED_SCALARS_BUG,),
    )


def _make_item_audit(setting: items.ItemScenario) -> MechanismAudit:
    def run_trials(n: int, seed: int, bug: str | None) -> Trials:
        return items.run_trials(setting, n, seed, bug)

    mechanism = "randomised response" if setting.mechanism == "krr" else setting.mechanism
    return MechanismAudit(
        name=f"PDC-FRS, {mechanism}",
        unit="one item" if setting.items == 1 else f"person, {setting.items} items",
        against="the server",
        make_claim=setting.build_claim,
        run_trials=run_trials,
        canaries=100_000,
        bugs=(HALF_NOISE_BUG,),
    )


def _make_sum_audit(name: str, setting: sums.SumScenario, canaries: int) -> MechanismAudit:
    def run_trials(n: int, seed: int, bug: str | None) -> Trials:
        return sums.run_trials(setting, n, seed, bug)

    bugs: tuple[str, ...] = COMMON_BUGS
    if setting.order and setting.one_release:
        bugs = (*COMMON_BUGS, sums.SEPARATE_CLIPS_BUG)
    return MechanismAudit(
        name=name,
        unit="person",
        against="the server" if setting.node else "who sees the sum",
        make_claim=setting.build_claim,
        run_trials=run_trials,
        canaries=canaries,
        bugs=bugs,
    )


def _make_stream_audit(name: str, setting: streams.StreamScenario, bugs: tuple[str, ...]) -> MechanismAudit:
    def run_trials(n: int, seed: int, bug: str | None) -> Trials:
        return streams.run_trials(setting, n, seed, bug)

    return MechanismAudit(
        name=name,
        unit="person",
        against="who sees the sums",
        make_claim=setting.build_claim,
        run_trials=run_trials,
        canaries=2000,
        bugs=bugs,
    )


def _list_dpps_audits() -> list[MechanismAudit]:
    """One release with one number, as it is by default, and over two releases."""
    scenario = rounds.RoundScenario
    per_silo = {**_DPPS_ONE_RELEASE, "unit": "silo"}
    one_release = scenario("DPPS, one release", _DPPS_ONE_RELEASE, 5.0, "local")
    silo_release = scenario("DPPS, one release", per_silo, 5.0, "local", "silo")
    smaller_tier = scenario("DPPS, 2 releases, smaller tier", _DPPS_TWO_TIERS, 1.0, releases=2)
    larger_tier = scenario("DPPS, 2 releases, larger tier", _DPPS_TWO_TIERS, 5.0, releases=2, tier=1)
    return [
        _make_round_audit(one_release, 1000),
        _make_round_audit(silo_release, 1200),
        *_list_default_dpps_audits(),
        _make_round_audit(smaller_tier, 20_000),
        _make_round_audit(larger_tier, 20_000),
    ]


def _list_default_dpps_audits() -> list[MechanismAudit]:
    """As it is by default, each number that goes along by itself, and one silo's sum."""
    scenario = rounds.RoundScenario
    whole = scenario("DPPS by default, one release", _DPPS_DEFAULT, 5.0, "local")
    length = scenario(
        "DPPS by default, the length that goes along",
        _DPPS_DEFAULT,
        5.0,
        "local",
        reads="dpps.length",
    )
    weight = scenario(
        "DPPS by default, the weight that goes along",
        _DPPS_DEFAULT,
        5.0,
        "local",
        reads="dpps.mass",
        other_part="interest",
    )
    silo_part = {**_DPPS_DEFAULT, "threat": "silo"}
    one_silo = {"silos": 1, "in_silos": "apart"}
    silo_sum = scenario("DPPS, a silo's sum, one release", silo_part, 5.0, "silo", train=one_silo)
    return [
        _make_round_audit(whole, 1000),
        _make_round_audit(length, 500),
        _make_round_audit(weight, 500),
        _make_round_audit(silo_sum, 20_000),
    ]


def _list_round_audits() -> list[MechanismAudit]:
    """Mechanisms with one noise for everybody, and Laplace noise."""
    scenario = rounds.RoundScenario
    two_rounds = {**_FEDAVG, "releases": 2}
    four_rounds = {**_FEDAVG, "releases": 4}
    everybody_drawn = scenario("DP-FedAvg, 2 rounds of everybody", two_rounds, 2.0, releases=2)
    quarter_drawn = scenario("DP-FedAvg, 4 rounds, a quarter drawn", four_rounds, 2.0, releases=4, rate=0.25)
    laplace = scenario("Laplace noise, one release", _LAPLACE, 2.0, "local")
    return [
        _make_round_audit(everybody_drawn, 20_000),
        _make_round_audit(quarter_drawn, 20_000),
        _make_round_audit(laplace, 1000),
    ]


def _list_item_audits() -> list[MechanismAudit]:
    audits = []
    for mechanism in ("krr", "exponential"):
        for n_items in (1, 2):
            setting = items.ItemScenario(mechanism, 1.0, n_items)
            audits.append(_make_item_audit(setting))
    return audits


def _list_sum_audits() -> list[MechanismAudit]:
    scenario = sums.SumScenario
    node_terms = scenario(4.0, node=True, one_release=True)
    order_terms = scenario(4.0, one_release=True, order=True)
    return [
        _make_sum_audit("tally, all of a first block", scenario(4.0), 1000),
        _make_sum_audit("tally, terms of one release", scenario(4.0, one_release=True), 2000),
        _make_sum_audit("tally, a node's own sum", scenario(4.0, node=True), 1000),
        _make_sum_audit("tally, terms of a node's own sum", node_terms, 2000),
        _make_sum_audit("tally-order, all of a first block", scenario(4.0, order=True), 1000),
        _make_sum_audit("tally-order, terms and order of one release", order_terms, 2000),
    ]


def _list_stream_audits() -> list[MechanismAudit]:
    scenario = streams.StreamScenario
    difference = scenario(2.0, 3, reader="changes")
    retractions = scenario(3.0, 1, 4)
    retraction_bugs = (HALF_NOISE_BUG, streams.FREE_RETRACTIONS_BUG)
    return [
        _make_stream_audit("tally, 3 blocks together", scenario(4.0, 3), COMMON_BUGS),
        _make_stream_audit("tally, what two blocks differ by", difference, (streams.SAME_NOISE_BUG,)),
        _make_stream_audit("tally, a block and 4 retractions", retractions, retraction_bugs),
    ]


def list_mechanism_audits() -> list[MechanismAudit]:
    """In the order of the table."""
    return [
        *_list_dpps_audits(),
        *_list_round_audits(),
        *_list_item_audits(),
        *_list_sum_audits(),
        *_list_stream_audits(),
    ]


def audit_canaries(seed: int = 1, share: float = 1.0, on_done: OnStep = None, only: str = "") -> AuditTable:
    """A row for every mechanism, then one for every transcript; `share`: of the canaries and plays."""
    mechanisms = [audit for audit in list_mechanism_audits() if only.lower() in audit.name.lower()]
    transcripts = [audit for audit in list_transcript_audits() if only.lower() in audit.title.lower()]
    if not mechanisms and not transcripts:
        raise TacitaError(f"--only {only}: no mechanism has that in its name; leave it out to see all.")
    steps = StepCounter(len(mechanisms) + len(transcripts), on_done)
    steps.reach(0)
    rows = []
    for mechanism in mechanisms:
        rows.append(mechanism.measure_row(seed, share))
        steps.advance()
    transcript_rows = []
    for transcript in transcripts:
        transcript_rows.append(transcript.measure_row(seed, share))
        steps.advance()
    all_rows = [*rows, *transcript_rows]
    return {
        "seed": seed,
        "rows": rows,
        "transcripts": transcript_rows,
        "holds": all(row["holds"] for row in all_rows),
        "caught": all(row["caught"] for row in all_rows),
    }
