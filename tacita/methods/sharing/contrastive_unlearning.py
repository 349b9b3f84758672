"""contrastive-unlearning: the server forgets what users take back, round by round (sharing spec B.1 to B.9).

After a round on what remains, steps bring every row near to what the remaining graph makes of it, and away from what
the graph of the withdrawn edges made of earlier tables. It is not exact: the certificate says so. What was kept of
earlier rounds still holds what was withdrawn and is dropped at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.types import AnyArray, Bools, Floats, Longs, Ragged, ServerState, SharedRecord
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
from tacita.methods.sharing.shared_graph_part import (
    NAME,
    purge_learned_state,
    rebuild_learned_graph,
    with_paused_learning,
)
from tacita.methods.sharing.snapshots import count_snapshot_bytes, read_snapshot_tables
from tacita.methods.sharing.withdrawn_pairs import WithdrawnPairs
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

MIN_COSINE = 0.5  # mean cosine of forgotten items with what devices left, below which a round took too much
_AUC_TOLERANCE = 0.01  # a move of the AUC that counts
_MIN_GAIN = 0.005  # a relative gain of the validation metric that counts


class ContrastiveUnlearningConfig(PartConfig):
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
        if self.glob_grad is None:
            return self.loss != "ref_hinge"
        return self.glob_grad


@register
class ContrastiveUnlearning(Part, Unlearning):
    name = "contrastive-unlearning"
    scope = ("given",)
    replays_rounds = True
    Config: ClassVar[type[PartConfig]] = ContrastiveUnlearningConfig
    config: ContrastiveUnlearningConfig

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        withdrawn = build_withdrawn_record(requests.senders, requests.withdrawn_items)
        state = server.parts.get(NAME, {})
        n_bytes_stored = count_snapshot_bytes(state)
        forgotten_graph = rebuild_learned_graph(server, withdrawn)
        if forgotten_graph is None or not len(withdrawn):  # nothing was withdrawn, or learned from it
            idle = {"edges": len(withdrawn), "stopped": "nothing to forget"}
            report = self._build_report(n_bytes_stored, [], idle)
            return server, report
        graph, people = forgotten_graph
        state = server.parts[NAME]
        tables = read_snapshot_tables(state, server.items)
        if not len(tables):
            tables = server.items[None]
        through_graph = self.config.forgotten == "graph"
        forgotten = ForgottenViews.compute(graph, tables, people, through_graph)
        n_items = len(server.items)
        pairs = WithdrawnPairs.from_record(withdrawn, server.shared, n_items)
        server, progress = self._run_forget_rounds(server, forgotten, pairs, play)
        server, purged = purge_learned_state(server, requests.senders)
        details = {
            "edges": len(withdrawn),
            "items": len(forgotten.items),
            "tables": len(tables),
            "loss": self.config.loss,
            **progress.build_summary(),
        }
        report = self._build_report(n_bytes_stored, purged, details)
        return server, report

    def _build_report(self, storage_server: float, purged: list[str], details: dict[str, Any]) -> UnlearningReport:
        return UnlearningReport(
            method=self.name,
            exact=False,
            storage_server=storage_server,
            storage_client=0,
            purged=tuple(purged),
            details=details,
        )

    def _run_forget_rounds(
        self, server: ServerState, forgotten: ForgottenViews, pairs: WithdrawnPairs, play: RoundPlayer
    ) -> tuple[ServerState, StoppingRule]:
        """Rounds of forgetting until the rule says stop; none of the server's other steps."""
        progress = StoppingRule(self._choose_max_rounds(server))
        draws = self.context.draws
        server = with_paused_learning(server)
        for turn in range(progress.most):
            if self.config.remaining_rounds:
                server = play(server, None)
            before = server.items[forgotten.items]
            key = draws.public(self.name, server.block, server.round, turn)
            items = self.run_forget_steps(server, forgotten, key)
            server = server.with_items(items)
            after = server.items[forgotten.items]
            if compute_mean_cosine(after, before) < MIN_COSINE:
                progress.stopped = "over-forgetting"
            elif (turn + 1) % self.config.check_every == 0:
                valid = play.measure_validation(server)
                pair_key = draws.public(self.name)
                auc = pairs.compute_auc(server.items, pair_key)
                progress.record_check(valid, auc)
            progress.rounds += 1
            if progress.stopped:
                break
        return server, progress

    def _choose_max_rounds(self, server: ServerState) -> int:
        if self.config.rounds is not None:
            return self.config.rounds
        tenth = math.ceil(0.1 * server.round)
        return max(1, tenth)

    def run_forget_steps(self, server: ServerState, forgotten: ForgottenViews, key: np.uint64) -> Floats:
        """The table after the steps of one round, from the table as devices left it."""
        config = self.config
        remaining_graph = rebuild_learned_graph(server, server.shared)
        assert remaining_graph is not None
        graph, people = remaining_graph
        adam = AdamTable(server.items, config.lr)
        batches = self._draw_batches(graph, key)
        with ThreadPoolExecutor(threads_in_use()) as cores:
            contrast = self._build_descent(server.items, graph, people, forgotten, cores, key)
            objective = GraphObjective(lam1=0.0, lam=0.0)
            ranking = GraphLoss(graph, objective, cores)
            with limit_blas_threads():
                for step in range(config.steps):
                    step_key = key + np.uint64(step)
                    gradient = contrast.compute_gradient(adam.table, step_key)
                    if config.keep_bpr and len(graph):
                        batch = next(batches)
                        slopes = ranking.compute_gradients(adam.table, batch, people)
                        gradient += slopes.table
                    adam.take_step(_clip_gradient(gradient, config.clip))
        return adam.table

    def _build_descent(
        self,
        table: Floats,
        graph: SharedGraph,
        people: Floats | None,
        forgotten: ForgottenViews,
        cores: ThreadPoolExecutor,
        key: np.uint64,
    ) -> ContrastiveDescent:
        """The loss of one round on a table as devices left it."""
        config = self.config
        shared_items = graph.shared_items.astype(np.int64)
        items = np.union1d(shared_items, forgotten.items)
        is_lonely = ~np.isin(items, shared_items)
        where = np.searchsorted(items, forgotten.items)
        is_lonely_item = is_lonely[where]
        reference = estimate_background(table, forgotten, is_lonely_item, key)
        loss = ContrastiveLoss(config.loss, config.tau, config.mu, items, forgotten, where, reference, cores)
        lonely_items = items[is_lonely]
        unit_rows = UnitRows.normalise(table).rows
        anchor = unit_rows[lonely_items]
        return ContrastiveDescent(graph, people, loss, is_lonely, anchor, config.moves_view)

    def _draw_batches(self, graph: SharedGraph, key: np.uint64) -> Iterator[Batch]:
        numbers = np.array([1, 2, 3], np.uint64)
        stride = np.uint64(1 << 32)
        offsets = numbers * stride
        keys = key + offsets
        sizes = BatchSizes(items=1, steps=self.config.steps)
        return draw_batches(graph, sizes, keys)


