"""Reg: hold parameters near the last block's by an implicit quadratic step (spec C.2).

Rows a client never touches feel only the pull, so after s steps they have moved by a known share of the way to
the old table. The client sends that share, its touched rows relative to it, and the server adds the rest: exact,
and as sparse as plain FedAvg.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.kernels.steps import subtract_background
from tacita.methods.base import Part, PartConfig, preset, register
from tacita.types import Arrays, CohortView, Local, Pull, ServerState, Total, Upload


class ProximalConfig(PartConfig):
    strength: float = Field(0.001, ge=0, description="weight of the squared distance (lambda_reg)")


@register
class Proximal(Part):
    """Pull old item rows, and returning users' private vectors, towards where the last block left them."""

    name = "proximal"
    Config: ClassVar[type[PartConfig]] = ProximalConfig
    broadcast_once = True
    extra_shapes = {"share": ()}
    config: ProximalConfig

    def server_end_block(self, server: ServerState) -> Arrays:
        return {"table": server.items}

    def broadcast(self, server: ServerState) -> Arrays:
        return dict(server.parts.get(self.name, {}))

    def device_arrays(self, n_users: int) -> Arrays:
        width = self.world.backbone.private_width
        return {"private": np.zeros((n_users, width), np.float32), "returning": np.zeros(n_users, bool)}

    def end_block(self, view: CohortView) -> Arrays:
        return {"private": view.private.copy(), "returning": np.ones(len(view.user), bool)}

    def _on(self, view: CohortView) -> bool:
        return self.config.strength > 0 and "table" in view.received[self.name]

    def pull(self, view: CohortView) -> Pull | None:
        if not self._on(view):
            return None
        mine = view.parts[self.name]
        table = view.received[self.name]["table"]
        return Pull(self.config.strength, table, mine["private"], mine["returning"])

    def extras(self, view: CohortView, local: Local) -> Arrays:
        if not self._on(view):
            return {}
        k = 2 * self.world.backbone.rates(view.n_items)["rows"] * self.config.strength
        return {"share": 1 - (1 + k) ** -local.n_steps.astype(np.float64)}

    def encode(self, view: CohortView, upload: Upload) -> Upload:
        """Touched rows relative to what the pull alone does to every old row."""
        share = upload.extras.get(f"{self.name}.share")
        if share is None:
            return upload
        table = view.received[self.name]["table"]
        value = upload.value.copy()
        subtract_background(upload.client, upload.item, value, share, table, view.items)
        return replace(upload, value=value)

    def decode(self, server: ServerState, total: Total) -> Total:
        share = total.extras.get(f"{self.name}.share")
        if share is None:
            return total
        table = server.parts[self.name]["table"]
        rows, weight = total.rows.copy(), total.row_weight.copy()
        rows[: len(table)] += share * (table.astype(np.float64) - server.items[: len(table)])
        weight[: len(table)] = total.weight  # every client moves every old row
        return replace(total, rows=rows, row_weight=weight)


preset("reg", {"name": "proximal"})
