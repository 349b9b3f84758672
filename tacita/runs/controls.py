"""Scorers that stand beside every method under the same protocol: random, most popular, alone, centralised linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.sparse import matrix_of_lists
from tacita.core.types import Block, CohortView, Doubles, Floats, Ints, Ragged
from tacita.federation.evaluation import build_test_block, unmasked_means
from tacita.kernels.hashing import uniforms
from tacita.kernels.pairs import dense_products
from tacita.learn.training import train_cohort
from tacita.messages import CooccurrenceTerms
from tacita.metrics import ScoreUsers
from tacita.models.scoring import score_with_own_rows
from tacita.models.tally.solver import available_memory, bytes_to_solve, invert_in_place, solve_zero_diagonal
from tacita.round.task import CohortTask
from tacita.round.plan import Federation
from tacita.runs.central_training import evaluate_scorer

RIDGE = 200.0  # of the linear control, on every dataset
MOST_LINEAR_ITEMS = 20_000
ALONE_EPOCHS = 30


def random_scorer(fed: Federation, block: Block) -> ScoreUsers:
    key = fed.draws.public("random-control", block.index)
    return lambda users: uniforms(key, fed.stream.user_keys[users], block.n_items)


def popular_scorer(fed: Federation, block: Block) -> ScoreUsers:
    """How many users have the item among their training items so far."""
    counts = build_choice_matrix(fed.stream.train_items(block.index), block.n_items).sum(axis=0).astype(np.float32)
    return lambda users: np.repeat(counts[None], len(users), axis=0)


def alone_scorer(fed: Federation, block: Block) -> ScoreUsers:
    """Every client by itself: its own copy of the initial table, its own data so far, nothing exchanged.

    The item rate is divided by the number of clients, as averaging would have done to each client's step.
    """
    n_clients = max(1, int((block.train.counts() > 0).sum()))
    scale = fed.scorer.item_scale(block.n_items) / n_clients
    config = fed.scorer.config.model_copy(update={"item_lr_scale": scale})
    backbone = type(fed.scorer)(config)
    plan = fed.config.train.model_copy(update={"local_epochs": ALONE_EPOCHS, "silos": 0})
    items = fed.initial_rows(0, block.n_items)
    heads = backbone.init_heads(fed.draws)
    data = fed.stream.train_items(block.index)
    read = build_test_block(fed, replace(block, train=data)).train

    def score_users(users: Ints) -> Floats:
        keys = fed.stream.user_keys[users]
        mine = data.take(users)
        view = CohortView(
            block=block.index,
            round=0,
            n_items=block.n_items,
            user_ptr=np.arange(len(users) + 1, dtype=np.int64),
            user=users,
            user_keys=keys,
            client_keys=keys,
            train=mine,
            exclude=mine,
            private=backbone.init_private(fed.draws, keys),
            parts={},
            items=items,
            heads=heads,
            received={},
        )
        local = train_cohort(CohortTask(view), backbone, (), plan, fed.draws).local
        own = Ragged(local.row_start, local.row_item, {"moved": local.rows})
        tested = replace(view, train=read.take(users))
        return score_with_own_rows(backbone, local.private, heads, items, own, backbone.context(tested))

    return score_users


def build_choice_matrix(train: Ragged, n_items: int) -> scipy.sparse.csr_array:
    """1 where a user has an item, however often."""
    chosen = matrix_of_lists(train, n_items)
    chosen.sum_duplicates()
    chosen.data[:] = 1
    return chosen


def item_gram(train: Ragged, n_items: int) -> Doubles:
    """How often each pair of items has been chosen by the same user."""
    chosen, gram = build_choice_matrix(train, n_items), np.zeros((n_items, n_items))
    ptr, item = chosen.indptr.astype(np.int64), chosen.indices.astype(np.int32)
    client, ones = np.arange(len(train), dtype=np.int32), np.ones(len(train))
    CooccurrenceTerms(client, ptr, item, ones, n_items).add_to(gram, np.zeros(0), ones)
    return gram


def linear_weights(gram: Doubles, ridge: float) -> Floats:
    """The ridge solution with zero diagonal (EASE): B = I - P / diag(P), P = (G + ridge I)^-1; G is overwritten."""
    gram[np.diag_indices(len(gram))] += ridge
    inverse = invert_in_place(gram)
    assert inverse is not None, "a sum of squares with a ridge is positive definite"
    return solve_zero_diagonal(inverse)


def linear_scorer(fed: Federation, block: Block) -> ScoreUsers:
    """A linear item-item model on everybody's pooled training data; scores with what the run reads of the block."""
    gram = item_gram(fed.stream.train_items(block.index), block.n_items)
    weights, read = linear_weights(gram, RIDGE), build_test_block(fed, block).train

    def score_users(users: Ints) -> Floats:
        mine = read.take(users)
        scores = np.zeros((len(users), block.n_items), np.float32)
        every = np.arange(block.n_items, dtype=np.int32)
        dense_products(mine.ptr, mine.ids, np.ones(len(mine.ids), np.float32), every, weights, scores)
        return scores

    return score_users


CONTROLS: dict[str, Callable[[Federation, Block], ScoreUsers]] = {
    "random": random_scorer,
    "popular": popular_scorer,
    "alone": alone_scorer,
    "linear": linear_scorer,
}


def find_skip_reason(name: str, fed: Federation) -> str | None:
    if name == "linear" and fed.stream.n_items > MOST_LINEAR_ITEMS:
        return f"more than {MOST_LINEAR_ITEMS:,} items"
    if name == "linear" and bytes_to_solve(fed.stream.n_items) > available_memory():
        return f"{bytes_to_solve(fed.stream.n_items) / 1e9:.0f} GB of free memory are needed for it"
    if name == "alone" and fed.learner.name != "rows":
        return f"backbone '{fed.backbone.name}' does not train item rows"
    if name == "alone" and fed.backbone.shared():
        return "parameters other than item rows are shared, and alone nobody shares"
    return None


def run_controls(
    fed: Federation, on_each: Callable[[str, int], None] | None = None, without: tuple[str, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every control on every block's test items, with the run's own masks and metrics, one after the other."""
    for name, make in CONTROLS.items():
        if name in without:
            continue
        reason = find_skip_reason(name, fed)
        if reason is not None:
            yield name, {"skipped": reason}
            continue
        blocks = []
        for block in fed.stream.blocks:
            blocks.append(_evaluate_control(fed, block, make(fed, block)))
            if on_each:
                on_each(name, block.index)
        yield name, {"blocks": blocks, "mean": average_blocks(blocks)}


def _evaluate_control(fed: Federation, block: Block, scorer: ScoreUsers) -> dict[str, Any]:
    found = evaluate_scorer(fed, block, scorer)
    more = unmasked_means(evaluate_scorer(fed, block, scorer, mask="none")) if fed.config.evaluate.unmasked else {}
    return {"users": len(found.users), **found.mean(), **more}


def average_blocks(blocks: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the incremental blocks (1..) in which somebody was tested, or of the only block there is."""
    later = blocks[1:] or blocks
    counted = [b for b in later if b["users"]] or later
    names = [k for k, v in counted[0].items() if isinstance(v, float) and ("@" in k or k == "auc")]
    return {k: float(np.mean([b[k] for b in counted])) for k in names}
