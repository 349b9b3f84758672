"""Who lives on which rank, and a federation as one rank has it: with its own people alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import AnyArray, Block, BlockStream, Ints, Keys, Longs, Ragged
from tacita.data.shards.placement import assign_places
from tacita.data.shards.stored_ids import are_side_by_side, take_ids
from tacita.federation.clients import assign_silos
from tacita.round.plan import Federation


def assign_user_ranks(federation: Federation, n_ranks: int) -> Ints:
    """The rank of each user; the people of a silo that trains one model stay together."""
    keys = federation.stream.user_keys
    silos = federation.config.train.n_joint_silos
    if not silos:
        return assign_places(keys, n_ranks)
    home = assign_silos(keys, silos, federation.draws) if federation.homes is None else federation.homes.silo
    silo_ranks = assign_places(np.arange(silos, dtype=np.uint64), n_ranks)
    return silo_ranks[home]


@dataclass(frozen=True)
class Shard:
    """The people of one rank."""

    federation: Federation  # of these people alone, numbered from 0 in the order of all
    users: Longs  # their numbers among all, ascending

    def number_clients(self, clients: AnyArray) -> Longs:
        """The numbers of some of its clients among all clients."""
        if self.federation.config.train.n_joint_silos:
            return np.asarray(clients, np.int64)
        return self.users[clients]


def take_shard(federation: Federation, rank: int, n_ranks: int) -> Shard:
    """A federation with the people of one rank."""
    users = np.flatnonzero(assign_user_ranks(federation, n_ranks) == rank)
    homes = federation.homes
    if homes is not None:
        homes = replace(homes, silo=homes.silo[users], label=homes.label[users])
    stream = _take_users(federation.stream, users)
    return Shard(replace(federation, stream=stream, homes=homes), users)


def _take_users(stream: BlockStream, users: Longs) -> BlockStream:
    user_ids = take_ids(stream.user_ids, users) if stream.user_ids else ()
    low_rated = stream.low_rated
    if low_rated is not None:
        low_rated = low_rated.take(users[users < len(low_rated)])
    return replace(
        stream,
        blocks=tuple(_take_block_users(block, users) for block in stream.blocks),
        user_ids=user_ids,
        user_keys=_take_keys(stream.user_keys, users),
        low_rated=low_rated,
    )


def _take_keys(keys: Keys, users: Longs) -> Keys:
    if are_side_by_side(users):
        return keys[users[0] : users[-1] + 1]
    return keys[users]


def _take_block_users(block: Block, users: Longs) -> Block:
    known = users[users < block.n_users]
    return replace(
        block,
        n_users=len(known),
        train=_take_lists(block.train, known),
        valid=_take_lists(block.valid, known),
        test=_take_lists(block.test, known),
        new_users=block.new_users[known],
    )


def _take_lists(lists: Ragged, users: Longs) -> Ragged:
    """The lists of some users, ascending; without a copy where they stand side by side, as on disk in shards."""
    if not are_side_by_side(users):
        return lists.take(users)
    first = int(users[0])
    ptr = lists.ptr[first : first + len(users) + 1]
    entries = slice(ptr[0], ptr[-1])
    values = {name: column[entries] for name, column in lists.values.items()}
    own_ptr = ptr - ptr[0] if ptr[0] else ptr
    return Ragged(own_ptr, lists.ids[entries], values)
