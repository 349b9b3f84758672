"""SPP: replay from a slow and a fast average of earlier models (spec C.5, the proxies of CCD).

Where we differ from the original: private parts of the proxies stay on the devices and the server sends the two
tables once per block; reference ranks come from the current model, not from the one at block start; the loss is a
mean; only the current block's training items can be masked; the server averages plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from tacita.core.flat_indices import compute_offsets
from tacita.core.types import (
    AnyArray,
    Arrays,
    CohortView,
    ExtraSamples,
    Floats,
    Ints,
    LocalModels,
    Longs,
    Ragged,
    ServerState,
)
from tacita.kernels.ranking import compute_list_ranks, find_best_items
from tacita.kernels.replay import draw_weighted_positions
from tacita.models.scoring import CHUNK, score_catalogue, score_lists, sigmoid
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask

STABILITY, PLASTICITY = "stability", "plasticity"


class ProxiesConfig(PartConfig):
    w_stability: float = Field(0.9, ge=0, le=1, description="share the stability proxy keeps of itself in a block")
    w_plasticity: float = Field(0.0, ge=0, le=1, description="share the plasticity proxy keeps of itself")
    n_stability: int = Field(3, ge=0, le=1000, description="items drawn from the stability proxy")
    n_plasticity: int = Field(3, ge=0, le=1000, description="items drawn from the plasticity proxy, from block 2 on")
    rank_limit: int = Field(50, ge=1, description="only the proxy's best items are drawn (R_abs)")
    eps_r: float = Field(1e-4, ge=0, description="how much rather items are drawn that the model has let drop")
    weight: float = Field(0.1, ge=0, description="weight of the replay loss in the first round (lambda_SPP)")
    every: int = Field(5, ge=1, description="rounds between draws")
    fade: float = Field(10.0, gt=0, description="rounds in which the weight falls by e")


@register
class Proxies(Part):
    """Distil, with fading weight, on items that the proxies rank high and the model has let drop."""

    name = "proxies"
    reads_logits = True
    Config: ClassVar[type[PartConfig]] = ProxiesConfig
    fills = frozenset({"rows_needed", "step_samples"})
    config: ProxiesConfig

    def compute_retention(self, proxy: str) -> float:
        """The share that a proxy keeps of itself in a block."""
        if proxy == STABILITY:
            return self.config.w_stability
        return self.config.w_plasticity

    # on the server: the public half of both proxies

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        backbone = self.context.scorer
        table_shape = (n_items, backbone.item_width)
        specs = {"table": ArraySpec(table_shape, fewer_rows=True)}
        heads = backbone.init_heads(self.context.draws)
        for name, head in heads.items():
            specs[f"heads.{name}"] = ArraySpec(head.shape)
        common = {}
        for proxy in (STABILITY, PLASTICITY):
            for name, spec in specs.items():
                common[f"{proxy}.{name}"] = spec
        return PartFields(common=common)

    def server_block_end(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        newest: Arrays = {"table": server.items}
        for name, head in server.heads.items():
            newest[f"heads.{name}"] = head
        proxies: Arrays = {}
        for proxy in (STABILITY, PLASTICITY):
            for name, value in newest.items():
                full_name = f"{proxy}.{name}"
                earlier = state.get(full_name, value[:0])
                share = self.compute_retention(proxy)
                proxies[full_name] = average_with_newest(earlier, value, share)
        return proxies

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        state = server.parts.get(self.name, {})
        return PartBroadcast(dict(state), once=True)

    # on the device: the private half, and what was drawn last

    def state(self, n_users: int) -> Sequence[StateSpec]:
        vector_shape = (n_users, self.context.backbone.private_width)
        drawn_shape = (n_users, self._n_drawn)
        return [
            StateSpec(STABILITY, np.zeros(vector_shape, np.float32)),
            StateSpec(PLASTICITY, np.zeros(vector_shape, np.float32)),
            StateSpec("seen", np.zeros(n_users, bool)),
            StateSpec("item", np.full(drawn_shape, -1, np.int32)),
            StateSpec("label", np.zeros(drawn_shape, np.float32)),
        ]

    @property
    def _n_drawn(self) -> int:
        """Items that are drawn for a user from both proxies together."""
        return self.config.n_stability + self.config.n_plasticity

    def on_block_end(self, view: CohortView) -> Arrays:
        state = view.parts[self.name]
        now = view.private
        is_returning = state["seen"][:, None]
        proxies: Arrays = {}
        for proxy in (STABILITY, PLASTICITY):
            share = self.compute_retention(proxy)
            average = average_with_newest(state[proxy], now, share)
            proxies[proxy] = np.where(is_returning, average, now)
        is_seen = np.ones(len(now), bool)
        return {**proxies, "seen": is_seen}

    def on_block_start(self, view: CohortView) -> Arrays:
        """Draws of an earlier block are forgotten: what they were drawn against is gone."""
        items = view.parts[self.name]["item"]
        return {"item": np.full_like(items, -1)}

    def prepare(self, view: CohortView) -> LocalTask:
        """Draw items every few rounds, and for users who were absent when the others drew."""
        if view.block == 0 or self.config.weight == 0:
            return LocalTask()
        state = view.parts[self.name]
        item = state["item"].copy()
        label = state["label"].copy()
        users = self._find_due_users(view)
        for start in range(0, len(users), CHUNK):
            chunk = users[start : start + CHUNK]
            new_items, new_labels = self.draw_items(view, chunk)
            item[chunk] = new_items
            label[chunk] = new_labels
        is_drawn = item >= 0
        ptr = compute_offsets(is_drawn.sum(1))
        return LocalTask(
            state={"item": item, "label": label},
            rows_needed=Ragged(ptr, item[is_drawn]),
            step_samples=self.list_drawn_samples,
        )

    def _find_due_users(self, view: CohortView) -> Longs:
        """Users with a proxy whose items are drawn in this round."""
        state = view.parts[self.name]
        is_undrawn = state["item"] < 0
        is_due = is_undrawn.all(1)
        if view.round % self.config.every == 0:
            is_due = np.ones_like(is_due)
        return np.flatnonzero(state["seen"] & is_due)

    def draw_items(self, view: CohortView, users: Longs) -> tuple[Ints, Floats]:
        """Items and labels for these users of the view; in block 1 both proxies coincide and one is enough."""
        vectors = view.private[users]
        scorer = self.context.scorer
        model_scores = score_catalogue(scorer, vectors, view.heads, view.items)
        mask_own_items(model_scores, view.train.take(users))
        stable_draw = self.draw_from_proxy(view, users, model_scores, STABILITY)
        draws = [stable_draw]
        if view.block > 1:
            plastic_draw = self.draw_from_proxy(view, users, model_scores, PLASTICITY)
            draws.append(plastic_draw)
        item = np.concatenate([items for items, _ in draws], axis=1)
        label = np.concatenate([labels for _, labels in draws], axis=1)
        return merge_draws(item, label, self._n_drawn)

    def draw_from_proxy(self, view: CohortView, users: Longs, model_scores: Floats, proxy: str) -> tuple[Ints, Floats]:
        """Some of the proxy's best items for each user, and what the proxy thinks of them."""
        scorer = self.context.scorer
        vectors = view.parts[self.name][proxy]
        private = vectors[users]
        received = view.received[self.name]
        table = received[f"{proxy}.table"]
        heads = {}
        for name in view.heads:
            heads[name] = received[f"{proxy}.heads.{name}"]
        scores = score_catalogue(scorer, private, heads, table)
        mask_own_items(scores, view.train.take(users))
        best, value = find_best_items(scores, self.config.rank_limit)
        log_weight = self._weigh_dropped_items(model_scores, best, value)
        draws = self.context.draws
        key = draws.private(f"proxies-{proxy}", view.block, view.round)
        n_items = self.config.n_plasticity
        if proxy == STABILITY:
            n_items = self.config.n_stability
        keys = view.user_keys[users]
        place = draw_weighted_positions(key, keys, log_weight, n_items)
        position = np.maximum(place, 0)
        picked = np.take_along_axis(best, position, 1)
        chosen = np.where(place < 0, -1, picked)
        item = chosen.astype(np.int32)
        known_items = np.maximum(item, 0)
        picked_scores = score_lists(scorer, private, heads, table, known_items)
        label = sigmoid(picked_scores)
        labels = np.where(item < 0, np.float32(0), label)
        return item, labels

    def _weigh_dropped_items(self, model_scores: Floats, best: Ints, value: Floats) -> Floats:
        """Log-weights of a proxy's best items: the further the model has let an item drop, the likelier it is drawn."""
        n_users, width = best.shape
        ptr = np.arange(n_users + 1) * width
        items = best.reshape(-1)
        ranks = compute_list_ranks(model_scores, ptr, items)
        places = ranks.reshape(best.shape) - 1
        drop = places - np.arange(width)
        preference = self.config.eps_r * drop
        is_ranked = np.isfinite(value)
        log_weight = np.where(is_ranked, preference, -np.inf)
        return log_weight.astype(np.float32)

    def list_drawn_samples(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples:
        """All that is drawn, in every step."""
        lists, _ = local.rows_needed[self.name]
        state = view.parts[self.name]
        exponent = -view.round / self.config.fade
        fading = np.exp(exponent)
        strength = self.config.weight * fading
        counts = lists.counts()
        shares = strength / np.maximum(counts, 1)
        weight = np.repeat(shares, counts)
        is_drawn = state["item"] >= 0
        return ExtraSamples(
            ptr=lists.ptr[view.user_ptr],
            pick=np.arange(len(lists.ids)),
            label=state["label"][is_drawn],
            weight=weight.astype(np.float32),
        )


def mask_own_items(scores: Floats, items: Ragged) -> None:
    """Set each user's own items to minus infinity; items without a column in the scores are left out."""
    n_columns = scores.shape[1]
    is_known = items.ids < n_columns
    rows = items.rows()[is_known]
    ids = items.ids[is_known]
    scores[rows, ids] = -np.inf


def average_with_newest(earlier: AnyArray, newest: AnyArray, keep: float) -> AnyArray:
    """keep * earlier + (1 - keep) * newest; rows that are new are copied."""
    known = len(earlier)
    average = newest.copy()
    new_part = (1 - keep) * newest[:known]
    average[:known] = keep * earlier + new_part
    return average


def merge_draws(item: Ints, label: Floats, width: int) -> tuple[Ints, Floats]:
    """One entry per item, with the larger of its labels; padded to a width."""
    n_users, n_drawn = item.shape
    shape = (n_users, width)
    items = np.full(shape, -1, np.int32)
    labels = np.zeros((n_users, width), np.float32)
    items[:, :n_drawn] = item
    labels[:, :n_drawn] = label
    for column in range(1, n_drawn):
        later = items[:, column, None]
        is_equal = items[:, :column] == later
        is_repeated = is_equal & (later >= 0)
        rows, first = np.nonzero(is_repeated)
        first_label = labels[rows, first]
        later_label = labels[rows, column]
        larger = np.maximum(first_label, later_label)
        labels[rows, first] = larger
        items[rows, column] = -1
        labels[rows, column] = 0
    return items, labels
