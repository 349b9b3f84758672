"""FedPerGNN: attention over a user's items, and over other users who have the same item (Wu et al. 2022; spec A.7).

Item rows and all matrices are shared, the user's vector is private; vectors of neighbours are constants that part
`neighbours` brings. A matrix that follows a weighted sum is applied to the sum, and one that precedes an inner product
to its other side, so no matrix ever meets a single item: the numbers are those of the formulas, at a fraction of the
cost. The paper's output is linear in [user ; item], under which everybody gets the same ranking, because the user's
half is one constant for all items; so the logit here is an inner product, and `output = "linear"` is the printed one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, CohortView, Floats, Keys, Ragged
from tacita.kernels.hashing import normals, uniforms
from tacita.models.base import BackboneConfig, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.scorer import Context

NEIGHBOURS = "neighbours"
"""The part whose letters hold vectors of other users, and the column of a context that they become."""

COUNT = "count"
_SLOPE = 0.2  # of LeakyReLU below 0
_MASK_PENALTY = 1e30  # below anything that is seen
_COMMON_OWNER = np.zeros(1, np.uint64)  # the owner of draws that all clients share


class FedPerGNNConfig(TrainedConfig):
    lr: float = Field(1e-2, gt=0, description="learning rate of everything, for an optimiser of Adam's kind")
    item_lr_scale: Literal["items"] | float = Field(
        1.0, description="item-table rate = lr * this: 'items' (number of items) or a number"
    )
    most: int = Field(10, ge=1, le=1000, description="neighbours of an item that are read (the paper: 100)")
    output: Literal["product", "linear"] = Field("product", description="linear: as printed, one ranking for everybody")
    init_std: float = Field(0.1, ge=0, description="standard deviation of the initial vectors")


@register
class FedPerGNN(TwoVectorModel):
    """Private p, public q_i, neighbours n_ik; x W is a row times a matrix, halves are told apart by ' and ".

    z_i = (sum_k a_k n_ik W2) W3' + q_i W1 W3", a = softmax of LeakyReLU(v' . q_i W1 + v" . n_ik W2) over k;
    g = (sum_i b_i z_i) W5' + p W4 W5", b = softmax of LeakyReLU(w' . p W4 + w" . z_i) over i; logit g . q_j W6 + bias.
    """

    name = "fedpergnn"
    brings: ClassVar[dict[str, Any]] = {"train": {"optimiser": "lazy-adam"}}
    Config: ClassVar[type[BackboneConfig]] = FedPerGNNConfig
    reads_context = True
    heads_in_score = False
    config: FedPerGNNConfig

    def shared(self) -> dict[str, tuple[int, ...]]:
        d = self.config.dim
        wide = {"w3", "w5"}  # take in two vectors, one above the other
        matrices = {name: (2 * d if name in wide else d, d) for name in ("w1", "w2", "w3", "w4", "w5", "w6")}
        out = {"out": (2 * d,)} if self.config.output == "linear" else {}
        return {**matrices, "v": (2 * d,), "w": (2 * d,), **out, "bias": (1,)}

    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        return self.config.init_std * normals(key, owners, self.config.dim)

    def init_heads(self, draws: Draws) -> Arrays:
        """Xavier's uniform start of everything but the bias."""
        made: Arrays = {}
        for name, shape in self.shared().items():
            drawn = uniforms(draws.public(f"init-{name}"), _COMMON_OWNER, math.prod(shape)).reshape(shape)
            bound = math.sqrt(6 / (shape[0] + (shape[1] if len(shape) == 2 else 1)))
            made[name] = (bound * (2 * drawn - 1)).astype(np.float32)
        return {**made, "bias": np.zeros(1, np.float32)}

    def rates(self, n_items: int) -> dict[str, float]:
        return super().rates(n_items) | dict.fromkeys(self.shared(), self.config.lr)

    def context(self, view: CohortView) -> Ragged:
        """The user's items, and where some were sent the vectors of other users who have them."""
        lists, sent = Ragged(view.train.ptr, view.train.ids), view.per_client.get(NEIGHBOURS)
        if sent is None or len(sent.ids) == 0:
            return lists
        return replace(lists, values=_align_neighbours(lists, sent, self.config.most))

    def represent(self, private: dict[str, Any], heads: dict[str, Any], context: Context | None) -> dict[str, Any]:
        """The vector that meets item rows, and what is added to every logit."""
        assert context is not None
        d, w1, w2, w3 = self.config.dim, heads["w1"], heads["w2"], heads["w3"]
        mine, rows = _multiply_per_user(private["p"], heads["w4"]), context.rows
        near = self._attend_neighbours(heads, context)
        after = heads["w"][:, d:]
        seen = context.repeat_per_entry((heads["w"][:, :d] * mine).sum(-1))
        seen = seen + (
            rows * context.repeat_per_entry(_multiply_transposed(w1, _multiply_transposed(w3[:, d:], after)))
        ).sum(-1)
        if near is not None:
            seen = seen + (
                near * context.repeat_per_entry(_multiply_transposed(w2, _multiply_transposed(w3[:, :d], after)))
            ).sum(-1)
        share = _softmax_per_user(_leaky_relu(seen), context)[:, None]
        around = _multiply_per_user(_multiply_per_user(context.sum_per_user(share * rows), w1), w3[:, d:])
        if near is not None:
            around = around + _multiply_per_user(_multiply_per_user(context.sum_per_user(share * near), w2), w3[:, :d])
        g = _multiply_per_user(around, heads["w5"][:, :d]) + _multiply_per_user(mine, heads["w5"][:, d:])
        if self.config.output == "linear":
            out = heads["out"]
            return {
                "u": _multiply_transposed(heads["w6"], out[:, d:]),
                "added": (out[:, :d] * g).sum(-1) + heads["bias"][:, 0],
            }
        return {"u": _multiply_transposed(heads["w6"], g), "added": heads["bias"][:, 0]}

    def _attend_neighbours(self, heads: dict[str, Any], context: Context) -> Any:
        """sum_k a_k n_ik of every item of every user; None where nobody has neighbours."""
        if NEIGHBOURS not in context.values:
            return None
        d, vectors, count = self.config.dim, context.values[NEIGHBOURS], context.values[COUNT]
        to_item = context.repeat_per_entry(_multiply_transposed(heads["w1"], heads["v"][:, :d]))
        to_near = context.repeat_per_entry(_multiply_transposed(heads["w2"], heads["v"][:, d:]))
        seen = _leaky_relu((context.rows * to_item).sum(-1)[:, None] + (vectors * to_near[:, None]).sum(-1))
        return (_masked_softmax(seen, count)[:, :, None] * vectors).sum(1)

    def score(self, rep: dict[str, Any], heads: dict[str, Any], rows: Any, inside: Any = None) -> Any:
        return (rep["u"] * rows).sum(-1) + rep["added"]

    def reading_outside(self, rep: dict[str, Any], heads: Arrays, items: Floats) -> tuple[Floats, Floats, Floats]:
        return np.asarray(rep["u"], np.float32), np.asarray(rep["added"], np.float32), items


