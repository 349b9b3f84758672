"""Shares of a clip: small values that DPPS sends along with an update, clipped and noised as one vector with it."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, Doubles
from tacita.messages import DenseArrays, Total
from tacita.methods.personal import releases

LENGTH_SHARE = 0.1  # of the clip that the length of an update may take up when it is sent along
WEIGHT_SHARE = 0.5  # of the clip that a weight other parts give may take up
_MIN_WEIGHT_SHARE = 0.1  # of the weight there could be: what a noised sum of weights is taken for at least
OWN_FIELDS = ("dpps.",)
"""How the names of DPPS's own fields begin."""


def compute_remaining_length(room: Doubles, used: Doubles) -> Doubles:
    """The length that is left for the rest of a vector when one coordinate of it is in use."""
    squares = room**2 - used**2
    return np.sqrt(np.maximum(0.0, squares))


def encode_update_length(norms: Doubles, room: Doubles, clips: Doubles) -> Doubles:
    """The squared length of each update within its room, as a number that takes `LENGTH_SHARE` of a clip at most."""
    clipped = np.minimum(norms, room)
    is_finite = np.isfinite(norms)
    clipped = np.where(is_finite, clipped, 0.0)
    return LENGTH_SHARE * clipped**2 / clips


def encode_weight(weight: Doubles, clips: Doubles, is_sent: AnyArray) -> Doubles:
    """Each client's weight as a number that takes `WEIGHT_SHARE` of its clip at most; 0 where nothing is sent."""
    mass = WEIGHT_SHARE * clips * weight
    return np.where(is_sent, mass, 0.0)


def decode_weight(total: Total, largest_clip: float) -> float:
    """The sum of all weights from its noised form, held between a tenth of what it could be and all of it."""
    noised_mass = float(total["dpps.mass"][0])
    mass = noised_mass / (WEIGHT_SHARE * largest_clip)
    least = _MIN_WEIGHT_SHARE * total.weight
    return min(max(mass, least), total.weight)


def estimate_client_variance(total: Total, noise_variance: float, clip: float) -> float:
    """The variance of a coordinate between clients: mean square minus square of the mean, both without noise."""
    size = releases.count_coordinates(total, OWN_FIELDS)
    noised_length = float(total["dpps.length"][0])
    length = clip / LENGTH_SHARE * noised_length
    mean_square = length / total.weight
    squares = []
    for name, value in total.sums.items():
        if not name.startswith(OWN_FIELDS):
            square = (value**2).sum()
            squares.append(float(square))
    noise_squares = size * noise_variance
    squared_sum = max(0.0, sum(squares) - noise_squares)
    squared_mean = squared_sum / total.weight**2
    return max(0.0, mean_square - squared_mean) / size


def to_scalar_field(values: Doubles) -> DenseArrays:
    """One number for each client, as a field of an upload."""
    return DenseArrays(values[:, None])
