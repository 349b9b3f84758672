"""Who exists, who takes part, and what each device holds; gathers views and puts results back.

The lab keeps all devices in a few arrays. Only this module indexes them by user; everything else gets a
`CohortView` with the rows of the clients at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tacita.core.config import ParticipationConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts, nest_parts
from tacita.core.flat_indices import compute_offsets, find_in_sorted
from tacita.core.types import (
    AnyArray,
    Arrays,
    Block,
    Bools,
    Broadcast,
    CohortView,
    Ints,
    Keys,
    Longs,
    Ragged,
    ServerState,
    StateUpdate,
)
from tacita.kernels.hashing import choose_distinct, hash_owners, sample_owners
from tacita.models.base import Backbone
from tacita.round.device_state import OWN_ROWS, PARTS, DeviceState
from tacita.round.paged_lists import PagedLists
from tacita.round.part import Part
from tacita.round.plan import Federation, Plan
from tacita.round.state import build_initial_state


def grow_devices_for_block(clients: DeviceState, plan: Plan, keys: Keys) -> None:
    """A new block: room for users up to len(keys), existing rows bit for bit as they are, nobody has trained."""
    fresh = plan.backbone.init_private(plan.draws, keys[clients.n_users :])
    part_state = {name: build_initial_state(specs) for name, specs in plan.list_state_specs(len(keys)).items()}
    state: dict[str, AnyArray | Ragged] = {"private": np.concatenate([clients.private, fresh])}
    state |= flatten_parts(part_state, PARTS)
    state["took_part"] = np.zeros(len(keys), bool)
    clients.grow(state)
    clients.arrays["took_part"] = np.zeros(len(keys), bool)
    clients.persistent = plan.persistent_names


def store_part_state(clients: DeviceState, users: Ints, changed: Mapping[str, StateUpdate]) -> None:
    clients.put(users, flatten_parts(changed, PARTS))


def empty_device_state(backbone: Backbone, own_rows: bool = False) -> DeviceState:
    """No devices yet; `own_rows`: users are going to be scored with their own item tables."""
    clients = DeviceState.from_private(np.zeros((0, backbone.private_width), np.float32))
    if own_rows:
        width = backbone.item_width
        columns: Arrays = {"item": np.zeros(0, np.int32), "moved": np.zeros((0, width), np.float32)}
        clients.lists[OWN_ROWS] = PagedLists.empty(0, columns)
        clients.common[OWN_ROWS] = np.zeros((0, width), np.float32)
    return clients


@dataclass(frozen=True)
class Membership:
    """Which users of a block live on which client; a client is one user unless there are silos."""

    users: Ragged  # client -> users with training data in the block, or in any
    keys: Keys  # client -> key of its random streams
    active: Longs  # clients with at least one such user, ascending

    def select_clients_by_key(self, keys: Keys) -> Longs:
        """The clients that have these keys, ascending."""
        if not len(keys):
            return np.zeros(0, np.int64)
        order = np.argsort(self.keys)
        place, is_known = find_in_sorted(self.keys[order], keys)
        if not is_known.all():
            raise TacitaError("some of the clients that were chosen are not known here.")
        return np.sort(order[place])


@dataclass(frozen=True)
class Respondents:
    """Whom a question goes to."""

    members: Membership
    clients: Longs  # ascending
    expected: float  # how many were to answer: exactly, or on average where each decides by itself


def group_users_into_clients(
    block: Block, user_keys: Keys, silos: int, draws: Draws, among: Bools | None = None, homes: Longs | None = None
) -> Membership:
    """The clients of a block: of the users who have data in it, or of others; `homes`: everybody's silo."""
    is_member = block.train.counts() > 0 if among is None else among
    members = np.flatnonzero(is_member)
    if silos == 0:
        ptr = compute_offsets(is_member)
        users = Ragged(ptr, members.astype(np.int32))
        return Membership(users, user_keys[: block.n_users], members)
    home = assign_silos(user_keys[members], silos, draws) if homes is None else homes[members]
    users = Ragged.from_pairs(home, members, silos)
    silo_keys = np.arange(silos, dtype=np.uint64)
    active = np.flatnonzero(users.counts() > 0)
    return Membership(users, silo_keys, active)


def assign_silos(user_keys: Keys, silos: int, draws: Draws) -> Longs:
    """The silo a user lives in, by a hash of the user alone."""
    hashes = hash_owners(draws.public("silo"), user_keys)
    silo = hashes % np.uint64(silos)
    return silo.astype(np.int64)


