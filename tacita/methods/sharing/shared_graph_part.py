"""shared-graph: after every round the server learns from what users shared with it (sharing spec A.7, B.3).

It keeps the last tables as well, where the run may have to unlearn by contrast with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.draws import Draws
from tacita.core.types import Arrays, CohortView, Floats, Keys, ServerState, SharedRecord
from tacita.messages import Total
from tacita.methods.sharing.graph import SharedGraph, UserStart
from tacita.methods.sharing.graph_training import (
    BatchSizes,
    GraphObjective,
    draw_batch_keys,
    draw_batches,
    draw_xavier_rows,
    overwrite_known_rows,
    refine_table,
)
from tacita.methods.sharing.snapshots import (
    TABLES,
    compute_spacing,
    count_snapshot_bytes,
    read_snapshot_tables,
    with_snapshot_added,
    without_snapshots,
)
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.serving import Purpose, Serving

NAME = "shared-graph"
_SENDER = "sender"
_PEOPLE = "people"
_LOSS = "loss"
_PAUSED = "paused"
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


@dataclass(frozen=True)
class SharedGraphTraining:
    """The server's steps on what users shared, as settings and draws: the part runs them, and a replay does."""

    config: SharedGraphConfig
    draws: Draws

    def build_graph(self, server: ServerState) -> SharedGraph:
        n_items = len(server.items)
        config = self.config
        return SharedGraph.from_record(server.shared, n_items, layers=config.layers, start=config.user_start)

    def train_on_shared(self, server: ServerState) -> ServerState:
        """The server after its steps on what is shared; unchanged where there are none."""
        config = self.config
        has_objective = config.bpr or config.lam1
        graph = self.build_graph(server)
        if not len(graph) or config.steps == 0 or not has_objective:
            return server
        keys = draw_batch_keys(self.draws, NAME, server)
        people = self.load_learned_user_rows(server, graph)
        batches = draw_batches(graph, config.build_batch_sizes(), keys)
        objective = config.build_objective()
        refined = refine_table(graph, server.items, batches, objective, people)
        earlier = server.parts.get(NAME, {})
        state = dict(earlier)
        start = _STARTS.index(config.user_start)
        losses = np.array([refined.bpr, refined.cl])
        state[_LOSS] = losses
        shape = np.array([config.layers, start])
        state[_SHAPE] = shape
        if refined.people is not None:
            state[_SENDER] = graph.users
            state[_PEOPLE] = refined.people
        updated = server.with_items(refined.table)
        return updated.with_part(NAME, state)

    def load_learned_user_rows(self, server: ServerState, graph: SharedGraph) -> Floats | None:
        """The users' rows, where these are learned."""
        if self.config.user_start != "learned":
            return None
        return self.load_user_rows(server, graph.users)

    def load_user_rows(self, server: ServerState, users: Keys) -> Floats:
        """The learned rows of some senders; a sender without one starts as a row of Xavier's does."""
        width = server.items.shape[1]
        key = self.draws.public(f"{NAME}-people")
        rows = draw_xavier_rows(key, users, width)
        state = server.parts.get(NAME, {})
        if _SENDER in state:
            known_users = state[_SENDER]
            known_rows = state[_PEOPLE]
            overwrite_known_rows(rows, users, known_users, known_rows)
        return rows


