"""What is kept only so that something can be forgotten: bytes on the server and on devices, as they are written."""

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
    held: Arrays = server.parts.get(part, {})
    sizes = np.zeros(clients.n_users)
    for name, array in clients.arrays.items():
        if name.startswith(f"{PARTS}{part}/"):
            sizes += array.nbytes / max(1, clients.n_users)
    for name, lists in clients.lists.items():
        if name.startswith(f"{PARTS}{part}/"):
            width = sum(column[:1].nbytes for column in lists.columns.values())
            sizes += lists.count * width
    return StoredBytes(len(pack(held)) if held else 0, float(sizes.mean()), float(sizes.max(initial=0)))