def equalise_silo_accounts(clients: DeviceState, plan: Plan, home: Longs) -> None:
    """Everybody in a silo has spent what it has, also who was away then: the most that one of them has."""
    n_silos = int(home.max(initial=-1)) + 1
    for part in plan.parts:
        if part.privacy is None or part.privacy.ledger() is None:
            continue
        for name in ("spent", "times"):
            account = clients.arrays[f"{PARTS}{part.name}/{name}"]
            most = np.zeros((n_silos, account.shape[1]), account.dtype)
            np.maximum.at(most, home, account)
            account[:] = most[home]


def copy_user_state(clients: DeviceState, source: DeviceState, names: Iterable[str], users: AnyArray) -> None:
    """Take over what other devices keep of some users, where there is room for it."""
    for name in names:
        if name in clients.lists:
            clients.lists[name].put(users, *source.lists[name].take(users))
        elif name in clients.arrays:
            clients.arrays[name][users] = source.arrays[name][users]


def draw_participants(members: Membership, config: ParticipationConfig, draws: Draws, block: int, round: int) -> Longs:
    """Who takes part in a round, ascending.

    With kind = "poisson" every client decides by itself, wherever it lives, by a draw that nobody else knows.
    """
    active = members.active
    if config.kind == "all" or (config.kind == "poisson" and config.rate >= 1):
        return active
    if config.kind == "poisson":
        key = draws.private("participants", block, round)
        chosen = sample_owners(key, members.keys[active], config.rate)
        return active[chosen]
    return active[draw_participant_places(len(active), config, draws, block, round)]


def draw_participant_places(n_active: int, config: ParticipationConfig, draws: Draws, block: int, round: int) -> Longs:
    """The places, among all active clients, of a drawn fraction of them, ascending."""
    key = draws.public("participants", block, round)
    n_clients = int(compute_expected_clients(n_active, config))
    return np.sort(choose_distinct(key, n_active, n_clients))


def compute_expected_clients(n_active: int, config: ParticipationConfig) -> float:
    """How many take part: exactly, or on average where each decides by itself."""
    if config.kind == "all":
        return float(n_active)
    expected = config.rate * n_active
    if config.kind == "poisson":
        return expected
    return float(max(1, round(expected)))


@dataclass(frozen=True)
class Cohort:
    """Some clients, with the users that live on them."""

    users: Ragged  # client -> users
    keys: Keys  # of these clients
    user_keys: Keys  # of everybody


def build_cohort_view(
    clients: DeviceState, server: ServerState, block: Block, cohort: Cohort, broadcast: Broadcast
) -> CohortView:
    """What some clients' devices see: their own rows, and what the server sent."""
    users = cohort.users.ids
    train = block.train.take(users)
    state = clients.take(users)
    lists = broadcast.per_client(cohort.keys)
    return CohortView(
        block=server.block,  # now, even where an earlier block is looked at
        round=server.round,
        n_items=len(server.items),
        user_ptr=cohort.users.ptr,
        user=users,
        user_keys=cohort.user_keys[users],
        client_keys=cohort.keys,
        train=train,
        exclude=train,
        private=state["private"],
        parts=nest_parts(state, PARTS),
        items=server.items,
        heads=server.heads,
        received=broadcast.common,
        per_client=broadcast.decode_lists(lists, len(server.items)),
        lists=clients.read_part_lists(users),
    )


def build_user_view(
    clients: DeviceState, server: ServerState, block: Block, users: AnyArray, keys: Keys, broadcast: Broadcast
) -> CohortView:
    """A view in which every user stands for itself, as when a device scores."""
    users = np.asarray(users, np.int32)
    alone = Ragged(np.arange(len(users) + 1, dtype=np.int64), users)
    cohort = Cohort(alone, keys[users], keys)
    return build_cohort_view(clients, server, block, cohort, broadcast)


def iterate_views_by_part(
    federation: Federation,
    server: ServerState,
    clients: DeviceState,
    broadcast: Broadcast,
    parts: Sequence[Part],
    users: Longs,
) -> Iterator[tuple[Part, CohortView]]:
    """Views of these users, chunk by chunk, for each part that asks for them."""
    block = federation.stream.blocks[server.block]
    for start in range(0, len(users) if parts else 0, federation.chunk):
        chunk = users[start : start + federation.chunk].astype(np.int32)
        view = build_user_view(clients, server, block, chunk, federation.stream.user_keys, broadcast)
        for part in parts:
            yield part, view
