"""ShardDevices: the devices of one rank's people, who take part as if all lived in one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.flat_indices import find_in_sorted
from tacita.core.types import Block, Keys, Longs, Ragged, ServerState
from tacita.federation.clients import Respondents, draw_participant_places
from tacita.federation.devices import LocalDevices
from tacita.kernels.hashing import hash_owners
from tacita.round.plan import Federation
from tacita.round.question import Question


@dataclass(frozen=True)
class BlockRoll:
    """Where a rank's clients stand among all those of a block."""

    block: int
    n_active: int  # on all ranks
    places: Longs  # of the rank's own active clients among all active ones, ascending
    last_validator: int | None = None  # the largest hash of a user who validates; None: all do


@dataclass
class ShardDevices(LocalDevices):
    """Devices of some people, drawn and sampled with all others."""

    roll: BlockRoll | None = None

    def draw_round_participants(self, federation: Federation, server: ServerState) -> Longs:
        config = federation.config.train.participation
        if config.kind != "fraction":
            return super().draw_round_participants(federation, server)
        assert self.roll is not None, "the roll of the block comes first"
        drawn = draw_participant_places(self.roll.n_active, config, federation.draws, server.block, server.round)
        places, is_own = find_in_sorted(self.roll.places, drawn)
        return self.group_active_clients(federation, server).active[places[is_own]]

    def select_respondents(
        self, federation: Federation, server: ServerState, question: Question, chosen: Keys | None
    ) -> Respondents:
        if chosen is not None and not federation.config.train.n_joint_silos:
            n_users = federation.stream.blocks[server.block].n_users
            chosen = chosen[np.isin(chosen, federation.stream.user_keys[:n_users])]
        return super().select_respondents(federation, server, question, chosen)

    def are_as_drawn(self, federation: Federation, server: ServerState, clients: Longs) -> bool:
        """Whether these are the clients that take part in the round by themselves."""
        return np.array_equal(clients, self.draw_round_participants(federation, server))

    def select_validators(self, federation: Federation, block: Block) -> Ragged:
        """The validation items of this rank's users who validate."""
        assert self.roll is not None, "the roll of the block comes first"
        if self.roll.last_validator is None:
            return block.valid
        if self.validated is None:
            users, hashes = hash_validators(federation, block)
            drawn = users[hashes <= np.uint64(self.roll.last_validator)]
            self.validated = block.valid.keep_rows(drawn)
        return self.validated


def hash_validators(federation: Federation, block: Block) -> tuple[Longs, Keys]:
    """The users with validation items, and the hashes that decide who validates."""
    users = np.flatnonzero(block.valid.counts())
    key = federation.draws.public("validators", block.index)
    return users, hash_owners(key, federation.stream.user_keys[users])
