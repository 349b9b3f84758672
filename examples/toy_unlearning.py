"""amnesia: who leaves is forgotten by training the open block again without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.types import Arrays, CohortView, Doubles, ServerState
from tacita.messages import Upload
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.state import StateSpec
from tacita.round.unlearning_report import UnlearningReport

ROUNDS = 5  # that the block is played again for


@register
class Amnesia(Part, Unlearning):
    name = "amnesia"
    scope = ("people",)
    weighs_presence = True

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("left", np.zeros(n_users, bool), persistent=True)]

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        """Who left does not count."""
        return 1.0 - view.parts[self.name]["left"]

    def on_device(self, view: CohortView, requests: RequestBatch) -> Arrays:
        if requests.kind != "leave":
            return {}
        return {"left": np.ones(len(view.user), bool)}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind != "leave":
            return None
        server = play.restart_block(server, server.block)
        for _ in range(ROUNDS):
            server = play(server, None)
        return server, UnlearningReport(method=self.name, exact=False, purged=("the block's rounds",))


register_preset("amnesia", {"name": "amnesia"})
