"""Implicit steps of what joins a client's loss beside its samples: pulls to earlier values, penalties on length."""

from __future__ import annotations

import numpy as np

from tacita.core.types import Arrays, Doubles, LocalModels, NormPenalty, ProximalTerm
from tacita.kernels.norms import scale_moves, sum_move_squares
from tacita.kernels.steps import pull_rows_to_target
from tacita.models.scorer import Scorer

_HALVINGS = 60  # of a bracket around the length that a penalty leads to


def apply_pull(pull: ProximalTerm, backbone: Scorer, local: LocalModels, step: int) -> None:
    """The implicit step x <- (x + 2 eta s target) / (1 + 2 eta s) on the rows and vectors that took step `step`."""
    rates = backbone.list_learning_rates(local.view.n_items)
    is_active = step < local.n_steps
    row_strength = 2 * rates["rows"] * pull.strength
    pull_rows_to_target(is_active, local.row_start, local.row_item, local.rows, pull.rows, row_strength)
    widths = [np.full(width, rates[name], np.float32) for name, width in backbone.private_layout.items()]
    strength = 2 * np.concatenate(widths) * pull.strength
    is_active_user = np.repeat(is_active, np.diff(local.view.user_ptr))
    users = np.flatnonzero(pull.pulls_private & is_active_user)
    pulled = local.private[users] + strength * pull.private[users]
    local.private[users] = pulled / (1 + strength)


def apply_penalty(penalty: NormPenalty, backbone: Scorer, local: LocalModels, step: int) -> None:
    """The implicit step of the penalty on clients that took step `step`: what is longer than the bound shrinks.

    With one rate r for everything a length l becomes (l + 2 r s bound) / (1 + 2 r s). Rows and shared parameters that
    have rates of their own shrink by 1 / (1 + 2 r s (1 - bound / n)) each, n the length that this leads to.
    """
    view = local.view
    rates = backbone.list_learning_rates(view.n_items)
    squares = _sum_squared_moves(local)
    length = np.sqrt(sum(squares.values(), np.zeros(view.n_clients)))
    strengths = {name: 2 * penalty.strength * rates[name] for name in squares}
    reached = _solve_penalised_length(penalty.length, length, squares, strengths)
    shrinks = (length > penalty.length) & (step < local.n_steps)
    factors: Arrays = {}
    excess = 1 - penalty.length / reached
    for name, strength in strengths.items():
        shrunk = 1 / (1 + strength * excess)
        factors[name] = np.where(shrinks, shrunk, 1.0)
    scale_moves(factors["rows"], local.row_start, local.row_item, local.rows, view.items)
    for name, value in view.heads.items():
        column_shape = (-1, *[1] * value.ndim)
        factor = factors[name].reshape(column_shape)
        moved = local.heads[name] - value
        local.heads[name][...] = value + factor * moved


def _sum_squared_moves(local: LocalModels) -> dict[str, Doubles]:
    """How far each client's rows and shared parameters have moved, squared."""
    view = local.view
    squares = {"rows": sum_move_squares(local.row_start, local.row_item, local.rows, view.items)}
    for name, value in view.heads.items():
        moved = (local.heads[name] - value).astype(np.float64)
        vectors = moved.reshape(view.n_clients, -1)
        squares[name] = (vectors**2).sum(axis=1)
    return squares


def _solve_penalised_length(
    bound: float, length: Doubles, squares: dict[str, Doubles], strengths: dict[str, float]
) -> Doubles:
    """The length that the penalty leads each client to, by halving a bracket."""
    low = np.full(len(length), bound)
    high = np.maximum(length, bound)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        excess = 1 - bound / middle
        reached = np.zeros(len(length))
        for name, square in squares.items():
            shrink = 1 + strengths[name] * excess
            reached += square / shrink**2
        is_longer = reached > middle**2
        low = np.where(is_longer, middle, low)
        high = np.where(is_longer, high, middle)
    return high
