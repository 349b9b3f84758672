"""FedPerGNN: attention over a user's items, and over other users who have the same item (Wu et al. 2022; spec A.7).

Item rows and all matrices are shared, the user's vector is private; vectors of neighbours are constants that part
`neighbours` brings. A matrix that follows a weighted sum is applied to the sum, and one that precedes an inner product
to its other side, so no matrix ever meets a single item: the numbers are those of the formulas, at a fraction of the
cost. The paper's output is linear in [user ; item]. Under it all users get the same ranking, because the user's half is
one constant for all items. So the logit here is an inner product, and `output = "linear"` is the printed one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.flat_indices import find_in_unsorted
from tacita.core.types import Arrays, CohortView, Floats, Keys, Ragged
from tacita.kernels.hashing import draw_normals
from tacita.models.base import BackboneConfig, Shapes, TrainedConfig, register
from tacita.models.factor import TwoVectorModel
from tacita.models.neural_cf import draw_layer
from tacita.models.scorer import Context, TableReading, Tensors

NEIGHBOURS = "neighbours"
"""The part whose letters hold vectors of other users, and the column of a context that they become."""

COUNT = "count"
_SLOPE = 0.2  # of LeakyReLU below 0
_MASK_PENALTY = 1e30  # below any attention score
_TALL_MATRICES = ("w3", "w5")  # they take in two vectors, one above the other
_MATRICES = ("w1", "w2", "w3", "w4", "w5", "w6")


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

    def list_head_shapes(self) -> Shapes:
        dim = self.config.dim
        shapes: Shapes = {}
        for name in _MATRICES:
            height = 2 * dim if name in _TALL_MATRICES else dim
            shapes[name] = (height, dim)
        shapes["v"] = (2 * dim,)
        shapes["w"] = (2 * dim,)
        if self.config.output == "linear":
            shapes["out"] = (2 * dim,)
        shapes["bias"] = (1,)
        return shapes

    def init_vectors(self, key: np.uint64, owners: Keys) -> Floats:
        drawn = draw_normals(key, owners, self.config.dim)
        return self.config.init_std * drawn

    def init_heads(self, draws: Draws) -> Arrays:
        """Xavier's uniform start of everything but the bias."""
        heads: Arrays = {}
        for name, shape in self.list_head_shapes().items():
            fan_in = shape[0]
            fan_out = shape[1] if len(shape) == 2 else 1
            key = draws.public(f"init-{name}")
            heads[name] = draw_layer(key, shape, fan_in + fan_out)
        heads["bias"] = np.zeros(1, np.float32)
        return heads

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        heads_rates = dict.fromkeys(self.list_head_shapes(), self.config.lr)
        return super().list_learning_rates(n_items) | heads_rates

    def list_context_items(self, view: CohortView) -> Ragged:
        """The user's items, with the vectors of other users who have them, where some were sent."""
        lists = Ragged(view.train.ptr, view.train.ids)
        neighbours = view.per_client.get(NEIGHBOURS)
        if neighbours is None or len(neighbours.ids) == 0:
            return lists
        columns = _align_neighbours(lists, neighbours, self.config.most)
        return replace(lists, values=columns)

    def represent_users(self, private: Tensors, heads: Tensors, context: Context | None) -> Tensors:
        """The vector that meets item rows, and what is added to every logit."""
        assert context is not None
        dim = self.config.dim
        upper_w5, lower_w5 = _split_halves(heads["w5"], dim)
        user = _multiply_per_user(private["p"], heads["w4"])
        near = self._attend_neighbours(heads, context)
        share = self._compute_item_attention(heads, context, user, near)
        around = self._sum_items(heads, context, share, near)
        from_items = _multiply_per_user(around, upper_w5)
        from_user = _multiply_per_user(user, lower_w5)
        g = from_items + from_user
        bias = heads["bias"][:, 0]
        if self.config.output == "product":
            vector = _multiply_transposed(heads["w6"], g)
            return {"u": vector, "added": bias}
        user_out, item_out = _split_halves(heads["out"], dim)
        vector = _multiply_transposed(heads["w6"], item_out)
        user_part = _multiply_rows(user_out, g)
        return {"u": vector, "added": user_part + bias}

    def _attend_neighbours(self, heads: Tensors, context: Context) -> Any:
        """sum_k a_k n_ik of every item of every user; None where nobody has neighbours."""
        if NEIGHBOURS not in context.values:
            return None
        item_v, near_v = _split_halves(heads["v"], self.config.dim)
        vectors = context.values[NEIGHBOURS]
        count = context.values[COUNT]
        to_item = _multiply_transposed(heads["w1"], item_v)
        to_near = _multiply_transposed(heads["w2"], near_v)
        item_direction = context.repeat_per_entry(to_item)
        near_direction = context.repeat_per_entry(to_near)
        item_part = _multiply_rows(context.rows, item_direction)
        near_part = _multiply_rows(vectors, near_direction[:, None])
        attention = _leaky_relu(item_part[:, None] + near_part)
        weights = _masked_softmax(attention, count)
        weighted = weights[:, :, None] * vectors
        return weighted.sum(1)

    def _compute_item_attention(self, heads: Tensors, context: Context, user: Any, near: Any) -> Any:
        """b_i of every item of every user, as a column."""
        dim = self.config.dim
        user_w, item_w = _split_halves(heads["w"], dim)
        near_w3, row_w3 = _split_halves(heads["w3"], dim)
        user_part = _multiply_rows(user_w, user)
        row_side = _multiply_transposed(row_w3, item_w)
        to_row = _multiply_transposed(heads["w1"], row_side)
        row_direction = context.repeat_per_entry(to_row)
        attention = context.repeat_per_entry(user_part)
        attention = attention + _multiply_rows(context.rows, row_direction)
        if near is not None:
            near_side = _multiply_transposed(near_w3, item_w)
            to_near = _multiply_transposed(heads["w2"], near_side)
            near_direction = context.repeat_per_entry(to_near)
            attention = attention + _multiply_rows(near, near_direction)
        weights = _softmax_per_user(_leaky_relu(attention), context)
        return weights[:, None]

    def _sum_items(self, heads: Tensors, context: Context, share: Any, near: Any) -> Any:
        """sum_i b_i z_i of every user."""
        near_w3, row_w3 = _split_halves(heads["w3"], self.config.dim)
        row_sum = context.sum_per_user(share * context.rows)
        hidden = _multiply_per_user(row_sum, heads["w1"])
        around = _multiply_per_user(hidden, row_w3)
        if near is None:
            return around
        near_sum = context.sum_per_user(share * near)
        hidden = _multiply_per_user(near_sum, heads["w2"])
        return around + _multiply_per_user(hidden, near_w3)

    def compute_logits(self, rep: Tensors, heads: Tensors, rows: Any, inside: Any = None) -> Any:
        return _multiply_rows(rep["u"], rows) + rep["added"]

    def build_affine_scores_outside_context(self, rep: Tensors, heads: Arrays, items: Floats) -> TableReading:
        vectors = np.asarray(rep["u"], np.float32)
        offsets = np.asarray(rep["added"], np.float32)
        return vectors, offsets, items


