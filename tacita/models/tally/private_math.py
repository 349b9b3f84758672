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
from tacita.privacy.calibration import compute_epsilon_of_mu, compute_max_mu
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
        steps = self.epsilon / MICRO * (1 + 1e-15)
        epsilon = math.floor(steps) * MICRO
        if not epsilon:
            return 0.0
        mu = compute_max_mu(epsilon, self.delta)
        charges = 2 * (self.blocks + 1)
        rounding = charges * UNIT
        return (mu**2 - rounding) / self.blocks

    def compute_term_share(self, first: bool) -> float:
        """What of a block's mu^2 the terms take: in the first block popularity takes some, too."""
        if not first:
            return 1.0
        return 1.0 - POPULARITY_SHARE - PEOPLE_SHARE

    def compute_deviation(self, share: float, length: float = 1.0) -> float:
        """Of the noise of a release of vectors of this length that takes a share of a block's mu^2."""
        mu = math.sqrt(share * self.mu2)
        return length / mu

    def compute_matrix_deviation(self, share: float, length: float = 1.0) -> float:
        """The same for symmetric matrices: off the diagonal; on it sqrt 2 times as much."""
        return self.compute_deviation(share, length) / SQUARE_ROOT_2

    def compute_spent_epsilon(self, blocks: int, retractions: int = 0) -> float:
        """The epsilon of a user in so many blocks, the first among them, with so many retractions."""
        n_releases = blocks + retractions
        mu = math.sqrt(n_releases * self.mu2)
        epsilons = compute_epsilon_of_mu(np.array([mu]), self.delta)
        return float(epsilons[0])


# On devices


def compute_unit_likes(lists: Ragged) -> Doubles:
    """The entry of every item in x / |x|, rounded down, so that no list is longer than 1."""
    counts = lists.counts()
    length = np.sqrt(np.maximum(counts, 1))
    entry = 1.0 / length
    steps = np.floor(entry / POPULARITY_GRID)
    return np.repeat(steps * POPULARITY_GRID, counts)


def build_unit_vectors(lists: Ragged, inputs: Ints, scale: Doubles, centre: Doubles, length: float = 1.0) -> Doubles:
    """(lists, k) each list among the inputs: scaled, centred, of the given length; zeros where that is none.

    Rounded towards 0, so that none is longer.
    """
    place, is_input = locate_inputs(lists, inputs)
    rows = lists.rows()[is_input]
    columns = place[is_input]
    shape = (len(lists), len(inputs))
    vectors = np.zeros(shape)
    vectors[rows, columns] = scale[columns]
    along_centre = vectors @ centre
    vectors -= np.outer(along_centre, centre)
    factor = _compute_length_factors(vectors, length)
    steps = factor / GRID
    vectors *= steps[:, None]
    whole = np.trunc(vectors, out=vectors)
    return whole * GRID


def _compute_length_factors(vectors: Doubles, length: float) -> Doubles:
    """What each vector is multiplied by to have the given length, or barely less; 0 where it has none."""
    squares = (vectors**2).sum(axis=1)
    size = np.sqrt(squares)
    most = length * (1 - 1e-9)
    stretch = most / np.maximum(size, MIN_LENGTH)
    is_short = size < MIN_LENGTH
    return np.where(is_short, 0.0, stretch)


def locate_inputs(lists: Ragged, inputs: AnyArray) -> tuple[AnyArray, AnyArray]:
    """The place of every entry among the inputs, and whether it is one of them."""
    place = np.searchsorted(inputs, lists.ids)
    nearest = np.append(inputs, -1)[place]
    return place, nearest == lists.ids


# Noise, in whole numbers


def draw_whole_noise(stream: NoiseStream, deviation: float, grid: float, size: int) -> Doubles:
    """Discrete Gaussian noise, in whole numbers of the grid."""
    deviation_steps = deviation / grid
    steps = stream.draw_discrete_normals(deviation_steps, size)
    return np.asarray(steps * grid)


def draw_symmetric_noise(stream: NoiseStream, deviation: float, k: int) -> Doubles:
    """Noise of this deviation off the diagonal and sqrt 2 times it on the diagonal; the same on both sides.

    A server that says that terms faded long ago asks for less and less, down to single whole numbers:
    `MIN_DEVIATION_STEPS` is least.
    """
    grid = GRID**2
    least = MIN_DEVIATION_STEPS * grid
    deviation = max(deviation, least)
    noise = np.zeros((k, k))
    rows, columns = np.tril_indices(k, -1)
    below = draw_whole_noise(stream, deviation, grid, len(rows))
    noise[rows, columns] = below
    noise[columns, rows] = below
    diagonal_deviation = SQUARE_ROOT_2 * deviation
    diagonal = draw_whole_noise(stream, diagonal_deviation, grid, k)
    np.fill_diagonal(noise, diagonal)
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
    signal = max(people, 1.0) / s
    size = more * SIZE_FACTOR * math.sqrt(signal)
    least = min(2, n_items)
    n_inputs = np.clip(round(size), least, n_items)
    return int(n_inputs)


