"""LightGCN on a user's own star, one layer deep: FedShare's model on the device (sharing spec A.3).

The user's vector takes in the rows of its items, and these items take in the user's vector; any other item is a
node without edges. Scores are cosines, so only directions matter.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, Ragged
from tacita.kernels.hashing import draw_uniforms
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.scorer import Context, TableReading, Tensors

_TINY = 1e-24  # keeps a cosine with a vector of zeros finite


class EgoConfig(TrainedConfig):
    item_propagation: bool = Field(True, description="the user's items take in its vector as well")


@register
class EgoModel(TwoVectorModel):
    """Private p_u, public rows: u = (p_u + sum of the user's rows / sqrt n) / 2, score cos(u, v)."""

    name = "ego"
    Config: ClassVar[type[BackboneConfig]] = EgoConfig
    reads_context = True
    config: EgoConfig

    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        """Xavier's uniform start of a single row."""
        dim = self.config.dim
        bound = math.sqrt(6 / (1 + dim))
        drawn = 2 * draw_uniforms(key, owners, dim) - 1
        vectors = bound * drawn
        return vectors.astype(np.float32)

    def list_context_items(self, view: CohortView) -> Ragged:
        return view.train

    def represent_users(self, private: Tensors, heads: Tensors, context: Context | None) -> Tensors:
        """The user's vector, and what its items take in of it."""
        assert context is not None
        p = private["p"]
        is_alone = context.count == 0
        edge = 0.5 / (context.count + is_alone) ** 0.5
        share = edge[:, None]
        passed = p if self.config.item_propagation else 0 * p
        total = context.sum_per_user(context.rows)
        user = 0.5 * p + share * total
        return {"u": user, "passed": share * passed}

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        u = rep["u"]
        v = 0.5 * rows + inside[:, None] * rep["passed"]
        product = (u * v).sum(-1)
        squares = _compute_squared_norm(u) * _compute_squared_norm(v)
        return product / (squares + _TINY) ** 0.5

    def build_affine_scores_outside_context(self, rep: Tensors, heads: Arrays, items: Floats) -> TableReading:
        users = _normalise_rows(rep["u"])
        offsets = np.zeros(len(users), np.float32)
        rows = _normalise_rows(items)
        return users, offsets, rows


def _compute_squared_norm(x: Any) -> Any:
    return (x * x).sum(-1)


def _normalise_rows(rows: Floats) -> Floats:
    squares = _compute_squared_norm(rows)[:, None]
    lengths = (squares + _TINY) ** 0.5
    return np.asarray(rows / lengths, np.float32)
