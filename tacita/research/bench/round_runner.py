"""Rounds of a run's first block, played one after another for benchmarks."""

from __future__ import annotations

from tacita.federation.rounds import begin_block, make_initial_progress, run_round
from tacita.round.plan import Federation


class RoundRunner:
    """Plays a round of block 0 when called, after some that compile and fill buffers."""

    def __init__(self, federation: Federation, warm_up: int = 0) -> None:
        self.federation = federation
        self.progress = make_initial_progress(federation)
        begin_block(federation, self.progress, 0)
        for _ in range(warm_up):
            self.play_round()

    def play_round(self) -> None:
        progress = self.progress
        after, _ = run_round(self.federation, progress.server, progress.devices)
        progress.server = after
