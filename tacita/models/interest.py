"""interest: a state of a user's last interactions beside a private vector, under a shared tower (LIPM; spec E.2, E.3).

The state h_u is that of a GRU over the last interactions of the block's training part, oldest first: the item's row,
the rating and how long ago the interaction before it was. It begins at 0 in every round, so that no event counts twice.
The logit is a tower over [p_u ; q_i ; h_u]; users' own loss keeps p_u and h_u close. All but p_u is shared.

In training a state can be made of other items than those it scores (`folds`). When people are served it is made of all.

Batches should hold whole users (`train.batches`): then every user's state is computed once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.flat_indices import expand_spans
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ints, Longs, Ragged
from tacita.kernels.interest_states import PIECES, compute_user_states
from tacita.models.base import BackboneConfig, Shapes, register
from tacita.models.neural_cf import LayerFans, TowerConfig, TowerModel, linear, project, relu
from tacita.models.scorer import Context, Tensors

RATING = "rating"
GAP = "gap"
CENTRE = "state_centre"
STATE_PIECES = ("gaps", "event_layer", "event_bias", "gru_in", "gru_in_bias", "gru_state", "gru_state_bias")
"""The shared parameters that make states of histories."""
GAP_BUCKETS = 24
"""Buckets of the time between two interactions: 0 for none before, then one for each doubling of the seconds."""

_MIN_NORM = 1e-8  # a vector shorter than this has no direction


class InterestConfig(TowerConfig):
    dim: int = Field(64, ge=1, le=4096, description="width of an item row, of a private vector and of the state")
    tower: list[Annotated[int, Field(ge=1, le=4096)]] = Field(
        [128, 64, 32], min_length=1, max_length=16, description="sizes of the hidden layers"
    )
    init_std: float = Field(0.1, ge=0, description="standard deviation of the initial vectors")
    last: int = Field(50, ge=1, le=1000, description="interactions that the state is made of, the latest ones")
    gap_width: int = Field(8, ge=1, le=256, description="numbers of a bucket of time")
    most_rating: float = Field(5.0, gt=0, description="the rating that is read as 1")
    mu: float = Field(0.1, ge=0, description="weight of 1 - cos(p_u, h_u), the mean over a batch's people")
    folds: int = Field(
        1,
        ge=1,
        le=10,
        description="above 1: in training an item is scored by a state of the history's other folds, drawn every "
        "round, so that no state knows the item it is asked about, as when it is served; needs the compiled step",
    )
    state_scale: float = Field(
        1.0, gt=0, le=1, description="how the state's layer begins and moves, as a share of the other layers"
    )
    centred: bool = Field(
        False,
        description="the tower reads how a state differs from the mean of everybody's, which is shared and follows "
        "by a round; needs the compiled step",
    )
    state_rate: float = Field(
        1.0, gt=0, le=1, description="the learning rate of what makes states, as a share of the others'"
    )


@register
class InterestModel(TowerModel):
    """Private p_u; public q_i, GRU and tower; the logit is the tower over [p_u ; q_i ; h_u]."""

    name = "interest"
    Config: ClassVar[type[BackboneConfig]] = InterestConfig
    brings: ClassVar[dict[str, Any]] = {"train": {"optimiser": "lazy-adam", "batches": "people"}}
    reads_context = True
    has_own_loss = True
    config: InterestConfig

    @property
    def _event_width(self) -> int:
        """Numbers of an event: row, rating and bucket."""
        return self.config.dim + 1 + self.config.gap_width

    def list_head_shapes(self) -> Shapes:
        dim = self.config.dim
        centre: Shapes = {CENTRE: (dim,)} if self.config.centred else {}
        return {
            **super().list_head_shapes(),
            "state_layer": (dim, self.config.tower[0]),
            "gaps": (GAP_BUCKETS, self.config.gap_width),
            "event_layer": (self._event_width, dim),
            "event_bias": (dim,),
            "gru_in": (dim, 3 * dim),
            "gru_in_bias": (3 * dim,),
            "gru_state": (dim, 3 * dim),
            "gru_state_bias": (3 * dim,),
            **centre,
        }

    def _list_layer_fans(self) -> LayerFans:
        dim = self.config.dim
        first = (3 * dim, self.config.tower[0])
        gate = (dim, dim)  # of three matrices beside each other
        return {
            **super()._list_layer_fans(),
            "user_layer": first,
            "item_layer": first,
            "state_layer": first,
            "event_layer": (self._event_width, dim),
            "gru_in": gate,
            "gru_state": gate,
            "gaps": (GAP_BUCKETS, self.config.gap_width),
        }

    def init_heads(self, draws: Draws) -> Arrays:
        heads = super().init_heads(draws)
        state_layer = self.config.state_scale * heads["state_layer"]
        heads["state_layer"] = state_layer.astype(np.float32)
        return heads

    def list_learning_rates(self, n_items: int) -> dict[str, float]:
        rates = super().list_learning_rates(n_items)
        rates["state_layer"] = self.config.state_scale * rates["state_layer"]
        for name in STATE_PIECES:
            rates[name] = self.config.state_rate * rates[name]
        return rates

    # what it reads

    def list_context_items(self, view: CohortView) -> Ragged:
        """The last interactions of each user, with ratings and gaps besides the item's row."""
        return select_recent_events(view.train, self.config.last, self.config.most_rating)

    def represent_users(self, private: Tensors, heads: Tensors, context: Context | None) -> Tensors:
        assert context is not None
        state = self._run_gru(heads, context)
        if self.config.centred:
            state = state - heads[CENTRE]
        return {"p": private["p"], "h": state}

    def _run_gru(self, heads: Tensors, context: Context) -> Any:
        """h_u of every user: users side by side, event after event; who has no more events stands still."""
        rows = context.rows
        count = np.diff(context.ptr)
        shape = len(count), self.config.dim
        state: Any = _make_zeros(rows, shape)
        n_rows = len(rows)
        if n_rows == 0:
            return state
        steps = np.arange(self.config.last)  # whatever the longest list is: no shape follows the cohort
        starts = context.ptr[:-1, None]
        place = np.minimum(starts + steps, n_rows - 1)
        is_event = steps < count[:, None]
        has_event = is_event.astype(np.float32)
        events = self._encode_events(heads, context, place)
        inputs = linear(events, heads["gru_in"], heads["gru_in_bias"])
        for step in range(int(count.max())):
            active = has_event[:, step, None]
            if not _is_numpy(rows):
                active = rows.new_tensor(active)
            event = inputs[:, step]
            state = self._step_gru(heads, state, event, active)
        return state

    def _step_gru(self, heads: Tensors, state: Any, event: Any, active: Any) -> Any:
        """The states after one event each, where it is `active`."""
        dim = self.config.dim
        matrix = heads["gru_state"]
        bias = heads["gru_state_bias"]
        from_state = linear(state[:, None], matrix, bias)[:, 0]
        event_gates, event_fresh = _split_gates(event, dim)
        state_gates, state_fresh = _split_gates(from_state, dim)
        gates = _sigmoid(event_gates + state_gates)
        reset = gates[:, :dim]
        keep = gates[:, dim:]
        fresh = _tanh(event_fresh + reset * state_fresh)
        share = active * (1 - keep)
        return state + share * (fresh - state)

    def _encode_events(self, heads: Tensors, context: Context, place: Longs) -> Any:
        """x of every event, (users, events, dim): one layer over [row ; rating ; bucket]."""
        shape = place.shape
        dim = self.config.dim
        row, rating, gap = self._gather_event_inputs(heads, context, place)
        rows = row.reshape(*shape, dim)
        ratings = rating.reshape(*shape, 1)
        gaps = gap.reshape(*shape, self.config.gap_width)
        matrix = heads["event_layer"]
        row_matrix = matrix[:, :dim]
        rating_vector = matrix[:, dim, None]
        gap_matrix = matrix[:, dim + 1 :]
        from_row = linear(rows, row_matrix, heads["event_bias"])
        from_rating = ratings * rating_vector
        return from_row + from_rating + gaps @ gap_matrix

    def _gather_event_inputs(self, heads: Tensors, context: Context, place: Longs) -> tuple[Any, Any, Any]:
        """Row, rating and vector of the gap of every event, flat."""
        flat = place.reshape(-1)
        n_users, n_steps = place.shape
        owner = np.arange(n_users).repeat(n_steps)
        columns = context.values
        if _is_numpy(context.rows):
            row = context.rows[flat]
            rating: Any = np.ones(len(flat), np.float32)
            gap: Any = np.zeros(len(flat), np.int64)
            if RATING in columns:
                rating = columns[RATING][flat]
            if GAP in columns:
                gap = columns[GAP][flat]
            return row, rating, heads["gaps"][owner, gap]
        at = context.user.new_tensor(flat, dtype=context.user.dtype)
        row = context.rows.index_select(0, at)
        rating = row.new_ones(len(flat))
        gap = at * 0
        if RATING in columns:
            rating = columns[RATING].index_select(0, at)
        if GAP in columns:
            gap = columns[GAP].index_select(0, at)
        table = heads["gaps"].reshape(-1, self.config.gap_width)
        first = at.new_tensor(owner) * GAP_BUCKETS
        return row, rating, table.index_select(0, first + gap)

    def compute_interest(self, view: CohortView) -> Floats:
        """h_u under the received model."""
        lists = self.list_context_items(view)
        return self._compute_states(lists, view.heads, view.items)

    def compute_common_interest(self, view: CohortView) -> Floats:
        """h of a history as long as any, in which every item is the mean of the catalogue."""
        last = self.config.last
        columns: Arrays = {RATING: np.ones(last, np.float32), GAP: np.zeros(last, np.int32)}
        history = Ragged(np.array([0, last]), np.zeros(last, np.int32), columns)
        mean_row = super().compute_common_interest(view)
        states = self._compute_states(history, view.heads, mean_row[None])
        return np.asarray(states[0])

    def _compute_states(self, lists: Ragged, heads: Arrays, items: Floats) -> Floats:
        """The states of histories under one model, compiled."""
        as_one_client = {name: value[None] for name, value in heads.items()}
        flat = self.flatten_heads(as_one_client)[0]
        states = np.empty((len(lists), self.config.dim), np.float32)
        columns = (lists.values[RATING], lists.values[GAP])
        rows = np.ascontiguousarray(items, np.float32)
        pieces = self.find_piece_starts()
        compute_user_states(flat, pieces, self.config.gap_width, lists.ptr, lists.ids, *columns, rows, states)
        return states

    def find_piece_starts(self) -> Longs:
        """Where the pieces of the flat shared parameters begin that compiled loops of states ask for."""
        return self.find_starts(PIECES)

    def find_starts(self, names: Sequence[str]) -> Longs:
        """Where some of the shared parameters begin in the vector of `flatten_heads`; -1: there is none."""
        shapes = self.list_head_shapes()
        lengths = [math.prod(shape) for shape in shapes.values()]
        starts = np.cumsum([0, *lengths])
        start_of = dict(zip(shapes, starts.tolist(), strict=False))
        return np.array([start_of.get(name, -1) for name in names], np.int64)

    # how it scores

    def compute_group_logits(self, private: Tensors, heads: Tensors, rows: Any) -> Any:
        of_item = linear(rows, heads["item_layer"], heads["bias_0"])
        of_user = private["p"] @ heads["user_layer"]
        of_state = private["h"] @ heads["state_layer"]
        first = relu(of_item + of_user + of_state)
        hidden = self._run_upper_layers(first, heads)
        logits = project(hidden, heads["out"])
        return logits + heads["out_bias"]

    def compute_own_loss(self, rep: Tensors) -> Any:
        """mu (1 - cos(p_u, h_u)); a vector without length has no direction."""
        p = rep["p"]
        h = rep["h"]
        lengths = _measure_lengths(p) * _measure_lengths(h)
        product = (p * h).sum(-1)
        cosine = product / lengths
        return self.config.mu * (1 - cosine)


