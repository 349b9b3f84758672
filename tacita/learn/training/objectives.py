"""What local training minimises: a loss per sample, or per pair of a positive and a negative."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


def compute_bce_loss(scores: Tensor, label: Tensor) -> Tensor:
    """Of logits; labels are hard or soft."""
    return functional.binary_cross_entropy_with_logits(scores, label, reduction="none")


def squared_error(scores: Tensor, label: Tensor) -> Tensor:
    return functional.mse_loss(scores, label, reduction="none")


def compute_bpr_loss(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    margin = scale * (positive - negative)
    return -functional.logsigmoid(margin)


POINTWISE: dict[str, Loss] = {"bce": compute_bce_loss, "squared": squared_error}


def sum_weighted_squares(table: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The weighted squared lengths of some rows of a table."""
    squares = table[rows] ** 2
    weighted = weight[:, None] * squares
    return weighted.sum()