@register
class SharedGraphPart(Part):
    """FedShare's server: positives above negatives along shared edges, and rows that agree with the graph."""

    name = NAME
    serves = frozenset({"view"})
    Config: ClassVar[type[PartConfig]] = SharedGraphConfig
    config: SharedGraphConfig

    @property
    def training(self) -> SharedGraphTraining:
        return SharedGraphTraining(self.config, self.context.draws)

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        shape = (n_items, self.context.backbone.item_width)
        return PartFields(common={"table": ArraySpec(shape, fewer_rows=True)})

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        tables = read_snapshot_tables(state, server.items)
        if not len(tables):
            return state
        return {**state, TABLES: tables}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        state = server.parts.get(self.name, {})
        is_paused = _PAUSED in state
        if is_paused or not len(server.shared):
            return server
        server = self.training.train_on_shared(server)
        rounds = server.round + 1
        if not self._is_snapshot_due(rounds):
            return server
        state = server.parts.get(self.name, {})
        moment = (server.block, rounds)
        most = self.config.snapshots
        state = with_snapshot_added(state, server.items, moment, most)
        return server.with_part(self.name, state)

    def _is_snapshot_due(self, rounds: int) -> bool:
        most = self.config.snapshots
        if not most:
            return False
        block_rounds = self.context.train.rounds
        every = self.config.snapshot_every
        spacing = compute_spacing(every, most, block_rounds)
        return rounds % spacing == 0

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        """What the graph makes of the rows, where devices score with that."""
        if self.config.serve != "glob":
            return PartBroadcast()
        return PartBroadcast({"table": self.compute_smoothed_items(server)})

    def compute_smoothed_items(self, server: ServerState) -> Floats:
        graph = self.training.build_graph(server)
        people = self.training.load_learned_user_rows(server, graph)
        _, items = graph.propagate_and_average(server.items, people)
        return items

    def serve(self, view: CohortView, purpose: Purpose) -> Serving:
        received = view.received.get(self.name, {})
        if "table" not in received:
            return Serving()
        changed = replace(view, items=received["table"])
        return Serving(view=changed)

    def metrics(self, server: ServerState) -> dict[str, float]:
        state = server.parts.get(self.name, {})
        if _LOSS not in state:
            return {}
        bpr, cl = state[_LOSS]
        return {"shared_bpr": float(bpr), "shared_cl": float(cl)}


# what other parts do with it


def rebuild_learned_graph(server: ServerState, record: SharedRecord) -> tuple[SharedGraph, Floats | None] | None:
    """A graph of other edges, built as the one that was learned on, and its users' rows; None: none was."""
    state = server.parts.get(NAME, {})
    if _SHAPE not in state:
        return None
    layers, start = state[_SHAPE].tolist()
    n_items = len(server.items)
    user_start = _STARTS[start]
    graph = SharedGraph.from_record(record, n_items, layers=layers, start=user_start)
    if graph.start != "learned":
        return graph, None
    width = server.items.shape[1]
    shape = (len(graph.users), width)
    people = np.zeros(shape, np.float32)
    senders = state[_SENDER]
    if len(senders):
        position = np.searchsorted(senders, graph.users)
        last = len(senders) - 1
        place = np.minimum(position, last)
        is_known = senders[place] == graph.users
        known = place[is_known]
        known_rows = state[_PEOPLE][known]
        people[is_known] = known_rows
    return graph, people


def with_paused_learning(server: ServerState) -> ServerState:
    """The server without steps of its own on what is shared, until `purge_learned_state`."""
    state = server.parts.get(NAME, {})
    paused = np.ones(1, bool)
    return server.with_part(NAME, {**state, _PAUSED: paused})


def purge_learned_state(server: ServerState, senders: Keys) -> tuple[ServerState, list[str]]:
    """The server without the kept tables and some senders' learned rows, and the names of what was dropped."""
    state = server.parts.get(NAME, {})
    purged = []
    if count_snapshot_bytes(state):
        purged.append("snapshots")
    remaining = without_snapshots(state)
    remaining.pop(_LOSS, None)
    remaining.pop(_PAUSED, None)
    if _SENDER in remaining:
        known = remaining[_SENDER]
        is_sender = np.isin(known, senders)
        if is_sender.any():
            known_senders = remaining[_SENDER]
            known_rows = remaining[_PEOPLE]
            remaining[_SENDER] = known_senders[~is_sender]
            remaining[_PEOPLE] = known_rows[~is_sender]
            purged.append("learned_rows")
    return server.with_part(NAME, remaining), purged
