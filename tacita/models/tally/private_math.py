"""The mathematics of tally under a budget: how much noise each release takes, and what is made of noisy sums.

A user's term is c c^T with c of length 1 whatever the history, so one Gaussian release of the sum protects all users
alike. All that follows the noise (which items, scales, shrinkage, B) is computed from noisy numbers and public ones
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

POPULARITY_SHARE = 0.055  # of the first block's mu^2, for popularity
PEOPLE_SHARE = 0.005  # the same for the number of people
SIZE_FACTOR = 5.0  # k = 5 sqrt(people / s)
SIZE_WITH_FEATURES = 1.3  # so many times more where features help
QUANTILE = 0.05  # popularity is at least this quantile
SCALE_POWER = 0.25  # of popularity in the scale of an item
MIN_LENGTH = 1e-3  # of a centred history that adds a term; a shorter one is all popularity
CENTRE_SHARE = 0.5  # what is put back of popularity in the end
RIDGE = 4.0  # times s sqrt(k)
RIDGE_WITH_FEATURES = 3.0  # the same where features help
GRID = 2.0**-16  # vectors are whole numbers of it, so that entries of terms are whole numbers of its square
POPULARITY_GRID = 2.0**-24
MIN_DEVIATION_STEPS = 64.0
"""Whole numbers that a deviation has at least: with fewer, noise costs more than the formulas say."""

MOST_PEOPLE = 2**20  # whose terms add up exactly in double precision, noise included
SQUARE_ROOT_2 = math.sqrt(2.0)


@dataclass(frozen=True)
class TallyBudget:
    """What a user may lose in all, and how it is shared out: in mu^2, which adds up over releases."""

    epsilon: float
    delta: float
    blocks: int  # that share it

    @property
    def mu2(self) -> float:
        """Of one block; a ledger that rounds every charge up holds all of them."""
        epsilon = math.floor(self.epsilon / MICRO * (1 + 1e-15)) * MICRO
        if not epsilon:
            return 0.0
        whole = mu_of(epsilon, self.delta) ** 2
        rounding = 2 * (self.blocks + 1) * UNIT
        return (whole - rounding) / self.blocks

    def term_share(self, first: bool) -> float:
        """What of a block's mu^2 the terms take: in the first block popularity takes some, too."""
        return 1.0 - POPULARITY_SHARE - PEOPLE_SHARE if first else 1.0

    def deviation(self, share: float, length: float = 1.0) -> float:
        """Of the noise of a release of vectors of this length that takes a share of a block's mu^2."""
        mu = math.sqrt(share * self.mu2)
        return length / mu

    def matrix_deviation(self, share: float, length: float = 1.0) -> float:
        """The same for symmetric matrices: off the diagonal; on it sqrt 2 times as much."""
        return self.deviation(share, length) / SQUARE_ROOT_2

    def spent_epsilon(self, blocks: int, retractions: int = 0) -> float:
        """The epsilon of a user in so many blocks, the first among them, with so many retractions."""
        mu = math.sqrt((blocks + retractions) * self.mu2)
        return float(epsilon_of_mu(np.array([mu]), self.delta)[0])


# On devices


def unit_likes(lists: Ragged) -> Doubles:
    """The entry of every item in x / |x|, rounded down, so that no list is longer than 1."""
    counts = lists.counts()
    entry = 1.0 / np.sqrt(np.maximum(counts, 1))
    rounded = np.floor(entry / POPULARITY_GRID) * POPULARITY_GRID
    return np.asarray(np.repeat(rounded, counts))


def unit_vectors(lists: Ragged, inputs: Ints, scale: Doubles, centre: Doubles, length: float = 1.0) -> Doubles:
    """(lists, k) each list among the inputs: scaled, centred, of the given length; zeros where that is none.

    Rounded towards 0, so that none is longer.
    """
    z = np.zeros((len(lists), len(inputs)))
    place, is_input = find_inputs(lists, inputs)
    columns = place[is_input]
    z[lists.rows()[is_input], columns] = scale[columns]
    z -= np.outer(z @ centre, centre)
    size = np.sqrt((z**2).sum(axis=1))
    stretch = length * (1 - 1e-9) / np.maximum(size, MIN_LENGTH)
    factor = np.where(size < MIN_LENGTH, 0.0, stretch)
    steps = factor / GRID
    z *= steps[:, None]
    whole = np.trunc(z, out=z)
    return np.asarray(whole * GRID)


