"""retrain: forget by beginning anew without what was withdrawn, with the same draws and as many rounds (spec C.4).

The exact answer that other methods are measured against. It keeps nothing for it but how many rounds each block took.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, ServerState
from tacita.messages import Total
from tacita.methods.sharing import update_log as log
from tacita.round.parts import DeviceQuery, Part, RoundPlayer
from tacita.round.plan import RETRAINING_OVER_BUDGET
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch


@register
class RetrainPart(Part):
    name = "retrain"
    only_notes = True
    plays_again = True
    works_with = ("rows", "statistic")

    def check(self, n_items: int) -> None:
        if self.context.backbone.ledger() is not None:
            raise TacitaError(RETRAINING_OVER_BUDGET)
        log.check_replay_settings(self.name, self.context.train.model_copy(update={"aggregation": "mean"}))

    def server_begin_block(self, server: ServerState) -> Arrays:
        return {"rounds": np.append(server.parts.get(self.name, {}).get("rounds", np.zeros(0, np.int64)), 0)}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        rounds = server.parts[self.name]["rounds"].copy()
        rounds[-1] += 1
        return server.with_part(self.name, {"rounds": rounds})

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind == "share":
            return None
        held = server.parts[self.name]
        if log.asks_to_forget(requests):
            for block, rounds in enumerate(held["rounds"].tolist()):
                server = play.restart_block(server, block)
                for _ in range(rounds):
                    server = play(server, None)
        purged = ["everything that was learnt"] if log.asks_to_forget(requests) else []
        return server, {**log.build_certificate(self.name, {}, purged=purged), "exact": True, "storage_client": 0.0}


register_preset("retrain", {"name": "withdrawal"}, {"name": "retrain"})
