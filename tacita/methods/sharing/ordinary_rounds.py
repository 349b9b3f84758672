"""ordinary-rounds: what was shared and taken back is overwritten by rounds as before, on what remains.

It is the control of every way to unlearn that plays rounds: what these are worth is what they gain beside it. Nothing
is erased, so it is not exact and the certificate says so.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from tacita.core.types import ServerState
from tacita.methods.sharing.shared_graph_part import purge_learned_state
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport


class OrdinaryRoundsConfig(PartConfig):
    rounds: int | None = Field(None, ge=1, description="rounds; default: a tenth of those that led to the model")


@register
class OrdinaryRounds(Part, Unlearning):
    name = "ordinary-rounds"
    scope = ("given",)
    replays_rounds = True
    Config: ClassVar[type[PartConfig]] = OrdinaryRoundsConfig
    config: OrdinaryRoundsConfig

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        n_edges = len(requests.withdrawn_items.ids)
        n_rounds = count_forget_rounds(self.config.rounds, server) if n_edges else 0
        play.require_rounds_left(n_rounds)
        for _ in range(n_rounds):
            server = play(server, None)
        server, purged = purge_learned_state(server, requests.senders)
        report = UnlearningReport(
            method=self.name,
            exact=False,
            storage_server=0,
            storage_client=0,
            purged=tuple(purged),
            details={"edges": n_edges, "turns": n_rounds},
        )
        return server, report


def count_forget_rounds(rounds: int | None, server: ServerState) -> int:
    """The rounds of a setting; by default a tenth of those that led to the model."""
    if rounds is not None:
        return rounds
    tenth = math.ceil(0.1 * server.round)
    return max(1, tenth)
