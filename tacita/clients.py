"""Who exists, who takes part, and what each device holds; gathers views and puts results back.

The lab keeps all devices in a few arrays. Only this module indexes them by user; everything else gets a
`CohortView` with the rows of the clients at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.backbones.base import Backbone
from tacita.config import ParticipationConfig
from tacita.kernels.hashing import choose, hash_owners, thin
from tacita.methods.base import Part
from tacita.rng import Draws
from tacita.types import AnyArray, Arrays, Block, Bools, CohortView, Floats, Ints, Keys, Longs, Ragged, ServerState


@dataclass
class OwnRows:
    """Every user's own version of the item rows it last trained, for scoring with personal tables (PFedRec).

    User u's table is `base`, the table last broadcast, plus `moved` on the items of its slice.
    """

    base: Floats  # (n_items, width)
    start: Longs  # (users,)
    count: Longs  # (users,)
    item: Ints  # (pool,)
    moved: Floats  # (pool, width)

    @staticmethod
    def nobody(width: int) -> OwnRows:
        none = np.zeros(0, np.int64)
        return OwnRows(np.zeros((0, width), np.float32), none, none, none.astype(np.int32), np.zeros((0, width), "f4"))

    def take(self, users: AnyArray) -> tuple[Longs, Ints, Floats]:
        """Row borders, items and moves of some users; nothing for users who never trained."""
        known = np.asarray(users) < len(self.count)
        at = np.where(known, users, 0)
        count = np.where(known, self.count[at], 0) if len(self.count) else np.zeros(len(at), np.int64)
        ptr = np.zeros(len(at) + 1, np.int64)
        np.cumsum(count, out=ptr[1:])
        start = self.start[at] if len(self.start) else np.zeros(len(at), np.int64)
        where = np.repeat(start - ptr[:-1], count) + np.arange(ptr[-1])
        return ptr, self.item[where], self.moved[where]

    def put(self, n_users: int, users: Ints, row_start: Longs, item: Ints, moved: Floats) -> OwnRows:
        """Replace the slices of some users, dropping what nobody points to any more."""
        others = np.setdiff1d(np.flatnonzero(self.count > 0), users)
        ptr, kept_item, kept_moved = self.take(others)
        start, count = np.zeros(n_users, np.int64), np.zeros(n_users, np.int64)
        start[others], count[others] = ptr[:-1], np.diff(ptr)
        start[users], count[users] = len(kept_item) + row_start[:-1], np.diff(row_start)
        return OwnRows(self.base, start, count, np.concatenate([kept_item, item]), np.concatenate([kept_moved, moved]))


@dataclass
class Clients:
    """All devices of the lab: private vectors and the parts' device arrays, one row per user."""

    private: Floats
    parts: dict[str, Arrays]
    took_part: Bools  # (users,) trained in the current block
    own: OwnRows | None = None  # only kept where users are scored with their own item tables

    @staticmethod
    def nobody(backbone: Backbone) -> Clients:
        return Clients(np.zeros((0, backbone.private_width), np.float32), {}, np.zeros(0, bool))

    @property
    def n_users(self) -> int:
        return len(self.private)

    def copy(self) -> Clients:
        kept = {name: {k: v.copy() for k, v in arrays.items()} for name, arrays in self.parts.items()}
        return Clients(self.private.copy(), kept, self.took_part.copy(), self.own)

    def grow(self, backbone: Backbone, parts: tuple[Part, ...], draws: Draws, keys: Keys) -> None:
        """A new block: room for users up to len(keys), existing rows bit for bit as they are, nobody has trained."""
        self.took_part = np.zeros(len(keys), bool)
        fresh = keys[self.n_users :]
        if len(fresh) == 0 and all(p.name in self.parts for p in parts):
            return
        for part in parts:
            new = part.device_arrays(len(keys))
            held = self.parts.get(part.name, {})
            self.parts[part.name] = {
                k: np.concatenate([held[k], v[len(held[k]) :]]) if k in held else v for k, v in new.items()
            }
        self.private = np.concatenate([self.private, backbone.init_private(draws, fresh)])

    def put_parts(self, users: Ints, changed: dict[str, Arrays]) -> None:
        for name, arrays in changed.items():
            for k, v in arrays.items():
                self.parts[name][k][users] = v


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
    clients: Clients,
    server: ServerState,
    block: Block,
    user_ptr: Longs,
    users: Ints,
    user_keys: Keys,
    client_keys: Keys,
    received: dict[str, Arrays],
) -> CohortView:
    """What the given users' devices see: their own rows, and what the server sent."""
    train = block.train.take(users)
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
        private=clients.private[users],
        parts={name: {k: v[users] for k, v in arrays.items()} for name, arrays in clients.parts.items()},
        items=server.items,
        heads=server.heads,
        received=received,
    )


def users_view(
    clients: Clients,
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
