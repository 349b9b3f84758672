"""MF, PFedRec and the one-layer NCF of F3CRec: item rows met by a private vector (spec A.1-A.3)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Keys
from tacita.kernels import steps
from tacita.kernels.hashing import draw_normals, draw_uniforms
from tacita.models.base import BackboneConfig, Shapes, TrainedConfig, compute_linear_bound, register, repeat_start
from tacita.models.scorer import Reading, Scorer, Tensors

_COMMON_OWNER = np.zeros(1, np.uint64)  # the owner of draws that all clients share


class FactorModel(Scorer):
    """What the three share: item rows of `dim` numbers and an item rate that may grow with the catalogue."""

    config: TrainedConfig

    @property
    def item_width(self) -> int:
        return self.config.dim

    def compute_item_rate_scale(self, n_items: int) -> float:
        scale = self.config.item_lr_scale
        if isinstance(scale, str):
            return float(n_items)
        return float(scale)


class TwoVectorModel(FactorModel):
    """A private vector for the user, a public one for the item, of the same width; both start alike."""

    @property
    def private_layout(self) -> dict[str, int]:
        return {"p": self.config.dim}

    @abstractmethod
    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        """The first vector of each owner."""

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        key = draws.public("init-items")
        return self.init_vectors(key, item_keys)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        key = draws.private("init-private")
        return self.init_vectors(key, user_keys)

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        item_rate = lr * self.compute_item_rate_scale(n_items)
        return {"p": lr, "rows": item_rate}


class MFConfig(TrainedConfig):
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial entries")


@register
class MF(TwoVectorModel):
    """Matrix factorisation: private p_u, public q_i, logit p_u . q_i, no bias."""

    name = "mf"
    Config: ClassVar[type[BackboneConfig]] = MFConfig
    affine_kind = steps.MF
    config: MFConfig

    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        drawn = draw_normals(key, owners, self.config.dim)
        return self.config.init_std * drawn

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        products = rep["p"] * rows
        return products.sum(-1)

    def reduce_to_affine(self, private: Floats, heads: Arrays) -> Reading:
        offsets = np.zeros(len(private), np.float32)
        return private, offsets


class HeadConfig(TrainedConfig):
    lr: float = Field(0.05, gt=0, description="learning rate of the private score function")
    lr_eta: float = Field(170.0, gt=0, description="extra factor of the embedding rates (80 in PFedRec's code)")


@register
class PFedRec(FactorModel):
    """A private linear score function over public item rows, updated one after the other in each step."""

    name = "pfedrec"
    Config: ClassVar[type[BackboneConfig]] = HeadConfig
    phases = (("private",), ("rows",))
    affine_kind = steps.PFEDREC
    config: HeadConfig

    @property
    def private_layout(self) -> dict[str, int]:
        return {"w": self.config.dim, "b": 1}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        key = draws.public("init-items")
        return draw_normals(key, item_keys, self.config.dim)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        bound = compute_linear_bound(self.config.dim)
        start = _draw_common_start(draws, bound, self.private_width)
        return repeat_start(start, len(user_keys))

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        scaled = lr * self.compute_item_rate_scale(n_items)
        item_rate = scaled * self.config.lr_eta
        return {"w": lr, "b": lr, "rows": item_rate}

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        products = rep["w"] * rows
        bias = rep["b"][:, 0]
        return products.sum(-1) + bias

    def reduce_to_affine(self, private: Floats, heads: Arrays) -> Reading:
        dim = self.config.dim
        weights = private[:, :dim]
        bias = private[:, dim]
        return weights, bias


class NCFConfig(HeadConfig):
    share_mlp: bool = Field(False, description="send the linear layer to the server (FedKDRec's FedNCF)")


@register
class NCF(FactorModel):
    """One linear layer on [p_u ; q_i]; without a hidden layer the user part cannot change a ranking."""

    name = "ncf"
    Config: ClassVar[type[BackboneConfig]] = NCFConfig
    config: NCFConfig

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__(config)
        if not self.config.share_mlp:
            self.affine_kind = steps.NCF  # type: ignore[misc]

    @property
    def private_layout(self) -> dict[str, int]:
        dim = self.config.dim
        if self.config.share_mlp:
            return {"p": dim}
        return {"p": dim, "w": 2 * dim, "b": 1}

    def list_head_shapes(self) -> Shapes:
        if not self.config.share_mlp:
            return {}
        width = 2 * self.config.dim
        return {"w": (width,), "b": (1,)}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        key = draws.public("init-items")
        return draw_normals(key, item_keys, self.config.dim)

    def _init_layer(self, draws: Draws) -> Floats:
        width = 2 * self.config.dim
        bound = compute_linear_bound(width)
        return _draw_common_start(draws, bound, width + 1)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        key = draws.public("init-user")
        start = draw_normals(key, _COMMON_OWNER, self.config.dim)
        if not self.config.share_mlp:
            layer = self._init_layer(draws)
            start = np.concatenate([start, layer], axis=1)
        return repeat_start(start, len(user_keys))

    def init_heads(self, draws: Draws) -> Arrays:
        if not self.config.share_mlp:
            return {}
        layer = self._init_layer(draws)[0]
        weights = layer[:-1].copy()
        bias = layer[-1:].copy()
        return {"w": weights, "b": bias}

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        eta = self.config.lr_eta
        item_rate = lr * self.compute_item_rate_scale(n_items) * eta
        return {"p": lr * eta, "w": lr, "b": lr, "rows": item_rate}

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        layer = heads if self.config.share_mlp else rep
        dim = self.config.dim
        user_weights = layer["w"][:, :dim]
        item_weights = layer["w"][:, dim:]
        bias = layer["b"][:, 0]
        user_products = user_weights * rep["p"]
        item_products = item_weights * rows
        user_part = user_products.sum(-1) + bias
        return user_part + item_products.sum(-1)

    def reduce_to_affine(self, private: Floats, heads: Arrays) -> Reading:
        dim = self.config.dim
        n_users = len(private)
        if self.config.share_mlp:
            weights = repeat_start(heads["w"], n_users)
            bias = np.broadcast_to(heads["b"], (n_users,))
        else:
            weights = private[:, dim : 3 * dim]
            bias = private[:, 3 * dim]
        p = private[:, :dim]
        products = weights[:, :dim] * p
        user_part = products.sum(1)
        item_weights = np.ascontiguousarray(weights[:, dim:])
        return item_weights, user_part + bias


def _draw_common_start(draws: Draws, bound: float, width: int) -> Floats:
    """A uniform start within the bound, the same for all clients."""
    key = draws.public("init-head")
    drawn = draw_uniforms(key, _COMMON_OWNER, width)
    start = bound * (2 * drawn - 1)
    return start.astype(np.float32)
