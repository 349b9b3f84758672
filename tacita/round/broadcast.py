"""What parts send down: the same to all clients, and to some a list of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tacita.core.types import Arrays, Keys, Ragged, ServerState


@dataclass(frozen=True)
class Audience:
    """Whom a broadcast is for."""

    occasion: Literal["round", "serving"]  # serving: to begin a block, to be validated, tested or served
    clients: Keys | None = None  # None: only what goes to all
    items: Ragged | None = None  # serving: the items of each client that are going to be scored; None: all


@dataclass(frozen=True)
class PartBroadcast:
    """What one part sends."""

    common: Arrays = field(default_factory=dict)
    per_client: Ragged | None = None  # a list for each client of the audience
    server: ServerState | None = None  # round only: where writing to clients changes what the server keeps
    once: bool = False  # `common` stays the same during a block, so it travels in the first round only


@dataclass(frozen=True)
class PerClientLists:
    """Lists that were written to some clients, to be looked up by their keys; all others have an empty one."""

    clients: Keys
    lists: dict[str, Ragged]

    def select_lists(self, wanted: Keys) -> dict[str, Ragged]:
        order = np.argsort(self.clients)
        last = max(0, len(order) - 1)
        place = np.minimum(np.searchsorted(self.clients, wanted, sorter=order), last)
        is_known = np.zeros(len(wanted), bool)
        if len(order):
            is_known = self.clients[order[place]] == wanted
        selected = {}
        for name, lists in self.lists.items():
            known_lists = lists.take(order[place[is_known]])
            counts = np.zeros(len(wanted), np.int64)
            counts[is_known] = known_lists.counts()
            ptr = np.zeros(len(wanted) + 1, np.int64)
            np.cumsum(counts, out=ptr[1:])
            selected[name] = Ragged(ptr, known_lists.ids, known_lists.values)
        return selected


def count_list_bytes(lists: Ragged) -> float:
    """Four bytes an id and what the columns hold; the channel names the client."""
    return float(4 * len(lists.ids) + sum(column.nbytes for column in lists.values.values()))
