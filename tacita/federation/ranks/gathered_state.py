"""What devices of all ranks hold, as one state in the order of people, and cut up again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tacita.core.types import AnyArray, Arrays, Longs
from tacita.federation.devices import LocalDevices
from tacita.federation.ranks.rank_messages import RankReply, select_below
from tacita.federation.ranks.rank_worker import BEST, NOW, list_own_arrays
from tacita.round.device_state import (
    COMMON,
    LISTS,
    DeviceState,
    flatten_devices,
    join_rows,
    take_rows,
    unflatten_devices,
)


def join_devices(replies: Sequence[RankReply], users: Sequence[Longs]) -> LocalDevices:
    """The devices of all ranks in the order of people; `users`: the numbers of each rank's people among all.

    It takes the arrays out of the replies, so that few of them are in memory twice.
    """
    n_users = [len(reply.arrays[f"{NOW}private"]) for reply in replies]
    known = [numbers[:n] for numbers, n in zip(users, n_users, strict=True)]
    clients = unflatten_devices(_join_arrays(replies, NOW, known), NOW)
    best = unflatten_devices(_join_arrays(replies, BEST, known), BEST)
    devices = LocalDevices(clients.with_snapshot(best))
    devices.clients.persistent = frozenset(replies[0].fields["persistent"])
    return devices


def _join_arrays(replies: Sequence[RankReply], prefix: str, users: Sequence[Longs]) -> Arrays:
    """Rows of all ranks in the order of users; what all devices received alike once."""
    joined: Arrays = {}
    lists: list[Arrays] = [{} for _ in replies]
    for name in select_below(replies[0].arrays, prefix):
        arrays = [reply.arrays.pop(f"{prefix}{name}") for reply in replies]
        if name.startswith(COMMON):
            joined[name] = arrays[0]
        elif name.startswith(LISTS):
            for own, array in zip(lists, arrays, strict=True):
                own[name] = array
        else:
            joined[name] = _place_rows(arrays, users)
    return {f"{prefix}{name}": array for name, array in (joined | _join_lists(lists, users)).items()}


def _place_rows(arrays: Sequence[AnyArray], users: Sequence[Longs]) -> AnyArray:
    n_users = sum(len(numbers) for numbers in users)
    whole = np.empty((n_users, *arrays[0].shape[1:]), arrays[0].dtype)
    for array, numbers in zip(arrays, users, strict=True):
        whole[numbers] = array
    return whole


def _join_lists(lists: Sequence[Arrays], users: Sequence[Longs]) -> Arrays:
    joined = lists[0]
    for more in lists[1:]:
        joined = join_rows(joined, more)
    return take_rows(joined, np.argsort(np.concatenate(users), kind="stable"))


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
