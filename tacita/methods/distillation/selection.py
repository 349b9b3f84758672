"""The agent that picks what the server sends (spec E.3 steps 2 and 8): a walk over candidates, actor and critic.

All clients walk at once, one position after the other. An action is drawn by a number named after the client and the
position, and every client's part of the first layer is a product of its own, so a walk does not depend on who else
walks. `Selection` has a switch for each variant of Table 4 and for each control that the claim of learning needs:
rewards shuffled among clients, no adjustment by position (a fixed schedule is in `candidates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.special import expit

from tacita.core.types import AnyArray, Arrays, Bools, Doubles, Floats, Ints, Longs, Ragged
from tacita.methods.distillation.measures import Loss, mean_losses, standardize_values
from tacita.methods.distillation.networks import (
    Layers,
    bundle_networks,
    forward,
    init_network,
    predict_values,
    select_network,
    take_adam_step,
)
from tacita.methods.distillation.rewards import (
    Divergence,
    Diversity,
    adjust_by_position,
    divergence,
    diversity,
    shuffle_values,
)
from tacita.methods.distillation.round_draws import RoundDraws, rank_in_rows
from tacita.models.scoring import sigmoid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SelectionOptions:
    most: int = 30  # candidates a client's walk has, hence also picks (mu)
    hidden: int = 64
    lr: float = 1e-3  # of actor and critic; with 1e-4 the drift of the rewards is slow
    clip_norm: float = 1.0  # of the gradients
    discount: float = 0.99
    rho: float = 4.0  # the adjustment by position is at most 1 / rho
    adjust: bool = True
    shuffle: bool = False  # rewards dealt anew among the clients
    without: Literal["", "loss", "diversity", "divergence"] = ""  # reward that is left out (Table 4)
    diversity: Diversity = "softmax"
    divergence: Divergence = "bernoulli"
    loss: Loss = "ce"  # that rewards read


@dataclass(frozen=True)
class CandidateWalk:
    """What the agent saw and did, kept until the round's outcome is known; rows are clients, columns positions."""

    length: Longs  # (clients,) candidates
    item: Ints  # (clients, most), -1 after the last
    score: Floats  # (clients, most) the server's probability
    state: Floats  # (clients, most, 2 dim + 3)
    action: Bools  # (clients, most)
    log_prob: Floats  # (clients, most) of the action taken; 0 after the last

    @property
    def inside(self) -> Bools:
        return np.asarray(np.arange(self.item.shape[1]) < self.length[:, None])

    def list_picks(self) -> Ragged:
        """What is sent: items with their scores, best first."""
        row, at = np.nonzero(self.action)
        return Ragged.from_pairs(row, self.item[row, at], len(self.length), {"score": self.score[row, at]})


@dataclass(frozen=True)
class SelectionOutcome:
    """What a round showed: its uploads, a row per client of the walk, and the server after it learned from them."""

    upload: Ragged
    logits: AnyArray  # (entries of the upload,)
    table: AnyArray  # (items, dim) item rows


def init_selection(how: SelectionOptions, dim: int, actor_key: np.uint64, critic_key: np.uint64) -> Arrays:
    sizes = (2 * dim + 3, how.hidden, 1)
    return bundle_networks(actor=init_network(sizes, actor_key), critic=init_network(sizes, critic_key))


def take_walk(
    agent: Arrays, candidates: Ragged, user_rows: AnyArray, item_rows: AnyArray, how: SelectionOptions, dice: RoundDraws
) -> CandidateWalk:
    """Decide on every candidate of every client; `found` as `candidates` gives it, `user_rows` one row per client."""
    dim, actor = item_rows.shape[1], select_network(agent, "actor")
    row, at, n = candidates.rows(), rank_in_rows(candidates.rows()), len(candidates)
    state = np.zeros((n, how.most, 2 * dim + 3), np.float32)
    state[row, at, 0], state[row, at, 1] = candidates.values["score"], candidates.values["frequency"]
    state[row, at, 2 : 2 + dim] = user_rows[row]
    state[row, at, 2 + dim : 2 + 2 * dim] = item_rows[candidates.ids]
    item, score = np.full((n, how.most), -1, np.int32), np.zeros((n, how.most), np.float32)
    item[row, at], score[row, at] = candidates.ids, candidates.values["score"]
    action, log_prob = np.zeros((n, how.most), bool), np.zeros((n, how.most), np.float32)
    length, drawn, picked = candidates.counts(), dice.draw_uniforms("action", how.most), np.zeros(n, np.float32)
    known = np.matmul(state[:, :, :-1], actor["w0"][:-1]) + actor["b0"]  # all but the count, for every position
    for k in range(int(length.max(initial=0))):
        state[:, k, -1] = np.where(k < length, picked / how.most, 0)
        hidden = np.maximum(known[:, k] + state[:, k, -1:] * actor["w0"][-1], 0)
        logit = (hidden * actor["w1"][:, 0]).sum(1) + actor["b1"][0]
        action[:, k] = (drawn[:, k] < expit(logit.astype(np.float64))) & (k < length)
        log_prob[:, k] = np.where(k < length, -np.logaddexp(0, np.where(action[:, k], -logit, logit)), 0)
        picked += action[:, k]
    return CandidateWalk(length, item, score, state, action, log_prob)


