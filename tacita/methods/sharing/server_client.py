"""server-client: the server is one client more, whose data is what users shared (sharing spec C.1).

In every round it learns for one pass over the shared edges, from the table that all clients got, to rank shared items
above others. Then it enters the mean by the number of these edges; where clients count 1 each, so does the server.
Shared parameters besides item rows are learned by clients alone.
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
from tacita.methods.sharing.graph_training import (
    BatchSizes,
    GraphObjective,
    draw_batch_keys,
    draw_batches,
    refine_table,
)
from tacita.round.part import Part, PartConfig
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
        config = self.config
        n_items = len(server.items)
        graph = SharedGraph.from_record(server.shared, n_items, layers=config.layers)
        if not len(graph):
            return server
        draws = self.context.draws
        keys = draw_batch_keys(draws, self.name, server)
        sizes = BatchSizes(config.edge_batch, 1)
        objective = GraphObjective(lam1=0.0, lam=config.lam, lr=config.lr, scale=config.bpr_scale)
        batches = draw_batches(graph, sizes, keys)
        refined = refine_table(graph, before.items, batches, objective)
        moved = refined.table - before.items
        n_edges = float(len(graph))
        items, share = self.merge_server_update(before, server, total, moved, n_edges)
        notes_values = [refined.bpr, share]
        notes = np.array(notes_values)
        state: Arrays = {"said": notes}
        updated = server.with_items(items)
        return updated.with_part(self.name, state)

    def merge_server_update(
        self, before: ServerState, server: ServerState, total: Total, moved: Floats, edges: float
    ) -> tuple[Floats, float]:
        """The mean with one member more, and the server's share of it."""
        train = self.context.train
        others: float | Doubles = 0.0
        if total.n_clients:
            others = choose_denominator(total, "rows", train, 0.0)
        server_weight = self._choose_server_weight(edges, total)
        weight: float | Doubles = server_weight
        if train.aggregation == "per-row":  # a row that the server did not touch has no share of it
            is_touched = (moved != 0).any(1)
            weight = server_weight * is_touched[:, None]
        whole = np.maximum(others + weight, 1e-300)
        change = moved.astype(np.float64)
        step = train.server_lr * change
        target = before.items + step
        distance = target - server.items
        factor = weight / whole
        items = server.items + factor * distance
        clients_and_server = max(server_weight + total.weight, 1e-300)
        share = server_weight / clients_and_server
        return items.astype(np.float32), share

    def _choose_server_weight(self, edges: float, total: Total) -> float:
        """What the server counts, where a client of weight 1 counts 1."""
        cap = self.config.weight_cap
        weight = 1.0
        if self.context.train.weighs_data:
            weight = edges
        if cap < 1:
            odds = cap / (1 - cap)
            most = odds * total.weight
            weight = min(weight, most)
        return weight

    def metrics(self, server: ServerState) -> dict[str, float]:
        state = server.parts.get(self.name, {})
        if "said" not in state:
            return {}
        bpr, share = state["said"]
        return {"shared_bpr": float(bpr), "server_share": float(share)}
