"""Means over ragged rows, cross entropy from logits, and scaling over the clients of a round."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import xlog1py, xlogy

from tacita.core.sparse import matrix_of_lists
from tacita.core.types import AnyArray, Doubles, Ragged

Loss = Literal["ce", "kl"]
_TINY = 1e-8


def average_values_per_row(lists: Ragged, values: AnyArray) -> Doubles:
    """Mean of each row's values (one per entry); 0 for a row without entries."""
    rows = lists.rows()
    n_lists = len(lists)
    sums = np.bincount(rows, weights=values, minlength=n_lists)
    counts = np.maximum(lists.counts(), 1)
    return np.asarray(sums / counts)


def average_item_rows(lists: Ragged, table: AnyArray) -> Doubles:
    """Mean of the table's rows of each list's items; zeros for a list without items."""
    matrix = matrix_of_lists(lists, len(table))
    values = np.asarray(table, np.float64)
    sums = matrix @ values
    counts = np.maximum(lists.counts(), 1)
    return np.asarray(sums / counts[:, None])


def compute_cross_entropy(logits: AnyArray, labels: AnyArray) -> Doubles:
    """-(y ln p + (1 - y) ln(1 - p)) with p = sigmoid(logit); labels may be soft."""
    x = np.asarray(logits, np.float64)
    y = np.asarray(labels, np.float64)
    magnitude = np.abs(x)
    decay = np.exp(-magnitude)
    tail = np.log1p(decay)
    positive = np.maximum(x, 0)
    product = x * y
    return np.asarray(positive - product + tail)


def compute_mean_losses(upload: Ragged, logits: AnyArray, how: Loss = "ce") -> Doubles:
    """Mean cross entropy of each client's upload under the logits of its entries, or KL divergence from its labels.

    Both pull a model the same way. They rank clients differently: cross entropy charges those whose labels are soft.
    """
    score = upload.values["score"]
    labels = np.asarray(score, np.float64)
    losses = compute_cross_entropy(logits, labels)
    if how == "kl":
        losses = losses - _compute_entropy(labels)
    return average_values_per_row(upload, losses)


def _compute_entropy(labels: Doubles) -> Doubles:
    """Of Bernoulli variables with these probabilities."""
    first = xlogy(labels, labels)
    second = xlog1py(1 - labels, -labels)
    negative = first + second
    return np.asarray(-negative)


def standardize_values(values: Doubles, cap: float | None = None) -> Doubles:
    """z-scores (population) over the first axis; exactly 0 where all are equal."""
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        return values
    deviation = values.std(0) + _TINY
    centred = values - values.mean(0)
    scores = centred / deviation
    is_constant = values.max(0) == values.min(0)
    scores = np.where(is_constant, 0.0, scores)
    if cap is None:
        return scores
    return np.clip(scores, -cap, cap)
