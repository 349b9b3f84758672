"""delta-replay: unlearn without devices, by repeating the run on what is still shared (sharing spec D.1).

The server records how far devices moved the table in every round, summed over all of them. So it can repeat the whole
run from its first table: the same moves, and its own steps on what remains. What was withdrawn is in no step of its own
any more. Devices that had seen it made the moves, so this is not exact. The record is then that of the repeated run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Floats, ServerState, SharedRecord
from tacita.messages import Total
from tacita.methods.sharing.contrastive_unlearning import build_withdrawn_record
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.methods.sharing.shared_graph_part import SharedGraphConfig, SharedGraphTraining, purge_learned_state
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

_START = "start"
_MOVES = "moves"
_OPEN = "open"
_ROUNDS = "rounds"
_MARK = "mark"
_ENDS = "ends"
_NEVER = float(np.finfo(np.float64).min)
_RESIDUAL = (
    "The sums of how devices moved the table, which are kept so that the run can be repeated again, were made by "
    "devices that had seen the data; they are as large as the repeated run has them, and name nobody."
)


class DeltaReplayConfig(PartConfig):
    segment: int = Field(10, ge=1, description="rounds whose moves are kept as one sum")
    precision: Literal["fp16", "fp32"] = Field("fp16", description="of the sums that are kept")
    correction: float = Field(
        0.0, ge=0, lt=1, description="how much of the distance to the original table each round's moves take back"
    )


@register
class DeltaReplay(Part, Unlearning):
    """Stands before the part `shared-graph` in the list: it has to see the table before the server's own steps."""

    name = "delta-replay"
    observes_only = True
    scope = ("given",)
    Config: ClassVar[type[PartConfig]] = DeltaReplayConfig
    config: DeltaReplayConfig

    def check(self, n_items: int) -> None:
        names = [traits.name for traits in self.context.traits]
        if GRAPH in names and names.index(GRAPH) < names.index(self.name):
            raise TacitaError(f"part '{self.name}' has to stand before '{GRAPH}' in 'parts'.")
        if GRAPH in names and self.context.train.resume_from == "last":
            raise TacitaError(f"part '{self.name}' goes over the best rounds again; use train.resume_from = 'best'.")
        backbone = self.context.backbone
        if backbone.list_head_shapes():
            raise TacitaError(
                f"part '{self.name}' goes over item rows again, and backbone '{backbone.name}' shares other "
                "parameters as well; use another backbone, or another way to unlearn."
            )

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        if not state:
            return self._make_empty_state(server)
        moves = state[_MOVES]
        n_known = len(state[_START])
        new_rows = server.items[n_known:]
        n_moves = len(moves)
        new_shape = (n_moves, *new_rows.shape)
        no_moves = np.zeros(new_shape, moves.dtype)
        return {
            **state,
            _START: np.concatenate([state[_START], new_rows]),
            _MOVES: np.concatenate([moves, no_moves], axis=1),
            _OPEN: np.concatenate([state[_OPEN], np.zeros_like(new_rows)]),
        }

    def _make_empty_state(self, server: ServerState) -> Arrays:
        return {
            _START: server.items,
            _MOVES: np.zeros((0, *server.items.shape), self._dtype),
            _OPEN: np.zeros_like(server.items),
            _ROUNDS: np.zeros((0, 2), np.int64),
            _MARK: np.zeros(0),
            _ENDS: np.zeros(0, np.int64),
        }

    @property
    def _dtype(self) -> type[np.floating[Any]]:
        return np.float16 if self.config.precision == "fp16" else np.float32

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Record the round's move, and build the table from it, as a replay will."""
        move = server.items - before.items
        old_state = server.parts[self.name]
        state = dict(old_state)
        pair = [server.block, server.round]
        moment = np.array([pair])
        last_time = server.shared.time.max(initial=_NEVER)
        earlier = state[_ROUNDS]
        rounds = np.concatenate([earlier, moment])
        state[_ROUNDS] = rounds
        earlier_marks = state[_MARK]
        marks = np.append(earlier_marks, last_time)
        state[_MARK] = marks
        state[_OPEN] = state[_OPEN] + move
        last_end = state[_ENDS][-1:]
        n_closed = last_end.sum()
        n_open = len(rounds) - n_closed
        if n_open == self.config.segment:
            open_move = state[_OPEN]
            closed = open_move.astype(self._dtype)
            earlier_moves = state[_MOVES]
            moves = np.concatenate([earlier_moves, closed[None]])
            state[_MOVES] = moves
            n_rounds = len(rounds)
            earlier_ends = state[_ENDS]
            state[_ENDS] = np.append(earlier_ends, n_rounds)
            state[_OPEN] = np.zeros_like(server.items)
        items = before.items + move
        server = server.with_items(items)
        return server.with_part(self.name, state)

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        withdrawn = build_withdrawn_record(requests.senders, requests.withdrawn_items)
        state = server.parts[self.name]
        n_segments = len(state[_MOVES])
        details = {"edges": len(withdrawn), "segments": n_segments}
        report = UnlearningReport(
            method=self.name,
            exact=False,
            rounds=0,
            clients_asked=0,
            storage_server=count_state_bytes(state),
            storage_client=0,
            purged=(),
            details=details,
        )
        if not len(withdrawn) or not len(state[_ROUNDS]):
            return server, report
        server = self.replay_recorded_moves(server, withdrawn)
        server, purged = purge_learned_state(server, requests.senders)
        if self.config.correction:
            purged = [*purged, "delta_log"]
        done = UnlearningReport(
            purged=tuple(purged),
            residual_risk=_RESIDUAL,
            details={**details, "correction": self.config.correction},
        )
        return server, done.with_defaults(report)

    def replay_recorded_moves(self, server: ServerState, withdrawn: SharedRecord | None = None) -> ServerState:
        """The run once more, on what is shared now; `withdrawn`: edges that went, for the correction of moves."""
        state = server.parts[self.name]
        start = state[_START]
        repeated = replace(server, items=start, parts={})
        original = None
        if self.config.correction and withdrawn is not None:
            record = _join_records(server.shared, withdrawn)
            original = replace(repeated, shared=record)
        new_moves = []
        for move, rounds in _list_segments(state):
            current = move.astype(np.float32)
            if original is not None:
                items_before = original.items
                original = self._replay_segment(original, current, rounds, state)
                share = 1 - self.config.correction
                remains = share ** len(rounds)
                pull = np.float32(1 - remains)
                distance = repeated.items - items_before
                corrected = current - pull * distance
                stored = corrected.astype(move.dtype)
                current = stored.astype(np.float32)  # as it is kept
            repeated = self._replay_segment(repeated, current, rounds, state)
            new_moves.append(current.astype(move.dtype))
        *closed, open_move = new_moves
        old_moves = state[_MOVES]
        moves = np.array(closed, old_moves.dtype)
        moves = moves.reshape(old_moves.shape)
        parts = dict(server.parts)
        if GRAPH in parts:
            learned = repeated.parts.get(GRAPH, {})
            old_state = parts[GRAPH]
            parts[GRAPH] = {**old_state, **learned}
        updated = {**state, _MOVES: moves, _OPEN: open_move}
        parts[self.name] = updated
        return replace(server, items=repeated.items, parts=parts)

    def _replay_segment(self, server: ServerState, move: Floats, rounds: range, state: Arrays) -> ServerState:
        """One segment: the devices' move, then the server's steps of its rounds on what was shared by then."""
        items = server.items + move
        server = server.with_items(items)
        graph_training = self._make_graph_training()
        if graph_training is None:
            return server
        for index in rounds:
            moment = state[_ROUNDS][index]
            block, number = moment.tolist()
            last_time = state[_MARK][index]
            shared = _select_shared_by(server.shared, last_time)
            earlier = replace(server, block=block, round=number, shared=shared)
            trained = graph_training.train_on_shared(earlier)
            server = replace(server, items=trained.items, parts=trained.parts)
        return server

    def _make_graph_training(self) -> SharedGraphTraining | None:
        """The run's steps on what users shared; None: it has none."""
        options = self.context.find_part_options(GRAPH)
        if options is None:
            return None
        label = f"part '{GRAPH}'"
        config = validate_model(SharedGraphConfig, options, label)
        return SharedGraphTraining(config, self.context.draws)


def _list_segments(state: Arrays) -> list[tuple[AnyArray, range]]:
    """Every recorded move and the rounds that it is the sum of; the open segment is the last."""
    segments = []
    start = 0
    ends = state[_ENDS].tolist()
    moves = state[_MOVES]
    for move, end in zip(moves, ends, strict=True):
        rounds = range(start, end)
        segments.append((move, rounds))
        start = end
    n_rounds = len(state[_ROUNDS])
    open_rounds = range(start, n_rounds)
    open_move = state[_OPEN]
    segments.append((open_move, open_rounds))
    return segments


def _join_records(first: SharedRecord, second: SharedRecord) -> SharedRecord:
    return SharedRecord(
        np.concatenate([first.sender, second.sender]),
        np.concatenate([first.item, second.item]),
        np.concatenate([first.time, second.time]),
    )


def _select_shared_by(record: SharedRecord, time: float) -> SharedRecord:
    """What was shared by a time."""
    is_shared = record.time <= time
    sender = record.sender[is_shared]
    item = record.item[is_shared]
    times = record.time[is_shared]
    return SharedRecord(sender, item, times)


def count_state_bytes(state: Arrays) -> int:
    """What is kept so that rounds can be repeated."""
    return sum(int(array.nbytes) for array in state.values())
