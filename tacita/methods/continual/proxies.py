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
from tacita.kernels.ranking import best_items, list_ranks
from tacita.kernels.replay import weighted_picks
from tacita.models.scoring import CHUNK, score_all, score_lists, sigmoid
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
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

    def retention(self, proxy: str) -> float:
        return self.config.w_stability if proxy == STABILITY else self.config.w_plasticity

    # on the server: the public half of both proxies

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        backbone = self.context.scorer
        specs = {"table": ArraySpec((n_items, backbone.item_width), fewer_rows=True)}
        for name, head in backbone.init_heads(self.context.draws).items():
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
                earlier = state.get(f"{proxy}.{name}", value[:0])
                proxies[f"{proxy}.{name}"] = average_rows(earlier, value, self.retention(proxy))
        return proxies

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        return PartBroadcast(dict(server.parts.get(self.name, {})), once=True)

    # on the device: the private half, and what was drawn last

    def state(self, n_users: int) -> Sequence[StateSpec]:
        width = self.context.backbone.private_width
        n_drawn = self.config.n_stability + self.config.n_plasticity
        return [
            StateSpec(STABILITY, np.zeros((n_users, width), np.float32)),
            StateSpec(PLASTICITY, np.zeros((n_users, width), np.float32)),
            StateSpec("seen", np.zeros(n_users, bool)),
            StateSpec("item", np.full((n_users, n_drawn), -1, np.int32)),
            StateSpec("label", np.zeros((n_users, n_drawn), np.float32)),
        ]

    def on_block_end(self, view: CohortView) -> Arrays:
        state = view.parts[self.name]
        now = view.private
        is_returning = state["seen"][:, None]
        proxies: Arrays = {}
        for proxy in (STABILITY, PLASTICITY):
            average = average_rows(state[proxy], now, self.retention(proxy))
            proxies[proxy] = np.where(is_returning, average, now)
        return {**proxies, "seen": np.ones(len(now), bool)}

    def on_block_start(self, view: CohortView) -> Arrays:
        """Draws of an earlier block are forgotten: what they were drawn against is gone."""
        return {"item": np.full_like(view.parts[self.name]["item"], -1)}

    def prepare(self, view: CohortView) -> LocalTask:
        """Draw again every few rounds, and for who was not there when the others drew."""
        if view.block == 0 or self.config.weight == 0:
            return LocalTask()
        state = view.parts[self.name]
        has_no_draw = (state["item"] < 0).all(1)
        is_due = state["seen"] & ((view.round % self.config.every == 0) | has_no_draw)
        item = state["item"].copy()
        label = state["label"].copy()
        users = np.flatnonzero(is_due)
        for start in range(0, len(users), CHUNK):
            chunk = users[start : start + CHUNK]
            item[chunk], label[chunk] = self.draw_items(view, chunk)
        ptr = np.zeros(len(item) + 1, np.int64)
        np.cumsum((item >= 0).sum(1), out=ptr[1:])
        return LocalTask(
            state={"item": item, "label": label},
            rows_needed=Ragged(ptr, item[item >= 0]),
            step_samples=self.list_samples,
        )

    def draw_items(self, view: CohortView, users: Longs) -> tuple[Ints, Floats]:
        """Items and labels for these users of the view; in block 1 both proxies coincide and one is enough."""
        model = score_all(self.context.scorer, view.private[users], view.heads, view.items)
        train = view.train.take(users)
        model[train.rows(), train.ids] = -np.inf
        draws = [self.draw_from_proxy(view, users, model, STABILITY, self.config.n_stability)]
        if view.block > 1:
            draws.append(self.draw_from_proxy(view, users, model, PLASTICITY, self.config.n_plasticity))
        item = np.concatenate([items for items, _ in draws], axis=1)
        label = np.concatenate([labels for _, labels in draws], axis=1)
        return merge_draws(item, label, self.config.n_stability + self.config.n_plasticity)

    def draw_from_proxy(self, view: CohortView, users: Longs, model: Floats, proxy: str, n: int) -> tuple[Ints, Floats]:
        """n items of the proxy's best for each user, and what the proxy thinks of them."""
        private = view.parts[self.name][proxy][users]
        sent = view.received[self.name]
        table = sent[f"{proxy}.table"]
        heads = {k: sent[f"{proxy}.heads.{k}"] for k in view.heads}
        scores = score_all(self.context.scorer, private, heads, table)
        train = view.train.take(users)
        known = train.ids < len(table)  # items of this block alone have no row in a proxy
        scores[train.rows()[known], train.ids[known]] = -np.inf
        best, value = best_items(scores, self.config.rank_limit)
        width = best.shape[1]
        ptr = np.arange(len(users) + 1) * width
        ranks = list_ranks(model, ptr, best.reshape(-1)).reshape(best.shape) - 1
        drop = ranks - np.arange(width)
        log_weight = np.where(np.isfinite(value), self.config.eps_r * drop, -np.inf).astype(np.float32)
        key = self.context.draws.private(f"proxies-{proxy}", view.block, view.round)
        place = weighted_picks(key, view.user_keys[users], log_weight, n)
        picked = np.take_along_axis(best, np.maximum(place, 0), 1)
        item = np.where(place < 0, -1, picked).astype(np.int32)
        scores = score_lists(self.context.scorer, private, heads, table, np.maximum(item, 0))
        label = sigmoid(scores)
        return item, np.where(item < 0, np.float32(0), label)

    def list_samples(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples:
        """All that is drawn, in every step."""
        lists, _ = local.rows_needed[self.name]
        state = view.parts[self.name]
        strength = self.config.weight * np.exp(-view.round / self.config.fade)
        counts = lists.counts()
        weight = np.repeat(strength / np.maximum(counts, 1), counts)
        return ExtraSamples(
            ptr=lists.ptr[view.user_ptr],
            pick=np.arange(len(lists.ids)),
            label=state["label"][state["item"] >= 0],
            weight=weight.astype(np.float32),
        )


def average_rows(held: AnyArray, newest: AnyArray, keep: float) -> AnyArray:
    """keep * held + (1 - keep) * newest; rows that are new are copied."""
    out = newest.copy()
    out[: len(held)] = keep * held + (1 - keep) * newest[: len(held)]
    return out


def merge_draws(item: Ints, label: Floats, width: int) -> tuple[Ints, Floats]:
    """One entry per item, with the larger of its labels; padded to a width."""
    out_item = np.full((len(item), width), -1, np.int32)
    out_label = np.zeros((len(item), width), np.float32)
    out_item[:, : item.shape[1]], out_label[:, : item.shape[1]] = item, label
    for late in range(1, item.shape[1]):
        twice = (out_item[:, :late] == out_item[:, late, None]) & (out_item[:, late, None] >= 0)
        rows, first = np.nonzero(twice)
        out_label[rows, first] = np.maximum(out_label[rows, first], out_label[rows, late])
        out_item[rows, late], out_label[rows, late] = -1, 0
    return out_item, out_label


register_preset("spp", {"name": "proxies"})