def find_inputs(lists: Ragged, inputs: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The place of every entry among the inputs, and whether it is one of them."""
    place = np.searchsorted(inputs, lists.ids)
    is_input = np.append(inputs, -1)[place] == lists.ids
    return place, is_input


# Noise, in whole numbers


def draw_whole_noise(stream: NoiseStream, deviation: float, grid: float, size: int) -> Doubles:
    """Discrete Gaussian noise, in whole numbers of the grid."""
    steps = stream.discrete_normals(deviation / grid, size)
    return np.asarray(steps * grid)


def draw_symmetric_noise(stream: NoiseStream, s: float, k: int) -> Doubles:
    """Deviation s off the diagonal and s sqrt 2 on it; the same on both sides.

    A server that says that terms faded long ago asks for less and less, down to single whole numbers:
    `MIN_DEVIATION_STEPS` is least.
    """
    grid = GRID**2
    s = max(s, MIN_DEVIATION_STEPS * grid)
    noise = np.zeros((k, k))
    rows, columns = np.tril_indices(k, -1)
    below = draw_whole_noise(stream, s, grid, len(rows))
    noise[rows, columns] = below
    noise[columns, rows] = below
    diagonal = draw_whole_noise(stream, SQUARE_ROOT_2 * s, grid, k)
    noise[np.diag_indices(k)] = diagonal
    return noise


# On the server


@dataclass(frozen=True)
class TermAxes:
    """What terms are about: the items, what each is multiplied by, and the direction that is taken out."""

    inputs: Ints
    scale: Doubles
    centre: Doubles


def choose_n_inputs(people: float, s: float, n_items: int, with_features: bool) -> int:
    """How many items the terms can be about under this noise."""
    more = SIZE_WITH_FEATURES if with_features else 1.0
    size = round(more * SIZE_FACTOR * math.sqrt(max(people, 1.0) / s))
    least = min(2, n_items)
    return int(np.clip(size, least, n_items))


def choose_axes(liked: Doubles, k: int) -> TermAxes:
    """The k most popular items, rarer ones scaled up, and popularity as the direction that is taken out."""
    by_popularity = np.argsort(-liked, kind="stable")
    inputs = np.sort(by_popularity[:k]).astype(np.int32)
    popularity = liked[inputs]
    scale = normalise_popularity(popularity) ** -SCALE_POWER
    centre = scale * np.maximum(popularity, 0.0)
    length = np.linalg.norm(centre)
    if length > 0:
        return TermAxes(inputs, scale, centre / length)
    return TermAxes(inputs, scale, scale / np.linalg.norm(scale))


def normalise_popularity(liked: Doubles) -> Doubles:
    """Noisy popularity, never too low, on average 1."""
    floor = float(np.quantile(liked, QUANTILE))
    if floor <= 0:  # all noise
        largest = float(np.abs(liked).max(initial=0.0))
        floor = max(1e-3 * largest, 1e-12)
    raised = np.maximum(liked, floor)
    return np.asarray(raised / raised.mean())


def shrink_values(values: Doubles, edge: float) -> Doubles:
    """Eigenvalues without what noise puts on them: none below its edge."""
    squares = np.maximum(values**2 - edge**2, 0.0)
    return np.asarray(np.where(values > edge, np.sqrt(squares), 0.0))


def fit_smoother(gram: Doubles, centre: Doubles, s: float, basis: Doubles | None = None) -> Doubles:
    """K: what of each direction is signal, and a half of the centre.

    With a basis of public features, what lies in it is shrunk by the smaller edge of its own dimension.
    """
    root_k = math.sqrt(len(gram))
    centred = _take_out_centre(gram, centre)
    edge = 2 * s * root_k
    ridge = RIDGE * s * root_k
    if basis is not None:
        centred = _shrink_by_basis(centred, basis, s)
        edge = 0.0
        ridge = RIDGE_WITH_FEATURES * s * root_k
    values, vectors = scipy.linalg.eigh(centred, check_finite=False)
    signal = shrink_values(values, edge)
    is_signal = signal > 0
    vectors = vectors[:, is_signal]
    signal = signal[is_signal]
    weights = signal / (signal + ridge)
    smooth = (vectors * weights) @ vectors.T
    return np.asarray(smooth + CENTRE_SHARE * np.outer(centre, centre))


def _take_out_centre(gram: Doubles, centre: Doubles) -> Doubles:
    """The matrix without the direction of the centre, on either side."""
    along = gram @ centre
    both = (centre @ along) * np.outer(centre, centre)
    return np.asarray(gram - np.outer(along, centre) - np.outer(centre, along) + both)


def _shrink_by_basis(centred: Doubles, basis: Doubles, s: float) -> Doubles:
    """Shrink what lies in the basis and what does not, each by the edge of its own dimension."""
    edge = 2 * s * math.sqrt(len(centred))
    inner_edge = 2 * s * math.sqrt(basis.shape[1])
    inner = basis.T @ centred @ basis
    inside = basis @ _shrink_matrix(inner, inner_edge) @ basis.T
    outside = centred - basis @ inner @ basis.T
    return np.asarray(inside + _shrink_matrix(outside, edge))


def _shrink_matrix(matrix: Doubles, edge: float) -> Doubles:
    values, vectors = scipy.linalg.eigh(matrix, check_finite=False)
    signal = shrink_values(values, edge)
    return np.asarray((vectors * signal) @ vectors.T)


def build_feature_basis(codes: Floats, liked: Doubles, axes: TermAxes) -> Doubles:
    """An orthonormal basis of what public features of the inputs span, without the centre."""
    popularity = normalise_popularity(liked[axes.inputs])
    weight = np.sqrt(popularity) * axes.scale
    span = codes[axes.inputs] * weight[:, None]
    span = span - np.outer(axes.centre, axes.centre @ span)
    vectors, sizes, _ = np.linalg.svd(span, full_matrices=False)
    least = 1e-6 * sizes.max(initial=1e-300)
    return np.asarray(vectors[:, sizes > least])


def solve_weights(smooth: Doubles, scale: Doubles) -> Floats:
    """B between the inputs, with a zero diagonal."""
    rest = 1.0 - np.diag(smooth)
    weights = smooth / rest[None, :] * scale[:, None] / scale[None, :]
    np.fill_diagonal(weights, 0.0)
    return np.asarray(weights, np.float32)


def scale_outside_popularity(axes: TermAxes, liked: AnyArray) -> Floats:
    """Popularity from 0 to 1 for items outside of the inputs; 0 for those."""
    outside = np.maximum(liked, 0.0)
    outside[axes.inputs] = 0.0
    largest = max(float(outside.max(initial=0.0)), 1e-12)
    return np.asarray(outside / largest, np.float32)
