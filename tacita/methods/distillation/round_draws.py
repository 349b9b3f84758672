"""The draws of one round: each is named by a client's key, a purpose and an item, never by order or company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, Doubles, Keys, Longs
from tacita.kernels.hashing import draw_uniforms, hash_owners

_UNIT = 2.0**-53


@dataclass(frozen=True)
class RoundDraws:
    """Draws for some clients in one round."""

    draws: Draws
    keys: Keys  # (clients,)
    block: int
    round: int
    public: bool = False  # the server's own steps; what a device draws follows its secret

    def derive_key(self, purpose: str) -> np.uint64:
        """The key of one purpose's draws in this round."""
        if self.public:
            return self.draws.public(purpose, self.block, self.round)
        return self.draws.private(purpose, self.block, self.round)

    def take(self, clients: AnyArray) -> RoundDraws:
        """The same draws, for some of the clients."""
        return replace(self, keys=self.keys[clients])

    def draw_uniforms(self, purpose: str, width: int = 1) -> Doubles:
        """Uniform numbers in [0, 1), shape (clients, width)."""
        key = self.derive_key(purpose)
        draws = draw_uniforms(key, self.keys, width)
        return draws.astype(np.float64)

    def draw_between(self, purpose: str, span: tuple[float, float]) -> Doubles:
        """One uniform number per client, from the first bound up to the second."""
        low, high = span
        draws = self.draw_uniforms(purpose)
        unit = draws[:, 0]
        width = high - low
        return np.asarray(low + width * unit)

    def hash_entries(self, purpose: str, rows: AnyArray, ids: AnyArray) -> Keys:
        """64 random bits per (client, id); sorting by them shuffles."""
        key = self.derive_key(purpose)
        of_clients = hash_owners(key, self.keys)
        streams = of_clients[rows]
        offsets = np.asarray(ids).astype(np.uint64)
        entries = streams + offsets
        return hash_owners(key, entries)

    def draw_indices(self, purpose: str, rows: AnyArray, ids: AnyArray, counts: AnyArray) -> Longs:
        """A whole number in [0, count) per (client, id)."""
        hashes = self.hash_entries(purpose, rows, ids)
        bits = hashes >> np.uint64(11)
        unit = bits.astype(np.float64) * _UNIT
        scaled = unit * counts
        index = scaled.astype(np.int64)
        limits = np.asarray(counts, np.int64)
        largest = limits - 1
        return np.minimum(index, largest)


def rank_in_rows(rows: AnyArray, *by: AnyArray) -> Longs:
    """Place of every entry in its row, from 0, when the row is sorted by the given columns; ties keep their order."""
    columns = (*by[::-1], rows)
    order = np.lexsort(columns)
    sorted_rows = rows[order]
    _, starts, counts = np.unique(sorted_rows, return_index=True, return_counts=True)
    n_entries = len(rows)
    rank = np.empty(n_entries, np.int64)
    first_places = np.repeat(starts, counts)
    places = np.arange(len(rows))
    rank[order] = places - first_places
    return rank


def floor_share(share: AnyArray | float, counts: AnyArray) -> Longs:
    """floor(share * count), where a product that misses a whole number by rounding counts as that number."""
    shares = np.asarray(share, np.float64)
    product = shares * counts
    whole = np.floor(product + 1e-9)
    return whole.astype(np.int64)
