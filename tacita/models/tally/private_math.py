"""The mathematics of tally under a budget: how much noise each release takes, and what is made of noised sums.

A person's term is c c^T with c of length 1 whatever the history, so one Gaussian release of the sum protects everybody
alike. All that follows the noise (which items, scales, shrinkage, B) is computed from noised numbers and public ones
alone, so it costs nothing more. The constants were chosen on the validation part of MovieLens-1M and hold for all data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from tacita.core.types import AnyArray, Doubles, Floats, Ints, Ragged
from tacita.privacy.calibration import epsilon_of_mu, mu_of
from tacita.privacy.ledger import MICRO, UNIT
from tacita.privacy.noise import NoiseStream

POPULARITY_SHARE, PEOPLE_SHARE = (
    0.055,
    0.005,
)  # shares of the first block's mu^2 that popularity and the number of people take
SIZE_FACTOR, SIZE_WITH_FEATURES = 5.0, 1.3  # k = 5 sqrt(people / s); so many times more where features help
QUANTILE, SCALE_POWER = 0.05, 0.25  # popularity is at least this quantile; its power in the scale of an item
MIN_LENGTH = 1e-3  # of a centred history that is told; a shorter one is all popularity
CENTRE_SHARE = 0.5  # what is put back of popularity in the end
RIDGE, RIDGE_WITH_FEATURES = 4.0, 3.0  # times s sqrt(k)
GRID = 2.0**-16  # vectors are whole numbers of it, so that entries of terms are whole numbers of its square
POPULARITY_GRID = 2.0**-24
MIN_DEVIATION_STEPS = (
    64.0  # whole numbers that a deviation has at least: with fewer, noise costs more than the formulas say
)
MOST_PEOPLE = 2**20  # whose terms add up exactly in double precision, noise included
SQUARE_ROOT_2 = math.sqrt(2.0)


@dataclass(frozen=True)
class TallyBudget:
    """What a person may lose in all, and how it is shared out: in mu^2, which adds up over releases."""

    epsilon: float
    delta: float
    blocks: int  # that share it

    @property
    def mu2(self) -> float:
        """Of one block; a ledger that rounds every charge up holds all of them."""
        epsilon = math.floor(self.epsilon / MICRO * (1 + 1e-15)) * MICRO
        return (mu_of(epsilon, self.delta) ** 2 - 2 * (self.blocks + 1) * UNIT) / self.blocks if epsilon else 0.0

    def term_share(self, first: bool) -> float:
        """What of a block's mu^2 the terms take: in the first block popularity has to be asked for, too."""
        return 1.0 - POPULARITY_SHARE - PEOPLE_SHARE if first else 1.0

    def deviation(self, share: float, length: float = 1.0) -> float:
        """Of the noise of a release of vectors of this length that takes a share of a block's mu^2."""
        return length / math.sqrt(share * self.mu2)

    def matrix_deviation(self, share: float, length: float = 1.0) -> float:
        """The same for symmetric matrices: off the diagonal; on it sqrt 2 times as much."""
        return self.deviation(share, length) / SQUARE_ROOT_2

    def spent_epsilon(self, blocks: int, retractions: int = 0) -> float:
        """The epsilon of who told in so many blocks, the first among them, and took back so often."""
        return float(epsilon_of_mu(np.array([math.sqrt((blocks + retractions) * self.mu2)]), self.delta)[0])


# On devices


def unit_likes(lists: Ragged) -> Doubles:
    """The entry of every item in x / |x|, rounded down, so that no list is longer than 1."""
    counts = lists.counts()
    each = np.floor(1.0 / np.sqrt(np.maximum(counts, 1)) / POPULARITY_GRID) * POPULARITY_GRID
    return np.asarray(np.repeat(each, counts))


def unit_vectors(lists: Ragged, inputs: Ints, scale: Doubles, centre: Doubles, length: float = 1.0) -> Doubles:
    """(lists, k) what each list is among the inputs: scaled, centred, of the given length; nothing where that is none.

    Rounded towards 0, so that none is longer.
    """
    z = np.zeros((len(lists), len(inputs)))
    place = np.searchsorted(inputs, lists.ids)
    known = np.append(inputs, -1)[place] == lists.ids
    z[lists.rows()[known], place[known]] = scale[place[known]]
    z -= np.outer(z @ centre, centre)
    size = np.sqrt((z**2).sum(axis=1))
    factor = np.where(size < MIN_LENGTH, 0.0, length * (1 - 1e-9) / np.maximum(size, MIN_LENGTH))
    z *= (factor / GRID)[:, None]
    return np.asarray(np.trunc(z, out=z) * GRID)


# Noise, in whole numbers


def draw_whole_noise(stream: NoiseStream, deviation: float, grid: float, size: int) -> Doubles:
    """Discrete Gaussian noise, in whole numbers of the grid."""
    return np.asarray(stream.discrete_normals(deviation / grid, size) * grid)


