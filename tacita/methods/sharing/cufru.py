"""cufru: a station on the server keeps how the table moved, and a few of those who stay say where it should have gone.

Our version of CUFRU (TIST'25) after two sentences of it, so call results "CUFRU-like" (sharing spec C.6). Going over
what the station keeps, from the first table on, a fraction of each step's remaining participants trains one epoch at
the table as it now is. Direction: half way between theirs and the old one, row by row; length: the old one. What those
who left had added to an old step is not known apart, so it stays in its length.

It stands before parts with server steps of their own, which run again inside each round and must not be in the
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
from tacita.learn.rows import choose_denominator
from tacita.messages import Total
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.replay_unlearning import ReplayUnlearning, find_leavers
from tacita.round.parts import DeviceQuery, PartConfig, RoundPlayer
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch

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
    certificate_fields: ClassVar[dict[str, Any]] = {"storage_client": 0.0}
    Config: ClassVar[type[PartConfig]] = CufruConfig
    config: CufruConfig

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        """An entry of the station; between two entries the steps add up."""
        held = dict(server.parts[self.name])
        if "now" in held:
            return server
        step: Floats = server.items - before.items
        earlier = held.pop("open", step[:0])
        step[: len(earlier)] += earlier
        heads = {name: v - before.heads[name] + held.pop(f"open.{name}", 0) for name, v in server.heads.items()}
        if len(held["rounds"]) % self.config.every:
            held |= {"open": step} | {f"open.{name}": v for name, v in heads.items()}
            return server.with_part(self.name, held)
        at = f"{len(held['rounds']) - 1:06d}"
        item = _select_longest(step, self.config.keep)
        held |= {f"{at}.item": item.astype(np.int32), f"{at}.row": step[item]}
        held |= {f"{at}.head.{name}": v for name, v in heads.items()}
        return server.with_part(self.name, held)

    def decode(self, server: ServerState, total: Total) -> Total:
        """While the station is gone over: its step in a direction that those who were asked agree with."""
        held = server.parts.get(self.name, {})
        if "now" not in held or "rows" not in total.sums or total.n_clients == 0:
            return total
        plan = self.context.train
        by = choose_denominator(total, "rows", plan, 0.0)
        whole = by if isinstance(by, float) else total.weight
        step = blend_directions(held["now"], total["rows"], self.config.fresh)
        heads = {k.removeprefix("now."): v for k, v in held.items() if k.startswith("now.")}
        sums = {f"heads/{name}": v * whole / plan.server_lr for name, v in heads.items()}
        return total.with_sums({"rows": step * by / plan.server_lr, **sums})

    def replay_rounds(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]]:
        play.require_rounds(math.ceil(self.count_block_rounds(server) / self.config.every))
        held = log.drop_clients(server.parts[self.name], find_leavers(requests))
        rounds, server = list(log.iterate_rounds(held)), self.restore_start(server)
        ends = sorted(int(name[:6]) for name in held if name.endswith(".item"))
        for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            clients = np.unique(np.concatenate([who for _, who in rounds[first : last + 1]]))
            server = self._replay_entry(server.with_part(self.name, held), last, rounds[last][0], clients, play)
        if "open" in held:  # what came after the last entry, as it was
            items = server.items.copy()
            items[: len(held["open"])] += held["open"]
            server = server.with_items(items)
        said = log.build_certificate(self.name, held, purged=["tables after the first"], **self.certificate_fields)
        return server.with_part(self.name, held), said

    def _replay_entry(
        self, server: ServerState, entry: int, moment: log.BlockRound, clients: Keys, play: RoundPlayer
    ) -> ServerState:
        """One entry of the station over again; of an earlier block, or where nobody is left, as it is."""
        held, at = server.parts[self.name], f"{entry:06d}"
        step = np.zeros(server.items.shape)
        step[held[f"{at}.item"]] = held[f"{at}.row"]
        heads = {name: held[f"{at}.head.{name}"] for name in server.heads}
        if moment[0] != server.block or len(clients) == 0:
            moved = {name: (v + heads[name]).astype(np.float32) for name, v in server.heads.items()}
            return replace(server, items=(server.items + step).astype(np.float32), heads=moved)
        drawn = hash_owners(self.context.draws.public("station", *moment), clients)
        some = clients[np.argsort(drawn, kind="stable")[: max(1, math.ceil(self.config.asked * len(clients)))]]
        now: Arrays = {"now": step} | {f"now.{name}": v for name, v in heads.items()}
        one_epoch = RoundReplay(moment[1], 1 / self.context.train.local_epochs)
        server = play(server.with_part(self.name, {**held, **now}), np.sort(some), one_epoch)
        return server.with_part(self.name, held)


def _select_longest(step: Floats, keep: float) -> Longs:
    """The rows that moved furthest, a share of those that moved, in the order of items."""
    length = np.linalg.norm(step, axis=1)
    moved = np.flatnonzero(length > 0)
    order = moved[np.lexsort((moved, -length[moved]))]
    return np.asarray(np.sort(order[: math.ceil(keep * len(moved) - 1e-9)]))


def blend_directions(old: Doubles, new: Doubles, fresh: float) -> Doubles:
    """Rows of the old length between two directions; where nobody says a new one, the old one."""
    length, now = (np.linalg.norm(one, axis=1, keepdims=True) for one in (old, new))
    ahead = (1 - fresh) * old / np.maximum(length, _TINY)
    between = np.where(now > _TINY, ahead + fresh * new / np.maximum(now, _TINY), ahead)
    size = np.linalg.norm(between, axis=1, keepdims=True)
    return np.asarray(np.where(size > _TINY, length * between / np.maximum(size, _TINY), old))


register_preset("cufru", {"name": "withdrawal"}, {"name": "cufru"})