def _align_neighbours(lists: Ragged, neighbours: Ragged, most: int) -> Arrays:
    """The neighbours' vectors beside the entries of lists that hold their items: at most so many each."""
    n_entries = len(lists.ids)
    largest_sent = int(neighbours.ids.max(initial=0))
    largest_own = int(lists.ids.max(initial=0))
    n_items = 1 + max(largest_own, largest_sent)
    sent_keys = neighbours.number_entries(n_items)
    own_keys = lists.number_entries(n_items)
    steps = np.diff(sent_keys, prepend=-1)
    first = np.flatnonzero(steps)  # vectors of one item stand together
    ends = np.append(first, len(sent_keys))
    number = np.diff(ends)
    entry, is_known = find_in_unsorted(own_keys, sent_keys[first])
    places = np.arange(len(sent_keys))
    slot = places - np.repeat(first, number)
    item_is_known = np.repeat(is_known, number)
    fits = (slot < most) & item_is_known
    vector = neighbours.values["vector"][fits]
    shape = (n_entries, most, vector.shape[1])
    vectors = np.zeros(shape, np.float32)
    entry_of_vector = np.repeat(entry, number)[fits]
    vectors[entry_of_vector, slot[fits]] = vector
    count = np.zeros(n_entries, np.float32)
    known_entry = entry[is_known]
    count[known_entry] = np.minimum(number[is_known], most)
    return {NEIGHBOURS: vectors, COUNT: count}


def _split_halves(stacked: Any, dim: int) -> tuple[Any, Any]:
    """What meets the first and what meets the second of two vectors, one above the other."""
    return stacked[:, :dim], stacked[:, dim:]


def _multiply_rows(x: Any, y: Any) -> Any:
    """The inner product of each two rows."""
    products = x * y
    return products.sum(-1)


def _multiply_per_user(x: Any, matrix: Any) -> Any:
    """x W of every user; written out, so that no sum depends on how many users there are."""
    products = x[:, :, None] * matrix
    return products.sum(1)


def _multiply_transposed(matrix: Any, y: Any) -> Any:
    """The vector whose inner product with any x is that of x W with y."""
    products = matrix * y[:, None]
    return products.sum(2)


def _leaky_relu(x: Any) -> Any:
    straight = (1 + _SLOPE) / 2
    bent = (1 - _SLOPE) / 2
    return straight * x + bent * abs(x)


def _exp(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.exp(x)
    return x.exp()


def _softmax_per_user(attention: Any, context: Context) -> Any:
    """Over the entries of each user."""
    largest = context.find_largest_value_per_user(attention)
    top = context.repeat_per_entry(largest)
    force = _exp(attention - top)
    total = context.sum_per_user(force)
    return force / context.repeat_per_entry(total)


def _masked_softmax(attention: Any, count: Any) -> Any:
    """Over the first `count` of each row, 0 elsewhere; all 0 where there are none."""
    place = np.arange(attention.shape[1], dtype=np.float32)
    if isinstance(attention, np.ndarray):
        is_inside = place < count[:, None]
        mask = is_inside.astype(np.float32)
        penalty = _MASK_PENALTY * (1 - mask)
        masked = mask * attention - penalty
        top = masked.max(1)
    else:
        is_inside = count.new_tensor(place) < count[:, None]
        mask = is_inside.to(attention.dtype)
        penalty = _MASK_PENALTY * (1 - mask)
        masked = mask * attention.detach() - penalty
        top = masked.amax(1)
    distance = attention - top[:, None]
    force = mask * _exp(mask * distance)
    total = force.sum(1) + (count == 0)
    return force / total[:, None]
