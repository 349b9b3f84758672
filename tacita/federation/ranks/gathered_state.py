"""What devices of all ranks hold, as one state in the order of people, and cut up again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.types import Arrays, Longs
from tacita.federation.devices import LocalDevices
from tacita.federation.ranks.rank_messages import RankReply, select_below
from tacita.federation.ranks.rank_worker import BEST, NOW, list_own_arrays
from tacita.round.device_state import COMMON, DeviceState, flatten_devices, join_rows, take_rows, unflatten_devices


def join_devices(replies: Sequence[RankReply], users: Sequence[Longs]) -> LocalDevices:
    """The devices of all ranks in the order of people; `users`: the numbers of each rank's people among all."""
    n_users = [len(reply.arrays[f"{NOW}private"]) for reply in replies]
    known = [numbers[:n] for numbers, n in zip(users, n_users, strict=True)]
    order = np.argsort(np.concatenate(known), kind="stable")
    clients = unflatten_devices(_join_arrays(replies, NOW, order), NOW)
    best = unflatten_devices(_join_arrays(replies, BEST, order), BEST)
    devices = LocalDevices(clients.with_snapshot(best))
    devices.clients.persistent = frozenset(replies[0].fields["persistent"])
    return devices


def _join_arrays(replies: Sequence[RankReply], prefix: str, order: Longs) -> Arrays:
    """Rows of all ranks in one order; what all devices received alike once."""
    own = [select_below(reply.arrays, prefix) for reply in replies]
    common = {name: array for name, array in own[0].items() if name.startswith(COMMON)}
    joined = {name: array for name, array in own[0].items() if not name.startswith(COMMON)}
    for arrays in own[1:]:
        joined = join_rows(joined, arrays)
    rows = take_rows(joined, order)
    return {f"{prefix}{name}": array for name, array in (common | rows).items()}


def cut_devices(devices: LocalDevices, users: Sequence[Longs]) -> tuple[Arrays, ...]:
    """What each rank's people hold of all devices, as a rank loads it."""
    clients = devices.clients
    return tuple(_cut_state(clients, numbers[numbers < clients.n_users]) for numbers in users)


def _cut_state(clients: DeviceState, users: Longs) -> Arrays:
    arrays: Arrays = {}
    for prefix, whole in ((NOW, flatten_devices(clients, "")), (BEST, list_own_arrays(clients))):
        for name, array in whole.items():
            if name.startswith(COMMON):
                arrays[f"{prefix}{name}"] = array
        rows = {name: array for name, array in whole.items() if not name.startswith(COMMON)}
        for name, array in take_rows(rows, users).items():
            arrays[f"{prefix}{name}"] = array
    return arrays
