"""delta-replay: unlearn without devices, by going over the run again on what is still shared (sharing spec D.1).

The server writes down by how much devices moved the table in every round, summed over all of them, and so can repeat
the whole run from its first table: the same moves, and its own steps on what remains. What was withdrawn is in no
step of its own any more; the moves were made by devices that had seen it, so this is not exact. What is written down
is then that of the run as it was repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Floats, ServerState, SharedRecord
from tacita.messages import Total
from tacita.methods.sharing.contrastive_unlearning import build_withdrawn_record
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.methods.sharing.shared_graph_part import SharedGraphPart, purge_learned_state
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import build_parts, register
from tacita.round.request import RequestBatch

_START, _MOVES, _OPEN, _ROUNDS, _MARK, _ENDS = "start", "moves", "open", "rounds", "mark", "ends"
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
class DeltaReplay(Part):
    """Stands before the part `shared-graph` in the list: it has to see the table before the server's own steps."""

    name = "delta-replay"
    only_notes = True
    takes_back = ("given",)
    Config: ClassVar[type[PartConfig]] = DeltaReplayConfig
    config: DeltaReplayConfig

    def check(self, n_items: int) -> None:
        names = [one["name"] for one in self.context.part_specs]
        if GRAPH in names and names.index(GRAPH) < names.index(self.name):
            raise TacitaError(f"part '{self.name}' has to stand before '{GRAPH}' in 'parts'.")
        if self.context.train.resume_from == "last" and GRAPH in names:
            raise TacitaError(f"part '{self.name}' goes over the best rounds again; use train.resume_from = 'best'.")

        if self.context.backbone.shared():
            raise TacitaError(
                f"part '{self.name}' goes over item rows again, and backbone '{self.context.backbone.name}' "
                "shares other "
                "parameters as well; use another backbone, or another way to unlearn."
            )

    def server_begin_block(self, server: ServerState) -> Arrays:
        kept = server.parts.get(self.name, {})
        if not kept:
            none = np.zeros((0, *server.items.shape), self._dtype)
            rounds: Arrays = {_ROUNDS: np.zeros((0, 2), np.int64), _MARK: np.zeros(0), _ENDS: np.zeros(0, np.int64)}
            return {_START: server.items, _MOVES: none, _OPEN: np.zeros_like(server.items), **rounds}
        new = server.items[len(kept[_START]) :]
        still = np.zeros((len(kept[_MOVES]), *new.shape), kept[_MOVES].dtype)
        return {
            **kept,
            _START: np.concatenate([kept[_START], new]),
            _MOVES: np.concatenate([kept[_MOVES], still], axis=1),
            _OPEN: np.concatenate([kept[_OPEN], np.zeros_like(new)]),
        }

    @property
    def _dtype(self) -> type[np.floating[Any]]:
        return np.float16 if self.config.precision == "fp16" else np.float32

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """Writes the round's move down, and makes the table from it, as going over it again will."""
        kept, move = server.parts[self.name], server.items - before.items
        rounds = np.concatenate([kept[_ROUNDS], np.array([[server.block, server.round]])])
        mark = np.append(kept[_MARK], server.shared.time.max(initial=_NEVER))
        kept = {**kept, _ROUNDS: rounds, _MARK: mark, _OPEN: kept[_OPEN] + move}
        if len(rounds) - kept[_ENDS][-1:].sum() == self.config.segment:
            moves = np.concatenate([kept[_MOVES], kept[_OPEN][None].astype(self._dtype)])
            ends = np.append(kept[_ENDS], len(rounds))
            kept |= {_MOVES: moves, _ENDS: ends, _OPEN: np.zeros_like(server.items)}
        return server.with_items(before.items + move).with_part(self.name, kept)

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind == "share" or requests.withdrawn_items is None:
            return None
        gone, kept = build_withdrawn_record(requests.senders, requests.withdrawn_items), server.parts[self.name]
        said = {"method": self.name, "exact": False, "edges": len(gone), "rounds": 0, "clients_asked": 0, "purged": []}
        said |= {"storage_server": n_bytes(kept), "storage_client": 0, "segments": len(kept[_MOVES])}
        if not len(gone) or not len(kept[_ROUNDS]):
            return server, said
        server, purge = purge_learned_state(self.replay_run(server, gone), requests.senders)
        return server, {
            **said, "purged": purge + ["delta_log"] * bool(self.config.correction),
            "correction": self.config.correction, "residual_risk": _RESIDUAL,
        }  # fmt: skip

    def replay_run(self, server: ServerState, gone: SharedRecord | None = None) -> ServerState:
        """The run once more, on what is shared now; `gone`: withdrawn edges, for the correction of moves."""
        kept, original = server.parts[self.name], None
        now = replace(server, items=kept[_START], parts={})
        if self.config.correction and gone is not None:
            given = server.shared
            both = [(getattr(given, name), getattr(gone, name)) for name in ("sender", "item", "time")]
            original = replace(now, shared=SharedRecord(*(np.concatenate(pair) for pair in both)))
        ends = [0, *kept[_ENDS].tolist()]
        segments = [(kept[_MOVES][k], range(ends[k], ends[k + 1])) for k in range(len(kept[_MOVES]))]
        segments.append((kept[_OPEN], range(ends[-1], len(kept[_ROUNDS]))))
        written = []
        for move, rounds in segments:
            own = move.astype(np.float32)
            if original is not None:
                pull = np.float32(1 - (1 - self.config.correction) ** len(rounds))
                then, original = original.items, self._replay_segment(original, own, rounds, kept)
                own = (own - pull * (now.items - then)).astype(move.dtype).astype(np.float32)  # as it is kept
            now = self._replay_segment(now, own, rounds, kept)
            written.append(own.astype(move.dtype))
        parts = dict(server.parts)
        if GRAPH in parts:
            parts[GRAPH] = {**parts[GRAPH], **now.parts.get(GRAPH, {})}
        moves = np.array(written[:-1], kept[_MOVES].dtype).reshape(kept[_MOVES].shape)
        parts[self.name] = {**kept, _MOVES: moves, _OPEN: written[-1]}
        return replace(server, items=now.items, parts=parts)

    def _replay_segment(self, now: ServerState, move: Floats, rounds: range, kept: Arrays) -> ServerState:
        """One segment: the devices' move, then the server's steps of its rounds on what was shared by then."""
        now = now.with_items(now.items + move)
        learner = self._build_graph_part()
        for k in rounds if learner else ():
            block, round = (int(one) for one in kept[_ROUNDS][k])
            there = now.shared.time <= kept[_MARK][k]
            given = SharedRecord(now.shared.sender[there], now.shared.item[there], now.shared.time[there])
            assert learner is not None
            made = learner.train_on_shared(replace(now, block=block, round=round, shared=given))
            now = replace(now, items=made.items, parts=made.parts)
        return now

    def _build_graph_part(self) -> SharedGraphPart | None:
        options = self.context.part_options(GRAPH)
        if options is None:
            return None
        (made,) = build_parts([{"name": GRAPH, **options}], self.context)
        assert isinstance(made, SharedGraphPart)
        return made


def n_bytes(state: Arrays) -> int:
    return sum(int(array.nbytes) for array in state.values())
