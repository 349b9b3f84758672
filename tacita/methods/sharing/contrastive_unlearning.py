"""contrastive-unlearning: the server forgets what people take back, round by round (sharing spec B.1 to B.9).

A round on what remains, then steps that bring every row near to what the remaining graph makes of it and away from
what the graph of the withdrawn edges made of earlier tables. It is not exact: the certificate says so. What was kept
of earlier rounds still holds what was withdrawn and is dropped at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import AnyArray, Floats, Longs, Ragged, ServerState, SharedRecord
from tacita.kernels.threads import limit_blas_threads, threads_in_use
from tacita.methods.sharing.contrastive_loss import ContrastiveLoss, ForgottenViews, estimate_background
from tacita.methods.sharing.graph import SharedGraph
from tacita.methods.sharing.graph_training import (
    AdamTable,
    Batch,
    BatchSizes,
    GraphLoss,
    GraphObjective,
    UnitRows,
    draw_batches,
)
from tacita.methods.sharing.shared_graph_part import NAME, pause_learning, purge_learned_state, rebuild_graph
from tacita.methods.sharing.snapshots import load_tables, snapshot_bytes
from tacita.methods.sharing.withdrawn_pairs import WithdrawnPairs
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register
from tacita.round.request import RequestBatch

MIN_COSINE = 0.5  # mean cosine of forgotten items with what devices left, below which a round took too much
_AUC_TOLERANCE, _MIN_GAIN = 0.01, 0.005  # a move of the AUC, and a relative gain of the validation metric, that count


class UnlearningConfig(PartConfig):
    loss: Literal["ref_hinge", "infonce_pos", "printed"] = Field(
        "ref_hinge", description="only what remaining data does not justify is pushed away; softplus; or as printed"
    )
    tau: float = Field(0.2, gt=0, description="temperature")
    mu: float = Field(1.0, ge=0, description="weight of pushing away, for ref_hinge")
    rounds: int | None = Field(None, ge=0, description="most rounds; default: a tenth of those that led to the model")
    steps: int = Field(20, ge=0, description="steps in a round, each on all shared and forgotten items")
    lr: float = Field(1e-3, gt=0, description="learning rate of Adam, which starts afresh in every round")
    clip: float = Field(1.0, gt=0, description="the length that a step's slope has at most")
    glob_grad: bool | None = Field(None, description="the graph's view moves as well; default: not for ref_hinge")
    keep_bpr: bool = Field(False, description="also learn to rank what is still shared, as in learning")
    forgotten: Literal["graph", "rows"] = Field(
        "graph", description="what to get away from: what the forgotten graph makes of earlier tables, or their rows"
    )
    remaining_rounds: bool = Field(True, description="devices take part; false: the server works by itself")
    check_every: int = Field(2, ge=1, description="rounds between two looks at whether to stop")

    @property
    def moves_view(self) -> bool:
        return self.loss != "ref_hinge" if self.glob_grad is None else self.glob_grad


@register
class ContrastiveUnlearning(Part):
    name = "contrastive-unlearning"
    takes_back = ("given",)
    plays_again = True
    Config: ClassVar[type[PartConfig]] = UnlearningConfig
    config: UnlearningConfig

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        gone = build_withdrawn_record(requests.senders, requests.withdrawn_items)
        storage = snapshot_bytes(server.parts.get(NAME, {}))
        said = {"method": self.name, "exact": False, "edges": len(gone), "storage_server": storage, "storage_client": 0}
        found = rebuild_graph(server, gone)
        if not len(gone) or found is None:  # nothing was withdrawn, or nothing was ever learned from it
            return server, {**said, "purged": [], "stopped": "nothing to forget"}
        tables = load_tables(server.parts[NAME], server.items)
        tables = tables if len(tables) else server.items[None]
        forgotten = ForgottenViews.of(*found[:1], tables, found[1], self.config.forgotten == "graph")
        server, watched = self._run_rounds(
            server, forgotten, WithdrawnPairs.of(gone, server.shared, len(server.items)), play
        )
        server, purge = purge_learned_state(server, requests.senders)
        return server, {
            **said, "items": len(forgotten.items), "tables": len(tables), "loss": self.config.loss,
            "purged": purge, **watched.build_summary(),
        }  # fmt: skip

    def _run_rounds(
        self, server: ServerState, forgotten: ForgottenViews, pairs: WithdrawnPairs, play: RoundPlayer
    ) -> tuple[ServerState, StoppingRule]:
        """Rounds of forgetting until the rule says stop; none of the server's other steps."""
        most = self.config.rounds
        watched = StoppingRule(max(1, math.ceil(0.1 * server.round)) if most is None else most)
        server = pause_learning(server)
        for turn in range(watched.most):
            if self.config.remaining_rounds:
                server = play(server, None)
            local, key = server.items, self.context.draws.public(self.name, server.block, server.round, turn)
            server = server.with_items(self.run_forget_steps(server, forgotten, key))
            near = mean_cosine(server.items[forgotten.items], local[forgotten.items])
            if near < MIN_COSINE:
                watched.stopped = "over-forgetting"
            elif (turn + 1) % self.config.check_every == 0:
                watched.record_check(
                    play.validate(server), pairs.auc(server.items, self.context.draws.public(self.name))
                )
            watched.rounds += 1
            if watched.stopped:
                break
        return server, watched

    def run_forget_steps(self, server: ServerState, forgotten: ForgottenViews, key: np.uint64) -> Floats:
        """The table after the steps of one round, from the table as devices left it."""
        found = rebuild_graph(server, server.shared)
        assert found is not None
        graph, people = found
        shared = graph.shared_items.astype(np.int64)
        items = np.union1d(shared, forgotten.items)
        lonely = ~np.isin(items, shared)
        where = np.searchsorted(items, forgotten.items)
        reference = estimate_background(server.items, forgotten, lonely[where], key)
        adam = AdamTable(server.items, self.config.lr)
        with limit_blas_threads(), ThreadPoolExecutor(threads_in_use()) as cores:
            one = self.config
            contrast = ContrastiveLoss(one.loss, one.tau, one.mu, items, forgotten, where, reference, cores)
            walk = ContrastiveDescent(
                graph, people, contrast, lonely, UnitRows.of(server.items).rows[items[lonely]], one.moves_view
            )
            descent = GraphLoss(graph, GraphObjective(lam1=0.0, lam=0.0), cores)
            batches = self._draw_batches(graph, key)
            for step in range(one.steps):
                slope = walk.compute_gradient(adam.table, key + np.uint64(step))
                if one.keep_bpr and len(graph):
                    slope += descent.compute_gradients(adam.table, next(batches), people).table
                length = float(np.linalg.norm(slope))
                adam.step(slope * np.float32(min(1.0, one.clip / max(length, 1e-12))))
        return adam.table

    def _draw_batches(self, graph: SharedGraph, key: np.uint64) -> Iterator[Batch]:
        keys = key + np.array([1, 2, 3], np.uint64) * np.uint64(1 << 32)
        return draw_batches(graph, BatchSizes(items=1, steps=self.config.steps), keys)


