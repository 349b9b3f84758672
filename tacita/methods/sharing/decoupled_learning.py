"""decoupled: what people shared is learned beside the federation, so that it can be taken out exactly (spec D.1).

Devices federate on what stays local and never see what the server learns from the rest: that is a residual table for
each shard of people, learned from zeros in a fixed number of steps on top of the federated table as it was at the last
sync. Devices score with the sum. Who takes something back has their own shard learned anew without it; every number is
then the one that a run without it would have, and no device is asked. What stays the same is the number of rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, Longs, ServerState, SharedRecord
from tacita.kernels.hashing import choose_distinct, hash_owners
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph, list_edges
from tacita.methods.sharing.graph_training import Batch, count_unshared, draw_negatives, refine_table
from tacita.methods.sharing.shared_graph_part import LearningConfig
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register
from tacita.round.request import RequestBatch

_BASE, _RESIDUAL, _ADDED, _SYNCED, _LATE = "base", "residual", "added", "synced", "late"


class DecoupledConfig(LearningConfig):
    lr: float = Field(0.01, gt=0, description="learning rate of Adam, which starts afresh at every sync")
    steps: int = Field(50, ge=0, description="steps of every shard, whatever its size")
    shards: int = Field(8, ge=1, description="groups of people that are learned from apart")
    sync_every: int = Field(5, ge=1, description="rounds between two times that residuals are learned anew")


@register
class DecoupledLearning(Part):
    name = "decoupled"
    takes_back = ("given",)
    Config: ClassVar[type[PartConfig]] = DecoupledConfig
    config: DecoupledConfig

    def server_begin_block(self, server: ServerState) -> Arrays:
        kept = server.parts.get(self.name, {})
        if _BASE not in kept:
            return kept
        new = server.items[len(kept[_BASE]) :]
        grown = {_BASE: np.concatenate([kept[_BASE], new])}
        grown[_ADDED] = np.concatenate([kept[_ADDED], np.zeros_like(new)])
        room_for_new = np.zeros((len(kept[_RESIDUAL]), *new.shape), np.float32)
        return {**kept, **grown, _RESIDUAL: np.concatenate([kept[_RESIDUAL], room_for_new], axis=1)}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        done = server.round + 1
        if done % self.config.sync_every or not len(server.shared):
            return server
        kept = server.parts.get(self.name, {})
        blank = np.zeros((self.config.shards, *server.items.shape), np.float32)
        fresh = {**kept, _BASE: server.items, _RESIDUAL: blank, _SYNCED: np.array([server.block, done])}
        everything = np.arange(self.config.shards)
        return server.with_part(self.name, self.train_shards(fresh, server.shared, everything))

    def train_shards(self, state: Arrays, record: SharedRecord, shards: Longs) -> Arrays:
        """Some shards' residuals learned anew from zeros, and what all of them add to the table."""
        base, residual, mine = state[_BASE], state[_RESIDUAL].copy(), self.assign_shards(record.sender)
        weight = np.zeros((self.config.shards, len(base)))
        np.add.at(weight, (mine, record.item), 1.0)
        for k in shards:
            some = mine == k
            edges = SharedRecord(record.sender[some], record.item[some], record.time[some])
            residual[k] = self.train_residual(base, edges, int(k), state[_SYNCED])
        weight /= np.maximum(1, weight.sum(0))
        added = np.zeros(base.shape)
        for k in range(self.config.shards):
            added += weight[k][:, None] * residual[k]
        return {**state, _RESIDUAL: residual, _ADDED: added.astype(np.float32)}

    def train_residual(self, base: Floats, edges: SharedRecord, shard: int, synced: Longs) -> Floats:
        """What a shard's people change of the table: a function of their edges, the table and the seed alone."""
        graph = SharedGraph.of(edges, len(base), layers=self.config.layers)
        if not len(graph):
            return np.zeros_like(base)
        draw = self.context.draws.public
        keys = np.array([draw(f"shard-{what}", shard, *synced.tolist()) for what in ("other", "items")])
        return refine_table(graph, base, self._draw_batches(graph, keys), self.config.build_objective()).table - base

    def _draw_batches(self, graph: SharedGraph, keys: Keys) -> Iterator[Batch]:
        """All edges in every step; negatives by each person's own draws."""
        user, liked = list_edges(graph)
        some, shared = np.flatnonzero(count_unshared(graph)[user] > 0), graph.shared_items.astype(np.int64)
        for step in range(self.config.steps):
            other = draw_negatives(graph, keys[0] + np.uint64(step))
            items = choose_distinct(keys[1] + np.uint64(step), len(shared), min(self.config.item_batch, len(shared)))
            yield Batch(user[some], liked[some], other[some], shared[items])

    def assign_shards(self, senders: Keys) -> Longs:
        """By chance, not by what people like: a shard must not say anything of its people."""
        drawn = hash_owners(self.context.draws.public("shards"), senders)
        return (drawn % np.uint64(self.config.shards)).astype(np.int64)

    # what devices score with

    def broadcast(self, server: ServerState) -> Arrays:
        added = server.parts.get(self.name, {}).get(_ADDED)
        return {} if added is None else {"table": server.items + added}

    def serving(self, view: CohortView) -> CohortView:
        table = view.received.get(self.name, {}).get("table")
        return view if table is None else replace(view, items=table)

    # what people ask for

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        kept, taken = server.parts.get(self.name, {}), requests.withdrawn_items
        if requests.kind == "share":
            return self._record_late_sharers(server, requests.senders)
        if taken is None:
            return None
        asking = requests.senders[taken.counts() > 0]
        exact = self._is_exact(kept, requests) and len(asking) > 0
        kept = self._drop_late_sharers(kept, server, requests.senders)
        server = server.with_part(self.name, kept) if kept else server
        said = {"method": self.name, "exact": exact, "edges": len(taken.ids), "rounds": 0, "clients_asked": 0}
        said |= {"storage_server": n_bytes(kept), "storage_client": 0, "purged": []}
        if not len(asking) or _BASE not in kept:
            return server, {**said, "shards": 0}
        shards = np.unique(self.assign_shards(asking))
        server = server.with_part(self.name, self.train_shards(kept, server.shared, shards))
        return server, {**said, "shards": len(shards), "of_shards": self.config.shards, "purged": ["residuals"]}

    def _record_late_sharers(self, server: ServerState, senders: Keys) -> tuple[ServerState, dict[str, Any]] | None:
        """Who shares after devices began to learn may have taught the federated table what they share."""
        if server.round == 0 and server.block == 0:
            return None
        kept = server.parts.get(self.name, {})
        late = np.union1d(kept.get(_LATE, np.zeros(0, np.uint64)), senders)
        return server.with_part(self.name, {**kept, _LATE: late}), {"method": self.name, "late": len(senders)}

    def _drop_late_sharers(self, kept: Arrays, server: ServerState, senders: Keys) -> Arrays:
        """Of who shares nothing any more it is not kept that they shared late."""
        if _LATE not in kept:
            return kept
        gone = np.isin(kept[_LATE], np.setdiff1d(senders, server.shared.sender))
        return {**kept, _LATE: kept[_LATE][~gone]} if gone.any() else kept

    def _is_exact(self, kept: Arrays, requests: RequestBatch) -> bool:
        """Whether all that is to be forgotten was learned here and nowhere else."""
        sharing = self.context.part_options("sharing") or {}
        apart = sharing.get("exclude") == "local" and sharing.get("unshare", "delete") == "delete"
        apart = apart and not sharing.get("still_learn", False)
        late = np.isin(requests.senders, kept.get(_LATE, np.zeros(0, np.uint64))).any()
        # of who forgets or leaves, it does not hear what their devices learned from
        return bool(apart and requests.kind == "unshare" and not late)


def n_bytes(state: Arrays) -> int:
    """What is kept so that a shard can be learned anew: the table it began from, and every shard by itself."""
    return sum(int(state[name].nbytes) for name in (_BASE, _RESIDUAL) if name in state)
