"""What the selection agent is rewarded with, each made well defined where the paper's equation is not (spec E.4).

Note the direction: diversity and divergence reward selections for clients whose uploads differ from the selection or
from the server, and within a round they hardly depend on single actions. The adjustment by position pays skipping more
than selecting whatever the reward, so the agent drifts towards sending nothing even when its reward is noise.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import log_softmax

from tacita.core.types import AnyArray, Bools, Doubles, Longs, Ragged
from tacita.methods.distillation.measures import average_item_rows, average_values_per_row
from tacita.methods.distillation.round_draws import RoundDraws

Diversity = Literal["softmax", "gauss"]
Divergence = Literal["bernoulli", "vector"]
_FLOOR = 1e-4  # least variance of a fitted Gaussian


def measure_diversity(upload: Ragged, picked: Ragged, table: AnyArray, how: Diversity = "softmax") -> Doubles:
    """KL divergence of uploaded items from picked ones, by the server's item rows; 0 where either is missing.

    softmax: of the two mean rows, read as logits over coordinates. gauss: of diagonal Gaussians fitted to both sets,
    which takes two items each.
    """
    upload_mean = average_item_rows(upload, table)
    picked_mean = average_item_rows(picked, table)
    if how == "softmax":
        min_items = 1
        p = log_softmax(upload_mean, axis=1)
        q = log_softmax(picked_mean, axis=1)
        probability = np.exp(p)
        terms = probability * (p - q)
        values = terms.sum(1)
    else:
        min_items = 2
        values_of_items = np.asarray(table, np.float64)
        squares = values_of_items**2
        upload_variance = _fit_variance(average_item_rows(upload, squares), upload_mean)
        picked_variance = _fit_variance(average_item_rows(picked, squares), picked_mean)
        difference = upload_mean - picked_mean
        distance = difference**2 / picked_variance
        ratio = upload_variance / picked_variance
        log_ratio = np.log(picked_variance / upload_variance)
        terms = ratio - 1 + log_ratio + distance
        values = 0.5 * terms.sum(1)
    n_uploaded = upload.counts()
    n_items = np.minimum(n_uploaded, picked.counts())
    bounded = np.maximum(values, 0)
    return np.where(n_items >= min_items, bounded, 0.0)


def _fit_variance(mean_square: Doubles, mean: Doubles) -> Doubles:
    """The variance of a fitted Gaussian, held away from 0."""
    return np.maximum(mean_square - mean**2, _FLOOR)


def measure_upload_divergence(upload: Ragged, predicted: AnyArray, how: Divergence = "bernoulli") -> Doubles:
    """1 - cosine between a client's upload and what the server predicts for it, in [0, 1].

    Equation 9 takes the cosine of two positive numbers, which is always 1. bernoulli: of (r, 1 - r), item by item, then
    averaged. vector: one cosine over all items of the upload.
    """
    score = upload.values["score"]
    r = score.astype(np.float64)
    s = np.asarray(predicted, np.float64)
    if how == "bernoulli":
        r_square = r**2 + (1 - r) ** 2
        s_square = s**2 + (1 - s) ** 2
        complements = (1 - r) * (1 - s)
        product = r * s + complements
        length = np.sqrt(r_square * s_square)
        cosine = product / length
        divergence = np.clip(1 - cosine, 0, 1)
        return average_values_per_row(upload, divergence)
    product = average_values_per_row(upload, r * s)
    r_square = average_values_per_row(upload, r * r)
    s_square = average_values_per_row(upload, s * s)
    squares = r_square * s_square
    length = np.sqrt(squares)
    has_length = length > 0
    divisor = np.where(has_length, length, 1)
    cosine = product / divisor
    divergence = np.clip(1 - cosine, 0, 1)
    return np.where(has_length, divergence, 0.0)


def adjust_by_position(reward: Doubles, action: Bools, length: Longs, rho: float) -> Doubles:
    """The reward of every position (clients, positions): later in the list, picking earns less and skipping more."""
    n_positions = action.shape[1]
    position = np.arange(1, n_positions + 1)
    at_least_one = np.maximum(length, 1)
    n_candidates = at_least_one[:, None]
    magnitude = np.abs(reward)[:, None]
    relative_position = position / (rho * n_candidates)
    share = relative_position * magnitude
    adjustment = np.where(action, -share, share)
    column = reward[:, None]
    return np.asarray(column + adjustment)


def shuffle_values(values: Doubles, draws: RoundDraws) -> Doubles:
    """The values in random order among the clients: a control in which the reward says nothing of who earned it."""
    clients = np.arange(len(values))
    n_values = len(values)
    zeros = np.zeros(n_values, np.int64)
    bits = draws.hash_entries("shuffle", clients, zeros)
    source = np.argsort(bits, kind="stable")
    target = np.argsort(draws.keys, kind="stable")
    shuffled = np.empty_like(values)
    shuffled[target] = values[source]
    return shuffled