@dataclass(frozen=True)
class ContrastiveDescent:
    """Gradients of the contrast in the whole table."""

    graph: SharedGraph
    people: Floats | None
    contrast: ContrastiveLoss
    lonely: Bools  # (items,) without a remaining view: their own row, as devices left it, stands for it
    anchor: Floats
    moves_view: bool

    def compute_gradient(self, table: Floats, key: np.uint64) -> Floats:
        items = self.contrast.items
        _, smoothed = self.graph.propagate_and_average(table, self.people)
        rows = UnitRows.normalise(table)
        views = UnitRows.normalise(smoothed)
        remaining_views = views.rows[items]
        remaining_views[self.lonely] = self.anchor
        own_rows = rows.rows[items]
        gradients = self.contrast.compute_gradients(own_rows, remaining_views, key)
        row_gradient = _scatter_rows(gradients.row_gradient, items, table)
        gradient = rows.backpropagate(row_gradient)
        if not self.moves_view or self.lonely.all():
            return gradient
        gradients.view_gradient[self.lonely] = 0
        view_gradient = _scatter_rows(gradients.view_gradient, items, table)
        item_gradient = views.backpropagate(view_gradient)
        n_users = len(self.graph.users)
        width = table.shape[1]
        user_shape = (n_users, width)
        user_gradient = np.zeros(user_shape, np.float32)
        gradient += self.graph.backpropagate_table(user_gradient, item_gradient)
        return gradient


def _clip_gradient(gradient: Floats, longest: float) -> Floats:
    length = float(np.linalg.norm(gradient))
    shortening = longest / max(length, 1e-12)
    factor = min(1.0, shortening)
    return gradient * np.float32(factor)


def _scatter_rows(rows: Floats, items: Longs, table: Floats) -> Floats:
    scattered = np.zeros_like(table)
    scattered[items] = rows
    return scattered


@dataclass
class StoppingRule:
    """How forgetting goes on, and when it is enough (B.7)."""

    most: int
    rounds: int = 0
    stopped: str = ""
    valid: list[float | None] = field(default_factory=list)
    auc: list[float | None] = field(default_factory=list)
    calm: int = 0  # checks in a row in which nothing more was gained

    def record_check(self, valid: float | None, auc: float | None) -> None:
        """Enough: validation gains nothing and the withdrawn pairs stay where they are, twice in a row."""
        has_gained = self._has_gained(valid)
        self.valid.append(valid)
        self.auc.append(auc)
        if has_gained or not self._is_steady(auc):
            self.calm = 0
            return
        self.calm += 1
        if self.calm == 2:
            self.stopped = "settled"

    def _has_gained(self, valid: float | None) -> bool:
        if valid is None:
            return False
        earlier = [score for score in self.valid if score is not None]
        if not earlier:
            return True
        least = (1 + _MIN_GAIN) * max(earlier)
        return valid > least

    def _is_steady(self, auc: float | None) -> bool:
        """Whether the AUC moved little since two checks ago."""
        if len(self.auc) <= 2:
            return False
        if auc is None:
            return True
        earlier = self.auc[-3] or 0.0
        return abs(auc - earlier) <= _AUC_TOLERANCE

    def build_summary(self) -> dict[str, Any]:
        stopped = self.stopped or "at most"
        return {"turns": self.rounds, "stopped": stopped, "valid": self.valid, "pair_auc": self.auc}


def build_withdrawn_record(senders: AnyArray, withdrawn: Ragged) -> SharedRecord:
    """The withdrawn edges, as a record of their own."""
    sender = np.repeat(senders, withdrawn.counts())
    time = np.zeros(len(withdrawn.ids))
    return SharedRecord(sender, withdrawn.ids, time)


def compute_mean_cosine(first: Floats, second: Floats) -> float:
    if not len(first):
        return 1.0
    first_array = np.ascontiguousarray(first)
    first_rows = UnitRows.normalise(first_array).rows
    second_array = np.ascontiguousarray(second)
    second_rows = UnitRows.normalise(second_array).rows
    cosines = (first_rows * second_rows).sum(1)
    return float(cosines.mean())
