"""shared-graph: after every round the server learns from what people shared with it (sharing spec A.7, B.3).

It keeps the last tables as well, where the run may have to unlearn by contrast with them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Keys, ServerState, SharedRecord
from tacita.kernels.hashing import uniforms
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph, UserStart
from tacita.methods.sharing.graph_training import BatchSizes, GraphObjective, draw_batches, refine_table
from tacita.methods.sharing.snapshots import (
    TABLES,
    append_table,
    compute_spacing,
    drop_tables,
    load_tables,
    snapshot_bytes,
)
from tacita.round.parts import Part, PartConfig
from tacita.round.registry import register

NAME = "shared-graph"
_SENDER, _PEOPLE, _LOSS, _PAUSED = "sender", "people", "loss", "paused"
_SHAPE = "shape"
_STARTS: tuple[UserStart, ...] = ("mean", "zero", "learned")


class LearningConfig(PartConfig):
    """What the server's steps minimise, and how many of them there are."""

    tau: float = Field(0.2, gt=0, description="temperature of the agreement of rows with the graph")
    lam1: float = Field(0.3, ge=0, description="weight of that agreement; 0: without")
    bpr: bool = Field(True, description="learn to rank what people shared above what they did not")
    bpr_scale: float = Field(1.0, gt=0, description="factor on the difference of cosines")
    lam: float = Field(1e-4, ge=0, description="weight of the squared rows of a batch, over its size")
    lr: float = Field(1e-3, gt=0, description="learning rate of Adam, which starts afresh in every round")
    cl_grad: Literal["both", "anchor"] = Field(
        "both", description="both views move, or the rows agree with the table as devices left it"
    )
    edge_batch: int = Field(8192, ge=1, description="shared interactions in a step")
    item_batch: int = Field(1024, ge=1, description="shared items in a step, for the agreement")
    steps: int | None = Field(None, ge=0, description="steps in a round; default: one pass over what is shared")
    layers: int = Field(3, ge=0, description="how often vectors pass along the graph")

    def build_objective(self) -> GraphObjective:
        return GraphObjective(self.tau, self.lam1, self.lam, self.lr, self.bpr, self.bpr_scale, self.cl_grad)

    def build_batch_sizes(self) -> BatchSizes:
        return BatchSizes(self.edge_batch, self.item_batch, self.steps)


class SharedGraphConfig(LearningConfig):
    user_start: Literal["mean", "zero", "learned"] = Field(
        "mean", description="what a person's vector starts from: the mean of the items' rows, zeros, a row of its own"
    )
    serve: Literal["rows", "glob"] = Field(
        "rows", description="what devices score with: the item rows, or what the graph makes of them"
    )
    snapshots: int = Field(5, ge=0, description="last tables that are kept for unlearning (M)")
    snapshot_every: int = Field(1, ge=0, description="rounds between two of them; 0: spread over a block")


