"""What `fru` and `cufru` share: the server keeps the first table and who took part, and goes over it all again.

A part says what it holds while a round is played once more (`playing`), so that such a round is not written down as a
new one, and how it goes over the rounds (`gone_over`). Of people who took part in nothing there is nothing to take
back: that costs no round. What is left costs as many as the block had, which nodes allow only so often (`Play.allow`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from tacita.core.types import Arrays, Keys, Ragged, ServerState
from tacita.methods.sharing import update_log as log
from tacita.round.parts import DeviceQuery, Part, RoundPlayer
from tacita.round.request import RequestBatch


class ReplayUnlearning(Part):
    only_notes = True
    plays_again = True
    replay_key: ClassVar[str]  # what the server holds for this part while a round is played once more
    required_order: ClassVar[tuple[str, Literal["before", "after"]]]  # where it has to stand, by the hook of the others
    certificate_fields: ClassVar[dict[str, Any]] = {}  # in every certificate

    def check(self, n_items: int) -> None:
        log.check_replay_settings(self.name, self.context.train)
        log.check_part_order(self.name, self.context, self.required_order)

    def server_begin_block(self, server: ServerState) -> Arrays:
        held = server.parts.get(self.name) or self.empty_state(server)
        heads = {f"start.{name}": v for name, v in server.heads.items() if f"start.{name}" not in held}
        return {**held, **heads, "start": log.append_new_rows(held.get("start"), server.items)}

    def empty_state(self, server: ServerState) -> Arrays:
        """What the server holds before the first round."""
        return log.empty_round_log()

    def own(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """Nothing is for single clients; the server writes down who takes part."""
        held = server.parts[self.name]
        if self.replay_key not in held:
            held = log.record_participants(held, (server.block, server.round), clients)
        return server.with_part(self.name, held), Ragged.empty(len(clients))

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind == "share":
            return None
        held = server.parts[self.name]
        took_part = np.isin(requests.senders, held["clients"]).any()
        if not log.asks_to_forget(requests) or not (took_part or requests.kind == "unshare"):
            return server, log.build_certificate(self.name, held, **self.certificate_fields)
        return self.replay_rounds(server, requests, ask, play)

    @abstractmethod
    def replay_rounds(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]]:
        """The rounds once more, without what was withdrawn, and what a certificate says of it."""

    def count_block_rounds(self, server: ServerState) -> int:
        """How many rounds of the open block are written down: only these can be played."""
        return int((server.parts[self.name]["rounds"][:, 0] == server.block).sum())

    def restore_start(self, server: ServerState) -> ServerState:
        """The model that everything began with."""
        held = server.parts[self.name]
        return replace(server, items=held["start"], heads={name: held[f"start.{name}"] for name in server.heads})


def find_leavers(requests: RequestBatch) -> Keys:
    return requests.senders if requests.kind == "leave" else np.zeros(0, np.uint64)