def draw_symmetric_noise(stream: NoiseStream, s: float, k: int) -> Doubles:
    """Deviation s off the diagonal and s sqrt 2 on it; the same on both sides.

    A server that says that terms faded long ago asks for less and less, down to single whole numbers: `FINE` is least.
    """
    s, out = max(s, MIN_DEVIATION_STEPS * GRID**2), np.zeros((k, k))
    rows, columns = np.tril_indices(k, -1)
    below = draw_whole_noise(stream, s, GRID**2, len(rows))
    out[rows, columns] = below
    out[columns, rows] = below
    out[np.diag_indices(k)] = draw_whole_noise(stream, SQUARE_ROOT_2 * s, GRID**2, k)
    return out


# On the server


@dataclass(frozen=True)
class TermAxes:
    """In what terms people tell: the items, what each is multiplied by, and the direction that is taken out."""

    inputs: Ints
    scale: Doubles
    centre: Doubles


def choose_n_inputs(people: float, s: float, n_items: int, with_features: bool) -> int:
    """How many items the noise lets be told of."""
    more = SIZE_WITH_FEATURES if with_features else 1.0
    return int(np.clip(round(more * SIZE_FACTOR * math.sqrt(max(people, 1.0) / s)), min(2, n_items), n_items))


def choose_axes(liked: Doubles, k: int) -> TermAxes:
    """The k most popular items, rarer ones scaled up, and popularity as the direction that is taken out."""
    inputs = np.sort(np.argsort(-liked, kind="stable")[:k]).astype(np.int32)
    weights = normalise_popularity(liked[inputs])
    scale = weights**-SCALE_POWER
    centre = scale * np.maximum(liked[inputs], 0.0)
    length = np.linalg.norm(centre)
    return TermAxes(inputs, scale, centre / length if length > 0 else scale / np.linalg.norm(scale))


def normalise_popularity(liked: Doubles) -> Doubles:
    """Noised popularity, never too low, on average 1."""
    floor = float(np.quantile(liked, QUANTILE))
    if floor <= 0:  # all noise
        floor = max(1e-3 * float(np.abs(liked).max(initial=0.0)), 1e-12)
    found = np.maximum(liked, floor)
    return np.asarray(found / found.mean())


def shrink_values(values: Doubles, edge: float) -> Doubles:
    """Eigenvalues without what noise puts on them: none below its edge."""
    return np.asarray(np.where(values > edge, np.sqrt(np.maximum(values**2 - edge**2, 0.0)), 0.0))


def fit_smoother(gram: Doubles, centre: Doubles, s: float, basis: Doubles | None = None) -> Doubles:
    """K: what of each direction is signal, and a half of the centre.

    With a basis of public features, what lies in it is shrunk by the smaller edge of its own dimension.
    """
    k = len(gram)
    along = gram @ centre
    centred = gram - np.outer(along, centre) - np.outer(centre, along) + (centre @ along) * np.outer(centre, centre)
    edge, ridge = 2 * s * math.sqrt(k), RIDGE * s * math.sqrt(k)
    if basis is not None:
        inner = basis.T @ centred @ basis
        near = basis @ _shrink_matrix(inner, 2 * s * math.sqrt(basis.shape[1])) @ basis.T
        centred = near + _shrink_matrix(centred - basis @ inner @ basis.T, edge)
        edge, ridge = 0.0, RIDGE_WITH_FEATURES * s * math.sqrt(k)
    values, vectors = scipy.linalg.eigh(centred, check_finite=False)
    found = shrink_values(values, edge)
    kept = found > 0
    vectors, found = vectors[:, kept], found[kept]
    return np.asarray((vectors * (found / (found + ridge))) @ vectors.T + CENTRE_SHARE * np.outer(centre, centre))


def _shrink_matrix(matrix: Doubles, edge: float) -> Doubles:
    values, vectors = scipy.linalg.eigh(matrix, check_finite=False)
    return np.asarray((vectors * shrink_values(values, edge)) @ vectors.T)


def build_feature_basis(codes: Floats, liked: Doubles, axes: TermAxes) -> Doubles:
    """An orthonormal basis of what public features of the inputs span, without the centre."""
    span = codes[axes.inputs] * (np.sqrt(normalise_popularity(liked[axes.inputs])) * axes.scale)[:, None]
    span = span - np.outer(axes.centre, axes.centre @ span)
    vectors, sizes, _ = np.linalg.svd(span, full_matrices=False)
    return np.asarray(vectors[:, sizes > 1e-6 * sizes.max(initial=1e-300)])


def solve_weights(smooth: Doubles, scale: Doubles) -> Floats:
    """B between the inputs, with a zero diagonal."""
    found = smooth / (1.0 - np.diag(smooth))[None, :] * scale[:, None] / scale[None, :]
    np.fill_diagonal(found, 0.0)
    return np.asarray(found, np.float32)


def scale_outside_popularity(axes: TermAxes, liked: AnyArray) -> Floats:
    """Popularity from 0 to 1 for items outside of the inputs; 0 for those."""
    out = np.maximum(liked, 0.0)
    out[axes.inputs] = 0.0
    return np.asarray(out / max(float(out.max(initial=0.0)), 1e-12), np.float32)
