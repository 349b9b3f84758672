"""The run's own model trained on everybody's pooled data: what keeping data apart costs (upper rows of FedKDRec).

Each epoch draws new negatives, Adam continues from epoch to epoch, and the epoch that validates best is kept.
Protocol, rates, decay and number of negatives are the run's own; an epoch stands where a run has a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.evaluation import build_evaluation_rules, build_ranking_mask, parse_selection_metric
from tacita.kernels.sampling import count_possible_negatives, draw_samples
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.central_model import CentralModel
from tacita.learn.training.central_state import CentralState, InteractionGraph, TrainingSamples
from tacita.metrics import Evaluation, ScoreUsers, evaluate_ranking
from tacita.models.lightgcn import LightGCN
from tacita.round.plan import Federation
from tacita.round.serving import Purpose

BATCH = 1024
GRAPH_BATCH = 8192  # each step of a graph model passes along every edge, so small batches cost too much


@dataclass(frozen=True)
class CentralCheckpoint:
    """A central model at its best epoch."""

    central: CentralModel
    state: CentralState
    epochs: int
    best_epoch: int
    valid: float | None  # the selecting metric; None: nobody has anything to validate

    def scorer(self) -> ScoreUsers:
        return lambda users: self.central.score_catalogue(self.state, users)


def train_centrally(federation: Federation, block: Block) -> CentralCheckpoint:
    """Epochs on the training data so far until validation has not improved for `train.patience` of them."""
    data = federation.stream.collect_train_items(block.index)
    settings = federation.config.train
    every = federation.config.evaluate.every
    graph = _build_graph(federation, data, block)
    central = CentralModel(federation.scorer, graph, settings.weight_decay)
    state = _init_state(federation, central, block)
    best = CentralCheckpoint(central, state, 0, 0, None)
    batch = GRAPH_BATCH if federation.scorer.on_graph else BATCH
    for epoch in range(1, settings.rounds + 1):
        order = federation.draws.public("central-order", block.index, epoch)
        samples = _draw_samples(federation, data, block, epoch)
        state = central.train_epochs(state, samples, batch, [order])
        is_last = epoch == settings.rounds
        if epoch % every and not is_last:
            continue
        current = CentralCheckpoint(central, state, epoch, epoch, None)
        score = _validate_checkpoint(federation, block, current)
        if _is_better_score(score, best.valid):
            best = replace(current, valid=score)
        best = replace(best, epochs=epoch)
        if epoch - best.best_epoch >= settings.patience:
            break
    return best


def _is_better_score(score: float | None, best: float | None) -> bool:
    """Without a score, a later epoch counts as better."""
    if score is None or best is None:
        return True
    return score > best


def evaluate_scorer(
    federation: Federation, block: Block, scorer: ScoreUsers, purpose: Purpose = "test", mask: str | None = None
) -> Evaluation:
    """A scorer on a block's validation or test items, under the run's protocol, or with another mask."""
    if purpose == "valid":
        metric, k = parse_selection_metric(federation.config)
        rules = build_evaluation_rules(federation, block, [metric], [k])
        targets = block.valid
    else:
        rules = build_evaluation_rules(federation, block)
        targets = block.test
    mask = mask or federation.config.evaluate.mask
    masked = build_ranking_mask(federation, block, purpose, mask)
    user_keys = federation.stream.user_keys
    return evaluate_ranking(scorer, targets, masked, user_keys, federation.draws, rules)


def _validate_checkpoint(federation: Federation, block: Block, checkpoint: CentralCheckpoint) -> float | None:
    evaluation = evaluate_scorer(federation, block, checkpoint.scorer(), "valid")
    if not len(evaluation.users):
        return None
    scores = next(iter(evaluation.values.values()))
    return float(scores.mean())


def _init_state(federation: Federation, central: CentralModel, block: Block) -> CentralState:
    """Rows of all users, and items as the run's own devices get them."""
    stream = federation.stream
    user_keys = stream.user_keys[: block.n_users]
    item_keys = stream.item_keys[: block.n_items]
    state = central.init_state(federation.draws, user_keys, item_keys)
    items = federation.init_item_rows(0, block.n_items)
    return replace(state, values={**state.values, "items": items})


def _build_graph(federation: Federation, data: Ragged, block: Block) -> InteractionGraph | None:
    if not isinstance(federation.backbone, LightGCN):
        return None
    users = data.rows()
    weights = np.ones(len(users))
    return InteractionGraph.from_edges(users, data.ids, weights, block.n_users, block.n_items)


def _draw_samples(federation: Federation, data: Ragged, block: Block, epoch: int) -> TrainingSamples:
    """The positives of all users, with new negatives that are not among them."""
    n_users = len(data)
    n_items = block.n_items
    counts = data.counts()
    room = count_possible_negatives(data.ptr, data.ids, n_items)
    ratio = federation.config.train.negatives
    negatives = np.where(room > 0, ratio * counts, 0)
    sizes = counts + negatives
    ptr = np.zeros(n_users + 1, np.int64)
    np.cumsum(sizes, out=ptr[1:])
    n_samples = ptr[-1]
    item: Ints = np.empty(n_samples, np.int32)
    label: Floats = np.empty(n_samples, np.float32)
    key = federation.draws.private("central-negatives", block.index, epoch)
    owners = federation.stream.user_keys[:n_users]
    threads = threads_in_use()
    items = (data.ptr, data.ids)
    draw_samples(threads, key, owners, *items, *items, ptr, n_items, item, label)
    users = np.arange(n_users, dtype=np.int64)
    user = np.repeat(users, sizes)
    weight = np.ones(n_samples, np.float32)
    return TrainingSamples(user, item.astype(np.int64), label, weight)
