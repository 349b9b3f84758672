"""interest: a state of what a person did last beside a private vector, under a shared tower (LIPM; spec E.2, E.3).

The state h_u is that of a GRU over the last interactions of the block's training part, oldest first: the item's row,
the rating and how long ago the interaction before it was. It begins at 0 in every round, so that no event counts twice.
The logit is a tower over [p_u ; q_i ; h_u]; people's own loss keeps p_u and h_u close. All but p_u is shared.

Batches should hold whole people (`train.batches`): then every person's state is worked out once an epoch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.flat_indices import expand_spans
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ints, Longs, Ragged
from tacita.models.base import BackboneConfig, register
from tacita.models.neural_cf import TowerConfig, TowerModel, linear, relu
from tacita.models.scorer import Context

RATING, GAP = "rating", "gap"
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
    state_scale: float = Field(
        1.0, gt=0, le=1, description="how the state's layer begins and moves, as a share of the other layers"
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

    def shared(self) -> dict[str, tuple[int, ...]]:
        d = self.config.dim
        return {
            **super().shared(),
            "state_layer": (d, self.config.tower[0]),
            "gaps": (GAP_BUCKETS, self.config.gap_width),
            "event_layer": (d + 1 + self.config.gap_width, d),
            "event_bias": (d,),
            "gru_in": (d, 3 * d),
            "gru_in_bias": (3 * d,),
            "gru_state": (d, 3 * d),
            "gru_state_bias": (3 * d,),
        }

    def _layer_fans(self) -> dict[str, tuple[int, int]]:
        d, first = self.config.dim, self.config.tower[0]
        layer, events = (3 * d, first), (d + 1 + self.config.gap_width, d)
        below = {"user_layer": layer, "item_layer": layer, "state_layer": layer, "event_layer": events}
        gates = {"gru_in": (d, d), "gru_state": (d, d)}  # three matrices beside each other
        return {**super()._layer_fans(), **below, **gates, "gaps": (GAP_BUCKETS, self.config.gap_width)}

    def init_heads(self, draws: Draws) -> Arrays:
        made = super().init_heads(draws)
        return {**made, "state_layer": (self.config.state_scale * made["state_layer"]).astype(np.float32)}

    def rates(self, n_items: int) -> dict[str, float]:
        found = super().rates(n_items)
        return {**found, "state_layer": self.config.state_scale * found["state_layer"]}

    # what is read

    def context(self, view: CohortView) -> Ragged:
        """The last interactions of each user, with what is read of them beside the item's row."""
        return select_recent_events(view.train, self.config.last, self.config.most_rating)

    def represent(self, private: dict[str, Any], heads: dict[str, Any], context: Context | None) -> dict[str, Any]:
        assert context is not None
        return {"p": private["p"], "h": self._run_gru(heads, context)}

    def _run_gru(self, heads: dict[str, Any], context: Context) -> Any:
        """h_u of every user: users side by side, event after event; who has no more events stands still."""
        rows, count = context.rows, np.diff(context.ptr)
        steps = self.config.last  # whatever the longest list is: no shape follows the company
        shape = len(count), self.config.dim
        h: Any = np.zeros(shape, np.float32) if _is_numpy(rows) else rows.new_zeros(shape)
        if len(rows) == 0:
            return h
        place = np.minimum(context.ptr[:-1, None] + np.arange(steps), len(rows) - 1)
        there = (np.arange(steps) < count[:, None]).astype(np.float32)
        inputs = linear(self._encode_events(heads, context, place), heads["gru_in"], heads["gru_in_bias"])
        d = self.config.dim
        for t in range(int(count.max())):
            now = inputs[:, t]
            from_state = linear(h[:, None], heads["gru_state"], heads["gru_state_bias"])[:, 0]
            gates = _sigmoid(now[:, : 2 * d] + from_state[:, : 2 * d])
            fresh = _tanh(now[:, 2 * d :] + gates[:, :d] * from_state[:, 2 * d :])
            keep = gates[:, d:]
            active = there[:, t, None] if _is_numpy(rows) else rows.new_tensor(there[:, t, None])
            h = h + active * (1 - keep) * (fresh - h)
        return h

    def _encode_events(self, heads: dict[str, Any], context: Context, place: Longs) -> Any:
        """x of every event, (users, events, dim): one layer over [row ; rating ; bucket]."""
        n, d = place.shape, self.config.dim
        flat = place.reshape(-1)
        told = context.values
        if _is_numpy(context.rows):
            row = context.rows[flat]
            rating = told[RATING][flat] if RATING in told else np.ones(len(flat), np.float32)
            gap = told[GAP][flat] if GAP in told else np.zeros(len(flat), np.int64)
            gaps = heads["gaps"][np.arange(n[0]).repeat(n[1]), gap]
        else:
            at = context.user.new_tensor(flat, dtype=context.user.dtype)
            row = context.rows.index_select(0, at)
            rating = told[RATING].index_select(0, at) if RATING in told else row.new_ones(len(flat))
            gap = told[GAP].index_select(0, at) if GAP in told else at * 0
            owner = at.new_tensor(np.arange(n[0]).repeat(n[1]))
            table = heads["gaps"].reshape(-1, self.config.gap_width)
            gaps = table.index_select(0, owner * GAP_BUCKETS + gap)
        matrix, wide = heads["event_layer"], self.config.gap_width
        x = linear(row.reshape(*n, d), matrix[:, :d], heads["event_bias"])
        x = x + rating.reshape(*n, 1) * matrix[:, d, None]
        return x + gaps.reshape(*n, wide) @ matrix[:, d + 1 :]

    def interest(self, view: CohortView) -> Floats:
        """h_u under the model that was received."""
        lists = self.context(view)
        heads = {name: np.broadcast_to(v, (len(lists), *v.shape)) for name, v in view.heads.items()}
        return np.asarray(self._run_gru(heads, Context.from_lists(lists, view.items)), np.float32)

    # how it scores

    def score_groups(self, private: dict[str, Any], heads: dict[str, Any], rows: Any) -> Any:
        up = linear(rows, heads["item_layer"], heads["bias_0"])
        up = relu(up + private["p"] @ heads["user_layer"] + private["h"] @ heads["state_layer"])
        for k in range(1, len(self.config.tower)):
            up = relu(linear(up, heads[f"layer_{k}"], heads[f"bias_{k}"]))
        return (up @ heads["out"][:, :, None])[:, :, 0] + heads["out_bias"]

    def own_loss(self, rep: dict[str, Any]) -> Any:
        """mu (1 - cos(p_u, h_u)); what has no length has no direction."""
        p, h = rep["p"], rep["h"]
        lengths = [(x * x).sum(-1).clamp(min=_MIN_NORM**2).sqrt() for x in (p, h)]
        return self.config.mu * (1 - (p * h).sum(-1) / (lengths[0] * lengths[1]))