def _align_neighbours(lists: Ragged, sent: Ragged, most: int) -> Arrays:
    """Vectors that came with items, beside the entries of lists that hold these items: at most so many each."""
    width = 1 + max(int(lists.ids.max(initial=0)), int(sent.ids.max(initial=0)))
    of_sent = sent.rows().astype(np.int64) * width + sent.ids  # vectors of one item stand together
    first = np.flatnonzero(np.diff(of_sent, prepend=-1))
    number = np.diff(np.append(first, len(of_sent)))
    held = lists.rows().astype(np.int64) * width + lists.ids
    order = np.argsort(held, kind="stable")
    at = np.minimum(np.searchsorted(held, of_sent[first], sorter=order), max(0, len(held) - 1))
    entry = order[at] if len(held) else np.zeros(len(first), np.int64)
    found = held[entry] == of_sent[first] if len(held) else np.zeros(len(first), bool)
    slot = np.arange(len(of_sent)) - np.repeat(first, number)
    kept = (slot < most) & np.repeat(found, number)
    vectors = np.zeros((len(held), most, sent.values["vector"].shape[1]), np.float32)
    vectors[np.repeat(entry, number)[kept], slot[kept]] = sent.values["vector"][kept]
    count = np.zeros(len(held), np.float32)
    count[entry[found]] = np.minimum(number[found], most)
    return {NEIGHBOURS: vectors, COUNT: count}


def _multiply_per_user(x: Any, matrix: Any) -> Any:
    """x W of every user; written out, so that no sum depends on how many users there are."""
    return (x[:, :, None] * matrix).sum(1)


def _multiply_transposed(matrix: Any, y: Any) -> Any:
    """The vector whose inner product with any x is that of x W with y."""
    return (matrix * y[:, None]).sum(2)


def _leaky_relu(x: Any) -> Any:
    """LeakyReLU."""
    return (1 + _SLOPE) / 2 * x + (1 - _SLOPE) / 2 * abs(x)


def _exp(x: Any) -> Any:
    return np.exp(x) if isinstance(x, np.ndarray) else x.exp()


def _softmax_per_user(seen: Any, context: Context) -> Any:
    """Over the entries of each user."""
    force = _exp(seen - context.repeat_per_entry(context.max_per_user(seen)))
    return force / context.repeat_per_entry(context.sum_per_user(force))


def _masked_softmax(seen: Any, count: Any) -> Any:
    """Over the first `count` of each row, 0 elsewhere; all 0 where there are none."""
    place = np.arange(seen.shape[1], dtype=np.float32)
    if isinstance(seen, np.ndarray):
        there = (place < count[:, None]).astype(np.float32)
        top = (there * seen - _MASK_PENALTY * (1 - there)).max(1)
    else:
        there = (count.new_tensor(place) < count[:, None]).to(seen.dtype)
        top = (there * seen.detach() - _MASK_PENALTY * (1 - there)).amax(1)
    force = there * _exp(there * (seen - top[:, None]))
    return force / (force.sum(1) + (count == 0))[:, None]