@register
class SharedGraphPart(Part):
    """FedShare's server: positives above negatives along shared edges, and rows that agree with the graph."""

    name = NAME
    Config: ClassVar[type[PartConfig]] = SharedGraphConfig
    config: SharedGraphConfig

    def build_graph(self, server: ServerState) -> SharedGraph:
        return SharedGraph.of(server.shared, len(server.items), layers=self.config.layers, start=self.config.user_start)

    def server_begin_block(self, server: ServerState) -> Arrays:
        kept = server.parts.get(self.name, {})
        tables = load_tables(kept, server.items)
        return {**kept, TABLES: tables} if len(tables) else kept

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not len(server.shared) or _PAUSED in server.parts.get(self.name, {}):
            return server
        server = self.train_on_shared(server)
        most, done = self.config.snapshots, server.round + 1
        if most and done % compute_spacing(self.config.snapshot_every, most, self.context.train.rounds) == 0:
            kept = server.parts.get(self.name, {})
            server = server.with_part(self.name, append_table(kept, server.items, (server.block, done), most))
        return server

    def train_on_shared(self, server: ServerState) -> ServerState:
        """The server after its steps on what is shared; unchanged where there are none."""
        graph = self.build_graph(server)
        if not len(graph) or self.config.steps == 0 or not (self.config.bpr or self.config.lam1):
            return server
        draw = self.context.draws.public
        keys = np.array([draw(f"{NAME}-{what}", server.block, server.round) for what in ("order", "other", "items")])
        people = self.load_user_rows(server, graph.users) if self.config.user_start == "learned" else None
        batches = draw_batches(graph, self.config.build_batch_sizes(), keys)
        made = refine_table(graph, server.items, batches, self.config.build_objective(), people)
        kept = {**server.parts.get(self.name, {}), _LOSS: np.array([made.bpr, made.cl])}
        kept[_SHAPE] = np.array([self.config.layers, _STARTS.index(self.config.user_start)])
        if made.people is not None:
            kept |= {_SENDER: graph.users, _PEOPLE: made.people}
        return server.with_items(made.table).with_part(self.name, kept)

    def load_user_rows(self, server: ServerState, users: Keys) -> Floats:
        """The learned rows of some senders; who has none yet starts as a row of Xavier's does."""
        dim = server.items.shape[1]
        key, bound = self.context.draws.public(f"{NAME}-people"), math.sqrt(6 / (1 + dim))
        rows = (bound * (2 * uniforms(key, users, dim) - 1)).astype(np.float32)
        kept = server.parts.get(self.name, {})
        if _SENDER in kept:
            _, mine, theirs = np.intersect1d(users, kept[_SENDER], assume_unique=True, return_indices=True)
            rows[mine] = kept[_PEOPLE][theirs]
        return rows

    def broadcast(self, server: ServerState) -> Arrays:
        """What the graph makes of the rows, where devices score with that."""
        return {"table": self.smooth_items(server)} if self.config.serve == "glob" else {}

    def smooth_items(self, server: ServerState) -> Floats:
        graph = self.build_graph(server)
        people = self.load_user_rows(server, graph.users) if self.config.user_start == "learned" else None
        return graph.smooth(server.items, people)[1]

    def serving(self, view: CohortView) -> CohortView:
        table = view.received.get(self.name, {}).get("table")
        return view if table is None else replace(view, items=table)

    def server_notes(self, server: ServerState) -> dict[str, float]:
        kept = server.parts.get(self.name, {})
        if _LOSS not in kept:
            return {}
        return {"shared_bpr": float(kept[_LOSS][0]), "shared_cl": float(kept[_LOSS][1])}


# what other parts do with it


def rebuild_graph(server: ServerState, record: SharedRecord) -> tuple[SharedGraph, Floats | None] | None:
    """A graph of other edges, built as the one that was learned on, and its people's rows; None: none was."""
    kept = server.parts.get(NAME, {})
    if _SHAPE not in kept:
        return None
    layers, start = (int(one) for one in kept[_SHAPE])
    graph = SharedGraph.of(record, len(server.items), layers=layers, start=_STARTS[start])
    if graph.start != "learned":
        return graph, None
    at = np.minimum(np.searchsorted(kept[_SENDER], graph.users), max(0, len(kept[_SENDER]) - 1))
    known = kept[_SENDER][at] == graph.users if len(kept[_SENDER]) else np.zeros(len(at), bool)
    people = np.zeros((len(at), server.items.shape[1]), np.float32)
    people[known] = kept[_PEOPLE][at[known]]
    return graph, people


def pause_learning(server: ServerState) -> ServerState:
    """The server as it would be without steps of its own on what is shared, until `purged`."""
    return server.with_part(NAME, {**server.parts.get(NAME, {}), _PAUSED: np.ones(1, bool)})


def purge_learned_state(server: ServerState, senders: Keys) -> tuple[ServerState, list[str]]:
    """Without the tables that were kept and without some senders' learned rows; says what was there."""
    kept = server.parts.get(NAME, {})
    left = {name: v for name, v in drop_tables(kept).items() if name not in (_LOSS, _PAUSED)}
    said = ["snapshots"] if snapshot_bytes(kept) else []
    if _SENDER in left and np.isin(left[_SENDER], senders).any():
        stays = ~np.isin(left[_SENDER], senders)
        left |= {_SENDER: left[_SENDER][stays], _PEOPLE: left[_PEOPLE][stays]}
        said.append("learned_rows")
    return server.with_part(NAME, left), said
