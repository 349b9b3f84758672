"""shared-graph: after every round the server learns from what people shared with it (sharing spec A.7, B.3).

It keeps the last tables as well, where the run may have to unlearn by contrast with them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, CohortView, Floats, Given, Keys, ServerState
from tacita.fields import Total
from tacita.kernels.hashing import uniforms
from tacita.methods.sharing.graph import SharedGraph, Start
from tacita.methods.sharing.refining import Aims, Sizes, batches_of, refine
from tacita.methods.sharing.snapshots import TABLES, n_bytes, spacing, tables_of, with_table, without_tables
from tacita.round.parts import Part, PartConfig, register

NAME = "shared-graph"
_SENDER, _PEOPLE, _LOSS, _PAUSED = "sender", "people", "loss", "paused"
_SHAPE = "shape"
_STARTS: tuple[Start, ...] = ("mean", "zero", "learned")


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

    def aims(self) -> Aims:
        return Aims(self.tau, self.lam1, self.lam, self.lr, self.bpr, self.bpr_scale, self.cl_grad)

    def sizes(self) -> Sizes:
        return Sizes(self.edge_batch, self.item_batch, self.steps)


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

    def graph(self, server: ServerState) -> SharedGraph:
        return SharedGraph.of(server.given, len(server.items), layers=self.config.layers, start=self.config.user_start)

    def server_begin_block(self, server: ServerState) -> Arrays:
        kept = server.parts.get(self.name, {})
        tables = tables_of(kept, server.items)
        return {**kept, TABLES: tables} if len(tables) else kept

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        if not len(server.given) or _PAUSED in server.parts.get(self.name, {}):
            return server
        server = self.learned(server)
        most, done = self.config.snapshots, server.round + 1
        if most and done % spacing(self.config.snapshot_every, most, self.world.train.rounds) == 0:
            kept = server.parts.get(self.name, {})
            server = server.with_part(self.name, with_table(kept, server.items, (server.block, done), most))
        return server

    def learned(self, server: ServerState) -> ServerState:
        """The server after its steps on what is shared; unchanged where there are none."""
        graph = self.graph(server)
        if not len(graph) or self.config.steps == 0 or not (self.config.bpr or self.config.lam1):
            return server
        draw = self.world.draws.public
        keys = np.array([draw(f"{NAME}-{what}", server.block, server.round) for what in ("order", "other", "items")])
        people = self.people(server, graph.users) if self.config.user_start == "learned" else None
        batches = batches_of(graph, self.config.sizes(), keys)
        made = refine(graph, server.items, batches, self.config.aims(), people)
        kept = {**server.parts.get(self.name, {}), _LOSS: np.array([made.bpr, made.cl])}
        kept[_SHAPE] = np.array([self.config.layers, _STARTS.index(self.config.user_start)])
        if made.people is not None:
            kept |= {_SENDER: graph.users, _PEOPLE: made.people}
        return server.with_items(made.table).with_part(self.name, kept)

    def people(self, server: ServerState, users: Keys) -> Floats:
        """The learned rows of some senders; who has none yet starts as a row of Xavier's does."""
        dim = server.items.shape[1]
        key, bound = self.world.draws.public(f"{NAME}-people"), math.sqrt(6 / (1 + dim))
        rows = (bound * (2 * uniforms(key, users, dim) - 1)).astype(np.float32)
        kept = server.parts.get(self.name, {})
        if _SENDER in kept:
            _, mine, theirs = np.intersect1d(users, kept[_SENDER], assume_unique=True, return_indices=True)
            rows[mine] = kept[_PEOPLE][theirs]
        return rows

    def broadcast(self, server: ServerState) -> Arrays:
        """What the graph makes of the rows, where devices score with that."""
        return {"table": self.smoothed(server)} if self.config.serve == "glob" else {}

    def smoothed(self, server: ServerState) -> Floats:
        graph = self.graph(server)
        people = self.people(server, graph.users) if self.config.user_start == "learned" else None
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


def graph_like(server: ServerState, given: Given) -> tuple[SharedGraph, Floats | None] | None:
    """A graph of other edges, built as the one that was learned on, and its people's rows; None: none was."""
    kept = server.parts.get(NAME, {})
    if _SHAPE not in kept:
        return None
    layers, start = (int(one) for one in kept[_SHAPE])
    graph = SharedGraph.of(given, len(server.items), layers=layers, start=_STARTS[start])
    if graph.start != "learned":
        return graph, None
    at = np.minimum(np.searchsorted(kept[_SENDER], graph.users), max(0, len(kept[_SENDER]) - 1))
    known = kept[_SENDER][at] == graph.users if len(kept[_SENDER]) else np.zeros(len(at), bool)
    people = np.zeros((len(at), server.items.shape[1]), np.float32)
    people[known] = kept[_PEOPLE][at[known]]
    return graph, people


def paused(server: ServerState) -> ServerState:
    """The server as it would be without steps of its own on what is shared, until `purged`."""
    return server.with_part(NAME, {**server.parts.get(NAME, {}), _PAUSED: np.ones(1, bool)})


def purged(server: ServerState, senders: Keys) -> tuple[ServerState, list[str]]:
    """Without the tables that were kept and without some senders' learned rows; says what was there."""
    kept = server.parts.get(NAME, {})
    left = {name: v for name, v in without_tables(kept).items() if name not in (_LOSS, _PAUSED)}
    said = ["snapshots"] if n_bytes(kept) else []
    if _SENDER in left and np.isin(left[_SENDER], senders).any():
        stays = ~np.isin(left[_SENDER], senders)
        left |= {_SENDER: left[_SENDER][stays], _PEOPLE: left[_PEOPLE][stays]}
        said.append("learned_rows")
    return server.with_part(NAME, left), said
