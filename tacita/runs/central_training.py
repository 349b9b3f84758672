"""The run's own model trained on everybody's pooled data: what keeping data apart costs (upper rows of FedKDRec).

Negatives are drawn anew in every epoch, Adam goes on from epoch to epoch, and the epoch that validates best is kept,
under the run's own protocol, rates, decay and number of negatives; an epoch stands where a run has a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.evaluation import build_mask, build_rules, selection_metric
from tacita.kernels.sampling import draw_samples, room_for_negatives
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.central_model import (
    CentralModel,
    CentralState,
    InteractionGraph,
    TrainingSamples,
    require_central,
)
from tacita.metrics import Evaluation, ScoreUsers, evaluate
from tacita.models.lightgcn import LightGCN
from tacita.round.serving import Purpose
from tacita.round.plan import Federation

BATCH = 1024
GRAPH_BATCH = 8192  # a step of a graph model passes along every edge there is, so that small ones cost too much


@dataclass(frozen=True)
class CentralCheckpoint:
    """A central model at its best epoch."""

    central: CentralModel
    state: CentralState
    epochs: int
    best_epoch: int
    valid: float | None  # the selecting metric; None: nobody has anything to validate

    def scorer(self) -> ScoreUsers:
        return lambda users: self.central.score(self.state, users)


def train_centrally(fed: Federation, block: Block) -> CentralCheckpoint:
    """Epochs on the training data so far until validation has not improved for `train.patience` of them."""
    data, plan, every = fed.stream.train_items(block.index), fed.config.train, fed.config.evaluate.every
    central = CentralModel(require_central(fed.backbone), _build_graph(fed, data, block), plan.weight_decay)
    state = _init_state(fed, central, block)
    best = CentralCheckpoint(central, state, 0, 0, None)
    batch = GRAPH_BATCH if central.backbone.on_graph else BATCH
    for epoch in range(1, plan.rounds + 1):
        order = fed.draws.public("central-order", block.index, epoch)
        state = central.train(state, _draw_samples(fed, data, block, epoch), batch, [order])
        if epoch % every and epoch != plan.rounds:
            continue
        score = _validate(fed, block, CentralCheckpoint(central, state, epoch, epoch, None))
        if score is None or best.valid is None or score > best.valid:
            best = CentralCheckpoint(central, state, epoch, epoch, score)
        best = replace(best, epochs=epoch)
        if epoch - best.best_epoch >= plan.patience:
            break
    return best


def evaluate_scorer(
    fed: Federation, block: Block, scorer: ScoreUsers, purpose: Purpose = "test", mask: str | None = None
) -> Evaluation:
    """A scorer on a block's validation or test items, under the run's protocol, or with another mask."""
    metric, k = selection_metric(fed.config)
    rules = build_rules(fed, block, [metric], [k]) if purpose == "valid" else build_rules(fed, block)
    wanted = block.valid if purpose == "valid" else block.test
    known = build_mask(fed, block, purpose, mask or fed.config.evaluate.mask)
    return evaluate(scorer, wanted, known, fed.stream.user_keys, fed.draws, rules)


def _validate(fed: Federation, block: Block, trained: CentralCheckpoint) -> float | None:
    found = evaluate_scorer(fed, block, trained.scorer(), "valid")
    return float(next(iter(found.values.values())).mean()) if len(found.users) else None


def _init_state(fed: Federation, central: CentralModel, block: Block) -> CentralState:
    """Rows of everybody, items as the run's own devices get them."""
    users = fed.stream.user_keys[: block.n_users]
    state = central.init_state(fed.draws, users, fed.stream.item_keys[: block.n_items])
    return replace(state, values={**state.values, "items": fed.initial_rows(0, block.n_items)})


def _build_graph(fed: Federation, data: Ragged, block: Block) -> InteractionGraph | None:
    if not isinstance(fed.backbone, LightGCN):
        return None
    return InteractionGraph.from_edges(data.rows(), data.ids, np.ones(len(data.ids)), block.n_users, block.n_items)


def _draw_samples(fed: Federation, data: Ragged, block: Block, epoch: int) -> TrainingSamples:
    """Everybody's positives with fresh negatives that are not among them."""
    counts = data.counts()
    room = room_for_negatives(data.ptr, data.ids, block.n_items)
    size = counts + np.where(room > 0, fed.config.train.negatives * counts, 0)
    ptr = np.zeros(len(data) + 1, np.int64)
    np.cumsum(size, out=ptr[1:])
    item: Ints = np.empty(ptr[-1], np.int32)
    label: Floats = np.empty(ptr[-1], np.float32)
    key = fed.draws.private("central-negatives", block.index, epoch)
    owners = fed.stream.user_keys[: len(data)]
    draw_samples(threads_in_use(), key, owners, data.ptr, data.ids, data.ptr, data.ids, ptr, block.n_items, item, label)
    user = np.repeat(np.arange(len(data), dtype=np.int64), size)
    return TrainingSamples(user, item.astype(np.int64), label, np.ones(len(item), np.float32))
