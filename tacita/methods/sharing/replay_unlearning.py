"""What `fru` and `cufru` share: the server keeps the first table and who took part, and replays all rounds.

A part names what the server holds for it while a round is replayed (`replay_key`), so that such a round is not recorded
as a new one, and how it replays the rounds (`replay_rounds`). Users who took part in nothing cost no round. All others
cost as many as the block had, which nodes allow only so often (`RoundPlayer.require_rounds_left`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tacita.core.types import Arrays, Keys, Ragged, ServerState
from tacita.methods.sharing import update_log as log
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.part import Part
from tacita.round.request import RequestBatch
from tacita.round.unlearning_report import UnlearningReport


class ReplayUnlearning(Part, Unlearning):
    observes_only = True
    replays_rounds = True
    addresses_clients = True  # it writes nothing to them; the server records who takes part
    replay_key: ClassVar[str]  # what the server holds for this part while a round is replayed
    required_order: ClassVar[tuple[str, log.Place]]  # where it has to stand, by the hook of the others
    report_fields: ClassVar[dict[str, Any]] = {}  # in every report

    def check(self, n_items: int) -> None:
        train = self.context.train
        log.check_replay_settings(self.name, train)
        order = self.required_order
        log.check_part_order(self.name, self.context, order)

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name)
        if not state:
            state = self.make_empty_state(server)
        heads = {}
        for name, head in server.heads.items():
            key = f"start.{name}"
            heads[key] = state.get(key, head)
        earlier = state.get("start")
        start = log.extend_first_table(earlier, server.items)
        return {**state, **heads, "start": start}

    def make_empty_state(self, server: ServerState) -> Arrays:
        """What the server holds before the first round."""
        return log.make_empty_round_log()

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        """Nothing but empty lists; the server records who takes part."""
        clients = audience.clients
        if audience.occasion != "round" or clients is None:
            return PartBroadcast()
        state = server.parts[self.name]
        if self.replay_key not in state:
            moment = (server.block, server.round)
            state = log.record_participants(state, moment, clients)
        nothing = Ragged.empty(len(clients))
        updated = server.with_part(self.name, state)
        return PartBroadcast(per_client=nothing, server=updated)

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind == "share":
            return None
        state = server.parts[self.name]
        clients = state["clients"]
        took_part = np.isin(requests.senders, clients)
        concerns_rounds = took_part.any() or requests.kind == "unshare"
        if concerns_rounds and log.asks_to_forget(requests):
            return self.replay_all(server, requests, ask, play)
        report = log.build_unlearning_report(self.name, state, **self.report_fields)
        return server, report

    @abstractmethod
    def replay_all(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport]:
        """The rounds once more, without what was withdrawn, and what a certificate says of it."""

    def count_block_rounds(self, server: ServerState) -> int:
        """How many rounds of the open block are recorded: only these can be played."""
        state = server.parts[self.name]
        rounds = state["rounds"]
        blocks = rounds[:, 0]
        is_of_block = blocks == server.block
        return int(is_of_block.sum())

    def restore_start(self, server: ServerState) -> ServerState:
        """The first model of the run."""
        state = server.parts[self.name]
        heads = {name: state[f"start.{name}"] for name in server.heads}
        return replace(server, items=state["start"], heads=heads)


def find_leavers(requests: RequestBatch) -> Keys:
    if requests.kind == "leave":
        return requests.senders
    return np.zeros(0, np.uint64)