def reward_walks(walk: CandidateWalk, outcome: SelectionOutcome, how: SelectionOptions, dice: RoundDraws) -> Doubles:
    """The reward of each client's walk: the mean of three, each scaled over the clients; nan for those not judged."""
    upload = outcome.upload
    judged = np.flatnonzero((walk.length > 0) & (upload.counts() > 0))
    raw = {
        "loss": -mean_losses(upload, outcome.logits, how.loss),
        "diversity": diversity(upload, walk.list_picks(), outcome.table, how.diversity),
        "divergence": divergence(upload, sigmoid(np.asarray(outcome.logits)), how.divergence),
    }
    parts = [standardize_values(values[judged]) for name, values in raw.items() if name != how.without]
    reward = np.mean(parts, axis=0)
    out = np.full(len(walk.length), np.nan)
    out[judged] = shuffle_values(reward, dice.take(judged)) if how.shuffle else reward
    return out


def td_errors(values: Tensor, rewards: Tensor, inside: Tensor, discount: float) -> Tensor:
    """R + discount * V(next) - V, with V = 0 after the last state; no gradient through the next value."""
    import torch

    ahead = torch.zeros_like(values)
    ahead[:, :-1] = (values * inside)[:, 1:]
    return (rewards + discount * ahead.detach() - values) * inside


def client_mean(values: Tensor, inside: Tensor) -> Tensor:
    """Mean over the states of each client, then over clients."""
    return ((values * inside).sum(1) / inside.sum(1)).mean()


def critic_loss(errors: Tensor, inside: Tensor) -> Tensor:
    return client_mean(errors**2, inside)


def actor_loss(logits: Tensor, action: Tensor, errors: Tensor, inside: Tensor) -> Tensor:
    """-ln pi(action) times the error, which is a constant here."""
    import torch
    from torch.nn.functional import logsigmoid

    return -client_mean(logsigmoid(torch.where(action, logits, -logits)) * errors.detach(), inside)


def update_selection(agent: Arrays, walk: CandidateWalk, reward: Doubles, how: SelectionOptions) -> Arrays:
    """The agent after a round; clients without candidates or without a reward (nan) teach nothing."""
    import torch

    told = np.flatnonzero((walk.length > 0) & ~np.isnan(reward))
    if len(told) == 0:
        return agent
    each = reward[told]
    rho = how.rho if how.adjust else np.inf
    gained = adjust_by_position(each, walk.action[told], walk.length[told], rho)
    state = torch.from_numpy(walk.state[told])
    action, inside = torch.from_numpy(walk.action[told]), torch.from_numpy(walk.inside[told].astype(np.float32))
    rewards = torch.from_numpy(gained.astype(np.float32))
    actor, critic = select_network(agent, "actor"), select_network(agent, "critic")
    errors = td_errors(predict_values(critic, walk.state[told]), rewards, inside, how.discount)

    def judge_values(layers: Layers) -> Tensor:
        return critic_loss(td_errors(forward(layers, state), rewards, inside, how.discount), inside)

    def judge_actions(layers: Layers) -> Tensor:
        return actor_loss(forward(layers, state), action, errors, inside)

    critic = take_adam_step(critic, judge_values, how.lr, how.clip_norm)
    actor = take_adam_step(actor, judge_actions, how.lr, how.clip_norm)
    return bundle_networks(actor=actor, critic=critic)
