"""Named randomness: every draw comes from (seed, purpose, block, round, owner, counter), never from call order.

Public draws (participants, initial tables, server steps) follow the run seed. Draws that protect a user (negatives,
replay, noise) follow a secret as well: a device makes its own, so a server that knows the seed cannot subtract the
device's noise; a lab run that states an epsilon has one that its folder does not hold. All other lab runs have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tacita.core.types import Keys


def _hash_to_uint64(*fields: object) -> np.uint64:
    digest = _hash_fields(fields, 8)
    number = int.from_bytes(digest, "little")
    return np.uint64(number)


def _hash_fields(fields: Iterable[object], size: int) -> bytes:
    text = "\x1f".join(str(field) for field in fields)
    return _hash_bytes(text.encode(), size)


def _hash_bytes(content: bytes, size: int, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=size, key=key).digest()


@dataclass(frozen=True)
class Draws:
    """Makes 64-bit purpose keys; the kernels turn a key and an owner into a stream of numbers."""

    seed: int
    secret: str = ""  # of a device; "" in the lab
    lab_secret: str = ""  # of a lab run under a budget; "": draws follow the seed alone

    @property
    def is_secret(self) -> bool:
        """Whether private draws follow more than the seed."""
        return bool(self._all_secrets)

    @property
    def _all_secrets(self) -> str:
        return self.secret + self.lab_secret

    def public(self, purpose: str, *ids: int) -> np.uint64:
        return _hash_to_uint64("public", self.seed, purpose, *ids)

    def private(self, purpose: str, *ids: int) -> np.uint64:
        return _hash_to_uint64("private", self.seed, self._all_secrets, purpose, *ids)

    def secret_key(self, purpose: str, *ids: int) -> bytes:
        """A private key of 32 bytes, for streams of which others see a part and may not guess the rest."""
        fields = ("sealed", self.seed, self._all_secrets, purpose, *ids)
        return _hash_fields(fields, 32)


def derive_keys(raw_ids: Iterable[str]) -> Keys:
    """A 64-bit key per raw id: streams follow the user or item, not its number in this run."""
    return _join_keys(_hash_bytes(raw_id.encode(), 8) for raw_id in raw_ids)


def _join_keys(digests: Iterable[bytes]) -> Keys:
    content = b"".join(digests)
    return np.frombuffer(content, np.uint64).copy()


def hash_rows(key: bytes, *columns: Keys) -> Keys:
    """A number of 64 bits for each row of some columns; without the key it reveals nothing of the row."""
    rows = np.column_stack(columns)
    rows = rows.astype("<u8", copy=False)
    return _join_keys(_hash_bytes(row.tobytes(), 8, key) for row in rows)
