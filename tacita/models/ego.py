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
from tacita.kernels.hashing import uniforms
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.scorer import Context

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
        bound = math.sqrt(6 / (1 + self.config.dim))
        return (bound * (2 * uniforms(key, owners, self.config.dim) - 1)).astype(np.float32)

    def context(self, view: CohortView) -> Ragged:
        return view.train

    def represent(self, private: dict[str, Any], heads: dict[str, Any], context: Context | None) -> dict[str, Any]:
        """The user's vector, and what its items take in of it."""
        assert context is not None
        p = private["p"]
        share = 0.5 / (context.count + (context.count == 0)) ** 0.5
        passed = p if self.config.item_propagation else 0 * p
        return {"u": 0.5 * p + share[:, None] * context.sum_per_user(context.rows), "passed": share[:, None] * passed}

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        v = 0.5 * rows + inside[:, None] * rep["passed"]
        return (rep["u"] * v).sum(-1) / (_squared_norm(rep["u"]) * _squared_norm(v) + _TINY) ** 0.5

    def reading_outside(self, rep: dict[str, Any], heads: Arrays, items: Floats) -> tuple[Floats, Floats, Floats]:
        return _normalise_rows(rep["u"]), np.zeros(len(rep["u"]), np.float32), _normalise_rows(items)


def _squared_norm(x: Any) -> Any:
    return (x * x).sum(-1)


def _normalise_rows(rows: Floats) -> Floats:
    return np.asarray(rows / (_squared_norm(rows)[:, None] + _TINY) ** 0.5, np.float32)
