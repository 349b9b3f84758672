"""Bytes that a part keeps on the server and on devices so that something can be forgotten, as they are written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tacita.core.codec import pack
from tacita.core.types import Arrays, ServerState
from tacita.round.device_state import PARTS, DeviceState


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that a part keeps."""

    server: int
    device_mean: float
    device_max: float


def measure_storage(part: str, server: ServerState, clients: DeviceState) -> StoredBytes:
    """What one part keeps on both sides; a device's lists are its numbers and ids."""
    prefix = f"{PARTS}{part}/"
    sizes = np.zeros(clients.n_users)
    for name, array in clients.arrays.items():
        if name.startswith(prefix):
            sizes += array.nbytes / max(1, clients.n_users)
    for name, lists in clients.lists.items():
        if name.startswith(prefix):
            columns = lists.columns.values()
            entry_bytes = sum(column[:1].nbytes for column in columns)
            sizes += lists.count * entry_bytes
    server_arrays: Arrays = server.parts.get(part, {})
    server_bytes = len(pack(server_arrays)) if server_arrays else 0
    largest = float(sizes.max(initial=0))
    return StoredBytes(server_bytes, float(sizes.mean()), largest)
