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
from tacita.core.flat_indices import compute_offsets
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
from tacita.kernels.ranking import find_best_items
from tacita.kernels.replay import compute_local_list_ranks, pick_distinct_positions
from tacita.messages import Total
from tacita.methods.continual.last_table import LastTable
from tacita.models.scoring import score_catalogue, score_lists, sigmoid
from tacita.round.capabilities import Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
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
        if self.context.backbone.list_head_shapes():
            raise TacitaError(
                f"replay ranks with private parameters only, and backbone '{self.context.backbone.name}' shares others "
                "as well; use another backbone (of ncf, turn backbone.share_mlp off)."
            )
        if self.config.eps > 0 and not self._reads_rows_affinely():
            raise TacitaError(
                f"replay with eps > 0 needs a backbone that is affine in the item row, not "
                f"'{self.context.backbone.name}'; use eps = 0 (method kd) or another backbone."
            )

    def _reads_rows_affinely(self) -> bool:
        """Whether the backbone's scores are affine in the item row, so that ranks are cheap."""
        width = self.context.backbone.private_width
        shape = (1, width)
        vector = np.zeros(shape, np.float32)
        return self.context.scorer.reduce_to_affine(vector, {}) is not None

    def state(self, n_users: int) -> Sequence[StateSpec]:
        width = self.context.backbone.private_width
        list_shape = (n_users, self.config.top_n)
        no_items = np.full(list_shape, -1, np.int32)
        vector_shape = (n_users, width)
        no_vectors = np.zeros(vector_shape, np.float32)
        no_labels = np.zeros(list_shape, np.float32)
        return [
            StateSpec("list", no_items),
            StateSpec("teacher", no_vectors),
            StateSpec("label", no_labels),
        ]

    def on_block_start(self, view: CohortView) -> Arrays:
        """Teacher scores: the client's last private parameters on the last block's table."""
        state = view.parts[self.name]
        label = state["label"].copy()
        first_item = state["list"][:, 0]
        returning = np.flatnonzero(first_item >= 0)
        if len(returning):
            table = view.received[self.name]["table"]
            teacher = state["teacher"][returning]
            lists = state["list"][returning]
            scorer = self.context.scorer
            scores = score_lists(scorer, teacher, view.heads, table, lists)
            label[returning] = sigmoid(scores)
        return {"label": label}

    def on_block_end(self, view: CohortView) -> Arrays:
        scorer = self.context.scorer
        scores = score_catalogue(scorer, view.private, view.heads, view.items)
        if self.config.topn_mask == "train":
            rows = view.train.rows()
            scores[rows, view.train.ids] = -np.inf
        top, _ = find_best_items(scores, self.config.top_n)
        return {"list": top, "teacher": view.private.copy()}

    def purge(self, server: ServerState) -> tuple[Arrays, list[str]]:
        """The last block's table, which devices have read by now; the block's end leaves a new one."""
        if "table" not in server.parts.get(self.name, {}):
            return {}, []
        return {}, ["last_table"]

    def prepare(self, view: CohortView) -> LocalTask:
        if view.block == 0 or self.config.weight == 0:
            return LocalTask()
        items = self.list_items(view)
        return LocalTask(rows_needed=items, step_samples=self.draw_replayed_samples)

    def list_items(self, view: CohortView) -> Ragged:
        """The items that every user remembers."""
        lists = view.parts[self.name]["list"]
        has_list = lists[:, 0] >= 0
        length = lists.shape[1]
        counts = np.where(has_list, length, 0)
        items = lists[has_list].reshape(-1)
        return Ragged(compute_offsets(counts), np.ascontiguousarray(items))

    def measure_rank_shift(self, view: CohortView, local: LocalModels, users: Ints) -> Longs:
        """How far the remembered items have moved in the clients' current rankings (Delta)."""
        all_lists = view.parts[self.name]["list"]
        lists = all_lists[users]
        length = lists.shape[1]
        ranks = rank_listed_items(self, view, local, users, lists)
        old_ranks = np.arange(1, length + 1)
        new_ranks = ranks.reshape(-1, length)
        shift = np.abs(new_ranks - old_ranks)
        return np.asarray(shift.sum(1), np.int64)

    def choose_replay_sizes(self, view: CohortView, local: LocalModels, users: Ints) -> Longs:
        """How many items each of these users replays, given how its ranks stand now."""
        if self.config.eps == 0:
            n_users = len(users)
            return np.full(n_users, self.config.top_n, np.int64)
        shift = self.measure_rank_shift(view, local, users)
        config = self.config
        return compute_replay_sizes(shift, config.eps, config.top_n)

    def draw_replayed_samples(self, view: CohortView, local: LocalModels, step: int, phase: int) -> ExtraSamples:
        """The replayed subset of each list, drawn again in every step and phase."""
        lists, _ = local.rows_needed[self.name]
        client_of_user = view.client_of_user
        is_active = (step < local.n_steps)[client_of_user]
        has_list = lists.counts() > 0
        replays = np.flatnonzero(has_list & is_active)
        users = replays.astype(np.int32)
        sizes = self.choose_replay_sizes(view, local, users)
        if step == 0 and phase == 0 and view.has_single_users:
            note = np.full(view.n_clients, np.nan)
            note[users] = sizes
            local.notes["replayed"] = note
        draws = self.context.draws
        key = draws.private("replay", view.block, view.round, step, phase)
        keys = view.user_keys[users]
        entry = pick_distinct_positions(key, keys, self.config.top_n, sizes)
        user = np.repeat(users, sizes)
        client = client_of_user[user]
        n_samples = np.bincount(client, minlength=view.n_clients)
        labels = view.parts[self.name]["label"]
        return ExtraSamples(
            ptr=compute_offsets(n_samples),
            pick=lists.ptr[user] + entry,
            label=labels[user, entry],
            weight=self.weigh_replayed_samples(sizes),
        )

    def weigh_replayed_samples(self, sizes: Longs) -> Floats:
        """What each replayed sample weighs in the loss, user by user."""
        strength = self.config.weight
        if self.config.reduction == "mean":
            shares = strength / np.maximum(sizes, 1)
            weight = np.repeat(shares, sizes)
        else:
            weight = np.full(sizes.sum(), strength)
        return weight.astype(np.float32)


