"""The agent that weighs uploads (spec E.3 steps 5 to 7): clients whose labels the server fits well weigh more.

There is no sampling and no baseline in its objective: it is pushed to give more weight to lower losses without bound.
A small reward for entropy is ours; `concentration` tells whether the weights collapsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from tacita.core.types import AnyArray, Arrays, Doubles, Floats, Ragged
from tacita.methods.distillation.measures import Loss, mean_losses, row_means, standardize_values
from tacita.methods.distillation.networks import forward, init_network, predict_values, take_adam_step

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
    without: Literal["", "size", "statistics", "loss"] = ""  # part of the state that is left out (Table 4)
    loss: Loss = "ce"  # that a client's upload has under the server's model, in states and rewards


def init_weighting(how: WeightingOptions, key: np.uint64) -> Arrays:
    return init_network((4 - len(_COLUMNS.get(how.without, ())), how.hidden, 1), key)


def compute_states(upload: Ragged, logits: AnyArray, how: WeightingOptions) -> Doubles:
    """The state of each client, z-scored over the round: size, mean and variance of its labels, the server's loss.

    `logits`: of the server before it learns from the upload, one per entry.
    """
    score = upload.values["score"].astype(np.float64)
    mean = row_means(upload, score)
    variance = row_means(upload, (score - mean[upload.rows()]) ** 2)
    raw = np.stack([np.log1p(upload.counts()), mean, variance, mean_losses(upload, logits, how.loss)], axis=1)
    return standardize_values(np.delete(raw, _COLUMNS.get(how.without, ()), axis=1))


def compute_weights(agent: Arrays, states: Doubles) -> Doubles:
    """The weights of the round's clients; they sum to 1."""
    import torch

    return np.asarray(torch.softmax(predict_values(agent, states).double(), 0).numpy())


def expand_weights(weights: Doubles, upload: Ragged) -> Floats:
    """Weight of each entry in the server's loss, mean 1 over clients: equal weights give exactly 1."""
    return np.repeat((len(weights) * weights).astype(np.float32), upload.counts())


def concentration(weights: Doubles) -> float:
    """The largest weight as a multiple of an equal share."""
    return float(weights.max() * len(weights))


def compute_rewards(losses: Doubles, how: WeightingOptions) -> Doubles:
    """A low loss of the updated server on a client's upload is rewarded, relative to the round's other clients."""
    return standardize_values(-np.asarray(losses, np.float64), how.reward_cap)


def objective(logits: Tensor, reward: Tensor, entropy: float) -> Tensor:
    """What the agent minimises: -sum R ln w, less what entropy is worth."""
    import torch

    log_weight = torch.log_softmax(logits, 0)
    return -(reward * log_weight).sum() + entropy * (log_weight.exp() * log_weight).sum()


def update_weighting(agent: Arrays, states: Doubles, losses: Doubles, how: WeightingOptions) -> Arrays:
    """The agent after a round; the same where there is nothing to compare."""
    import torch

    reward = compute_rewards(losses, how)
    if len(reward) < 2 or not reward.any():
        return agent
    x, r = (torch.from_numpy(np.ascontiguousarray(one, np.float32)) for one in (states, reward))
    return take_adam_step(agent, lambda layers: objective(forward(layers, x), r, how.entropy), how.lr, how.clip_norm)
