"""What several continual methods send once a block: the table that the last block ended with."""

from __future__ import annotations

from tacita.core.types import Arrays, ServerState
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part


class LastTable(Part):
    """A part whose devices need the last block's table."""

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        shape = (n_items, self.context.backbone.item_width)
        table = ArraySpec(shape, fewer_rows=True)
        return PartFields(common={"table": table})

    def server_block_end(self, server: ServerState) -> Arrays:
        return {"table": server.items}

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        state = server.parts.get(self.name, {})
        return PartBroadcast(dict(state), once=True)
