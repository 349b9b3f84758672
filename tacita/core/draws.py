"""Named randomness: every draw comes from (seed, purpose, block, round, owner, counter), never from call order.

Public draws (participants, initial tables, server steps) follow the run seed. Draws that protect a person
(negatives, replay, noise) follow a secret as well; the lab derives it from the seed, a device makes its own, so
that a server that knows the seed cannot subtract what the device added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Keys


def _digest(*fields: object) -> np.uint64:
    text = "\x1f".join(str(field) for field in fields)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


@dataclass(frozen=True)
class Draws:
    """Makes 64-bit purpose keys; the kernels turn a key and an owner into a stream of numbers."""

    seed: int
    secret: str = ""  # "" in the lab

    def public(self, purpose: str, *ids: int) -> np.uint64:
        return _digest("public", self.seed, purpose, *ids)

    def private(self, purpose: str, *ids: int) -> np.uint64:
        return _digest("private", self.seed, self.secret, purpose, *ids)

    def secret_key(self, purpose: str, *ids: int) -> bytes:
        """A private key of 32 bytes, for streams of which others see a part and may not guess the rest."""
        text = "\x1f".join(str(field) for field in ("sealed", self.seed, self.secret, purpose, *ids))
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def derive_keys(raw_ids: Iterable[str]) -> Keys:
    """A 64-bit key per raw id: streams follow the person or item, not its number in this run."""
    made = [hashlib.blake2b(one.encode(), digest_size=8).digest() for one in raw_ids]
    return np.frombuffer(b"".join(made), dtype=np.uint64).copy()


def hash_rows(key: bytes, *columns: Keys) -> Keys:
    """A number of 64 bits for each row of some columns, which says nothing of the row to who has not the key."""
    rows = np.column_stack(columns).astype("<u8", copy=False) if len(columns) > 1 else columns[0].astype("<u8")[:, None]
    made = [hashlib.blake2b(one.tobytes(), key=key, digest_size=8).digest() for one in rows]
    return np.frombuffer(b"".join(made), np.uint64).copy()