def choose_axes(liked: Doubles, k: int) -> TermAxes:
    """The k most popular items, rarer ones scaled up, and popularity as the direction that is taken out."""
    by_popularity = np.argsort(-liked, kind="stable")
    chosen = np.sort(by_popularity[:k])
    inputs = chosen.astype(np.int32)
    popularity = liked[inputs]
    scale = normalise_popularity(popularity) ** -SCALE_POWER
    centre = scale * np.maximum(popularity, 0.0)
    length = np.linalg.norm(centre)
    if not length > 0:
        centre = scale
        length = np.linalg.norm(scale)
    return TermAxes(inputs, scale, centre / length)


def normalise_popularity(liked: Doubles) -> Doubles:
    """Noisy popularity, never too low, on average 1."""
    floor = float(np.quantile(liked, QUANTILE))
    if floor <= 0:  # all noise
        size = np.abs(liked)
        largest = float(size.max(initial=0.0))
        floor = max(1e-3 * largest, 1e-12)
    raised = np.maximum(liked, floor)
    return np.asarray(raised / raised.mean())


def shrink_values(values: Doubles, edge: float) -> Doubles:
    """Eigenvalues without what noise puts on them: none below its edge."""
    squares = values**2 - edge**2
    shrunk = np.sqrt(np.maximum(squares, 0.0))
    is_signal = values > edge
    return np.where(is_signal, shrunk, 0.0)


def fit_denoising_matrix(gram: Doubles, centre: Doubles, s: float, basis: Doubles | None = None) -> Doubles:
    """K: what of each direction is signal, and a half of the centre.

    With a basis of public features, what lies in it is shrunk by the smaller edge of its own dimension.
    """
    root_k = math.sqrt(len(gram))
    centred = _project_out_centre(gram, centre)
    edge = find_noise_edge(s, len(gram))
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
    popularity = np.outer(centre, centre)
    return np.asarray(smooth + CENTRE_SHARE * popularity)


def find_noise_edge(s: float, k: int) -> float:
    """The largest eigenvalue that noise of deviation s has in k dimensions."""
    return 2 * s * math.sqrt(k)


def _project_out_centre(gram: Doubles, centre: Doubles) -> Doubles:
    """The matrix without the direction of the centre, on either side."""
    along = gram @ centre
    height = centre @ along
    both = height * np.outer(centre, centre)
    columns = np.outer(along, centre)
    rows = np.outer(centre, along)
    return gram - columns - rows + both


def _shrink_by_basis(centred: Doubles, basis: Doubles, s: float) -> Doubles:
    """Shrink what lies in the basis and what does not, each by the edge of its own dimension."""
    n_columns = basis.shape[1]
    edge = find_noise_edge(s, len(centred))
    inner_edge = find_noise_edge(s, n_columns)
    inner = basis.T @ centred @ basis
    shrunk = _shrink_matrix(inner, inner_edge)
    inside = basis @ shrunk @ basis.T
    projected = basis @ inner @ basis.T
    outside = centred - projected
    return inside + _shrink_matrix(outside, edge)


def _shrink_matrix(matrix: Doubles, edge: float) -> Doubles:
    values, vectors = scipy.linalg.eigh(matrix, check_finite=False)
    signal = shrink_values(values, edge)
    shrunk = (vectors * signal) @ vectors.T
    return np.asarray(shrunk)


def build_feature_basis(codes: Floats, liked: Doubles, axes: TermAxes) -> Doubles:
    """An orthonormal basis of what public features of the inputs span, without the centre."""
    input_codes = codes[axes.inputs]
    popularity = normalise_popularity(liked[axes.inputs])
    weight = np.sqrt(popularity) * axes.scale
    span = input_codes * weight[:, None]
    along_centre = axes.centre @ span
    centred = span - np.outer(axes.centre, along_centre)
    vectors, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    least = 1e-6 * sizes.max(initial=1e-300)
    is_spanned = sizes > least
    return vectors[:, is_spanned]


def solve_input_weights(smooth: Doubles, scale: Doubles) -> Floats:
    """B between the inputs, with a zero diagonal."""
    rest = 1.0 - np.diag(smooth)
    solution = smooth / rest[None, :]
    rescaled = solution * scale[:, None]
    weights = rescaled / scale[None, :]
    np.fill_diagonal(weights, 0.0)
    return np.asarray(weights, np.float32)


def scale_outside_popularity(axes: TermAxes, liked: AnyArray) -> Floats:
    """Popularity from 0 to 1 for items outside of the inputs; 0 for those."""
    outside = np.maximum(liked, 0.0)
    outside[axes.inputs] = 0.0
    largest = float(outside.max(initial=0.0))
    scaled = outside / max(largest, 1e-12)
    return np.asarray(scaled, np.float32)
