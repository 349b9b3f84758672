"""NeuMF and NeuNCF: a tower of layers over a user's and an item's vector (He et al. 2017; spec A.4, A.5).

Item rows and the tower are shared, the user's vector is private. A tower is thousands of numbers that all samples of a
client use, so these models score groups of samples, with one tower a group, and never copy it for a sample.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Keys
from tacita.kernels.hashing import draw_normals, draw_uniforms
from tacita.models.base import BackboneConfig, Shapes, TrainedConfig, register
from tacita.models.factor import FactorModel
from tacita.models.scorer import Tensors

_COMMON_OWNER = np.zeros(1, np.uint64)  # the owner of draws that all clients share

LayerFans = dict[str, tuple[int, int]]
"""Numbers into and out of the layer that each matrix belongs to."""


class TowerConfig(TrainedConfig):
    lr: float = Field(1e-3, gt=0, description="learning rate of everything, for an optimiser of Adam's kind")
    item_lr_scale: Literal["items"] | float = Field(
        1.0, description="item-table rate = lr * this: 'items' (number of items) or a number"
    )
    tower: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [64, 128, 64], min_length=1, max_length=16, description="sizes of the hidden layers"
    )
    init_std: float = Field(0.01, ge=0, description="standard deviation of the initial vectors")
    layer_init: Literal["xavier", "torch"] = Field(
        "xavier", description="how layers start: Xavier's uniform and biases 0, or as torch starts a linear layer"
    )


class TowerModel(FactorModel):
    """What both share: hidden layers over a user's and an item's vector, then a linear output.

    The first layer is two matrices, one for either vector, so that nothing is concatenated and a catalogue is scored
    with one product a user and one an item.
    """

    Config: ClassVar[type[BackboneConfig]] = TowerConfig
    config: TowerConfig
    grouped = True
    brings: ClassVar[dict[str, Any]] = {"train": {"optimiser": "lazy-adam"}}

    @property
    def private_layout(self) -> dict[str, int]:
        return {"p": self.config.dim}

    def _list_inner_layers(self) -> LayerFans:
        """The matrices between hidden layers."""
        sizes = self.config.tower
        layers = {}
        for k, pair in enumerate(pairwise(sizes), start=1):
            layers[f"layer_{k}"] = pair
        return layers

    def _list_layer_fans(self) -> LayerFans:
        sizes = self.config.tower
        first = (2 * self.config.dim, sizes[0])
        last = (sizes[-1], 1)
        inner = self._list_inner_layers()
        return {"user_layer": first, "item_layer": first, **inner, "out": last}

    def list_head_shapes(self) -> Shapes:
        sizes = self.config.tower
        first = (self.config.dim, sizes[0])
        inner = self._list_inner_layers()
        biases = {}
        for k, size in enumerate(sizes):
            biases[f"bias_{k}"] = (size,)
        return {
            "user_layer": first,
            "item_layer": first,
            **inner,
            **biases,
            "out": (sizes[-1],),
            "out_bias": (1,),
        }

    def init_items(self, draws: Draws, item_keys: Keys) -> Floats:
        key = draws.public("init-items")
        drawn = draw_normals(key, item_keys, self.item_width)
        return self.config.init_std * drawn

    def init_private(self, draws: Draws, user_keys: Keys) -> Floats:
        key = draws.private("init-private")
        drawn = draw_normals(key, user_keys, self.private_width)
        return self.config.init_std * drawn

    def init_heads(self, draws: Draws) -> Arrays:
        """A uniform start of every layer, as `layer_init` says."""
        if self.config.layer_init == "torch":
            return self._init_layers_as_torch(draws)
        fans = self._list_layer_fans()
        heads = {}
        for name, shape in self.list_head_shapes().items():
            if name in fans:
                key = draws.public(f"init-{name}")
                both_fans = sum(fans[name])
                heads[name] = draw_layer(key, shape, both_fans)
            else:
                heads[name] = np.zeros(shape, np.float32)
        return heads

    def _init_layers_as_torch(self, draws: Draws) -> Arrays:
        """Matrices and biases uniform within 1 / sqrt(inputs of the layer)."""
        fans = self._list_layer_fans()
        biased_layers = {"bias_0": "item_layer", "out_bias": "out"}
        for name in self._list_inner_layers():
            biased_layers[name.replace("layer", "bias")] = name
        heads = {}
        for name, shape in self.list_head_shapes().items():
            layer = biased_layers.get(name, name)
            n_inputs, _ = fans[layer]
            key = draws.public(f"init-{name}")
            heads[name] = draw_layer(key, shape, 6 * n_inputs)  # its bound is the root of 6 over these
        return heads

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        lr = self.config.lr
        names = (*self.private_layout, *self.list_head_shapes())
        rates = dict.fromkeys(names, lr)
        rates["rows"] = lr * self.compute_item_rate_scale(n_items)
        return rates

    @property
    def gmf_width(self) -> int:
        """How many of a vector's numbers are multiplied with their like; the others climb."""
        return self.item_width - self.config.dim

    def flatten_heads(self, heads: Arrays) -> Floats:
        """All shared parameters of each client as one vector, as compiled loops want it."""
        pieces = []
        for name in self.list_head_shapes():
            value = heads[name]
            pieces.append(value.reshape(len(value), -1))
        return np.concatenate(pieces, axis=1)

    def unflatten_heads(self, flat: Floats) -> Arrays:
        """The shared parameters of the vectors that `flatten_heads` makes."""
        shapes = self.list_head_shapes()
        sizes = [math.prod(shape) for shape in shapes.values()]
        ends = np.cumsum(sizes)[:-1]
        pieces = np.split(flat, ends, axis=1)
        heads = {}
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            heads[name] = piece.reshape(-1, *shape)
        return heads

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        groups = {}
        for name, value in rep.items():
            groups[name] = value[:, None]
        logits = self.compute_group_logits(groups, heads, rows[:, None])
        return logits[:, 0]

    def _run_tower(self, user: Any, heads: Tensors, item: Any) -> Any:
        """The output of the last hidden layer, (groups, samples, size)."""
        of_item = linear(item, heads["item_layer"], heads["bias_0"])
        of_user = user @ heads["user_layer"]
        first = relu(of_item + of_user)
        return self._run_upper_layers(first, heads)

    def _run_upper_layers(self, hidden: Any, heads: Tensors) -> Any:
        """From the first hidden layer to the last."""
        n_layers = len(self.config.tower)
        for k in range(1, n_layers):
            matrix = heads[f"layer_{k}"]
            bias = heads[f"bias_{k}"]
            hidden = relu(linear(hidden, matrix, bias))
        return hidden


