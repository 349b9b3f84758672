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
from tacita.methods.distillation.measures import pool_rows, row_means
from tacita.methods.distillation.round_draws import RoundDraws

Diversity = Literal["softmax", "gauss"]
Divergence = Literal["bernoulli", "vector"]
_FLOOR = 1e-4  # least variance of a fitted Gaussian


def diversity(upload: Ragged, picked: Ragged, table: AnyArray, how: Diversity = "softmax") -> Doubles:
    """KL divergence of the items told from the items picked, by the server's item rows; 0 where either is missing.

    softmax: of the two mean rows, read as logits over coordinates. gauss: of diagonal Gaussians fitted to both sets,
    which takes two items each.
    """
    told, sent = pool_rows(upload, table), pool_rows(picked, table)
    if how == "softmax":
        p, q = log_softmax(told, axis=1), log_softmax(sent, axis=1)
        found, least = (np.exp(p) * (p - q)).sum(1), 1
    else:
        squares = np.asarray(table, np.float64) ** 2
        v = np.maximum(pool_rows(upload, squares) - told**2, _FLOOR)
        w = np.maximum(pool_rows(picked, squares) - sent**2, _FLOOR)
        found, least = 0.5 * (v / w - 1 + np.log(w / v) + (told - sent) ** 2 / w).sum(1), 2
    enough = np.minimum(upload.counts(), picked.counts()) >= least
    return np.where(enough, np.maximum(found, 0), 0.0)


def divergence(upload: Ragged, predicted: AnyArray, how: Divergence = "bernoulli") -> Doubles:
    """1 - cosine between what a client tells and what the server predicts for it, in [0, 1].

    Equation 9 takes the cosine of two positive numbers, which is always 1. bernoulli: of (r, 1 - r), item by item, then
    averaged. vector: one cosine over all items of the upload.
    """
    r, s = upload.values["score"].astype(np.float64), np.asarray(predicted, np.float64)
    if how == "bernoulli":
        length = np.sqrt((r**2 + (1 - r) ** 2) * (s**2 + (1 - s) ** 2))
        return row_means(upload, np.clip(1 - (r * s + (1 - r) * (1 - s)) / length, 0, 1))
    dot, rr, ss = (row_means(upload, product) for product in (r * s, r * r, s * s))
    length = np.sqrt(rr * ss)
    return np.where(length > 0, np.clip(1 - dot / np.where(length > 0, length, 1), 0, 1), 0.0)


def adjust_by_position(reward: Doubles, action: Bools, length: Longs, rho: float) -> Doubles:
    """The reward of every position (clients, positions): later in the list, picking earns less and skipping more."""
    position = np.arange(1, action.shape[1] + 1)
    share = position / (rho * np.maximum(length, 1)[:, None]) * np.abs(reward)[:, None]
    return np.asarray(reward[:, None] + np.where(action, -share, share))


def shuffle_values(values: Doubles, dice: RoundDraws) -> Doubles:
    """The values dealt anew among the clients: a control in which the reward says nothing of who earned it."""
    zeros = np.zeros(len(values), np.int64)
    dealt = np.argsort(dice.hash_entries("shuffle", np.arange(len(values)), zeros), kind="stable")
    out = np.empty_like(values)
    out[np.argsort(dice.keys, kind="stable")] = values[dealt]
    return out
