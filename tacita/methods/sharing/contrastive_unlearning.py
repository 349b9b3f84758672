"""contrastive-unlearning: the server forgets what users take back, round by round (sharing spec B.1 to B.9).

After a round on what remains, steps bring every row near to what the remaining graph makes of it, and away from what
the graph of the withdrawn edges made of earlier tables. It is not exact: the certificate says so. What was kept of
earlier rounds still holds what was withdrawn and is dropped at the end.

Three options of ours bring it nearer to retraining. With `rollback` it begins at the oldest table that was kept, and
the rounds since then are played again with their own draws, as retraining plays them. With `reset` rows that stood on
withdrawn edges go back to where rows without any are. With `learns_on` the server goes on learning from what remains.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Bools, Floats, Longs, Ragged, RoundReplay, ServerState, SharedRecord
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
from tacita.methods.sharing.ordinary_rounds import count_forget_rounds
from tacita.methods.sharing.shared_graph_part import (
    NAME,
    SharedGraphConfig,
    purge_learned_state,
    rebuild_learned_graph,
    with_paused_learning,
)
from tacita.methods.sharing.snapshots import TAKEN_AT, count_snapshot_bytes, read_snapshot_tables
from tacita.methods.sharing.update_log import extend_first_table
from tacita.methods.sharing.withdrawn_pairs import WithdrawnPairs
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

FIRST = "first"  # the first table, among what the server keeps
DEFAULT_TAU = 0.2
MIN_COSINE = 0.5  # mean cosine of forgotten items with what devices left, below which a round took too much
_AUC_TOLERANCE = 0.01  # a move of the AUC that counts
_MIN_GAIN = 0.005  # a relative gain of the validation metric that counts


class ContrastiveUnlearningConfig(PartConfig):
    loss: Literal["ref_hinge", "infonce_pos", "printed"] = Field(
        "ref_hinge", description="only what remaining data does not justify is pushed away; softplus; or as printed"
    )
    tau: float = Field(DEFAULT_TAU, gt=0, description="temperature; under ref_hinge only beside keep_bpr")
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
    learns_on: bool = Field(False, description="in every round the server learns from what is still shared, as before")
    reset: float = Field(
        0.0, ge=0, description="rows go back to their start by (withdrawn / shared edges) to this power; 0: no"
    )
    rollback: bool = Field(False, description="begin at the oldest kept table and play the rounds since then again")
    check_every: int = Field(2, ge=1, description="rounds between two looks at whether to stop")

    @property
    def moves_view(self) -> bool:
        if self.glob_grad is None:
            return self.loss != "ref_hinge"
        return self.glob_grad

    @property
    def ignores_tau(self) -> bool:
        """A temperature that only scales the whole loss is undone by Adam."""
        return self.loss == "ref_hinge" and not self.keep_bpr


@register
class ContrastiveUnlearning(Part, Unlearning):
    name = "contrastive-unlearning"
    scope = ("given",)
    replays_rounds = True
    Config: ClassVar[type[PartConfig]] = ContrastiveUnlearningConfig
    config: ContrastiveUnlearningConfig

    def check(self, n_items: int) -> None:
        if self.config.ignores_tau and self.config.tau != DEFAULT_TAU:
            raise TacitaError(
                "part 'contrastive-unlearning': 'tau' changes nothing under loss = 'ref_hinge', whose scale Adam takes "
                "out; leave it away, or set keep_bpr or another loss."
            )

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        withdrawn = build_withdrawn_record(requests.senders, requests.withdrawn_items)
        state = server.parts.get(NAME, {})
        n_bytes_stored = count_snapshot_bytes(state) + self._count_first_bytes(server)
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
        replays: list[RoundReplay] = []
        if self.config.rollback:
            server, replays = _roll_back(server)
            play.require_rounds_left(len(replays))
        if self.config.reset:
            server = server.with_items(self._reset_rows(server, withdrawn))
        server, progress = self._run_forget_rounds(server, forgotten, pairs, play, replays)
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

    def server_block_start(self, server: ServerState) -> Arrays:
        """The first table, where rows are to go back to it."""
        state = server.parts.get(self.name, {})
        if not self.config.reset:
            return state
        return {**state, FIRST: extend_first_table(state.get(FIRST), server.items)}

    def _count_first_bytes(self, server: ServerState) -> int:
        state = server.parts.get(self.name, {})
        return int(state[FIRST].nbytes) if self.config.reset else 0

    def _reset_rows(self, server: ServerState, withdrawn: SharedRecord) -> Floats:
        """The table with rows as near to where they would be without shared edges as their edges were withdrawn.

        That is their first value, moved as the rows that nobody shared have moved since.
        """
        first = server.parts[self.name][FIRST]
        n_items = len(first)
        n_withdrawn = np.bincount(withdrawn.item, minlength=n_items)
        n_remaining = np.bincount(server.shared.item, minlength=n_items)
        share = n_withdrawn / np.maximum(1, n_withdrawn + n_remaining)
        weight = np.where(share > 0, share**self.config.reset, 0.0)
        is_unshared = (n_withdrawn + n_remaining) == 0
        target = first
        if is_unshared.any():
            target = first + (server.items - first)[is_unshared].mean(axis=0)
        items = server.items + weight[:, None] * (target - server.items)
        return items.astype(np.float32)

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
        self,
        server: ServerState,
        forgotten: ForgottenViews,
        pairs: WithdrawnPairs,
        play: RoundPlayer,
        replays: list[RoundReplay],
    ) -> tuple[ServerState, StoppingRule]:
        """Rounds of forgetting until the rule says stop; none of the server's other steps."""
        progress = StoppingRule(self._choose_max_rounds(server, len(replays)))
        draws = self.context.draws
        if not self.config.learns_on:
            server = with_paused_learning(server)
        for turn in range(progress.most):
            if self.config.remaining_rounds:
                replay = replays[turn] if turn < len(replays) else None
                server = play(server, None, replay)
            before = server.items[forgotten.items]
            key = draws.public(self.name, server.block, server.round, turn)
            items = self.run_forget_steps(server, forgotten, key)
            server = server.with_items(items)
            after = server.items[forgotten.items]
            if compute_mean_cosine(after, before) < MIN_COSINE:
                progress.stopped = "over-forgetting"
            elif not replays and (turn + 1) % self.config.check_every == 0:
                valid = play.measure_validation(server)
                pair_key = draws.public(self.name)
                auc = pairs.compute_auc(server.items, pair_key)
                progress.record_check(valid, auc)
            progress.rounds += 1
            if progress.stopped:
                break
        return server, progress

    def _choose_max_rounds(self, server: ServerState, n_replays: int) -> int:
        """After a rollback the rounds since then, unless more are set."""
        if n_replays:
            return max(self.config.rounds or 0, n_replays)
        return count_forget_rounds(self.config.rounds, server)

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
            ranking = GraphLoss(graph, self._build_ranking_objective(), cores)
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

    def _read_learning_config(self) -> SharedGraphConfig:
        """The settings that the server learns with."""
        options = self.context.find_part_options(NAME) or {}
        return SharedGraphConfig(**options)

    def _build_ranking_objective(self) -> GraphObjective:
        """The ranking of learning, on the scale that learning has."""
        learning = self._read_learning_config().build_objective()
        return replace(learning, lam1=0.0, lam=0.0, bpr=True)

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
        edges = self._read_learning_config().edge_batch
        sizes = BatchSizes(edges, items=1, steps=self.config.steps)
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


def _roll_back(server: ServerState) -> tuple[ServerState, list[RoundReplay]]:
    """The server with the oldest table that it kept of the open block, and the rounds since then."""
    state = server.parts[NAME]
    tables = read_snapshot_tables(state, server.items)
    for (block, rounds), table in zip(state.get(TAKEN_AT, []), tables, strict=True):
        if block == server.block and rounds < server.round:
            replays = [RoundReplay(number) for number in range(int(rounds), server.round)]
            return server.with_items(table), replays
    return server, []


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
