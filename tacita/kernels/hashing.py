"""Counter-based random numbers: draw j of a stream is a hash of (stream key, j), so nothing has state.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection on 64 bits with full avalanche.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tacita.core.types import Floats, Keys, Longs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_A = np.uint64(0xBF58476D1CE4E5B9)
_MUL_B = np.uint64(0x94D049BB133111EB)
_S30 = np.uint64(30)
_S27 = np.uint64(27)
_S31 = np.uint64(31)
_S32 = np.uint64(32)
_S11 = np.uint64(11)
_UNIT = 1.0 / 9007199254740992.0  # 2^-53
_LAST = np.float32(1.0 - 2.0**-24)  # the largest single below 1


@njit(inline="always")
def mix_bits(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _MUL_A
    x = (x ^ (x >> _S27)) * _MUL_B
    return x ^ (x >> _S31)


@njit(inline="always")
def derive_stream(key: np.uint64, owner: np.uint64) -> np.uint64:
    """The stream of one owner (a user, an item) under a purpose key."""
    return mix_bits(key ^ mix_bits(owner + _GOLDEN))


@njit(inline="always")
def draw_bits(stream: np.uint64, counter: np.uint64) -> np.uint64:
    place = counter + np.uint64(1)
    return mix_bits(stream + place * _GOLDEN)


@njit(inline="always")
def random_below(stream: np.uint64, counter: np.uint64, n: np.uint64) -> np.int64:
    """A whole number in [0, n), n < 2^32; the bias of the multiply-shift is under n / 2^32."""
    upper = draw_bits(stream, counter) >> _S32
    return np.int64((upper * n) >> _S32)


@njit(inline="always")
def random_unit(stream: np.uint64, counter: np.uint64) -> float:
    """A float in [0, 1)."""
    return np.float64(draw_bits(stream, counter) >> _S11) * _UNIT


@njit(cache=True)
def hash_owners(key: np.uint64, owners: Keys) -> Keys:
    out = np.empty(len(owners), np.uint64)
    for i in range(len(owners)):
        out[i] = derive_stream(key, owners[i])
    return out


@njit(cache=True, parallel=True)
def draw_normals(key: np.uint64, owners: Keys, width: int) -> Floats:
    """Standard normals by Box-Muller, `width` per owner."""
    out = np.empty((len(owners), width), np.float32)
    for i in prange(len(owners)):
        stream = derive_stream(key, owners[i])
        for j in range(0, width, 2):
            first = random_unit(stream, np.uint64(j))
            second = random_unit(stream, np.uint64(j + 1))
            radius = math.sqrt(-2.0 * math.log(1.0 - first))
            angle = 2.0 * math.pi * second
            out[i, j] = radius * math.cos(angle)
            if j + 1 < width:
                out[i, j + 1] = radius * math.sin(angle)
    return out


@njit(cache=True, parallel=True)
def draw_uniforms(key: np.uint64, owners: Keys, width: int) -> Floats:
    """Uniform numbers in [0, 1), `width` per owner."""
    out = np.empty((len(owners), width), np.float32)
    for i in prange(len(owners)):
        stream = derive_stream(key, owners[i])
        for j in range(width):
            number = np.float32(random_unit(stream, np.uint64(j)))
            out[i, j] = min(number, _LAST)
    return out


@njit(cache=True)
def choose_distinct(key: np.uint64, n: int, k: int) -> Longs:
    """k distinct numbers of [0, n), uniformly, in O(k): a partial shuffle that stores only what it moved."""
    moved = dict()
    moved[np.int64(-1)] = np.int64(-1)
    out = np.empty(k, np.int64)
    for i in range(k):
        j = i + random_below(key, np.uint64(i), np.uint64(n - i))
        at_i = moved.get(np.int64(i), np.int64(i))
        out[i] = moved.get(np.int64(j), np.int64(j))
        moved[np.int64(j)] = at_i
    return out


@njit(cache=True)
def sample_owners(key: np.uint64, owners: Keys, rate: float) -> Longs:
    """Places of the owners who say yes, each by itself with probability `rate`."""
    out = np.empty(len(owners), np.int64)
    n = 0
    for i in range(len(owners)):
        stream = derive_stream(key, owners[i])
        if random_unit(stream, np.uint64(0)) < rate:
            out[n] = i
            n += 1
    return out[:n]
