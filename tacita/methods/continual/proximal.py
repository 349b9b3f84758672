"""Reg: hold parameters near the last block's by an implicit quadratic step (spec C.2).

Rows a client never touches feel only the pull, so after s steps they have moved by a known share of the way to
the old table. The client sends that share, its touched rows relative to it, and the server adds the rest: exact,
and as sparse as plain FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, LocalModels, ProximalTerm, ServerState
from tacita.kernels.steps import subtract_background
from tacita.messages import DenseArrays, SparseRows, Spec, Total, Upload, touched_name
from tacita.methods.continual.last_table import LastTable
from tacita.round.fields import PartFields
from tacita.round.part import PartConfig
from tacita.round.registry import register
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask, TrainingOutcome


class ProximalConfig(PartConfig):
    strength: float = Field(0.001, ge=0, description="weight of the squared distance (lambda_reg)")


@register
class Proximal(LastTable):
    """Pull old item rows, and returning users' private vectors, towards where the last block left them."""

    name = "proximal"
    fills = frozenset({"pull"})
    Config: ClassVar[type[PartConfig]] = ProximalConfig
    config: ProximalConfig

    def state(self, n_users: int) -> Sequence[StateSpec]:
        shape = (n_users, self.context.backbone.private_width)
        private = np.zeros(shape, np.float32)
        returning = np.zeros(n_users, bool)
        return [StateSpec("private", private), StateSpec("returning", returning)]

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        share = Spec("share", (), most=1.0, least=0.0)
        table_fields = super().fields(n_items, block)
        return replace(table_fields, extra=(share,))

    def on_block_end(self, view: CohortView) -> Arrays:
        n_users = len(view.user)
        returning = np.ones(n_users, bool)
        return {"private": view.private.copy(), "returning": returning}

    def _has_pull(self, view: CohortView) -> bool:
        """Whether a round has a table to pull to."""
        return self.config.strength > 0 and "table" in view.received[self.name]

    def prepare(self, view: CohortView) -> LocalTask:
        if not self._has_pull(view):
            return LocalTask()
        state = view.parts[self.name]
        table = view.received[self.name]["table"]
        strength = self.config.strength
        pull = ProximalTerm(strength, table, state["private"], state["returning"])
        return LocalTask(pull=pull)

    def after_training(self, view: CohortView, local: LocalModels) -> TrainingOutcome:
        """The share of the way to the old table that rows go which a client never touches."""
        if not self._has_pull(view):
            return TrainingOutcome()
        rates = self.context.scorer.list_learning_rates(view.n_items)
        rate = rates["rows"]
        step = 2 * rate * self.config.strength
        n_steps = local.n_steps.astype(np.float64)
        remaining = (1 + step) ** -n_steps
        return TrainingOutcome(extras={"share": 1 - remaining})

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        """Touched rows relative to what the pull alone does to every old row."""
        share = upload.values.get(f"{self.name}.share")
        rows = upload.values["rows"]
        if share is None:
            return upload, {}
        assert isinstance(share, DenseArrays)
        assert isinstance(rows, SparseRows)
        table = view.received[self.name]["table"]
        value = rows.value.copy()
        subtract_background(rows.client, rows.item, value, share.value, table, view.items)
        relative_rows = replace(rows, value=value)
        return upload.with_value("rows", relative_rows), {}

    def decode(self, server: ServerState, total: Total) -> Total:
        state = server.parts.get(self.name, {})
        if "table" not in state or self.config.strength == 0:
            return total
        table = state["table"]
        known = len(table)
        rows = total["rows"].copy()
        known_rows = server.items[:known]
        distance = table.astype(np.float64) - known_rows
        share = total[f"{self.name}.share"]
        rows[:known] += share * distance
        sums = {"rows": rows}
        touched_field = touched_name("rows")
        if touched_field in total.sums:
            touched = total[touched_field].copy()
            touched[:known] = total.weight  # every client moves every old row
            sums[touched_field] = touched
        return total.with_sums(sums)
