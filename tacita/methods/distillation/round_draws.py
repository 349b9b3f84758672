"""The draws of one round: each is named by a client's key, a purpose and an item, never by order or company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, Doubles, Keys, Longs
from tacita.kernels.hashing import hash_owners, uniforms

_UNIT = 2.0**-53


@dataclass(frozen=True)
class RoundDraws:
    """Draws for some clients in one round."""

    draws: Draws
    keys: Keys  # (clients,)
    block: int
    round: int
    public: bool = False  # the server's own steps; what a device draws follows its secret

    def key(self, purpose: str) -> np.uint64:
        named = self.draws.public if self.public else self.draws.private
        return named(purpose, self.block, self.round)

    def take(self, clients: AnyArray) -> RoundDraws:
        return replace(self, keys=self.keys[clients])

    def draw_uniforms(self, purpose: str, width: int = 1) -> Doubles:
        """Uniform numbers in [0, 1), shape (clients, width)."""
        return uniforms(self.key(purpose), self.keys, width).astype(np.float64)

    def draw_between(self, purpose: str, span: tuple[float, float]) -> Doubles:
        """One uniform number per client, from the first bound up to the second."""
        low, high = span
        return np.asarray(low + (high - low) * self.draw_uniforms(purpose)[:, 0])

    def hash_entries(self, purpose: str, rows: AnyArray, ids: AnyArray) -> Keys:
        """64 random bits per (client, id); sorting by them shuffles."""
        key = self.key(purpose)
        return hash_owners(key, hash_owners(key, self.keys)[rows] + np.asarray(ids).astype(np.uint64))

    def draw_indices(self, purpose: str, rows: AnyArray, ids: AnyArray, counts: AnyArray) -> Longs:
        """A whole number in [0, count) per (client, id)."""
        unit = (self.hash_entries(purpose, rows, ids) >> np.uint64(11)).astype(np.float64) * _UNIT
        return np.minimum((unit * counts).astype(np.int64), np.asarray(counts, np.int64) - 1)


def rank_in_rows(rows: AnyArray, *by: AnyArray) -> Longs:
    """Place of every entry in its row, from 0, when the row is sorted by the given columns; ties keep their order."""
    order = np.lexsort((*by[::-1], rows))
    _, starts, counts = np.unique(rows[order], return_index=True, return_counts=True)
    out = np.empty(len(rows), np.int64)
    out[order] = np.arange(len(rows)) - np.repeat(starts, counts)
    return out


def floor_share(share: AnyArray | float, counts: AnyArray) -> Longs:
    """floor(share * count), where a product that misses a whole number by rounding counts as that number."""
    return np.floor(np.asarray(share, np.float64) * counts + 1e-9).astype(np.int64)
