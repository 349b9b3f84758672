"""NeuMF and NeuNCF: a tower of layers over a user's and an item's vector (He et al. 2017; spec A.4, A.5).

Item rows and the tower are shared, the user's vector is private. A tower is thousands of numbers that all samples of a
client use, so models here score groups of samples, with one tower a group, and never copy it for a sample.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Keys
from tacita.kernels.hashing import normals, uniforms
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import FactorModel

_COMMON_OWNER = np.zeros(1, np.uint64)  # the owner of draws that all clients share


class TowerConfig(TrainedConfig):
    lr: float = Field(1e-3, gt=0, description="learning rate of everything, for an optimiser of Adam's kind")
    item_lr_scale: Literal["items"] | float = Field(
        1.0, description="item-table rate = lr * this: 'items' (number of items) or a number"
    )
    tower: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [64, 128, 64], min_length=1, max_length=16, description="sizes of the hidden layers"
    )
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial vectors")


class TowerModel(FactorModel):
    """What both share: hidden layers over a user's and an item's vector, then a linear output.

    The first layer is kept as two matrices, one for either vector, so that nothing is concatenated and a catalogue is
    scored with one product a user and one an item.
    """

    Config: ClassVar[type[BackboneConfig]] = TowerConfig
    config: TowerConfig
    grouped = True
    brings: ClassVar[dict[str, Any]] = {"train": {"optimiser": "lazy-adam"}}

    @property
    def layout(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def _layer_fans(self) -> dict[str, tuple[int, int]]:
        """Numbers into and out of the layer that each matrix belongs to."""
        sizes = self.config.tower
        first = (2 * self.config.dim, sizes[0])
        deeper = {f"layer_{k}": pair for k, pair in enumerate(pairwise(sizes), start=1)}
        return {"user_layer": first, "item_layer": first, **deeper, "out": (sizes[-1], 1)}

    def shared(self) -> dict[str, tuple[int, ...]]:
        dim, sizes = self.config.dim, self.config.tower
        matrices = {f"layer_{k}": pair for k, pair in enumerate(pairwise(sizes), start=1)}
        biases = {f"bias_{k}": (size,) for k, size in enumerate(sizes)}
        first = {"user_layer": (dim, sizes[0]), "item_layer": (dim, sizes[0])}
        return {**first, **matrices, **biases, "out": (sizes[-1],), "out_bias": (1,)}

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        return self.config.init_std * normals(draws.public("init-items"), item_keys, self.item_width)

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        return self.config.init_std * normals(draws.private("init-private"), user_keys, self.private_width)

    def init_heads(self, draws: Draws) -> Arrays:
        """Xavier's uniform start of every layer; biases begin at 0."""
        fans, made = self._layer_fans(), {}
        for name, shape in self.shared().items():
            made[name] = np.zeros(shape, np.float32)
            if name in fans:
                drawn = uniforms(draws.public(f"init-{name}"), _COMMON_OWNER, math.prod(shape)).reshape(shape)
                made[name] = (math.sqrt(6 / sum(fans[name])) * (2 * drawn - 1)).astype(np.float32)
        return made

    def rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        return {name: lr for name in (*self.layout, *self.shared())} | {"rows": lr * self.item_scale(n_items)}

    @property
    def gmf_width(self) -> int:
        """How many of a vector's numbers are multiplied with their like; the others climb."""
        return self.item_width - self.config.dim

    def flatten_heads(self, heads: Arrays) -> Floats:
        """All that is shared as one vector each, as compiled loops want it."""
        return np.concatenate([heads[name].reshape(len(heads[name]), -1) for name in self.shared()], axis=1)

    def unflatten_heads(self, flat: Floats) -> Arrays:
        """What `joined` joined."""
        shapes = self.shared()
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
        pieces = np.split(flat, ends, axis=1)
        return {k: v.reshape(-1, *shape) for (k, shape), v in zip(shapes.items(), pieces, strict=True)}

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return self.score_groups({k: v[:, None] for k, v in rep.items()}, heads, rows[:, None])[:, 0]

    def _run_tower(self, user: Any, heads: dict[str, Any], item: Any) -> Any:
        """The output of the last hidden layer, (groups, samples, size)."""
        up = relu(linear(item, heads["item_layer"], heads["bias_0"]) + user @ heads["user_layer"])
        for k in range(1, len(self.config.tower)):
            up = relu(linear(up, heads[f"layer_{k}"], heads[f"bias_{k}"]))
        return up


@register
class NeuNCF(TowerModel):
    """Private p_u, public q_i: the tower over [p_u ; q_i] alone."""

    name = "neuncf"

    def score_groups(self, private: dict[str, Any], heads: dict[str, Any], rows: Any) -> Any:
        up = self._run_tower(private["p"], heads, rows)
        return (up @ heads["out"][:, :, None])[:, :, 0] + heads["out_bias"]


@register
class NeuMF(TowerModel):
    """Two vectors on either side: one pair is multiplied number by number, the other climbs the tower."""

    name = "neumf"

    @property
    def item_width(self) -> int:
        return 2 * self.config.dim

    @property
    def code_width(self) -> int:
        return self.config.dim

    def rows_of_codes(self, codes: Floats) -> Floats:
        """The same start in both tables."""
        return np.concatenate([codes, codes], axis=1)

    @property
    def layout(self) -> dict[str, int]:
        return {"gmf": self.config.dim, "mlp": self.config.dim}

    def _layer_fans(self) -> dict[str, tuple[int, int]]:
        both = (self.config.dim + self.config.tower[-1], 1)
        return {**super()._layer_fans(), "out": both, "out_gmf": both}

    def shared(self) -> dict[str, tuple[int, ...]]:
        return {**super().shared(), "out_gmf": (self.config.dim,)}

    def score_groups(self, private: dict[str, Any], heads: dict[str, Any], rows: Any) -> Any:
        d = self.config.dim
        up = self._run_tower(private["mlp"], heads, rows[..., d:])
        met = (private["gmf"] * heads["out_gmf"][:, None] * rows[..., :d]).sum(-1)
        return (up @ heads["out"][:, :, None])[:, :, 0] + met + heads["out_bias"]


def linear(x: Any, matrix: Any, bias: Any) -> Any:
    """x @ matrix + bias in every group; torch adds the bias on the way."""
    return x @ matrix + bias[:, None] if isinstance(x, np.ndarray) else bias[:, None].baddbmm(x, matrix)


def relu(x: Any) -> Any:
    return np.maximum(x, 0) if isinstance(x, np.ndarray) else x.relu()
