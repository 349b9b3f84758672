"""LightGCN on a device: its graph is one user and that user's items, a star (He et al. 2020; spec A.6).

On a star with n items the layers repeat. With s = sum b_j / sqrt n, the user's vector is a, s, a, s, ... and that of an
item b_j, a / sqrt n, s / sqrt n, a / sqrt n, ...; so any number of layers costs one sum. `learn/training/central_model.py`
has the model on the graph of many users.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, Ragged
from tacita.kernels.hashing import normals
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.scorer import Context


class LightGCNConfig(TrainedConfig):
    lr: float = Field(1e-3, gt=0, description="learning rate of everything, for an optimiser of Adam's kind")
    item_lr_scale: Literal["items"] | float = Field(
        1.0, description="item-table rate = lr * this: 'items' (number of items) or a number"
    )
    layers: int = Field(3, ge=0, le=16, description="how often vectors pass along the edges")
    init_std: float = Field(0.1, ge=0, description="standard deviation of the initial entries")


@register
class LightGCN(TwoVectorModel):
    """Private p_u, public rows; both are means over layers, and the logit is their inner product."""

    name = "lightgcn"
    on_graph = True
    brings: ClassVar[dict[str, Any]] = {"train": {"optimiser": "lazy-adam"}}
    Config: ClassVar[type[BackboneConfig]] = LightGCNConfig
    reads_context = True
    config: LightGCNConfig

    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        return self.config.init_std * normals(key, owners, self.config.dim)

    def context(self, view: CohortView) -> Ragged:
        return view.train

    def represent(self, private: dict[str, Any], heads: dict[str, Any], context: Context | None) -> dict[str, Any]:
        """The user's final vector, and what its items have taken in."""
        assert context is not None
        layers, p = self.config.layers, private["p"]
        alone = context.count == 0
        edge = ((context.count + alone) ** -0.5)[:, None]
        s = edge * context.sum_per_user(context.rows)
        some = (context.count / (context.count + alone))[:, None]  # 0: without items, a user is itself in one layer
        own = 1 + layers // 2 * some
        u = (own * p + (layers + 1) // 2 * s) / (layers + 1)
        return {"u": u, "passed": edge * ((layers + 1) // 2 * p + layers // 2 * s) / (layers + 1)}

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return (rep["u"] * (rows / (self.config.layers + 1) + inside[:, None] * rep["passed"])).sum(-1)

    def reading_outside(self, rep: dict[str, Any], heads: Arrays, items: Floats) -> tuple[Floats, Floats, Floats]:
        reading = np.asarray(rep["u"] / (self.config.layers + 1), np.float32)
        return reading, np.zeros(len(reading), np.float32), items
