"""Which shard a person belongs to, and in which order shards stand on disk."""

from __future__ import annotations

import numpy as np

from tacita.core.types import Ints, Keys
from tacita.kernels.hashing import hash_owners

_SALT = np.uint64(0x7261_6E6B)  # places follow the key alone, not the seed of a run


def assign_places(keys: Keys, n_places: int) -> Ints:
    """The shard, or rank, of each key: by a hash of the key alone."""
    hashes = hash_owners(_SALT, keys)
    places = hashes % np.uint64(n_places)
    return places.astype(np.int32)


def order_shards(n_shards: int) -> list[int]:
    """Shards in the order in which they stand on disk.

    With powers of two the people of a rank stand side by side, whether 1, 2, 4, ... ranks share them out: a rank has
    the shards of one remainder, and sorting by reversed bits puts equal remainders together.
    """
    n_bits = (n_shards - 1).bit_length()
    if n_shards != 1 << n_bits:
        return list(range(n_shards))

    def reverse_bits(shard: int) -> int:
        digits = f"{shard:0{n_bits}b}" if n_bits else ""
        return int(digits[::-1] or "0", 2)

    return sorted(range(n_shards), key=reverse_bits)
