"""amnesia: who leaves is forgotten by training the open block again without them."""

from __future__ import annotations

from tacita.core.types import ServerState
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

EARLIER_BLOCKS = "The open block began again from a model that had learned from them, and their part in it stays."


@register
class Amnesia(Part, Unlearning):
    name = "amnesia"
    scope = ("people",)

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind != "leave":
            return None
        block = server.block
        rounds = server.round  # of a finished run: its best round
        play.require_rounds_left(rounds)
        server = play.restart_block(server, block)
        for _ in range(rounds):
            server = play(server, None)
        residual_risk = EARLIER_BLOCKS if block > 0 else ""
        return server, UnlearningReport(method=self.name, exact=False, residual_risk=residual_risk)


register_preset("amnesia", {"name": "withdrawal"}, {"name": "amnesia"})
