"""cufru: a station on the server keeps how the table moved, and some remaining clients say where it should have gone.

Our version of CUFRU (TIST'25) after two sentences of it, so call results "CUFRU-like" (sharing spec C.6). It goes over
the entries of the station, from the first table on. A fraction of each entry's remaining participants trains one epoch
at the table as it now is. The direction lies half way between theirs and the old one, row by row; the length is the old
one. What users who left had added to an old step is not known apart, so it stays in its length.

The part stands before parts with server steps of their own: these run again inside each round and must not be in the
station as well.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.types import Arrays, Doubles, Floats, Keys, Longs, RoundReplay, ServerState
from tacita.kernels.hashing import hash_owners
from tacita.learn.rows import HEADS, choose_denominator
from tacita.messages import Total
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.replay_unlearning import ReplayUnlearning, find_leavers
from tacita.round.capabilities import DeviceQuery, RoundPlayer
from tacita.round.part import PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport

_TINY = 1e-12


class CufruConfig(PartConfig):
    every: int = Field(1, ge=1, description="rounds between two entries of the station (dt); an entry is their sum")
    keep: float = Field(0.5, gt=0, le=1, description="share of an entry's rows that is kept, the longest ones (alpha)")
    asked: float = Field(0.2, gt=0, le=1, description="share of an entry's remaining participants that is asked (rho)")
    fresh: float = Field(0.5, ge=0, le=1, description="weight of the new direction against the old one (kappa)")


@register
class Cufru(ReplayUnlearning):
    name = "cufru"
    replay_key = "now"
    required_order = ("server_step", "before")
    report_fields: ClassVar[dict[str, Any]] = {"storage_client": 0.0}
    Config: ClassVar[type[PartConfig]] = CufruConfig
    config: CufruConfig

    @property
    def asks_exact_share(self) -> bool:
        return self.config.asked < 1

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """An entry of the station; between two entries the steps add up."""
        old_state = server.parts[self.name]
        state = dict(old_state)
        if "now" in state:
            return server
        step: Floats = server.items - before.items
        open_step = state.pop("open", step[:0])
        step[: len(open_step)] += open_step
        head_steps = {}
        for name, head in server.heads.items():
            head_step = head - before.heads[name]
            open_head_step = state.pop(f"open.{name}", 0)
            head_steps[name] = head_step + open_head_step
        n_rounds = len(state["rounds"])
        if n_rounds % self.config.every:
            state["open"] = step
            state |= _with_prefixed_names("open", head_steps)
            return server.with_part(self.name, state)
        entry = f"{n_rounds - 1:06d}"
        items = _find_longest_rows(step, self.config.keep)
        stored_items = items.astype(np.int32)
        state[f"{entry}.item"] = stored_items
        rows = step[items]
        state[f"{entry}.row"] = rows
        state |= _with_prefixed_names(f"{entry}.head", head_steps)
        return server.with_part(self.name, state)

    def decode(self, server: ServerState, total: Total) -> Total:
        """While an entry is replayed: its step, in a direction that the asked clients agree with."""
        state = server.parts.get(self.name, {})
        is_replay = "now" in state and "rows" in total.sums
        if not is_replay or total.n_clients == 0:
            return total
        train = self.context.train
        denominator = choose_denominator(total, "rows", train, 0.0)
        divisor = total.weight
        if isinstance(denominator, float):
            divisor = denominator
        old_step = state["now"]
        new_step = total["rows"]
        fresh = self.config.fresh
        step = blend_directions(old_step, new_step, fresh)
        rows = step * denominator / train.server_lr
        heads = {}
        for key, head_step in state.items():
            if key.startswith("now."):
                name = key.removeprefix("now.")
                total_step = head_step * divisor
                heads[f"{HEADS}{name}"] = total_step / train.server_lr
        return total.with_sums({"rows": rows, **heads})

    def replay_all(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport]:
        n_rounds = self.count_block_rounds(server)
        step = self.config.every
        n_entries = math.ceil(n_rounds / step)
        play.require_rounds_left(n_entries)
        leavers = find_leavers(requests)
        state = server.parts[self.name]
        state = log.drop_clients(state, leavers)
        rounds = list(log.iterate_rounds(state))
        server = self.restore_start(server)
        first = 0
        for last in _list_entry_rounds(state):
            entry_rounds = rounds[first : last + 1]
            cohorts = [clients for _, clients in entry_rounds]
            clients = np.unique(np.concatenate(cohorts))
            moment, _ = rounds[last]
            server = server.with_part(self.name, state)
            server = self._replay_entry(server, last, moment, clients, play)
            first = last + 1
        if "open" in state:  # the steps after the last entry, as they were
            items = server.items.copy()
            open_step = state["open"]
            items[: len(open_step)] += open_step
            server = server.with_items(items)
        purged = ["tables after the first"]
        report = log.build_unlearning_report(self.name, state, purged=purged, **self.report_fields)
        updated = server.with_part(self.name, state)
        return updated, report

    def _replay_entry(
        self, server: ServerState, entry: int, moment: log.BlockRound, clients: Keys, play: RoundPlayer
    ) -> ServerState:
        """One entry of the station replayed; of an earlier block, or where no client remains, as it is."""
        block, number = moment
        state = server.parts[self.name]
        key = f"{entry:06d}"
        step = np.zeros(server.items.shape)
        items = state[f"{key}.item"]
        rows = state[f"{key}.row"]
        step[items] = rows
        head_steps = {}
        for name in server.heads:
            head_steps[name] = state[f"{key}.head.{name}"]
        if block != server.block or len(clients) == 0:
            return _with_steps_added(server, step, head_steps)
        respondents = self._draw_respondents(clients, moment)
        replaying = {**state, "now": step, **_with_prefixed_names("now", head_steps)}
        one_epoch = 1 / self.context.train.local_epochs
        server = server.with_part(self.name, replaying)
        replay = RoundReplay(number, one_epoch)
        server = play(server, respondents, replay)
        return server.with_part(self.name, state)

    def _draw_respondents(self, clients: Keys, moment: log.BlockRound) -> Keys:
        """The clients that are asked for a new direction."""
        n_clients = len(clients)
        share = self.config.asked * n_clients
        count = max(1, math.ceil(share))
        draws = self.context.draws
        key = draws.public("station", *moment)
        drawn = hash_owners(key, clients)
        order = np.argsort(drawn, kind="stable")
        chosen = order[:count]
        return np.sort(clients[chosen])


def _with_prefixed_names(prefix: str, arrays: Arrays) -> Arrays:
    named: Arrays = {}
    for name, array in arrays.items():
        named[f"{prefix}.{name}"] = array
    return named


def _list_entry_rounds(state: Arrays) -> list[int]:
    """The last round of every entry of the station."""
    return sorted(int(name[:6]) for name in state if name.endswith(".item"))


def _with_steps_added(server: ServerState, step: Doubles, head_steps: Arrays) -> ServerState:
    items = server.items + step
    heads = {}
    for name, head in server.heads.items():
        moved = head + head_steps[name]
        heads[name] = moved.astype(np.float32)
    rounded = items.astype(np.float32)
    return replace(server, items=rounded, heads=heads)


def _find_longest_rows(step: Floats, keep: float) -> Longs:
    """The rows that moved furthest, a share of those that moved, in the order of items."""
    length = np.linalg.norm(step, axis=1)
    moved = np.flatnonzero(length > 0)
    moved_length = length[moved]
    descending = -moved_length
    order = np.lexsort((moved, descending))
    share = keep * len(moved)
    count = math.ceil(share - 1e-9)
    longest = moved[order[:count]]
    return np.asarray(np.sort(longest))


def blend_directions(old: Doubles, new: Doubles, fresh: float) -> Doubles:
    """Rows of the old length between two directions; a row without a new direction keeps the old one."""
    old_length = np.linalg.norm(old, axis=1, keepdims=True)
    new_length = np.linalg.norm(new, axis=1, keepdims=True)
    old_divisor = np.maximum(old_length, _TINY)
    new_divisor = np.maximum(new_length, _TINY)
    scaled = (1 - fresh) * old
    old_direction = scaled / old_divisor
    new_direction = fresh * new / new_divisor
    both = old_direction + new_direction
    has_moved = new_length > _TINY
    between = np.where(has_moved, both, old_direction)
    length = np.linalg.norm(between, axis=1, keepdims=True)
    divisor = np.maximum(length, _TINY)
    rescaled = old_length * between / divisor
    has_length = length > _TINY
    blended = np.where(has_length, rescaled, old)
    return np.asarray(blended)


register_preset("cufru", {"name": "withdrawal"}, {"name": "cufru"})
