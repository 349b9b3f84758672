"""Noise that protects people, from named draws: whole arrays, and whole numbers for exact sums.

In the lab a stream follows the run's seed through a fast generator. On a device it follows the device's secret through
SHAKE-256: where a person's change is 0 the server reads the noise itself, and from a generator that is not
cryptographic it could compute the rest of it. Sums of doubles with Gaussian noise are still for research: rounding
leaves traces that the closed forms do not count. `Stream.whole_normals` is for sums of whole numbers.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Bools, Doubles, Keys, Longs
from tacita.kernels.threads import run_in_shares

MAX_SIGMA = 2.0**40  # deviation of whole-number noise, in whole numbers
_UNIT = 2.0**-53
_S11 = np.uint64(11)


class NoiseStream:
    """One stream of random numbers: its name says all of it, what was drawn before from other streams nothing."""

    def __init__(self, draws: Draws, purpose: str, *ids: int) -> None:
        self._key = draws.secret_key(purpose, *ids)
        self._drawn = 0
        self._fast = None if draws.secret else np.random.Philox(key=int.from_bytes(self._key[:16], "little"))

    def words(self, n: int) -> Keys:
        """The next n words of 64 bits."""
        if self._fast is not None:
            return np.atleast_1d(self._fast.random_raw(n)).astype(np.uint64, copy=False)
        block = hashlib.shake_256(self._key + self._drawn.to_bytes(8, "little")).digest(8 * n)
        self._drawn += 1
        return np.frombuffer(block, np.uint64)

    def uniforms(self, n: int) -> Doubles:
        """Uniform numbers in [0, 1)."""
        return np.asarray((self.words(n) >> _S11) * _UNIT)

    def integers_below(self, n: int, most: int) -> Longs:
        """Whole numbers in [0, most), each equally likely: what would favour some is drawn again."""
        if not 0 < most <= 2**62:
            raise TacitaError(f"whole numbers are drawn below 1 to 2^62, not below {most}.")
        limit = 2**64 // most * most
        out = self.words(n).copy()
        while limit < 2**64 and (again := np.flatnonzero(out >= np.uint64(limit))).size:
            out[again] = self.words(len(again))
        return (out % np.uint64(most)).astype(np.int64)

    def normals(self, *shape: int) -> Doubles:
        """Standard normals (Box-Muller, in double precision)."""
        size = math.prod(shape)
        half = -(-size // 2)
        first, second, out = self.words(half), self.words(half), np.empty((2, half))

        def turned(some: slice) -> None:
            radius = 1.0 - (first[some] >> _S11) * _UNIT
            np.log(radius, out=radius)  # in place: as many new arrays would take longer than the numbers
            radius *= -2.0
            np.sqrt(radius, out=radius)
            angle = (second[some] >> _S11) * _UNIT
            angle *= 2.0 * math.pi
            for part, turn in ((out[0, some], np.cos), (out[1, some], np.sin)):
                turn(angle, out=part)
                part *= radius

        run_in_shares(turned, half)
        return out.reshape(-1)[:size].reshape(shape)

    def laplaces(self, *shape: int) -> Doubles:
        """Laplace numbers of scale 1."""
        size = math.prod(shape)
        sign = np.where(self.words(size) & np.uint64(1), 1.0, -1.0)
        return np.asarray(sign * -np.log(1.0 - self.uniforms(size))).reshape(shape)

    def gammas(self, n: int, *shape: int) -> Doubles:
        """Sums of n exponential numbers each (Marsaglia and Tsang 2000)."""
        d = n - 1 / 3
        out = np.zeros(math.prod(shape))
        left = np.arange(out.size)
        while left.size:
            x = self.normals(left.size)
            v = (1 + x / math.sqrt(9 * d)) ** 3
            with np.errstate(invalid="ignore", divide="ignore"):
                taken = (v > 0) & (np.log(1.0 - self.uniforms(left.size)) < x**2 / 2 + d - d * v + d * np.log(v))
            out[left[taken]] = d * v[taken]
            left = left[~taken]
        return out.reshape(shape)

    def discrete_normals(self, sigma: float, *shape: int) -> Longs:
        """Whole numbers x with probability proportional to exp(-x^2 / 2 sigma^2): the discrete Gaussian.

        By rejection from the discrete Laplace law (Canonne, Kamath, Steinke 2020); every coin is right up to 2^-53.
        """
        if not (math.isfinite(sigma) and 0 < sigma < MAX_SIGMA):
            raise TacitaError(f"whole-number noise needs a deviation above 0 and below 2^40, not {sigma}.")
        size, wide = math.prod(shape), math.floor(sigma) + 1
        out = np.zeros(size, np.int64)
        left = np.arange(size)
        while left.size:
            drawn = self._discrete_laplaces(len(left), wide)
            gap = np.abs(drawn) - sigma**2 / wide
            taken = self._draw_coins(gap**2 / (2 * sigma**2))
            out[left[taken]] = drawn[taken]
            left = left[~taken]
        return out.reshape(shape)

    def _discrete_laplaces(self, n: int, wide: int) -> Longs:
        """Whole numbers with probability proportional to exp(-|x| / wide)."""
        out = np.zeros(n, np.int64)
        left = np.arange(n)
        while left.size:
            low = self.integers_below(len(left), wide)
            kept = self._draw_coins(low / wide)
            high = np.floor(-np.log(1.0 - self.uniforms(len(left)))).astype(np.int64)  # geometric: P(at least m) = e^-m
            size, minus = low + wide * high, (self.words(len(left)) & np.uint64(1)).astype(bool)
            kept &= ~((size == 0) & minus)  # 0 would come twice
            out[left[kept]] = np.where(minus, -size, size)[kept]
            left = left[~kept]
        return out

    def _draw_coins(self, exponent: AnyArray) -> Bools:
        """Yes with probability e^-exponent, each by itself."""
        return np.asarray(self.uniforms(len(exponent)) < np.exp(-exponent))
