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
from tacita.methods.distillation.measures import Loss, compute_mean_losses, standardize_values
from tacita.methods.distillation.networks import (
    Layers,
    bundle_networks,
    init_network,
    run_network,
    run_network_without_gradient,
    select_network,
    take_adam_step,
)
from tacita.methods.distillation.rewards import (
    Divergence,
    Diversity,
    adjust_by_position,
    measure_diversity,
    measure_upload_divergence,
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
        """(clients, most) whether there is a candidate at a position."""
        n_positions = self.item.shape[1]
        position = np.arange(n_positions)
        length = self.length[:, None]
        return np.asarray(position < length)

    def list_picks(self) -> Ragged:
        """What is sent: items with their scores, best first."""
        row, position = np.nonzero(self.action)
        item = self.item[row, position]
        score = self.score[row, position]
        n_clients = len(self.length)
        return Ragged.from_pairs(row, item, n_clients, {"score": score})


@dataclass(frozen=True)
class SelectionOutcome:
    """What a round showed: its uploads, a row per client of the walk, and the server after it learned from them."""

    upload: Ragged
    logits: AnyArray  # (entries of the upload,)
    table: AnyArray  # (items, dim) item rows


def init_selection_networks(how: SelectionOptions, dim: int, actor_key: np.uint64, critic_key: np.uint64) -> Arrays:
    """New networks that decide (actor) and judge (critic)."""
    width = 2 * dim + 3
    sizes = (width, how.hidden, 1)
    actor = init_network(sizes, actor_key)
    critic = init_network(sizes, critic_key)
    return bundle_networks(actor=actor, critic=critic)


def decide_on_candidates(
    agent: Arrays,
    candidates: Ragged,
    user_rows: AnyArray,
    item_rows: AnyArray,
    how: SelectionOptions,
    draws: RoundDraws,
) -> CandidateWalk:
    """Decide on every candidate of every client; `user_rows` has one row per client."""
    row = candidates.rows()
    position = rank_in_rows(row)
    shape = (len(candidates), how.most)
    item = np.full(shape, -1, np.int32)
    item[row, position] = candidates.ids
    score = np.zeros(shape, np.float32)
    scores = candidates.values["score"]
    score[row, position] = scores
    state = _build_states(candidates, position, user_rows, item_rows, how)
    length = candidates.counts()
    uniform = draws.draw_uniforms("action", how.most)
    action, log_prob = _draw_actions(agent, state, length, uniform)
    return CandidateWalk(length, item, score, state, action, log_prob)


def _build_states(
    candidates: Ragged, position: Longs, user_rows: AnyArray, item_rows: AnyArray, how: SelectionOptions
) -> Floats:
    """What the agent sees at each position: score, frequency, user, item; the number of picks so far is still 0."""
    dim = item_rows.shape[1]
    row = candidates.rows()
    n_clients = len(candidates)
    width = 2 * dim + 3
    shape = (n_clients, how.most, width)
    state = np.zeros(shape, np.float32)
    score = candidates.values["score"]
    state[row, position, 0] = score
    frequency = candidates.values["frequency"]
    state[row, position, 1] = frequency
    users = user_rows[row]
    state[row, position, 2 : 2 + dim] = users
    items = item_rows[candidates.ids]
    end = 2 + 2 * dim
    start = 2 + dim
    state[row, position, start:end] = items
    return state


def _draw_actions(agent: Arrays, state: Floats, length: Longs, uniform: Doubles) -> tuple[Bools, Floats]:
    """Picks and their log-probabilities, position by position; writes the number of picks so far into the states."""
    actor = select_network(agent, "actor")
    n_clients, most, _ = state.shape
    action = np.zeros((n_clients, most), bool)
    shape = (n_clients, most)
    log_prob = np.zeros(shape, np.float32)
    n_picked = np.zeros(n_clients, np.float32)
    input_weights = actor["w0"][:-1]
    count_weights = actor["w0"][-1]
    output_weights = actor["w1"][:, 0]
    inputs = state[:, :, :-1]
    from_inputs = np.matmul(inputs, input_weights)
    without_count = from_inputs + actor["b0"]  # for every position at once
    n_positions = int(length.max(initial=0))
    for k in range(n_positions):
        is_inside = k < length
        picked_share = n_picked / most
        share_so_far = np.where(is_inside, picked_share, 0)
        state[:, k, -1] = share_so_far
        count_share = state[:, k, -1:]
        from_count = count_share * count_weights
        before_relu = without_count[:, k] + from_count
        hidden = np.maximum(before_relu, 0)
        output = (hidden * output_weights).sum(1)
        logit = output + actor["b1"][0]
        probability = expit(logit.astype(np.float64))
        draws = uniform[:, k]
        is_drawn = draws < probability
        action[:, k] = is_drawn & is_inside
        is_picked = action[:, k]
        negative = -logit
        signed = np.where(is_picked, negative, logit)
        log_probability = -np.logaddexp(0, signed)
        known_log_prob = np.where(is_inside, log_probability, 0)
        log_prob[:, k] = known_log_prob
        n_picked += action[:, k]
    return action, log_prob


def compute_walk_rewards(
    walk: CandidateWalk, outcome: SelectionOutcome, how: SelectionOptions, draws: RoundDraws
) -> Doubles:
    """The reward of each client's walk: the mean of three, each scaled over the clients; nan for those not judged."""
    upload = outcome.upload
    has_upload = upload.counts() > 0
    is_judged = (walk.length > 0) & has_upload
    judged = np.flatnonzero(is_judged)
    predicted = sigmoid(np.asarray(outcome.logits))
    raw = {
        "loss": -compute_mean_losses(upload, outcome.logits, how.loss),
        "diversity": measure_diversity(upload, walk.list_picks(), outcome.table, how.diversity),
        "divergence": measure_upload_divergence(upload, predicted, how.divergence),
    }
    rewards = []
    for name, values in raw.items():
        if name != how.without:
            rewards.append(standardize_values(values[judged]))
    mean_reward = np.mean(rewards, axis=0)
    if how.shuffle:
        mean_reward = shuffle_values(mean_reward, draws.take(judged))
    n_clients = len(walk.length)
    reward = np.full(n_clients, np.nan)
    reward[judged] = mean_reward
    return reward


def compute_td_errors(values: Tensor, rewards: Tensor, inside: Tensor, discount: float) -> Tensor:
    """R + discount * V(next) - V, with V = 0 after the last state; no gradient through the next value."""
    import torch

    next_values = torch.zeros_like(values)
    inside_values = values * inside
    next_values[:, :-1] = inside_values[:, 1:]
    discounted = discount * next_values.detach()
    errors = rewards + discounted - values
    return errors * inside


def average_over_clients(values: Tensor, inside: Tensor) -> Tensor:
    """Mean over the states of each client, then over clients."""
    sums = (values * inside).sum(1)
    means = sums / inside.sum(1)
    return means.mean()


def compute_critic_loss(errors: Tensor, inside: Tensor) -> Tensor:
    """The mean squared error of the critic's values."""
    return average_over_clients(errors**2, inside)


def compute_actor_loss(logits: Tensor, action: Tensor, errors: Tensor, inside: Tensor) -> Tensor:
    """-ln pi(action) times the error, which is a constant here."""
    import torch
    from torch.nn.functional import logsigmoid

    signed = torch.where(action, logits, -logits)
    gains = logsigmoid(signed) * errors.detach()
    return -average_over_clients(gains, inside)


def update_selection_networks(agent: Arrays, walk: CandidateWalk, reward: Doubles, how: SelectionOptions) -> Arrays:
    """The agent after a round; clients without candidates or without a reward (nan) teach nothing."""
    import torch

    has_reward = ~np.isnan(reward)
    is_rewarded = (walk.length > 0) & has_reward
    clients = np.flatnonzero(is_rewarded)
    if len(clients) == 0:
        return agent
    rho = how.rho
    if not how.adjust:
        rho = np.inf
    actions = walk.action[clients]
    lengths = walk.length[clients]
    client_rewards = reward[clients]
    adjusted = adjust_by_position(client_rewards, actions, lengths, rho)
    states = walk.state[clients]
    state = torch.from_numpy(states)
    actions_taken = walk.action[clients]
    action = torch.from_numpy(actions_taken)
    is_inside = walk.inside[clients]
    weights = is_inside.astype(np.float32)
    inside = torch.from_numpy(weights)
    reward_values = adjusted.astype(np.float32)
    rewards = torch.from_numpy(reward_values)
    actor = select_network(agent, "actor")
    critic = select_network(agent, "critic")
    client_states = walk.state[clients]
    old_values = run_network_without_gradient(critic, client_states)
    errors = compute_td_errors(old_values, rewards, inside, how.discount)

    def compute_value_loss(layers: Layers) -> Tensor:
        values = run_network(layers, state)
        new_errors = compute_td_errors(values, rewards, inside, how.discount)
        return compute_critic_loss(new_errors, inside)

    def compute_action_loss(layers: Layers) -> Tensor:
        logits = run_network(layers, state)
        return compute_actor_loss(logits, action, errors, inside)

    critic = take_adam_step(critic, compute_value_loss, how.lr, how.clip_norm)
    actor = take_adam_step(actor, compute_action_loss, how.lr, how.clip_norm)
    return bundle_networks(actor=actor, critic=critic)