def compute_replay_sizes(shift: Longs, eps: float, n: int) -> Longs:
    """How many of the n remembered items are replayed: floor(n exp(-eps Delta))."""
    shifts = shift.astype(np.float64)
    exponent = -eps * shifts
    size = np.exp(exponent) * n
    return np.asarray(np.floor(size), np.int64)


def rank_listed_items(part: Part, view: CohortView, local: LocalModels, users: Ints, lists: Ints) -> Ints:
    """1-based ranks of listed items among all items under the users' local models, ties to the smaller id."""
    client_of_user = view.client_of_user
    backbone = part.context.scorer
    vectors = local.private[users]
    reading = backbone.reduce_to_affine(vectors, view.heads)
    if reading is None:
        raise TacitaError(f"part '{part.name}' needs a backbone that is affine in the item row, not '{backbone.name}'.")
    slope, offset = reading
    n_lists = len(users) + 1
    starts = np.arange(n_lists, dtype=np.int64)
    items = lists.reshape(-1)
    return compute_local_list_ranks(
        client_of_user[users],
        np.ascontiguousarray(slope, np.float32),
        np.ascontiguousarray(offset, np.float32),
        np.ascontiguousarray(view.items.T),
        local.row_start,
        local.row_item,
        local.rows,
        starts * lists.shape[1],
        np.ascontiguousarray(items),
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
        if "anchor" not in server.parts.get(self.name, {}):
            return {}, []
        return {}, ["anchor_table"]

    def weigh_earlier_rows(self, anchor: Doubles, now: Doubles) -> Doubles:
        """The weight of the earlier row, per item (gamma)."""
        beta = self.config.beta
        if not self.config.itemwise:
            return np.full(len(anchor), beta)
        squares = (anchor - now) ** 2
        shift = squares.sum(1)
        if self.config.phi == "l2":
            shift = np.sqrt(shift)
        width = anchor.shape[1]
        relative_shift = shift / np.sqrt(width)
        return np.asarray(beta / (1 + relative_shift))

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        state = server.parts.get(self.name, {})
        anchor = state.get("anchor")
        if anchor is None or self.config.beta == 0:
            return server
        known = len(anchor)
        earlier = anchor.astype(np.float64)
        known_rows = server.items[:known]
        now = known_rows.astype(np.float64)
        gamma = self.weigh_earlier_rows(earlier, now)
        weight = gamma[:, None]
        items = server.items.copy()
        new_part = (1 - weight) * now
        items[:known] = new_part + weight * earlier
        mean = np.array([gamma.mean()])
        state = {"anchor": anchor, "gamma": mean}
        updated = server.with_items(items)
        return updated.with_part(self.name, state)

    def metrics(self, server: ServerState) -> dict[str, float]:
        state = server.parts.get(self.name, {})
        if "gamma" not in state:
            return {}
        return {"gamma": float(state["gamma"][0])}
