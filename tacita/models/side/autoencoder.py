"""An autoencoder that presses features into a short code: F -> 128 -> code -> 128 -> F."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tacita.core.draws import Draws
from tacita.core.types import Floats
from tacita.kernels.hashing import uniforms
from tacita.models.side.matrix import FeatureMatrix

HIDDEN, EPOCHS, LR = 128, 200, 1e-3


def encode_matrix(matrix: FeatureMatrix, dim: int, draws: Draws) -> Floats:
    """The code of every row after training on all of them.

    A step sees all rows: on ml-100k and ml-latest-small batches of 512 took longer and kept genres less apart.
    """
    torch.set_num_threads(1)  # sums over threads would depend on their number
    table = torch.from_numpy(np.concatenate([matrix.marks, matrix.numbers], axis=1))
    n_marks, width = matrix.marks.shape[1], table.shape[1]
    weights = _init_weights((width, HIDDEN, dim, HIDDEN, width), draws)
    solver = torch.optim.Adam(weights, lr=LR)
    for _ in range(EPOCHS):
        loss = _loss(_apply_layers(_apply_layers(table, weights[:4]), weights[4:]), table, n_marks)
        solver.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        solver.step()
    with torch.no_grad():
        return np.asarray(_apply_layers(table, weights[:4]).numpy())


def _init_weights(sizes: tuple[int, ...], draws: Draws) -> list[Tensor]:
    """Weights and offsets of each layer: uniform within 1 / sqrt(inputs), and zero."""
    made = []
    for layer, (into, out) in enumerate(pairwise(sizes)):
        unit = uniforms(draws.public("side-layer", layer), np.arange(into, dtype=np.uint64), out)
        made += [torch.from_numpy((2 * unit - 1) / np.float32(math.sqrt(into))), torch.zeros(out)]
    return [one.requires_grad_() for one in made]


def _apply_layers(rows: Tensor, weights: list[Tensor]) -> Tensor:
    """Two layers, the first with ReLU; the second is the code, or what the code says the features are."""
    return torch.relu(rows @ weights[0] + weights[1]) @ weights[2] + weights[3]


def _loss(found: Tensor, wanted: Tensor, n_marks: int) -> Tensor:
    """The mean over all columns: cross-entropy of those that are 0 or 1, squared error of the others."""
    marks = functional.binary_cross_entropy_with_logits(found[:, :n_marks], wanted[:, :n_marks], reduction="sum")
    numbers = functional.mse_loss(found[:, n_marks:], wanted[:, n_marks:], reduction="sum")
    return (marks + numbers) / wanted.numel()
