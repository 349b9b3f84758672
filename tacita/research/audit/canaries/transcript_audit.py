"""Canaries over whole transcripts: for every mechanism, neighbours chosen against it, and leaks that were planted.

A row plays both worlds a few times and compares what is exact. If that differs, no finite epsilon covers it, and the
row ends. Else it plays on and bounds epsilon from below. A leak is the same row with one mended mistake put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tacita.research.audit.audit_progress import AuditTable
from tacita.research.audit.canaries.planted_leaks import LEAKS
from tacita.research.audit.canaries.transcript_bounds import EpsilonBound, bound_epsilon, measure_reader
from tacita.research.audit.canaries.transcripts import ExactDifference, Transcript, find_exact_differences

DELTA = 1e-5
EXACT_PLAYS = 8  # of each world: what is the same in all of them has no noise
CONFIRMING_PLAYS = 16  # of each world, before a difference is called exact
MIN_PLAYS = 64  # of which as many as test a statistic can show an epsilon of 1.3

PlayWorld = Callable[[bool, int], Transcript]
"""Plays the world with the person, or without them; every number has noise of its own."""


@dataclass(frozen=True)
class TranscriptAudit:
    """One row: a claim, neighbours, and how to play them."""

    name: str
    neighbour: str
    against: str
    epsilon: float
    prepare: Callable[[], PlayWorld]
    plays: int  # of both worlds together; 0: only what is exact is compared
    public: Mapping[str, str] = field(default_factory=dict)  # entries outside of the epsilon, and why
    delta: float = DELTA
    leak: str = ""  # a planted leak that this row must catch
    leak_plays: int = 64
    exact_plays: int = EXACT_PLAYS
    uncovered: str = ""  # why the claim does not cover what this row shows, in words that runs print
    reader: str = ""  # the entry that holds the score of the best reader
    mu: float = 0.0  # that the claim gives that reader

    @property
    def title(self) -> str:
        return f"{self.name}: {self.neighbour}"

    def measure_row(self, seed: int, share: float) -> AuditTable:
        """What the transcripts show, and what they show with the leak."""
        start = time.process_time()
        result = self.run_plays(seed, self._count_plays(share))
        row: AuditTable = {
            "mechanism": self.name,
            "neighbour": self.neighbour,
            "against": self.against,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "plays": result.plays,
            "exact": [str(difference) for difference in result.exact],
            "bound": result.bound.epsilon,
            "statistic": result.bound.statistic,
            "mu": result.mu,
            "mu_claimed": self.mu,
            "outside": dict(self.public),
            "uncovered": self.uncovered,
            "holds": bool(self.uncovered) or not result.breaks(self.epsilon),
            "leak": self.leak,
            "caught": True,
        }
        if self.leak:
            leaking = self.run_leak(seed)
            row["leak_exact"] = [str(difference) for difference in leaking.exact]
            row["leak_bound"] = leaking.bound.epsilon
            row["caught"] = leaking.breaks(self.epsilon)
        row["seconds"] = time.process_time() - start
        return row

    def run_plays(self, seed: int, n_plays: int) -> TranscriptResult:
        """Exact differences at once, or a bound by chance; without plays exact values alone."""
        play = self.prepare()
        first_number = 1 + seed * 1_000
        without: list[Transcript] = []
        with_person: list[Transcript] = []

        def play_until(n_each: int) -> list[ExactDifference]:
            for number in range(len(without), n_each):
                without.append(play(False, first_number + 2 * number))
                with_person.append(play(True, first_number + 2 * number + 1))
            return find_exact_differences(without, with_person, self.public)

        exact = play_until(self.exact_plays)
        if exact:  # what noise decides may be the same in a few plays by chance
            exact = play_until(CONFIRMING_PLAYS)
        if exact or not n_plays:
            return TranscriptResult(2 * len(without), exact, NO_BOUND, 0.0)
        exact = play_until(n_plays // 2)
        bound = bound_epsilon(without, with_person, self.delta, self.public)
        has_scores = all(self.reader in transcript.entries for transcript in (*without, *with_person))
        mu = measure_reader(without, with_person, self.reader) if has_scores else bound.mu
        return TranscriptResult(2 * len(without), exact, bound, mu)

    def run_leak(self, seed: int) -> TranscriptResult:
        """The same with the leak put back, by as many plays as it takes to see it."""
        with LEAKS[self.leak]():
            return self.run_plays(seed, self.leak_plays if self.plays else 0)

    def _count_plays(self, share: float) -> int:
        if not self.plays:  # more are asked for: a bound beside what is exact
            return int(share * 2 * self.exact_plays) if share > 1 else 0
        return max(MIN_PLAYS, int(share * self.plays))


NO_BOUND = EpsilonBound(0.0, "", 0.0)


@dataclass(frozen=True)
class TranscriptResult:
    """What plays of both worlds show."""

    plays: int
    exact: list[ExactDifference]
    bound: EpsilonBound
    mu: float

    def breaks(self, epsilon: float) -> bool:
        return bool(self.exact) or self.bound.epsilon > epsilon