def select_recent_events(train: Ragged, last: int, most_rating: float) -> Ragged:
    """The last entries of every list, with a rating up to 1 and a bucket of the time since the entry before."""
    counts = np.minimum(train.counts(), last)
    place = expand_spans(train.ptr[1:] - counts, counts)
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    rating = np.ones(len(place), np.float32)
    if "rating" in train.values:
        rating = np.clip(train.values["rating"][place] / most_rating, 0, 1).astype(np.float32)
    return Ragged(ptr, train.ids[place], {RATING: rating, GAP: _bucket_gaps(train)[place]})


def _bucket_gaps(train: Ragged) -> Ints:
    """The bucket of the time between each entry and the one before it."""
    out = np.zeros(len(train.ids), np.int32)
    if "time" not in train.values or not len(train.ids):
        return out
    since: AnyArray = np.maximum(np.diff(train.values["time"], prepend=train.values["time"][0]), 0)
    out[:] = np.minimum(1 + np.floor(np.log2(1 + since)), GAP_BUCKETS - 1)
    starts = train.ptr[:-1]
    out[starts[starts < len(out)]] = 0
    return out


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x)) if _is_numpy(x) else x.sigmoid()


def _tanh(x: Any) -> Any:
    return np.tanh(x) if _is_numpy(x) else x.tanh()
