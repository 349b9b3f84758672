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

from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Arrays, Floats, ServerState, SharedRecord
from tacita.messages import Total
from tacita.methods.sharing.contrastive_unlearning import build_withdrawn_record
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.methods.sharing.shared_graph_part import SharedGraphPart, purge_learned_state
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part, PartConfig
from tacita.round.registry import build_parts, register
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
        if backbone.shared():
            raise TacitaError(
                f"part '{self.name}' goes over item rows again, and backbone '{backbone.name}' shares other "
                "parameters as well; use another backbone, or another way to unlearn."
            )

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name, {})
        if not state:
            return self._empty_state(server)
        moves = state[_MOVES]
        n_known = len(state[_START])
        new_rows = server.items[n_known:]
        new_shape = (len(moves), *new_rows.shape)
        no_moves = np.zeros(new_shape, moves.dtype)
        return {
            **state,
            _START: np.concatenate([state[_START], new_rows]),
            _MOVES: np.concatenate([moves, no_moves], axis=1),
            _OPEN: np.concatenate([state[_OPEN], np.zeros_like(new_rows)]),
        }

    def _empty_state(self, server: ServerState) -> Arrays:
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
        state = dict(server.parts[self.name])
        moment = np.array([[server.block, server.round]])
        last_time = server.shared.time.max(initial=_NEVER)
        rounds = np.concatenate([state[_ROUNDS], moment])
        state[_ROUNDS] = rounds
        state[_MARK] = np.append(state[_MARK], last_time)
        state[_OPEN] = state[_OPEN] + move
        n_closed = state[_ENDS][-1:].sum()
        if len(rounds) - n_closed == self.config.segment:
            closed = state[_OPEN].astype(self._dtype)
            state[_MOVES] = np.concatenate([state[_MOVES], closed[None]])
            state[_ENDS] = np.append(state[_ENDS], len(rounds))
            state[_OPEN] = np.zeros_like(server.items)
        server = server.with_items(before.items + move)
        return server.with_part(self.name, state)

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        withdrawn = build_withdrawn_record(requests.senders, requests.withdrawn_items)
        state = server.parts[self.name]
        details = {"edges": len(withdrawn), "segments": len(state[_MOVES])}
        report = UnlearningReport(
            method=self.name,
            exact=False,
            rounds=0,
            clients_asked=0,
            storage_server=n_bytes(state),
            storage_client=0,
            purged=(),
            details=details,
        )
        if not len(withdrawn) or not len(state[_ROUNDS]):
            return server, report
        server = self.replay_run(server, withdrawn)
        server, purged = purge_learned_state(server, requests.senders)
        if self.config.correction:
            purged = [*purged, "delta_log"]
        done = UnlearningReport(
            purged=tuple(purged),
            residual_risk=_RESIDUAL,
            details={**details, "correction": self.config.correction},
        )
        return server, done.with_defaults(report)

    def replay_run(self, server: ServerState, withdrawn: SharedRecord | None = None) -> ServerState:
        """The run once more, on what is shared now; `withdrawn`: edges that went, for the correction of moves."""
        state = server.parts[self.name]
        repeated = replace(server, items=state[_START], parts={})
        original = None
        if self.config.correction and withdrawn is not None:
            original = replace(repeated, shared=_join_records(server.shared, withdrawn))
        new_moves = []
        for move, rounds in _list_segments(state):
            current = move.astype(np.float32)
            if original is not None:
                items_before = original.items
                original = self._replay_segment(original, current, rounds, state)
                remains = (1 - self.config.correction) ** len(rounds)
                pull = np.float32(1 - remains)
                distance = repeated.items - items_before
                corrected = current - pull * distance
                current = corrected.astype(move.dtype).astype(np.float32)  # as it is kept
            repeated = self._replay_segment(repeated, current, rounds, state)
            new_moves.append(current.astype(move.dtype))
        *closed, open_move = new_moves
        old_moves = state[_MOVES]
        moves = np.array(closed, old_moves.dtype)
        moves = moves.reshape(old_moves.shape)
        parts = dict(server.parts)
        if GRAPH in parts:
            learned = repeated.parts.get(GRAPH, {})
            parts[GRAPH] = {**parts[GRAPH], **learned}
        parts[self.name] = {**state, _MOVES: moves, _OPEN: open_move}
        return replace(server, items=repeated.items, parts=parts)

    def _replay_segment(self, server: ServerState, move: Floats, rounds: range, state: Arrays) -> ServerState:
        """One segment: the devices' move, then the server's steps of its rounds on what was shared by then."""
        server = server.with_items(server.items + move)
        graph_part = self._build_graph_part()
        if graph_part is None:
            return server
        for index in rounds:
            block, number = state[_ROUNDS][index].tolist()
            last_time = state[_MARK][index]
            shared = _select_shared_by(server.shared, last_time)
            earlier = replace(server, block=block, round=number, shared=shared)
            trained = graph_part.train_on_shared(earlier)
            server = replace(server, items=trained.items, parts=trained.parts)
        return server

    def _build_graph_part(self) -> SharedGraphPart | None:
        options = self.context.part_options(GRAPH)
        if options is None:
            return None
        (part,) = build_parts([{"name": GRAPH, **options}], self.context)
        assert isinstance(part, SharedGraphPart)
        return part


def _list_segments(state: Arrays) -> list[tuple[AnyArray, range]]:
    """Every recorded move and the rounds that it is the sum of; the open segment is the last."""
    segments = []
    start = 0
    for move, end in zip(state[_MOVES], state[_ENDS].tolist(), strict=True):
        segments.append((move, range(start, end)))
        start = end
    n_rounds = len(state[_ROUNDS])
    open_rounds = range(start, n_rounds)
    segments.append((state[_OPEN], open_rounds))
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
    return SharedRecord(sender, item, record.time[is_shared])


def n_bytes(state: Arrays) -> int:
    return sum(int(array.nbytes) for array in state.values())
