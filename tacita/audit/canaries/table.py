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

from tacita.audit.canaries import items, rounds, streams, sums
from tacita.audit.canaries.bounds import Claim, Trials, one_run, within_law
from tacita.core.errors import TacitaError

HALF, LONG, SHOWN = "half the noise", "no clip", "no noise on it"
_ONE = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1, "between": 0.0}
_TWO = {"name": "dpps", "tiers": [1.0, 5.0], "shares": [1.0, 1.0], "releases": 2, "threat": "central"}
_USUAL = {"name": "dpps", "tiers": [5.0], "shares": [1.0], "releases": 1}  # a length goes along with each update
_LAPLACE = {"name": "laplace-noise", "mode": "ldp", "epsilon": 2.0}


@dataclass(frozen=True)
class Audited:
    """One row: a claim, who makes it of whom, and how to play it."""

    name: str
    unit: str
    against: str
    claims: Callable[[], Claim]  # worked out when a row is made: noise for sampled rounds takes seconds to find
    play: Callable[[int, int, str | None], Trials]
    canaries: int
    bugs: tuple[str, ...] = (HALF, LONG)

    @cached_property
    def claim(self) -> Claim:
        return self.claims()

    def row(self, seed: int, share: float) -> dict[str, Any]:
        """What canaries show of it, and of it with a bug, by a fifth of them at least."""
        began = time.perf_counter()
        trials = self.play(max(20, int(share * self.canaries)), seed, None)
        found = {"one_run": one_run(trials, self.claim), "within_law": within_law(trials, self.claim)}
        fewer = max(20, int(share * self.canaries) // 2)
        played = {bug: self.play(fewer, seed, bug) for bug in self.bugs}
        caught = {bug: _largest(one, self.claim) for bug, one in played.items()}
        told = {bug: self._said(one) for bug, one in played.items()}
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
            "holds": max(found.values()) <= self._said(trials),
            "caught": all(caught[bug] > told[bug] for bug in self.bugs),
            "seconds": time.perf_counter() - began,
        }

    def _said(self, trials: Trials) -> float:
        """The epsilon that stands: what the devices' ledgers say, where they keep some, and never more than claimed."""
        return self.claim.epsilon if trials.charged is None else min(self.claim.epsilon, trials.charged)


def _largest(trials: Trials, claim: Claim) -> float:
    return max(one_run(trials, claim), within_law(trials, claim))


def _in_rounds(setting: rounds.Played, canaries: int) -> Audited:
    against = "who sees models" if setting.threat == "central" else "the server"
    bugs = (HALF, LONG) if setting.reads == "rows" else (SHOWN,)
    return Audited(
        setting.name,
        setting.unit,
        against,
        setting.claim,
        lambda n, seed, bug: rounds.play(setting, n, seed, bug),
        canaries,
        bugs,
    )


def _of_items(setting: items.Told) -> Audited:
    what = "one item" if setting.items == 1 else f"person, {setting.items} items"
    name = f"PDC-FRS, {'randomised response' if setting.mechanism == 'krr' else setting.mechanism}"
    play = lambda n, seed, bug: items.play(setting, n, seed, bug)  # noqa: E731
    return Audited(name, what, "the server", setting.claim, play, 100_000, (HALF,))


def _of_sums(name: str, setting: sums.Summed, canaries: int) -> Audited:
    against = "the server" if setting.node else "who sees the sum"
    play = lambda n, seed, bug: sums.play(setting, n, seed, bug)  # noqa: E731
    bugs = (HALF, LONG, *([sums.BESIDE] if setting.order and setting.one_release else []))
    return Audited(name, "person", against, setting.claim, play, canaries, bugs)


def _of_streams(name: str, setting: streams.Streamed, bugs: tuple[str, ...]) -> Audited:
    play = lambda n, seed, bug: streams.play(setting, n, seed, bug)  # noqa: E731
    return Audited(name, "person", "who sees the sums", setting.claim, play, 2000, bugs)


