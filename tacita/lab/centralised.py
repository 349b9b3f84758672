"""The run's own model trained on everybody's pooled data: what keeping data apart costs (upper rows of FedKDRec).

Negatives are drawn anew in every epoch, Adam goes on from epoch to epoch, and the epoch that validates best is kept,
under the run's own protocol, rates, decay and number of negatives; an epoch stands where a run has a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.measuring import known_items, rules_of, selecting_metric
from tacita.kernels.sampling import draw_samples, room_for_negatives
from tacita.kernels.threads import threads_in_use
from tacita.learn.training.central import Central, CentralState, Graph, Samples
from tacita.metrics import Evaluation, ScoreUsers, evaluate
from tacita.models.graph import LightGCN
from tacita.round.parts import Purpose
from tacita.round.plan import Federation

BATCH = 1024
GRAPH_BATCH = 8192  # a step of a graph model passes along every edge there is, so that small ones cost too much


@dataclass(frozen=True)
class Trained:
    """A central model at its best epoch."""

    central: Central
    state: CentralState
    epochs: int
    best_epoch: int
    valid: float | None  # the selecting metric; None: nobody has anything to validate

    def scorer(self) -> ScoreUsers:
        return lambda users: self.central.score(self.state, users)


def train_centrally(fed: Federation, block: Block) -> Trained:
    """Epochs on the training data so far until validation has not improved for `train.patience` of them."""
    data, plan, every = fed.stream.trained(block.index), fed.config.train, fed.config.evaluate.every
    central = Central(fed.backbone, _graph(fed, data, block), plan.weight_decay)
    state = _start(fed, central, block)
    best = Trained(central, state, 0, 0, None)
    batch = GRAPH_BATCH if fed.backbone.on_graph else BATCH
    for epoch in range(1, plan.rounds + 1):
        order = fed.draws.public("central-order", block.index, epoch)
        state = central.train(state, _samples(fed, data, block, epoch), batch, [order])
        if epoch % every and epoch != plan.rounds:
            continue
        score = _validated(fed, block, Trained(central, state, epoch, epoch, None))
        if score is None or best.valid is None or score > best.valid:
            best = Trained(central, state, epoch, epoch, score)
        best = replace(best, epochs=epoch)
        if epoch - best.best_epoch >= plan.patience:
            break
    return best


def scored(
    fed: Federation, block: Block, scorer: ScoreUsers, purpose: Purpose = "test", mask: str | None = None
) -> Evaluation:
    """A scorer on a block's validation or test items, under the run's protocol, or with another mask."""
    metric, k = selecting_metric(fed.config)
    rules = rules_of(fed, block, [metric], [k]) if purpose == "valid" else rules_of(fed, block)
    wanted = block.valid if purpose == "valid" else block.test
    known = known_items(fed, block, purpose, mask or fed.config.evaluate.mask)
    return evaluate(scorer, wanted, known, fed.stream.user_keys, fed.draws, rules)


def _validated(fed: Federation, block: Block, trained: Trained) -> float | None:
    found = scored(fed, block, trained.scorer(), "valid")
    return float(next(iter(found.values.values())).mean()) if len(found.users) else None


def _start(fed: Federation, central: Central, block: Block) -> CentralState:
    """Rows of everybody, items as the run's own devices get them."""
    users = fed.stream.user_keys[: block.n_users]
    state = central.start(fed.draws, users, fed.stream.item_keys[: block.n_items])
    return replace(state, values={**state.values, "items": fed.first_rows(0, block.n_items)})


def _graph(fed: Federation, data: Ragged, block: Block) -> Graph | None:
    if not isinstance(fed.backbone, LightGCN):
        return None
    return Graph.of(data.rows(), data.ids, np.ones(len(data.ids)), block.n_users, block.n_items)


def _samples(fed: Federation, data: Ragged, block: Block, epoch: int) -> Samples:
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
    return Samples(user, item.astype(np.int64), label, np.ones(len(item), np.float32))
