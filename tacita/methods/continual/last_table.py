"""What several continual methods send once a block: the table that the last block ended with."""

from __future__ import annotations

from typing import ClassVar

from tacita.core.types import Arrays, ServerState
from tacita.round.parts import Part


class LastTable(Part):
    """A part whose devices need the last block's table."""

    broadcast_once: ClassVar[bool] = True

    def server_end_block(self, server: ServerState) -> Arrays:
        return {"table": server.items}

    def broadcast(self, server: ServerState) -> Arrays:
        return dict(server.parts.get(self.name, {}))
