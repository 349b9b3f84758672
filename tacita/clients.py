"""Who exists, who takes part, and what each device holds; gathers views and puts results back.

The lab keeps all devices in a few arrays. Only this module indexes them by user; everything else gets a
`CohortView` with the rows of the clients at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.backbones.base import Backbone
from tacita.config import ParticipationConfig
from tacita.device_state import PARTS, DeviceState, Lists
from tacita.files import flat, nested
from tacita.kernels.hashing import choose, hash_owners, thin
from tacita.methods.base import Part
from tacita.rng import Draws
from tacita.types import AnyArray, Arrays, Block, CohortView, Ints, Keys, Longs, Ragged, ServerState

OWN = "own"  # every user's own version of the item rows it last trained: `item`, and `moved` beyond the table


def grow(clients: DeviceState, backbone: Backbone, parts: tuple[Part, ...], draws: Draws, keys: Keys) -> None:
    """A new block: room for users up to len(keys), existing rows bit for bit as they are, nobody has trained."""
    fresh = backbone.init_private(draws, keys[clients.n_users :])
    rows: Arrays = {"private": np.concatenate([clients.private, fresh])}
    rows |= flat({p.name: p.device_arrays(len(keys)) for p in parts}, PARTS)
    clients.grow({**rows, "took_part": np.zeros(len(keys), bool)})
    clients.arrays["took_part"] = np.zeros(len(keys), bool)


def put_parts(clients: DeviceState, users: Ints, changed: dict[str, Arrays]) -> None:
    clients.put(users, flat(changed, PARTS))


def no_devices(backbone: Backbone, own_rows: bool = False) -> DeviceState:
    """No devices yet; `own_rows`: users are going to be scored with their own item tables."""
    clients = DeviceState.of(np.zeros((0, backbone.private_width), np.float32))
    if own_rows:
        width = backbone.item_width
        columns: Arrays = {"item": np.zeros(0, np.int32), "moved": np.zeros((0, width), np.float32)}
        clients.lists[OWN] = Lists.empty(0, columns)
        clients.common[OWN] = np.zeros((0, width), np.float32)
    return clients


@dataclass(frozen=True)
class Members:
    """Which users of a block live on which client; a client is one user unless there are silos."""

    users: Ragged  # client -> users with training data in the block
    keys: Keys  # client -> key of its random streams
    active: Longs  # clients with at least one such user, ascending


def members_of(block: Block, user_keys: Keys, silos: int, draws: Draws) -> Members:
    trains = np.flatnonzero(block.train.counts() > 0)
    if silos == 0:
        counts = (block.train.counts() > 0).astype(np.int64)
        ptr = np.zeros(block.n_users + 1, np.int64)
        np.cumsum(counts, out=ptr[1:])
        return Members(Ragged(ptr, trains.astype(np.int32)), user_keys[: block.n_users], trains)
    home = silo_of(user_keys[trains], silos, draws)
    users = Ragged.from_pairs(home, trains, silos)
    return Members(users, np.arange(silos, dtype=np.uint64), np.flatnonzero(users.counts() > 0))


def silo_of(user_keys: Keys, silos: int, draws: Draws) -> Longs:
    """The silo a user lives in, by a hash of the user alone."""
    return (hash_owners(draws.public("silo"), user_keys) % np.uint64(silos)).astype(np.int64)


def participants(active: Longs, config: ParticipationConfig, key: np.uint64) -> Longs:
    """Who takes part in a round, ascending; cost grows with those chosen, not with those who exist."""
    if config.kind == "all":
        return active
    if config.kind == "poisson":
        picked = np.arange(len(active)) if config.rate >= 1 else thin(key, len(active), config.rate)
    else:
        picked = choose(key, len(active), int(expected_clients(active, config)))
    return active[np.sort(picked)]


def expected_clients(active: Longs, config: ParticipationConfig) -> float:
    """How many take part: exactly, or on average where each decides by itself."""
    if config.kind == "all":
        return float(len(active))
    return config.rate * len(active) if config.kind == "poisson" else float(max(1, round(config.rate * len(active))))


def view_of(
    clients: DeviceState,
    server: ServerState,
    block: Block,
    user_ptr: Longs,
    users: Ints,
    user_keys: Keys,
    client_keys: Keys,
    received: dict[str, Arrays],
) -> CohortView:
    """What the given users' devices see: their own rows, and what the server sent."""
    train, mine = block.train.take(users), clients.take(users)
    return CohortView(
        block=server.block,  # now, even where an earlier block is looked at
        round=server.round,
        n_items=len(server.items),
        user_ptr=user_ptr,
        user=users,
        user_keys=user_keys[users],
        client_keys=client_keys,
        train=train,
        exclude=train,
        private=mine["private"],
        parts=nested(mine, PARTS),
        items=server.items,
        heads=server.heads,
        received=received,
    )


def users_view(
    clients: DeviceState,
    server: ServerState,
    block: Block,
    users: AnyArray,
    keys: Keys,
    received: dict[str, Arrays],
) -> CohortView:
    """A view in which every user stands for itself, as when a device scores."""
    users = np.asarray(users, np.int32)
    ptr = np.arange(len(users) + 1, dtype=np.int64)
    return view_of(clients, server, block, ptr, users, keys, keys[users], received)