@dataclass(frozen=True)
class ContrastiveDescent:
    """Slopes of the contrast in the whole table."""

    graph: SharedGraph
    people: Floats | None
    contrast: ContrastiveLoss
    lonely: AnyArray  # (items,) which have no remaining view: their own row, as devices left it, stands for it
    anchor: Floats
    moves_view: bool

    def compute_gradient(self, table: Floats, key: np.uint64) -> Floats:
        items = self.contrast.items
        rows, view = UnitRows.of(table), UnitRows.of(self.graph.smooth(table, self.people)[1])
        made = view.rows[items]
        made[self.lonely] = self.anchor
        pull = self.contrast.compute_gradients(rows.rows[items], made, key)
        slope = rows.backpropagate(_scatter_rows(pull.row_gradient, items, table))
        if self.moves_view and not self.lonely.all():
            pull.view_gradient[self.lonely] = 0
            nobody = np.zeros((len(self.graph.users), table.shape[1]), np.float32)
            slope += self.graph.backpropagate_table(
                nobody, view.backpropagate(_scatter_rows(pull.view_gradient, items, table))
            )
        return slope


def _scatter_rows(rows: Floats, items: Longs, table: Floats) -> Floats:
    out = np.zeros_like(table)
    out[items] = rows
    return out


@dataclass
class StoppingRule:
    """How forgetting goes on, and when it is enough (B.7)."""

    most: int
    rounds: int = 0
    stopped: str = ""
    valid: list[float | None] = field(default_factory=list)
    auc: list[float | None] = field(default_factory=list)
    calm: int = 0  # looks in a row in which nothing more was gained

    def record_check(self, valid: float | None, auc: float | None) -> None:
        """Enough: validation gains nothing and the withdrawn pairs stay where they are, twice in a row."""
        self.valid.append(valid)
        self.auc.append(auc)
        best = max((v for v in self.valid[:-1] if v is not None), default=None)
        gained = valid is not None and (best is None or valid > (1 + _MIN_GAIN) * best)
        still = len(self.auc) > 2 and (auc is None or abs(auc - (self.auc[-3] or 0.0)) <= _AUC_TOLERANCE)
        self.calm = self.calm + 1 if still and not gained else 0
        if self.calm == 2:
            self.stopped = "settled"

    def build_summary(self) -> dict[str, Any]:
        return {"turns": self.rounds, "stopped": self.stopped or "at most", "valid": self.valid, "pair_auc": self.auc}


def build_withdrawn_record(senders: AnyArray, taken: Ragged) -> SharedRecord:
    """The edges that go, as a record of their own."""
    return SharedRecord(np.repeat(senders, taken.counts()), taken.ids, np.zeros(len(taken.ids)))


def mean_cosine(first: Floats, second: Floats) -> float:
    a, b = UnitRows.of(np.ascontiguousarray(first)).rows, UnitRows.of(np.ascontiguousarray(second)).rows
    return float((a * b).sum(1).mean()) if len(a) else 1.0
