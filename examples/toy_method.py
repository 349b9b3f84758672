"""steady: devices shorten what they send, and the server carries on a part of where it went in the last round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Floats, ServerState, StateUpdate
from tacita.messages import Total, Upload
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.state import StateSpec


class SteadyConfig(PartConfig):
    most: float = Field(100.0, gt=0, description="the length that an upload has at most")
    momentum: float = Field(0.5, ge=0, lt=1, description="share of the last round's move that is made again")


@register
class Steady(Part):
    name = "steady"
    Config: ClassVar[type[PartConfig]] = SteadyConfig
    config: SteadyConfig

    def check(self, n_items: int) -> None:
        """Refuse what cannot work before anything is trained."""
        if self.context.train.server_lr > 1:
            raise TacitaError("part 'steady' carries moves on by itself; use train.server_lr = 1.0 or less.")

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        return [StateSpec("shortened", np.zeros(n_users, np.int32))]

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        factor = np.minimum(1.0, self.config.most / np.maximum(upload.norms(), 1e-12))  # (clients,)
        shortened = np.repeat(factor < 1, np.diff(view.user_ptr))  # (users,)
        return upload.scale(factor), {"shortened": view.parts[self.name]["shortened"] + shortened}

    # on the server

    def server_block_start(self, server: ServerState) -> Arrays:
        return {"moved": np.zeros_like(server.items)}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        moved = server.parts[self.name]["moved"]
        items: Floats = (server.items + self.config.momentum * moved).astype(np.float32)
        return server.with_items(items).with_part(self.name, {"moved": items - before.items})


register_preset("steady", {"name": "steady"})
