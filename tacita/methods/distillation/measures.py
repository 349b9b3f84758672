"""Means over ragged rows, cross entropy from logits, and scaling over the clients of a round."""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import xlog1py, xlogy

from tacita.core.sparse import matrix_of_lists
from tacita.core.types import AnyArray, Doubles, Ragged

Loss = Literal["ce", "kl"]
_TINY = 1e-8


def row_means(lists: Ragged, values: AnyArray) -> Doubles:
    """Mean of each row's values (one per entry); 0 for a row without entries."""
    sums = np.bincount(lists.rows(), weights=values, minlength=len(lists))
    return np.asarray(sums / np.maximum(lists.counts(), 1))


def pool_rows(lists: Ragged, table: AnyArray) -> Doubles:
    """Mean of the table's rows of each list's items; zeros for a list without items."""
    return np.asarray(
        matrix_of_lists(lists, len(table)) @ np.asarray(table, np.float64) / np.maximum(lists.counts(), 1)[:, None]
    )


def cross_entropy(logits: AnyArray, labels: AnyArray) -> Doubles:
    """-(y ln p + (1 - y) ln(1 - p)) with p = sigmoid(logit); labels may be soft."""
    x, y = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    return np.asarray(np.maximum(x, 0) - x * y + np.log1p(np.exp(-np.abs(x))))


def mean_losses(upload: Ragged, logits: AnyArray, how: Loss = "ce") -> Doubles:
    """Mean cross entropy of each client's upload under the logits of its entries, or KL divergence from its labels.

    Both pull a model the same way. They rank clients differently: cross entropy charges those whose labels are soft.
    """
    labels = np.asarray(upload.values["score"], np.float64)
    losses = cross_entropy(logits, labels)
    return row_means(upload, losses if how == "ce" else losses - _entropy(labels))


def _entropy(labels: Doubles) -> Doubles:
    return np.asarray(-(xlogy(labels, labels) + xlog1py(1 - labels, -labels)))


def standardize_values(values: Doubles, cap: float | None = None) -> Doubles:
    """z-scores (population) over the first axis; exactly 0 where all are equal."""
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        return values
    out = (values - values.mean(0)) / (values.std(0) + _TINY)
    out = np.where(values.max(0) == values.min(0), 0.0, out)
    return out if cap is None else np.clip(out, -cap, cap)
