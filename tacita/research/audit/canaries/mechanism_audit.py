"""Every mechanism that claims an epsilon, and what canaries show of it: the bounds, the claim, and planted bugs.

A bound above its claim says that a promise is broken. The bugs are the control: were they not seen, a bound below the
claim would say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tacita.core.errors import TacitaError
from tacita.research.audit.canaries import items, rounds, streams, sums
from tacita.research.audit.canaries.bounds import Claim, Trials, bound_one_run, bound_within_law

HALF_NOISE_BUG, NO_CLIP_BUG, UNNOISED_SCALARS_BUG = "half the noise", "no clip", "no noise on it"
_DPPS_ONE_RELEASE = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1, "between": 0.0}
_DPPS_TWO_TIERS = {"name": "dpps", "tiers": [1.0, 5.0], "shares": [1.0, 1.0], "releases": 2, "threat": "central"}
_DPPS_DEFAULT = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1}  # a length goes along with each update
_LAPLACE = {"name": "laplace-noise", "mode": "ldp", "epsilon": 2.0}


@dataclass(frozen=True)
class MechanismAudit:
    """One row: a claim, who makes it of whom, and how to play it."""

    name: str
    unit: str
    against: str
    make_claim: Callable[[], Claim]  # worked out when a row is made: noise for sampled rounds takes seconds to find
    run_trials: Callable[[int, int, str | None], Trials]
    canaries: int
    bugs: tuple[str, ...] = (HALF_NOISE_BUG, NO_CLIP_BUG)

    @cached_property
    def claim(self) -> Claim:
        return self.make_claim()

    def make_row(self, seed: int, share: float) -> dict[str, Any]:
        """What canaries show of it, and of it with a bug, by a fifth of them at least."""
        began = time.perf_counter()
        trials = self.run_trials(max(20, int(share * self.canaries)), seed, None)
        found = {"one_run": bound_one_run(trials, self.claim), "within_law": bound_within_law(trials, self.claim)}
        fewer = max(20, int(share * self.canaries) // 2)
        played = {bug: self.run_trials(fewer, seed, bug) for bug in self.bugs}
        caught = {bug: _largest_bound(one, self.claim) for bug, one in played.items()}
        told = {bug: self._stated_epsilon(one) for bug, one in played.items()}
        return {
            "mechanism": self.name,
            "unit": self.unit,
            "against": self.against,
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "canaries": len(trials),
            **found,
            "bugs": caught,
            "said_with_bugs": told,
            "holds": max(found.values()) <= self._stated_epsilon(trials),
            "caught": all(caught[bug] > told[bug] for bug in self.bugs),
            "seconds": time.perf_counter() - began,
        }

    def _stated_epsilon(self, trials: Trials) -> float:
        """The epsilon that stands: what the devices' ledgers say, where they keep some, and never more than claimed."""
        return self.claim.epsilon if trials.ledger_epsilon is None else min(self.claim.epsilon, trials.ledger_epsilon)


def _largest_bound(trials: Trials, claim: Claim) -> float:
    return max(bound_one_run(trials, claim), bound_within_law(trials, claim))


def _audit_rounds(setting: rounds.RoundScenario, canaries: int) -> MechanismAudit:
    against = "who sees models" if setting.threat == "central" else "the server"
    bugs = (HALF_NOISE_BUG, NO_CLIP_BUG) if setting.reads == "rows" else (UNNOISED_SCALARS_BUG,)
    return MechanismAudit(
        setting.name,
        setting.unit,
        against,
        setting.claim,
        lambda n, seed, bug: rounds.run_trials(setting, n, seed, bug),
        canaries,
        bugs,
    )


def _audit_items(setting: items.ItemScenario) -> MechanismAudit:
    what = "one item" if setting.items == 1 else f"person, {setting.items} items"
    name = f"PDC-FRS, {'randomised response' if setting.mechanism == 'krr' else setting.mechanism}"
    play = lambda n, seed, bug: items.run_trials(setting, n, seed, bug)  # noqa: E731
    return MechanismAudit(name, what, "the server", setting.claim, play, 100_000, (HALF_NOISE_BUG,))


def _audit_sums(name: str, setting: sums.SumScenario, canaries: int) -> MechanismAudit:
    against = "the server" if setting.node else "who sees the sum"
    play = lambda n, seed, bug: sums.run_trials(setting, n, seed, bug)  # noqa: E731
    bugs = (HALF_NOISE_BUG, NO_CLIP_BUG, *([sums.SEPARATE_CLIPS_BUG] if setting.order and setting.one_release else []))
    return MechanismAudit(name, "person", against, setting.claim, play, canaries, bugs)


