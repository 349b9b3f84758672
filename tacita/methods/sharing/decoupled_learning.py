"""decoupled: shared items are learned outside the federation, so that they can be taken out exactly (spec D.1).

Devices federate on what stays local and never see what the server learns from the rest. That is a residual table for
each shard of users. It is learned from zeros in a fixed number of steps, on top of the federated table as it was at the
last sync. Devices score with the sum. When a user takes something back, the user's own shard is learned from zeros
without it, and no device is asked. Every number is then the one that a run of as many rounds without it would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, Longs, ServerState, SharedRecord
from tacita.kernels.hashing import hash_owners
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph, list_edge_ends
from tacita.methods.sharing.graph_training import (
    Batch,
    choose_shared_items,
    count_unshared_items,
    draw_negatives,
    refine_table,
)
from tacita.methods.sharing.shared_graph_part import LearningConfig
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.serving import Purpose, Serving
from tacita.round.unlearning_report import UnlearningReport

_BASE = "base"
_RESIDUAL = "residual"
_ADDED = "added"
_SYNCED = "synced"
_LATE = "late"


class DecoupledConfig(LearningConfig):
    lr: float = Field(0.01, gt=0, description="learning rate of Adam, which starts afresh at every sync")
    steps: int = Field(50, ge=0, description="steps of every shard, whatever its size")
    shards: int = Field(8, ge=1, description="groups of people that are learned from apart")
    sync_every: int = Field(5, ge=1, description="rounds between two times that residuals are learned anew")


@register
class DecoupledLearning(Part, Unlearning):
    name = "decoupled"
    scope = ("given",)
    serves = frozenset({"view"})
    Config: ClassVar[type[PartConfig]] = DecoupledConfig
    config: DecoupledConfig

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        shape = (n_items, self.context.backbone.item_width)
        return PartFields(common={"table": ArraySpec(shape, fewer_rows=True)})

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        if _BASE not in state:
            return state
        n_known = len(state[_BASE])
        new_rows = server.items[n_known:]
        n_shards = len(state[_RESIDUAL])
        new_shape = (n_shards, *new_rows.shape)
        no_residual = np.zeros(new_shape, np.float32)
        return {
            **state,
            _BASE: np.concatenate([state[_BASE], new_rows]),
            _ADDED: np.concatenate([state[_ADDED], np.zeros_like(new_rows)]),
            _RESIDUAL: np.concatenate([state[_RESIDUAL], no_residual], axis=1),
        }

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        rounds = server.round + 1
        is_between = rounds % self.config.sync_every
        if is_between or not len(server.shared):
            return server
        n_shards = self.config.shards
        earlier = server.parts.get(self.name, {})
        state = dict(earlier)
        state[_BASE] = server.items
        shape = (n_shards, *server.items.shape)
        state[_RESIDUAL] = np.zeros(shape, np.float32)
        moment = [server.block, rounds]
        state[_SYNCED] = np.array(moment)
        all_shards = np.arange(n_shards)
        record = server.shared
        state = self.train_shards(state, record, all_shards)
        return server.with_part(self.name, state)

    def train_shards(self, state: Arrays, record: SharedRecord, shards: Longs) -> Arrays:
        """Some shards' residuals learned from zeros, and what all of them add to the table."""
        base = state[_BASE]
        synced = state[_SYNCED]
        residual = state[_RESIDUAL].copy()
        shard_of_edge = self.assign_shards(record.sender)
        for shard in shards:
            is_in_shard = shard_of_edge == shard
            edges = _select_edges(record, is_in_shard)
            number = int(shard)
            residual[shard] = self.train_shard_residual(base, edges, number, synced)
        n_items = len(base)
        shape = (self.config.shards, n_items)
        weight = np.zeros(shape)
        places = (shard_of_edge, record.item)
        np.add.at(weight, places, 1.0)
        totals = np.maximum(1, weight.sum(0))
        weight /= totals
        added = np.zeros(base.shape)
        for shard in range(self.config.shards):
            shard_weight = weight[shard][:, None]
            added += shard_weight * residual[shard]
        rounded = added.astype(np.float32)
        return {**state, _RESIDUAL: residual, _ADDED: rounded}

    def train_shard_residual(self, base: Floats, edges: SharedRecord, shard: int, synced: Longs) -> Floats:
        """What a shard's users change of the table: a function of their edges, the table and the seed alone."""
        n_items = len(base)
        layers = self.config.layers
        graph = SharedGraph.from_record(edges, n_items, layers=layers)
        if not len(graph):
            return np.zeros_like(base)
        draws = self.context.draws
        moment = synced.tolist()
        negative_key = draws.public("shard-other", shard, *moment)
        item_key = draws.public("shard-items", shard, *moment)
        batches = self._draw_batches(graph, negative_key, item_key)
        objective = self.config.build_objective()
        refined = refine_table(graph, base, batches, objective)
        return refined.table - base

    def _draw_batches(self, graph: SharedGraph, negative_key: np.uint64, item_key: np.uint64) -> Iterator[Batch]:
        """All edges in every step; negatives by each edge's own draws."""
        user, liked = list_edge_ends(graph)
        has_negatives = count_unshared_items(graph)[user] > 0
        pairs = np.flatnonzero(has_negatives)
        for step in range(self.config.steps):
            number = np.uint64(step)
            other = draw_negatives(graph, negative_key + number)
            users = user[pairs]
            liked_items = liked[pairs]
            other_items = other[pairs]
            contrasted = choose_shared_items(graph, item_key + number, self.config.item_batch)
            yield Batch(users, liked_items, other_items, contrasted)

    def assign_shards(self, senders: Keys) -> Longs:
        """By chance, not by what users like: a shard must not say anything of its users."""
        key = self.context.draws.public("shards")
        drawn = hash_owners(key, senders)
        n_shards = np.uint64(self.config.shards)
        shards = drawn % n_shards
        return shards.astype(np.int64)

    # what devices score with

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        state = server.parts.get(self.name, {})
        if _ADDED not in state:
            return PartBroadcast()
        table = server.items + state[_ADDED]
        return PartBroadcast({"table": table})

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        received = view.received.get(self.name, {})
        if "table" not in received:
            return Serving()
        changed = replace(view, items=received["table"])
        return Serving(view=changed)

    # what users ask for

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        withdrawn = requests.withdrawn_items
        if requests.kind == "share":
            return self._record_late_sharers(server, requests.senders)
        if withdrawn is None:
            return None
        withdraws = withdrawn.counts() > 0
        senders = requests.senders[withdraws]
        has_withdrawn = len(senders) > 0
        is_exact = has_withdrawn and self._unlearns_exactly(server, requests)
        state = self._drop_late_sharers(server, requests.senders)
        if state:
            server = server.with_part(self.name, state)
        storage_server = count_shard_bytes(state)
        details = {"edges": len(withdrawn.ids), "shards": 0}
        purged: tuple[str, ...] = ()
        if len(senders) and _BASE in state:
            shards = np.unique(self.assign_shards(senders))
            state = self.train_shards(state, server.shared, shards)
            server = server.with_part(self.name, state)
            n_shards = self.config.shards
            details |= {"shards": len(shards), "of_shards": n_shards}
            purged = ("residuals",)
        return server, UnlearningReport(
            method=self.name,
            exact=is_exact,
            rounds=0,
            clients_asked=0,
            storage_server=storage_server,
            storage_client=0,
            purged=purged,
            details=details,
        )

    def _read_late_sharers(self, server: ServerState) -> Keys:
        state = server.parts.get(self.name, {})
        nobody = np.zeros(0, np.uint64)
        return state.get(_LATE, nobody)

    def _record_late_sharers(self, server: ServerState, senders: Keys) -> tuple[ServerState, UnlearningReport] | None:
        """Users who share after devices began to learn may have taught the federated table what they share."""
        if server.round == 0 and server.block == 0:
            return None
        state = server.parts.get(self.name, {})
        earlier = self._read_late_sharers(server)
        late = np.union1d(earlier, senders)
        updated = {**state, _LATE: late}
        server = server.with_part(self.name, updated)
        details = {"late": len(senders)}
        report = UnlearningReport(method=self.name, details=details)
        return server, report

    def _drop_late_sharers(self, server: ServerState, senders: Keys) -> Arrays:
        """The state without late sharers who share nothing any more."""
        state = server.parts.get(self.name, {})
        if _LATE not in state:
            return state
        without_items = np.setdiff1d(senders, server.shared.sender)
        late = state[_LATE]
        is_dropped = np.isin(late, without_items)
        if not is_dropped.any():
            return state
        remaining = state[_LATE][~is_dropped]
        return {**state, _LATE: remaining}

    def _unlearns_exactly(self, server: ServerState, requests: RequestBatch) -> bool:
        """Whether all that is to be forgotten was learned by this part and nowhere else."""
        if requests.kind != "unshare":  # the server does not know what the devices of leavers learned from
            return False
        others = self.context.list_other_parts(self.name)
        if any(other.learns_from_shared for other in others):
            return False
        late = self._read_late_sharers(server)
        is_late = np.isin(requests.senders, late)
        return not is_late.any()


def _select_edges(record: SharedRecord, selected: Any) -> SharedRecord:
    sender = record.sender[selected]
    item = record.item[selected]
    time = record.time[selected]
    return SharedRecord(sender, item, time)


def count_shard_bytes(state: Arrays) -> int:
    """What is kept so that a shard can be learned from zeros: its first table, and every shard by itself."""
    arrays = []
    for name in (_BASE, _RESIDUAL):
        if name in state:
            arrays.append(state[name])
    return sum(int(array.nbytes) for array in arrays)
