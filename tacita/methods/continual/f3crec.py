"""F3CRec: adaptive replay on the client and an item-wise temporal mean on the server (spec B; KD is C.3).

The two are parts of their own, so all ablations are lists of parts. Departures from the paper's text follow spec
B.5: squared shift, mean over the replayed items, and a user without an earlier block is not distilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import (
    Arrays,
    CohortView,
    Doubles,
    ExtraSamples,
    Floats,
    Ints,
    LocalModels,
    Longs,
    Ragged,
    ServerState,
)
from tacita.kernels.ranking import best_items
from tacita.kernels.replay import local_list_ranks, pick_subset
from tacita.messages import Total
from tacita.methods.continual.last_table import LastTable
from tacita.models.scoring import score_all, score_lists, sigmoid
from tacita.round.capabilities import Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.state import StateSpec
from tacita.round.task import LocalTask


class ReplayConfig(PartConfig):
    top_n: int = Field(30, ge=1, description="items remembered per client from its last block (N)")
    eps: float = Field(0.006, ge=0, description="how fast replay fades as ranks move; 0: always all (KD)")
    weight: float = Field(0.1, ge=0, description="weight of the distillation loss (lambda_KD)")
    reduction: Literal["mean", "sum"] = Field("mean", description="over the replayed items; the paper prints a sum")
    topn_mask: Literal["none", "train"] = Field("none", description="leave the block's training items out of the list")


@register
class Replay(LastTable, Unlearning):
    """Distil from the client's own last model on items it ranked high, fewer the more its ranks have moved."""

    name = "replay"
    reads_logits = True
    fills = frozenset({"rows_needed", "step_samples"})
    scope = ()  # it only drops what pulls back
    Config: ClassVar[type[PartConfig]] = ReplayConfig
    config: ReplayConfig

    def check(self, n_items: int) -> None:
        if self.config.top_n > n_items:
            raise TacitaError(
                f"replay.top_n = {self.config.top_n} is larger than the catalogue of {n_items} items; lower it."
            )
        if self.context.backbone.shared():
            raise TacitaError(
                f"replay ranks with private parameters only, and backbone '{self.context.backbone.name}' shares others "
                "as well; use another backbone (of ncf, turn backbone.share_mlp off)."
            )
        nobody = np.zeros((1, self.context.backbone.private_width), np.float32)
        if self.config.eps > 0 and self.context.scorer.reading(nobody, {}) is None:
            raise TacitaError(
                f"replay with eps > 0 needs a backbone that is affine in the item row, not "
                f"'{self.context.backbone.name}'; use eps = 0 (method kd) or another backbone."
            )

    def state(self, n_users: int) -> Sequence[StateSpec]:
        width = self.context.backbone.private_width
        list_shape = (n_users, self.config.top_n)
        return [
            StateSpec("list", np.full(list_shape, -1, np.int32)),
            StateSpec("teacher", np.zeros((n_users, width), np.float32)),
            StateSpec("label", np.zeros(list_shape, np.float32)),
        ]

    def on_block_start(self, view: CohortView) -> Arrays:
        """Teacher scores: the client's last private parameters on the last block's table."""
        state = view.parts[self.name]
        label = state["label"].copy()
        returning = np.flatnonzero(state["list"][:, 0] >= 0)
        if len(returning):
            table = view.received[self.name]["table"]
            teacher = state["teacher"][returning]
            scores = score_lists(self.context.scorer, teacher, view.heads, table, state["list"][returning])
            label[returning] = sigmoid(scores)
        return {"label": label}

    def on_block_end(self, view: CohortView) -> Arrays:
        scores = score_all(self.context.scorer, view.private, view.heads, view.items)
        if self.config.topn_mask == "train":
            scores[view.train.rows(), view.train.ids] = -np.inf
        top, _ = best_items(scores, self.config.top_n)
        return {"list": top, "teacher": view.private.copy()}

    def purge(self, server: ServerState) -> tuple[Arrays, list[str]]:
        """The last block's table, which devices have read by now; the block's end leaves a new one."""
        state = server.parts.get(self.name, {})
        return {}, ["last_table"] if "table" in state else []

    def prepare(self, view: CohortView) -> LocalTask:
        if view.block == 0 or self.config.weight == 0:
            return LocalTask()
        return LocalTask(rows_needed=self.list_items(view), step_samples=self.draw_replay)

    def list_items(self, view: CohortView) -> Ragged:
        """The items that every user remembers."""
        lists = view.parts[self.name]["list"]
        counts = np.where(lists[:, 0] >= 0, lists.shape[1], 0)
        ptr = np.zeros(len(lists) + 1, np.int64)
        np.cumsum(counts, out=ptr[1:])
        return Ragged(ptr, np.ascontiguousarray(lists[counts > 0].reshape(-1)))

    def rank_shift(self, view: CohortView, local: LocalModels, users: Ints) -> Longs:
        """How far the remembered items have moved in the clients' current rankings (Delta)."""
        lists = view.parts[self.name]["list"][users]
        n = lists.shape[1]
        ranks = current_ranks(self, view, local, users, lists).reshape(-1, n)
        moved = np.abs(ranks - np.arange(1, n + 1))
        return np.asarray(moved.sum(1), np.int64)

    def replay_sizes(self, view: CohortView, local: LocalModels, users: Ints) -> Longs:
        """How many items each of these users replays, given how its ranks stand now."""
        if self.config.eps == 0:
            return np.full(len(users), self.config.top_n, np.int64)
        shift = self.rank_shift(view, local, users)
        return replay_size(shift, self.config.eps, self.config.top_n)

    def draw_replay(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples:
        """The replayed subset of each list, drawn again in every step and phase."""
        lists, _ = local.rows_needed[self.name]
        client_of = np.repeat(np.arange(view.n_clients), np.diff(view.user_ptr))
        is_active = (step < local.n_steps)[client_of]
        users = np.flatnonzero((lists.counts() > 0) & is_active).astype(np.int32)
        sizes = self.replay_sizes(view, local, users)
        if step == 0 and phase == 0 and view.has_single_users:
            local.notes["replayed"] = np.full(view.n_clients, np.nan)
            local.notes["replayed"][users] = sizes
        key = self.context.draws.private("replay", view.block, view.round, step, phase)
        entry = pick_subset(key, view.user_keys[users], self.config.top_n, sizes)
        user = np.repeat(users, sizes)
        ptr = np.zeros(view.n_clients + 1, np.int64)
        np.cumsum(np.bincount(client_of[user], minlength=view.n_clients), out=ptr[1:])
        return ExtraSamples(
            ptr=ptr,
            pick=lists.ptr[user] + entry,
            label=view.parts[self.name]["label"][user, entry],
            weight=self.sample_weights(sizes),
        )

    def sample_weights(self, sizes: Longs) -> Floats:
        """What each replayed sample weighs in the loss, user by user."""
        if self.config.reduction == "mean":
            weight = np.repeat(self.config.weight / np.maximum(sizes, 1), sizes)
        else:
            weight = np.full(sizes.sum(), self.config.weight)
        return weight.astype(np.float32)


def replay_size(shift: Longs, eps: float, n: int) -> Longs:
    """How many of the n remembered items are replayed: floor(n exp(-eps Delta))."""
    return np.asarray(np.floor(np.exp(-eps * shift.astype(np.float64)) * n), np.int64)


def current_ranks(part: Part, view: CohortView, local: LocalModels, users: Ints, lists: Ints) -> Ints:
    """1-based ranks of listed items among all items under the users' local models, ties to the smaller id."""
    client_of = np.repeat(np.arange(view.n_clients, dtype=np.int32), np.diff(view.user_ptr))
    backbone = part.context.scorer
    heads = view.heads
    reading = backbone.reading(local.private[users], heads)
    if reading is None:
        raise TacitaError(f"part '{part.name}' needs a backbone that is affine in the item row, not '{backbone.name}'.")
    a, c = (np.ascontiguousarray(x, np.float32) for x in reading)
    ptr = np.arange(len(users) + 1, dtype=np.int64) * lists.shape[1]
    return local_list_ranks(
        client_of[users],
        a,
        c,
        np.ascontiguousarray(view.items.T),
        local.row_start,
        local.row_item,
        local.rows,
        ptr,
        np.ascontiguousarray(lists.reshape(-1)),
    )


class TemporalMeanConfig(PartConfig):
    beta: float = Field(0.9, ge=0, lt=1, description="most weight an item's earlier row may have")
    phi: Literal["sq", "l2"] = Field("sq", description="squared shift (released code) or un-squared (printed)")
    itemwise: bool = Field(True, description="false: the same weight beta for every item")


@register
class TemporalMean(Part, Unlearning):
    """Keep each known item's row near the last block's, the nearer the less it has moved (B8-B10)."""

    name = "temporal-mean"
    scope = ()  # it only drops what pulls back
    Config: ClassVar[type[PartConfig]] = TemporalMeanConfig
    config: TemporalMeanConfig

    def server_block_end(self, server: ServerState) -> Arrays:
        return {"anchor": server.items}

    def purge(self, server: ServerState) -> tuple[Arrays, list[str]]:
        """Nothing pulls back to a table that had learned from what is unlearned; the block's end makes a new one."""
        state = server.parts.get(self.name, {})
        return {}, ["anchor_table"] if "anchor" in state else []

    def gamma(self, anchor: Doubles, now: Doubles) -> Doubles:
        """The weight of the earlier row, per item."""
        if not self.config.itemwise:
            return np.full(len(anchor), self.config.beta)
        square = ((anchor - now) ** 2).sum(1)
        moved = square if self.config.phi == "sq" else np.sqrt(square)
        return np.asarray(self.config.beta / (1 + moved / np.sqrt(anchor.shape[1])))

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        anchor = server.parts.get(self.name, {}).get("anchor")
        if anchor is None or self.config.beta == 0:
            return server
        known = len(anchor)
        earlier = anchor.astype(np.float64)
        now = server.items[:known].astype(np.float64)
        gamma = self.gamma(earlier, now)
        items = server.items.copy()
        items[:known] = (1 - gamma[:, None]) * now + gamma[:, None] * earlier
        state = {"anchor": anchor, "gamma": np.array([gamma.mean()])}
        return server.with_items(items).with_part(self.name, state)

    def metrics(self, server: ServerState) -> dict[str, float]:
        gamma = server.parts.get(self.name, {}).get("gamma")
        return {} if gamma is None else {"gamma": float(gamma[0])}


register_preset("ft")
register_preset("kd", {"name": "replay", "eps": 0.0})
register_preset("f3crec", {"name": "replay"}, {"name": "temporal-mean"})
register_preset("f3crec-no-client", {"name": "temporal-mean"})
register_preset("f3crec-fixed-replay", {"name": "replay", "eps": 0.0}, {"name": "temporal-mean"})
register_preset("f3crec-no-server", {"name": "replay"})
register_preset("f3crec-uniform-mean", {"name": "replay"}, {"name": "temporal-mean", "itemwise": False})