def _make_zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if _is_numpy(like):
        return np.zeros(shape, np.float32)
    return like.new_zeros(shape)


def _split_gates(x: Any, dim: int) -> tuple[Any, Any]:
    """What meets the two gates, and what meets the fresh state."""
    end = 2 * dim
    return x[:, :end], x[:, end:]


def _measure_lengths(x: Any) -> Any:
    squares = (x * x).sum(-1)
    return squares.clamp(min=_MIN_NORM**2).sqrt()


def select_recent_events(train: Ragged, last: int, most_rating: float) -> Ragged:
    """The last entries of every list, with a rating up to 1 and a bucket of the time since the entry before."""
    counts = np.minimum(train.counts(), last)
    starts = train.ptr[1:] - counts
    place = expand_spans(starts, counts)
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    rating = np.ones(len(place), np.float32)
    if "rating" in train.values:
        scaled = train.values["rating"][place] / most_rating
        rating = np.clip(scaled, 0, 1).astype(np.float32)
    gap = _bucket_gaps(train)[place]
    columns: Arrays = {RATING: rating, GAP: gap}
    return Ragged(ptr, train.ids[place], columns)


def _bucket_gaps(train: Ragged) -> Ints:
    """The bucket of the time between each entry and the one before it."""
    buckets = np.zeros(len(train.ids), np.int32)
    if "time" not in train.values or not len(train.ids):
        return buckets
    time = train.values["time"]
    differences: AnyArray = np.diff(time, prepend=time[0])
    gaps = np.maximum(differences, 0)
    doublings = np.floor(np.log2(1 + gaps))
    last_bucket = GAP_BUCKETS - 1
    buckets[:] = np.minimum(1 + doublings, last_bucket)
    starts = train.ptr[:-1]
    first_entries = starts[starts < len(buckets)]
    buckets[first_entries] = 0
    return buckets


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _sigmoid(x: Any) -> Any:
    if _is_numpy(x):
        return 1 / (1 + np.exp(-x))
    return x.sigmoid()


def _tanh(x: Any) -> Any:
    if _is_numpy(x):
        return np.tanh(x)
    return x.tanh()
