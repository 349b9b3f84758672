"""server-client: the server is one client more, whose data is what people shared (sharing spec C.1).

In every round it learns for one pass over the shared edges, from the table that everybody got, to rank what people
shared above what they did not; then it enters the mean by the number of these edges. Where clients count 1 each, so
does the server. Shared parameters besides item rows stay the clients' own business.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Doubles, Floats, ServerState
from tacita.learn.rows import choose_denominator
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import BatchSizes, GraphObjective, draw_batches, refine_table
from tacita.round.parts import Part, PartConfig
from tacita.round.registry import register


class ServerClientConfig(PartConfig):
    layers: int = Field(3, ge=0, description="how often vectors pass along the graph of what is shared; as devices: 1")
    lr: float = Field(0.01, gt=0, description="learning rate of Adam, which starts afresh in every round")
    lam: float = Field(1e-4, ge=0, description="weight of the squared rows of a batch, over its size")
    bpr_scale: float = Field(1.0, gt=0, description="factor on the difference of cosines")
    edge_batch: int = Field(8192, ge=1, description="shared interactions in a step")
    weight_cap: float = Field(1.0, gt=0, le=1, description="the server's share of the mean at most")


@register
class ServerClient(Part):
    name = "server-client"
    Config: ClassVar[type[PartConfig]] = ServerClientConfig
    config: ServerClientConfig

    def check(self, n_items: int) -> None:
        train = self.context.train
        if train.aggregation == "fixed" and train.denominator is None:
            raise TacitaError(
                "part 'server-client' joins the sum, so with train.aggregation = 'fixed' it needs train.denominator."
            )

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        graph = SharedGraph.of(server.shared, len(server.items), layers=self.config.layers)
        if not len(graph):
            return server
        draw = self.context.draws.public
        keys = np.array(
            [draw(f"{self.name}-{what}", server.block, server.round) for what in ("order", "other", "items")]
        )
        aims = GraphObjective(lam1=0.0, lam=self.config.lam, lr=self.config.lr, scale=self.config.bpr_scale)
        batches = draw_batches(graph, BatchSizes(self.config.edge_batch, 1), keys)
        made = refine_table(graph, before.items, batches, aims)
        moved = made.table - before.items
        items, share = self.merge_server_update(before, server, total, moved, float(len(graph)))
        told: Arrays = {"said": np.array([made.bpr, share])}
        return server.with_items(items).with_part(self.name, told)

    def merge_server_update(
        self, before: ServerState, server: ServerState, total: Total, moved: Floats, edges: float
    ) -> tuple[Floats, float]:
        """The mean with one member more, and what of it is the server's."""
        train, cap = self.context.train, self.config.weight_cap
        others = choose_denominator(total, "rows", train, 0.0) if total.n_clients else 0.0
        mine = edges if train.weighs_data else 1.0
        if cap < 1:
            mine = min(mine, cap / (1 - cap) * total.weight)
        weight: float | Doubles = mine
        if train.aggregation == "per-row":  # who did not touch a row is not in its mean
            weight = mine * (moved != 0).any(1)[:, None]
        whole = np.maximum(others + weight, 1e-300)
        aim = before.items + train.server_lr * moved.astype(np.float64)
        items = (server.items + weight / whole * (aim - server.items)).astype(np.float32)
        return items, mine / max(mine + total.weight, 1e-300)

    def server_notes(self, server: ServerState) -> dict[str, float]:
        kept = server.parts.get(self.name, {})
        return {"shared_bpr": float(kept["said"][0]), "server_share": float(kept["said"][1])} if "said" in kept else {}
