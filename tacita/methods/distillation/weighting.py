"""The agent that weighs uploads (spec E.3 steps 5 to 7): clients whose labels the server fits well weigh more.

There is no sampling and no baseline in its objective: it is pushed to give more weight to lower losses without bound.
A small reward for entropy and a cap on the weights are ours; `measure_concentration` tells whether they collapsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from tacita.core.types import AnyArray, Arrays, Doubles, Floats, Ragged
from tacita.methods.distillation.measures import Loss, average_values_per_row, compute_mean_losses, standardize_values
from tacita.methods.distillation.networks import (
    Layers,
    init_network,
    run_network,
    run_network_without_gradient,
    take_adam_step,
)

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = {"size": (0,), "statistics": (1, 2), "loss": (3,)}


@dataclass(frozen=True)
class WeightingOptions:
    hidden: int = 32
    lr: float = 1e-3
    entropy: float = 0.01  # what the entropy of the weights is worth
    clip_norm: float = 1.0  # of the gradient
    reward_cap: float = 3.0
    cap: float | None = None  # largest weight as a multiple of an equal share; None: no bound
    without: Literal["", "size", "statistics", "loss"] = ""  # part of the state that is left out (Table 4)
    loss: Loss = "ce"  # that a client's upload has under the server's model, in states and rewards


def init_weighting_network(how: WeightingOptions, key: np.uint64) -> Arrays:
    """A new network from a client's state to its logit."""
    left_out = _COLUMNS.get(how.without, ())
    width = 4 - len(left_out)
    return init_network((width, how.hidden, 1), key)


def compute_client_states(upload: Ragged, logits: AnyArray, how: WeightingOptions) -> Doubles:
    """The state of each client, z-scored over the round: size, mean and variance of its labels, the server's loss.

    `logits`: of the server before it learns from the upload, one per entry.
    """
    scores = upload.values["score"]
    score = scores.astype(np.float64)
    size = np.log1p(upload.counts())
    mean = average_values_per_row(upload, score)
    row_means = mean[upload.rows()]
    deviation = score - row_means
    variance = average_values_per_row(upload, deviation**2)
    losses = compute_mean_losses(upload, logits, how.loss)
    columns = np.stack([size, mean, variance, losses], axis=1)
    left_out = _COLUMNS.get(how.without, ())
    return standardize_values(np.delete(columns, left_out, axis=1))


def compute_client_weights(agent: Arrays, states: Doubles, cap: float | None = None) -> Doubles:
    """The weights of the round's clients; they sum to 1, and none is above `cap` equal shares."""
    import torch

    logits = run_network_without_gradient(agent, states).double()
    weights = np.asarray(torch.softmax(logits, 0).numpy())
    if cap is None:
        return weights
    return cap_weights(weights, cap)


def cap_weights(weights: Doubles, cap: float) -> Doubles:
    """Weights that sum to 1 with none above `cap` equal shares: what is cut off goes to the others in proportion."""
    n_clients = len(weights)
    if n_clients <= cap:
        return weights
    bound = cap / n_clients
    capped = weights.copy()
    is_capped = np.zeros(n_clients, bool)
    is_above = capped > bound
    while is_above.any():  # at most once for each client: the others grow by what is cut off
        is_capped |= is_above
        capped[is_capped] = bound
        is_free = ~is_capped
        remainder = 1 - bound * np.count_nonzero(is_capped)
        capped[is_free] *= remainder / capped[is_free].sum()
        is_above = capped > bound * (1 + 1e-12)
    return capped


def expand_weights_to_entries(weights: Doubles, upload: Ragged) -> Floats:
    """Weight of each entry in the server's loss, mean 1 over clients: equal weights give exactly 1."""
    relative = len(weights) * weights
    counts = upload.counts()
    weight = relative.astype(np.float32)
    return np.repeat(weight, counts)


def measure_concentration(weights: Doubles) -> float:
    """The largest weight as a multiple of an equal share."""
    n_clients = len(weights)
    return float(weights.max() * n_clients)


def compute_rewards(losses: Doubles, how: WeightingOptions) -> Doubles:
    """A low loss of the updated server on a client's upload is rewarded, relative to the round's other clients."""
    gains = -np.asarray(losses, np.float64)
    return standardize_values(gains, how.reward_cap)


def compute_weighting_loss(logits: Tensor, reward: Tensor, entropy: float) -> Tensor:
    """What the agent minimises: -sum R ln w, less what entropy is worth."""
    import torch

    log_weight = torch.log_softmax(logits, 0)
    gain = (reward * log_weight).sum()
    negative_entropy = (log_weight.exp() * log_weight).sum()
    return -gain + entropy * negative_entropy


def update_weighting_network(agent: Arrays, states: Doubles, losses: Doubles, how: WeightingOptions) -> Arrays:
    """The agent after a round; the same where there is nothing to compare."""
    import torch

    reward = compute_rewards(losses, how)
    if len(reward) < 2 or not reward.any():
        return agent
    state_array = np.ascontiguousarray(states, np.float32)
    state_tensor = torch.from_numpy(state_array)
    reward_array = np.ascontiguousarray(reward, np.float32)
    reward_tensor = torch.from_numpy(reward_array)

    def compute_weight_loss(layers: Layers) -> Tensor:
        logits = run_network(layers, state_tensor)
        return compute_weighting_loss(logits, reward_tensor, how.entropy)

    return take_adam_step(agent, compute_weight_loss, how.lr, how.clip_norm)
