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

from tacita.core.types import Arrays, CohortView, LocalModels, ProximalTerm, ServerState
from tacita.kernels.steps import subtract_background
from tacita.messages import DenseArrays, SparseRows, Spec, Total, Upload, touched_name
from tacita.methods.continual.last_table import LastTable
from tacita.round.parts import PartConfig
from tacita.round.registry import register, register_preset


class ProximalConfig(PartConfig):
    strength: float = Field(0.001, ge=0, description="weight of the squared distance (lambda_reg)")


@register
class Proximal(LastTable):
    """Pull old item rows, and returning users' private vectors, towards where the last block left them."""

    name = "proximal"
    Config: ClassVar[type[PartConfig]] = ProximalConfig
    config: ProximalConfig

    def device_arrays(self, n_users: int) -> Arrays:
        width = self.context.backbone.private_width
        return {"private": np.zeros((n_users, width), np.float32), "returning": np.zeros(n_users, bool)}

    def end_block(self, view: CohortView) -> Arrays:
        return {"private": view.private.copy(), "returning": np.ones(len(view.user), bool)}

    def _is_active(self, view: CohortView) -> bool:
        return self.config.strength > 0 and "table" in view.received[self.name]

    def pull(self, view: CohortView) -> ProximalTerm | None:
        if not self._is_active(view):
            return None
        mine = view.parts[self.name]
        table = view.received[self.name]["table"]
        return ProximalTerm(self.config.strength, table, mine["private"], mine["returning"])

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        return (Spec("share", (), most=1.0, least=0.0),)

    def extras(self, view: CohortView, local: LocalModels) -> Arrays:
        if not self._is_active(view):
            return {}
        k = 2 * self.context.scorer.rates(view.n_items)["rows"] * self.config.strength
        return {"share": 1 - (1 + k) ** -local.n_steps.astype(np.float64)}

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Touched rows relative to what the pull alone does to every old row."""
        share, rows = upload.values.get(f"{self.name}.share"), upload.values["rows"]
        if share is None:
            return upload, {}
        assert isinstance(share, DenseArrays)
        assert isinstance(rows, SparseRows)
        value = rows.value.copy()
        subtract_background(rows.client, rows.item, value, share.value, view.received[self.name]["table"], view.items)
        return upload.with_value("rows", replace(rows, value=value)), {}

    def decode(self, server: ServerState, total: Total) -> Total:
        if "table" not in server.parts.get(self.name, {}) or self.config.strength == 0:
            return total
        table, rows = server.parts[self.name]["table"], total["rows"].copy()
        rows[: len(table)] += total[f"{self.name}.share"] * (table.astype(np.float64) - server.items[: len(table)])
        changed = {"rows": rows}
        if touched_name("rows") in total.sums:
            changed[touched_name("rows")] = total[touched_name("rows")].copy()
            changed[touched_name("rows")][: len(table)] = total.weight  # every client moves every old row
        return total.with_sums(changed)


register_preset("reg", {"name": "proximal"})
