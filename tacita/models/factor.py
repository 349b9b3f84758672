"""MF, PFedRec and the one-layer NCF of F3CRec: item rows met by a private vector (spec A.1-A.3)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Keys
from tacita.kernels import steps
from tacita.kernels.hashing import normals, uniforms
from tacita.models.base import BackboneConfig, TrainedConfig, linear_bound, register, repeat_start
from tacita.models.scorer import Scorer

_COMMON_OWNER = np.zeros(1, np.uint64)  # the owner of draws that all clients share


class FactorModel(Scorer):
    """What the three share: item rows of `dim` numbers and an item rate that may grow with the catalogue."""

    config: TrainedConfig

    @property
    def item_width(self) -> int:
        return self.config.dim

    def item_scale(self, n_items: int) -> float:
        scale = self.config.item_lr_scale
        return float(n_items) if isinstance(scale, str) else float(scale)


class TwoVectorModel(FactorModel):
    """A private vector for the user, a public one for the item, of the same width; both start alike."""

    @property
    def layout(self) -> dict[str, int]:
        return {"p": self.config.dim}

    @abstractmethod
    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        """The first vector of each owner."""

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return self.init_vectors(draws.public("init-items"), item_keys)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        return self.init_vectors(draws.private("init-private"), user_keys)

    def rates(self, n_items: int) -> dict[str, float]:
        return {"p": self.config.lr, "rows": self.config.lr * self.item_scale(n_items)}


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
        return self.config.init_std * normals(key, owners, self.config.dim)

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return (rep["p"] * rows).sum(-1)

    def reading(self, private: Floats, heads: Arrays) -> tuple[Floats, Floats]:
        return private, np.zeros(len(private), np.float32)


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
    def layout(self) -> dict[str, int]:
        return {"w": self.config.dim, "b": 1}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return normals(draws.public("init-items"), item_keys, self.config.dim)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        bound = linear_bound(self.config.dim)
        start = bound * (2 * uniforms(draws.public("init-head"), _COMMON_OWNER, self.private_width) - 1)
        return repeat_start(start.astype(np.float32), len(user_keys))

    def rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        return {"w": lr, "b": lr, "rows": lr * self.item_scale(n_items) * self.config.lr_eta}

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return (rep["w"] * rows).sum(-1) + rep["b"][:, 0]

    def reading(self, private: Floats, heads: Arrays) -> tuple[Floats, Floats]:
        d = self.config.dim
        return private[:, :d], private[:, d]


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
    def layout(self) -> dict[str, int]:
        d = self.config.dim
        return {"p": d} if self.config.share_mlp else {"p": d, "w": 2 * d, "b": 1}

    def shared(self) -> dict[str, tuple[int, ...]]:
        return {"w": (2 * self.config.dim,), "b": (1,)} if self.config.share_mlp else {}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return normals(draws.public("init-items"), item_keys, self.config.dim)

    def _init_layer(self, draws: Draws) -> Floats:
        width = 2 * self.config.dim + 1
        drawn = uniforms(draws.public("init-head"), _COMMON_OWNER, width)
        return (linear_bound(2 * self.config.dim) * (2 * drawn - 1)).astype(np.float32)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        start = normals(draws.public("init-user"), _COMMON_OWNER, self.config.dim)
        if not self.config.share_mlp:
            start = np.concatenate([start, self._init_layer(draws)], axis=1)
        return repeat_start(start, len(user_keys))

    def init_heads(self, draws: Draws) -> Arrays:
        if not self.config.share_mlp:
            return {}
        layer = self._init_layer(draws)[0]
        return {"w": layer[:-1].copy(), "b": layer[-1:].copy()}

    def rates(self, n_items: int) -> dict[str, float]:
        lr, eta = self.config.lr, self.config.lr_eta
        return {"p": lr * eta, "w": lr, "b": lr, "rows": lr * self.item_scale(n_items) * eta}

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        layer = heads if self.config.share_mlp else rep
        d = self.config.dim
        user_part = (layer["w"][:, :d] * rep["p"]).sum(-1) + layer["b"][:, 0]
        return user_part + (layer["w"][:, d:] * rows).sum(-1)

    def reading(self, private: Floats, heads: Arrays) -> tuple[Floats, Floats]:
        d = self.config.dim
        p = private[:, :d]
        if self.config.share_mlp:
            w = repeat_start(heads["w"], len(private))
            b = np.broadcast_to(heads["b"], (len(private),))
        else:
            w, b = private[:, d : 3 * d], private[:, 3 * d]
        return np.ascontiguousarray(w[:, d:]), (w[:, :d] * p).sum(1) + b
