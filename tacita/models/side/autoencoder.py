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
from tacita.kernels.hashing import draw_uniforms
from tacita.models.side.matrix import FeatureMatrix

HIDDEN = 128
EPOCHS = 200
LR = 1e-3


def encode_matrix(matrix: FeatureMatrix, dim: int, draws: Draws) -> Floats:
    """The code of every row after training on all of them.

    A step sees all rows: on ml-100k and ml-latest-small batches of 512 took longer and kept genres less apart.
    """
    torch.set_num_threads(1)  # sums over threads would depend on their number
    features = np.concatenate([matrix.marks, matrix.numbers], axis=1)
    table = torch.from_numpy(features)
    n_marks = matrix.marks.shape[1]
    width = table.shape[1]
    weights = _init_weights((width, HIDDEN, dim, HIDDEN, width), draws)
    encoder = weights[:4]
    decoder = weights[4:]
    solver = torch.optim.Adam(weights, lr=LR)
    for _ in range(EPOCHS):
        code = _apply_layers(table, encoder)
        logits = _apply_layers(code, decoder)
        loss = _compute_loss(logits, table, n_marks)
        solver.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        solver.step()
    with torch.no_grad():
        code = _apply_layers(table, encoder)
        return code.numpy()


def _init_weights(sizes: tuple[int, ...], draws: Draws) -> list[Tensor]:
    """Weights and offsets of each layer: uniform within 1 / sqrt(inputs), and zero."""
    weights = []
    for layer, (into, out) in enumerate(pairwise(sizes)):
        key = draws.public("side-layer", layer)
        owners = np.arange(into, dtype=np.uint64)
        unit = draw_uniforms(key, owners, out)
        bound = np.float32(math.sqrt(into))
        matrix = torch.from_numpy((2 * unit - 1) / bound)
        offsets = torch.zeros(out)
        weights.append(matrix.requires_grad_())
        weights.append(offsets.requires_grad_())
    return weights


def _apply_layers(rows: Tensor, weights: list[Tensor]) -> Tensor:
    """Two layers, the first with ReLU; the second is the code, or the features that the code stands for."""
    first, first_offsets, second, second_offsets = weights
    hidden = torch.relu(rows @ first + first_offsets)
    return hidden @ second + second_offsets


def _compute_loss(logits: Tensor, features: Tensor, n_marks: int) -> Tensor:
    """The mean over all columns: cross-entropy of those that are 0 or 1, squared error of the others."""
    mark_logits = logits[:, :n_marks]
    marks = features[:, :n_marks]
    mark_loss = functional.binary_cross_entropy_with_logits(mark_logits, marks, reduction="sum")
    number_logits = logits[:, n_marks:]
    numbers = features[:, n_marks:]
    number_loss = functional.mse_loss(number_logits, numbers, reduction="sum")
    return (mark_loss + number_loss) / features.numel()
