"""biased-mf: matrix factorisation in which every item also has a number of its own, how much everybody likes it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Keys
from tacita.kernels.hashing import draw_normals
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import FactorModel


class BiasedConfig(TrainedConfig):
    init_std: float = Field(0.1, ge=0, description="standard deviation of the initial entries")


@register
class BiasedMF(FactorModel):
    """Private p_u; a public row is [q_i, b_i]; the logit is p_u . q_i + b_i."""

    name = "biased-mf"
    Config: ClassVar[type[BackboneConfig]] = BiasedConfig
    config: BiasedConfig

    @property
    def item_width(self) -> int:
        return self.config.dim + 1

    @property
    def private_layout(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return self.config.init_std * draw_normals(draws.public("init-items"), item_keys, self.item_width)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        return self.config.init_std * draw_normals(draws.private("init-private"), user_keys, self.config.dim)

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        return {"p": self.config.lr, "rows": self.config.lr * self.compute_item_rate_scale(n_items)}

    def compute_logits(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return (rep["p"] * rows[:, :-1]).sum(-1) + rows[:, -1]

    def reduce_to_affine(self, private: Floats, heads: Arrays) -> tuple[Floats, Floats]:
        """The logit is a . row + c with a = [p_u, 1] and c = 0, so full ranking is compiled."""
        ones = np.ones((len(private), 1), np.float32)
        return np.concatenate([private, ones], axis=1), np.zeros(len(private), np.float32)