def _audit_streams(name: str, setting: streams.StreamScenario, bugs: tuple[str, ...]) -> MechanismAudit:
    play = lambda n, seed, bug: streams.run_trials(setting, n, seed, bug)  # noqa: E731
    return MechanismAudit(name, "person", "who sees the sums", setting.claim, play, 2000, bugs)


def _list_dpps_audits() -> list[MechanismAudit]:
    """As it is by default, each number that goes along by itself, and one silo's sum."""
    played, told = rounds.RoundScenario, "DPPS by default, "
    silo, alone = {**_DPPS_DEFAULT, "threat": "silo"}, {"silos": 1, "in_silos": "apart"}
    return [
        _audit_rounds(played(told + "one release", _DPPS_DEFAULT, 5.0, "local"), 1000),
        _audit_rounds(
            played(told + "the length that goes along", _DPPS_DEFAULT, 5.0, "local", reads="dpps.length"), 500
        ),
        _audit_rounds(
            played(
                told + "the weight that goes along",
                _DPPS_DEFAULT,
                5.0,
                "local",
                reads="dpps.mass",
                other_part="interest",
            ),
            500,
        ),
        _audit_rounds(played("DPPS, a silo's sum, one release", silo, 5.0, "silo", train=alone), 20_000),
    ]


def list_mechanisms() -> list[MechanismAudit]:
    """In the order of the table."""
    played = rounds.RoundScenario
    drawn = {"name": "dp-fedavg", "epsilon": 2.0}
    return [
        _audit_rounds(played("DPPS, one release", _DPPS_ONE_RELEASE, 5.0, "local"), 1000),
        _audit_rounds(played("DPPS, one release", {**_DPPS_ONE_RELEASE, "unit": "silo"}, 5.0, "local", "silo"), 1200),
        *_list_dpps_audits(),
        _audit_rounds(played("DPPS, 2 releases, smaller tier", _DPPS_TWO_TIERS, 1.0, releases=2), 20_000),
        _audit_rounds(played("DPPS, 2 releases, larger tier", _DPPS_TWO_TIERS, 5.0, releases=2, tier=1), 20_000),
        _audit_rounds(played("DP-FedAvg, 2 rounds of everybody", {**drawn, "releases": 2}, 2.0, releases=2), 20_000),
        _audit_rounds(
            played("DP-FedAvg, 4 rounds, a quarter drawn", {**drawn, "releases": 4}, 2.0, releases=4, rate=0.25), 20_000
        ),
        _audit_rounds(played("Laplace noise, one release", _LAPLACE, 2.0, "local"), 1000),
        *(_audit_items(items.ItemScenario(how, 1.0, n)) for how in ("krr", "exponential") for n in (1, 2)),
        _audit_sums("tally, all of a first block", sums.SumScenario(4.0), 1000),
        _audit_sums("tally, terms of one release", sums.SumScenario(4.0, one_release=True), 2000),
        _audit_sums("tally, a node's own sum", sums.SumScenario(4.0, node=True), 1000),
        _audit_sums("tally, terms of a node's own sum", sums.SumScenario(4.0, node=True, one_release=True), 2000),
        _audit_sums("tally-order, all of a first block", sums.SumScenario(4.0, order=True), 1000),
        _audit_sums(
            "tally-order, terms and order of one release", sums.SumScenario(4.0, one_release=True, order=True), 2000
        ),
        _audit_streams("tally, 3 blocks together", streams.StreamScenario(4.0, 3), (HALF_NOISE_BUG, NO_CLIP_BUG)),
        _audit_streams(
            "tally, what two blocks differ by",
            streams.StreamScenario(2.0, 3, reader="changes"),
            (streams.SAME_NOISE_BUG,),
        ),
        _audit_streams(
            "tally, a block and 4 retractions",
            streams.StreamScenario(3.0, 1, 4),
            (HALF_NOISE_BUG, streams.FREE_RETRACTIONS_BUG),
        ),
    ]


def audit_canaries(
    seed: int = 1, share: float = 1.0, on_done: Callable[[int, int], None] | None = None, only: str = ""
) -> dict[str, Any]:
    """A row for every mechanism; `share`: of the canaries, where it has to be quick."""
    chosen = [one for one in list_mechanisms() if only.lower() in one.name.lower()]
    if not chosen:
        raise TacitaError(f"--only {only}: no mechanism has that in its name; leave it out to see all.")
    rows = []
    for n, one in enumerate(chosen):
        if on_done:
            on_done(n, len(chosen))
        rows.append(one.make_row(seed, share))
    if on_done:
        on_done(len(chosen), len(chosen))
    held = all(row["holds"] for row in rows)
    return {"seed": seed, "rows": rows, "holds": held, "caught": all(row["caught"] for row in rows)}