@register
class NeuNCF(TowerModel):
    """Private p_u, public q_i: the tower over [p_u ; q_i] alone."""

    name = "neuncf"

    def compute_group_logits(self, private: Tensors, heads: Tensors, rows: Any) -> Any:
        hidden = self._run_tower(private["p"], heads, rows)
        logits = project(hidden, heads["out"])
        return logits + heads["out_bias"]


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

    def build_rows_from_codes(self, codes: Floats) -> Floats:
        """The same start in both tables."""
        return np.concatenate([codes, codes], axis=1)

    @property
    def private_layout(self) -> dict[str, int]:
        dim = self.config.dim
        return {"gmf": dim, "mlp": dim}

    def _list_layer_fans(self) -> LayerFans:
        last_size = self.config.tower[-1]
        fan_in = self.config.dim + last_size
        both = (fan_in, 1)
        fans = super()._list_layer_fans()
        return {**fans, "out": both, "out_gmf": both}

    def list_head_shapes(self) -> Shapes:
        shapes = super().list_head_shapes()
        return {**shapes, "out_gmf": (self.config.dim,)}

    def compute_group_logits(self, private: Tensors, heads: Tensors, rows: Any) -> Any:
        dim = self.config.dim
        gmf_rows = rows[..., :dim]
        mlp_rows = rows[..., dim:]
        hidden = self._run_tower(private["mlp"], heads, mlp_rows)
        gmf_weights = heads["out_gmf"][:, None]
        products = private["gmf"] * gmf_weights * gmf_rows
        gmf = products.sum(-1)
        tower = project(hidden, heads["out"])
        return tower + gmf + heads["out_bias"]


def draw_layer(key: np.uint64, shape: tuple[int, ...], fans: int) -> Floats:
    """Xavier's uniform start of a layer with so many numbers into and out of it."""
    size = math.prod(shape)
    drawn = draw_uniforms(key, _COMMON_OWNER, size).reshape(shape)
    bound = math.sqrt(6 / fans)
    start = bound * (2 * drawn - 1)
    return start.astype(np.float32)


def linear(x: Any, matrix: Any, bias: Any) -> Any:
    """x @ matrix + bias in every group; torch adds the bias on the way."""
    offset = bias[:, None]
    if isinstance(x, np.ndarray):
        return x @ matrix + offset
    return offset.baddbmm(x, matrix)


def project(hidden: Any, weights: Any) -> Any:
    """hidden @ weights of every sample in every group."""
    columns = weights[:, :, None]
    return (hidden @ columns)[:, :, 0]


def relu(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.maximum(x, 0)
    return x.relu()
