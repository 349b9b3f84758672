"""LightGCN on a device: its graph is one user and that user's items, a star (He et al. 2020; spec A.6).

On a star with n items the layers repeat. With s = sum b_j / sqrt n, the user's vector is a, s, a, s, ... and that of an
item b_j, a / sqrt n, s / sqrt n, a / sqrt n, ...; so any number of layers costs one sum. The model on the graph of many
users is in `learn/training/central_model.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, Ragged
from tacita.kernels.hashing import draw_normals
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.scorer import Context, TableReading, Tensors


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
        drawn = draw_normals(key, owners, self.config.dim)
        return self.config.init_std * drawn

    def list_context_items(self, view: CohortView) -> Ragged:
        return view.train

    def represent_users(self, private: Tensors, heads: Tensors, context: Context | None) -> Tensors:
        """The user's final vector, and what its items have taken in."""
        assert context is not None
        p = private["p"]
        layers = self.config.layers
        odd_layers = (layers + 1) // 2
        even_layers = layers // 2
        is_alone = context.count == 0
        degree = context.count + is_alone
        edge = (degree**-0.5)[:, None]
        total = context.sum_per_user(context.rows)
        s = edge * total
        has_items = (context.count / degree)[:, None]  # 0: without items, a user is itself in one layer
        own = 1 + even_layers * has_items
        user_sum = own * p + odd_layers * s
        passed_sum = odd_layers * p + even_layers * s
        passed = edge * passed_sum
        n_vectors = layers + 1
        return {"u": user_sum / n_vectors, "passed": passed / n_vectors}

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        own = rows / (self.config.layers + 1)
        passed = inside[:, None] * rep["passed"]
        products = rep["u"] * (own + passed)
        return products.sum(-1)

    def build_affine_scores_outside_context(self, rep: Tensors, heads: Arrays, items: Floats) -> TableReading:
        scaled = rep["u"] / (self.config.layers + 1)
        reading = np.asarray(scaled, np.float32)
        offsets = np.zeros(len(reading), np.float32)
        return reading, offsets, items