def _of_dpps() -> list[Audited]:
    """As it is by default, each number that goes along by itself, and one silo's sum."""
    played, told = rounds.Played, "DPPS by default, "
    silo, alone = {**_USUAL, "threat": "silo"}, {"silos": 1, "in_silos": "apart"}
    return [
        _in_rounds(played(told + "one release", _USUAL, 5.0, "local"), 1000),
        _in_rounds(played(told + "the length that goes along", _USUAL, 5.0, "local", reads="dpps.length"), 500),
        _in_rounds(
            played(told + "the weight that goes along", _USUAL, 5.0, "local", reads="dpps.mass", beside="interest"),
            500,
        ),
        _in_rounds(played("DPPS, a silo's sum, one release", silo, 5.0, "silo", train=alone), 20_000),
    ]


def mechanisms() -> list[Audited]:
    """In the order of the table."""
    played = rounds.Played
    drawn = {"name": "dp-fedavg", "epsilon": 2.0}
    return [
        _in_rounds(played("DPPS, one release", _ONE, 5.0, "local"), 1000),
        _in_rounds(played("DPPS, one release", {**_ONE, "unit": "silo"}, 5.0, "local", "silo"), 1200),
        *_of_dpps(),
        _in_rounds(played("DPPS, 2 releases, smaller tier", _TWO, 1.0, releases=2), 20_000),
        _in_rounds(played("DPPS, 2 releases, larger tier", _TWO, 5.0, releases=2, tier=1), 20_000),
        _in_rounds(played("DP-FedAvg, 2 rounds of everybody", {**drawn, "releases": 2}, 2.0, releases=2), 20_000),
        _in_rounds(
            played("DP-FedAvg, 4 rounds, a quarter drawn", {**drawn, "releases": 4}, 2.0, releases=4, rate=0.25), 20_000
        ),
        _in_rounds(played("Laplace noise, one release", _LAPLACE, 2.0, "local"), 1000),
        *(_of_items(items.Told(how, 1.0, n)) for how in ("krr", "exponential") for n in (1, 2)),
        _of_sums("tally, all of a first block", sums.Summed(4.0), 1000),
        _of_sums("tally, terms of one release", sums.Summed(4.0, one_release=True), 2000),
        _of_sums("tally, a node's own sum", sums.Summed(4.0, node=True), 1000),
        _of_sums("tally, terms of a node's own sum", sums.Summed(4.0, node=True, one_release=True), 2000),
        _of_sums("tally-order, all of a first block", sums.Summed(4.0, order=True), 1000),
        _of_sums("tally-order, terms and order of one release", sums.Summed(4.0, one_release=True, order=True), 2000),
        _of_streams("tally, 3 blocks together", streams.Streamed(4.0, 3), (HALF, LONG)),
        _of_streams("tally, what two blocks differ by", streams.Streamed(2.0, 3, reader="changes"), (streams.SAME,)),
        _of_streams("tally, a block and 4 retractions", streams.Streamed(3.0, 1, 4), (HALF, streams.FREE)),
    ]


def audit_canaries(
    seed: int = 1, share: float = 1.0, on_done: Callable[[int, int], None] | None = None, only: str = ""
) -> dict[str, Any]:
    """A row for every mechanism; `share`: of the canaries, where it has to be quick."""
    chosen = [one for one in mechanisms() if only.lower() in one.name.lower()]
    if not chosen:
        raise TacitaError(f"--only {only}: no mechanism has that in its name; leave it out to see all.")
    rows = []
    for n, one in enumerate(chosen):
        if on_done:
            on_done(n, len(chosen))
        rows.append(one.row(seed, share))
    if on_done:
        on_done(len(chosen), len(chosen))
    held = all(row["holds"] for row in rows)
    return {"seed": seed, "rows": rows, "holds": held, "caught": all(row["caught"] for row in rows)}
