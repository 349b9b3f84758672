"""retrain: forget by retraining without what was withdrawn, with the same draws and as many rounds (spec C.4).

It is the exact answer that other methods are measured against. All it keeps is how many rounds each block took.
"""

from __future__ import annotations

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, ServerState
from tacita.messages import Total
from tacita.methods.sharing import update_log as log
from tacita.models.statistic_model import StatisticModel
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.plan import RETRAINING_OVER_BUDGET
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport


@register
class RetrainPart(Part, Unlearning):
    name = "retrain"
    observes_only = True
    replays_rounds = True
    works_with = ("rows", "statistic")

    def check(self, n_items: int) -> None:
        backbone = self.context.backbone
        if isinstance(backbone, StatisticModel) and backbone.ledger() is not None:
            raise TacitaError(RETRAINING_OVER_BUDGET)
        train = self.context.train
        any_denominator = train.model_copy(update={"aggregation": "mean"})
        log.check_replay_settings(self.name, any_denominator)

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        no_rounds = np.zeros(0, np.int64)
        rounds = state.get("rounds", no_rounds)
        return {"rounds": np.append(rounds, 0)}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        state = server.parts[self.name]
        earlier = state["rounds"]
        rounds = earlier.copy()
        rounds[-1] += 1
        return server.with_part(self.name, {"rounds": rounds})

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share":
            return None
        purged = []
        if log.asks_to_forget(requests):
            purged = ["everything that was learnt"]
            server = self._retrain(server, play)
        report = log.build_unlearning_report(self.name, {}, exact=True, storage_client=0.0, purged=purged)
        return server, report

    def _retrain(self, server: ServerState, play: RoundPlayer) -> ServerState:
        state = server.parts[self.name]
        recorded = state["rounds"]
        rounds_of_blocks = recorded.tolist()
        for block, rounds in enumerate(rounds_of_blocks):
            server = play.restart_block(server, block)
            for _ in range(rounds):
                server = play(server, None)
        return server


register_preset("retrain", {"name": "withdrawal"}, {"name": "retrain"})
