"""Privacy noise from named draws: whole arrays, and whole numbers for exact sums.

Where noise is reproducible a stream follows the run's seed through a fast generator. Else it follows the secret of the
device or of the lab run through SHAKE-256. Where a user's change is 0 the server reads the noise itself; from a
generator that is not cryptographic it could compute the rest of it. Sums of doubles with Gaussian noise are still for
research: rounding leaves traces that the closed forms do not count. `NoiseStream.draw_discrete_normals` is for
sums of whole numbers.
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
    """One stream of random numbers: its name determines it, draws from other streams do not change it."""

    def __init__(self, draws: Draws, purpose: str, *ids: int) -> None:
        self._key = draws.secret_key(purpose, *ids)
        self._drawn = 0
        self._fast: np.random.Philox | None = None
        if not draws.is_secret:
            short_key = self._key[:16]
            number = int.from_bytes(short_key, "little")
            self._fast = np.random.Philox(key=number)

    def draw_words(self, n: int) -> Keys:
        """The next n words of 64 bits."""
        if self._fast is not None:
            raw = self._fast.random_raw(n)
            words = np.atleast_1d(raw)
            return words.astype(np.uint64, copy=False)
        counter = self._drawn.to_bytes(8, "little")
        generator = hashlib.shake_256(self._key + counter)
        block = generator.digest(8 * n)
        self._drawn += 1
        return np.frombuffer(block, np.uint64)

    def draw_uniforms(self, n: int) -> Doubles:
        """Uniform numbers in [0, 1)."""
        words = self.draw_words(n)
        return _to_unit_interval(words)

    def draw_integers_below(self, n: int, most: int) -> Longs:
        """Whole numbers in [0, most), each equally likely: words that would favour some are redrawn."""
        if not 0 < most <= 2**62:
            raise TacitaError(f"whole numbers are drawn below 1 to 2^62, not below {most}.")
        limit = 2**64 // most * most
        words = self.draw_words(n).copy()
        while limit < 2**64:
            is_rejected = words >= np.uint64(limit)
            n_rejected = int(np.count_nonzero(is_rejected))
            if not n_rejected:
                break
            words[is_rejected] = self.draw_words(n_rejected)
        numbers = words % np.uint64(most)
        return numbers.astype(np.int64)

    def draw_normals(self, *shape: int) -> Doubles:
        """Standard normals (Box-Muller, in double precision)."""
        size = math.prod(shape)
        half = -(-size // 2)
        first = self.draw_words(half)
        second = self.draw_words(half)
        normals = np.empty((2, half))

        def transform(share: slice) -> None:
            radius = 1.0 - _to_unit_interval(first[share])
            np.log(radius, out=radius)  # in place: as many new arrays would take longer than the numbers
            radius *= -2.0
            np.sqrt(radius, out=radius)
            angle = _to_unit_interval(second[share])
            angle *= 2.0 * math.pi
            cosines = normals[0, share]
            np.cos(angle, out=cosines)
            cosines *= radius
            sines = normals[1, share]
            np.sin(angle, out=sines)
            sines *= radius

        run_in_shares(transform, half)
        flat = normals.reshape(-1)
        return flat[:size].reshape(shape)

    def draw_laplaces(self, *shape: int) -> Doubles:
        """Laplace numbers of scale 1."""
        size = math.prod(shape)
        is_positive = self._draw_bits(size)
        sign = np.where(is_positive, 1.0, -1.0)
        numbers = sign * self._draw_exponentials(size)
        return np.asarray(numbers).reshape(shape)

    def draw_gammas(self, n: int, *shape: int) -> Doubles:
        """Sums of n exponential numbers each (Marsaglia and Tsang 2000)."""
        d = n - 1 / 3
        size = math.prod(shape)
        numbers = np.zeros(size)
        open_places = np.arange(size)
        while open_places.size:
            n_open = open_places.size
            x = self.draw_normals(n_open)
            v = 1 + x / math.sqrt(9 * d)
            v = v**3
            log_uniform = -self._draw_exponentials(n_open)
            with np.errstate(invalid="ignore", divide="ignore"):
                log_v = np.log(v)
            bound = x**2 / 2 + d - d * v + d * log_v
            accepted = v > 0
            accepted &= log_uniform < bound
            places = open_places[accepted]
            numbers[places] = d * v[accepted]
            open_places = open_places[~accepted]
        return numbers.reshape(shape)

    def draw_discrete_normals(self, sigma: float, *shape: int) -> Longs:
        """Whole numbers x with probability proportional to exp(-x^2 / 2 sigma^2): the discrete Gaussian.

        By rejection from the discrete Laplace law (Canonne, Kamath, Steinke 2020); every coin is right up to 2^-53.
        """
        is_valid = 0 < sigma < MAX_SIGMA
        if not is_valid:
            raise TacitaError(f"whole-number noise needs a deviation above 0 and below 2^40, not {sigma}.")
        size = math.prod(shape)
        width = math.floor(sigma) + 1
        variance = sigma**2
        numbers = np.zeros(size, np.int64)
        open_places = np.arange(size)
        while open_places.size:
            n_open = len(open_places)
            candidates = self._draw_discrete_laplaces(n_open, width)
            gap = np.abs(candidates) - variance / width
            exponent = gap**2 / (2 * variance)
            accepted = self._draw_coins(exponent)
            places = open_places[accepted]
            numbers[places] = candidates[accepted]
            open_places = open_places[~accepted]
        return numbers.reshape(shape)

    def _draw_discrete_laplaces(self, n: int, width: int) -> Longs:
        """Whole numbers with probability proportional to exp(-|x| / width)."""
        numbers = np.zeros(n, np.int64)
        open_places = np.arange(n)
        while open_places.size:
            n_open = len(open_places)
            low = self.draw_integers_below(n_open, width)
            accepted = self._draw_coins(low / width)
            geometric = np.floor(self._draw_exponentials(n_open))  # P(at least m) = e^-m
            high = geometric.astype(np.int64)
            magnitude = low + width * high
            is_negative = self._draw_bits(n_open)
            is_minus_zero = (magnitude == 0) & is_negative
            accepted &= ~is_minus_zero  # 0 would come twice
            candidates = np.where(is_negative, -magnitude, magnitude)
            places = open_places[accepted]
            numbers[places] = candidates[accepted]
            open_places = open_places[~accepted]
        return numbers

    def _draw_exponentials(self, n: int) -> Doubles:
        """Exponential numbers of mean 1."""
        uniform = self.draw_uniforms(n)
        return np.asarray(-np.log(1.0 - uniform))

    def _draw_bits(self, n: int) -> Bools:
        """Fair coins, from the lowest bit of a word each."""
        words = self.draw_words(n)
        bits = words & np.uint64(1)
        return bits.astype(bool)

    def _draw_coins(self, exponent: AnyArray) -> Bools:
        """True with probability e^-exponent, each by itself."""
        probability = np.exp(-exponent)
        uniform = self.draw_uniforms(len(exponent))
        return np.asarray(uniform < probability)


def _to_unit_interval(words: Keys) -> Doubles:
    """The upper 53 bits of words as numbers in [0, 1)."""
    bits = words >> _S11
    return np.asarray(bits * _UNIT)
