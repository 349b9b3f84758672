"""Scorers that stand beside every method under the same protocol: random, most popular, alone, centralised linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse

from tacita.core.sparse import matrix_of_lists
from tacita.core.types import Block, CohortView, Doubles, Floats, Ints, Ragged
from tacita.federation.evaluation import build_test_block, rename_unmasked_means, sample_user_lists
from tacita.kernels.hashing import draw_uniforms
from tacita.kernels.pairs import add_dense_products
from tacita.learn.training import train_cohort
from tacita.messages import CooccurrenceTerms
from tacita.metrics import ScoreUsers
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_with_own_rows
from tacita.models.tally.solver import (
    estimate_available_memory,
    estimate_solve_bytes,
    invert_in_place,
    solve_zero_diagonal,
)
from tacita.round.plan import Federation
from tacita.round.task import CohortTask
from tacita.runs.central_training import evaluate_scorer
from tacita.runs.file_schemas import ScoreRow

RIDGE = 200.0  # of the linear control, on every dataset
MOST_LINEAR_ITEMS = 20_000
CHEAP_LINEAR_ITEMS = {"rows": 4_000, "statistic": 2_000}
"""Learner -> items up to which the linear control costs little beside the run: it solves once a block."""
ALONE_EPOCHS = 30
ALONE_USERS = 500
"""Users of a block whose devices train alone; a mean over more of them costs more than it tells."""


def make_random_scorer(federation: Federation, block: Block) -> ScoreUsers:
    key = federation.draws.public("random-control", block.index)
    user_keys = federation.stream.user_keys
    return lambda users: draw_uniforms(key, user_keys[users], block.n_items)


def make_popular_scorer(federation: Federation, block: Block) -> ScoreUsers:
    """How many users have the item among their training items so far."""
    train = federation.stream.collect_train_items(block.index)
    chosen = build_choice_matrix(train, block.n_items)
    counts = chosen.sum(axis=0).astype(np.float32)
    return lambda users: np.repeat(counts[None], len(users), axis=0)


def make_alone_scorer(federation: Federation, block: Block) -> ScoreUsers:
    """Every client by itself: its own copy of the initial table, its own data so far, nothing exchanged.

    The item rate is divided by the number of clients, as averaging would have done to each client's step.
    """
    backbone = _build_lone_backbone(federation, block)
    settings = federation.config.train.model_copy(update={"local_epochs": ALONE_EPOCHS, "silos": 0})
    items = federation.init_item_rows(0, block.n_items)
    heads = backbone.init_heads(federation.draws)
    data = federation.stream.collect_train_items(block.index)
    test_data = build_test_block(federation, replace(block, train=data)).train

    def score_users(users: Ints) -> Floats:
        keys = federation.stream.user_keys[users]
        histories = data.take(users)
        view = CohortView(
            block=block.index,
            round=0,
            n_items=block.n_items,
            user_ptr=np.arange(len(users) + 1, dtype=np.int64),
            user=users,
            user_keys=keys,
            client_keys=keys,
            train=histories,
            exclude=histories,
            private=backbone.init_private(federation.draws, keys),
            parts={},
            items=items,
            heads=heads,
            received={},
        )
        local = train_cohort(CohortTask(view), backbone, (), settings, federation.draws).local
        own_rows = Ragged(local.row_start, local.row_item, {"moved": local.rows})
        test_view = replace(view, train=test_data.take(users))
        context = backbone.list_context_items(test_view)
        return score_with_own_rows(backbone, local.private, heads, items, own_rows, context)

    return score_users


def _build_lone_backbone(federation: Federation, block: Block) -> Scorer:
    """The run's model with the item rate of a client that trains alone."""
    has_data = block.train.counts() > 0
    n_clients = max(1, int(has_data.sum()))
    scale = federation.scorer.compute_item_rate_scale(block.n_items) / n_clients
    config = federation.scorer.config.model_copy(update={"item_lr_scale": scale})
    return type(federation.scorer)(config)


def build_choice_matrix(train: Ragged, n_items: int) -> scipy.sparse.csr_array:
    """1 where a user has an item, however often."""
    chosen = matrix_of_lists(train, n_items)
    chosen.sum_duplicates()
    chosen.data[:] = 1
    return chosen


def compute_item_gram(train: Ragged, n_items: int) -> Doubles:
    """How often each pair of items has been chosen by the same user."""
    chosen = build_choice_matrix(train, n_items)
    ptr = chosen.indptr.astype(np.int64)
    item = chosen.indices.astype(np.int32)
    client = np.arange(len(train), dtype=np.int32)
    weight = np.ones(len(train))
    gram = np.zeros((n_items, n_items))
    terms = CooccurrenceTerms(client, ptr, item, weight, n_items)
    terms.add_to(gram, np.zeros(0), weight)
    return gram


def solve_linear_weights(gram: Doubles, ridge: float) -> Floats:
    """The ridge solution with zero diagonal (EASE): B = I - P / diag(P), P = (G + ridge I)^-1; G is overwritten."""
    gram[np.diag_indices(len(gram))] += ridge
    inverse = invert_in_place(gram)
    assert inverse is not None, "a sum of squares with a ridge is positive definite"
    return solve_zero_diagonal(inverse)


def make_linear_scorer(federation: Federation, block: Block) -> ScoreUsers:
    """A linear item-item model on everybody's pooled training data; scores with what the run reads of the block."""
    train = federation.stream.collect_train_items(block.index)
    weights = solve_linear_weights(compute_item_gram(train, block.n_items), RIDGE)
    test_data = build_test_block(federation, block).train
    all_items = np.arange(block.n_items, dtype=np.int32)

    def score_users(users: Ints) -> Floats:
        histories = test_data.take(users)
        values = np.ones(len(histories.ids), np.float32)
        shape = (len(users), block.n_items)
        scores = np.zeros(shape, np.float32)
        add_dense_products(histories.ptr, histories.ids, values, all_items, weights, scores)
        return scores

    return score_users


MakeScorer = Callable[[Federation, Block], ScoreUsers]
OnBlock = Callable[[str, int], None]
"""Called with the name of a control and a block after it."""

ControlScores = dict[str, Any]
"""What result.json holds of a control: its blocks and their mean, or why it was skipped."""

CONTROLS: dict[str, MakeScorer] = {
    "random": make_random_scorer,
    "popular": make_popular_scorer,
    "alone": make_alone_scorer,
    "linear": make_linear_scorer,
}


def find_skip_reason(name: str, federation: Federation) -> str | None:
    """Why a control cannot be computed for a run; None: it can."""
    if name == "linear":
        return _find_linear_obstacle(federation)
    if name == "alone":
        return _find_alone_obstacle(federation)
    return None


def _find_linear_obstacle(federation: Federation) -> str | None:
    n_items = federation.stream.n_items
    if n_items > MOST_LINEAR_ITEMS:
        return f"more than {MOST_LINEAR_ITEMS:,} items"
    most_cheap = CHEAP_LINEAR_ITEMS.get(federation.learner.name, MOST_LINEAR_ITEMS)
    if n_items > most_cheap and not federation.config.evaluate.linear_control:
        return f"it would take longer than the run above {most_cheap:,} items (--set evaluate.linear_control=true)"
    needed = estimate_solve_bytes(n_items)
    if needed > estimate_available_memory():
        return f"{needed / 1e9:.0f} GB of free memory are needed for it"
    return None


def _find_alone_obstacle(federation: Federation) -> str | None:
    if federation.learner.name != "rows":
        return f"backbone '{federation.backbone.name}' does not train item rows"
    if federation.backbone.list_head_shapes():
        return "parameters other than item rows are shared, and alone nobody shares"
    return None


def run_controls(
    federation: Federation, on_each: OnBlock | None = None, without: Sequence[str] = ()
) -> Iterator[tuple[str, ControlScores]]:
    """Every control on every block's test items, with the run's own masks and metrics, one after the other."""
    for name, make_scorer in CONTROLS.items():
        if name in without:
            continue
        skip_reason = find_skip_reason(name, federation)
        if skip_reason is not None:
            yield name, {"skipped": skip_reason}
            continue
        blocks = []
        for block in federation.stream.blocks:
            scorer = make_scorer(federation, block)
            most_users = ALONE_USERS if name == "alone" else None
            blocks.append(_evaluate_control(federation, block, scorer, most_users))
            if on_each:
                on_each(name, block.index)
        yield name, {"blocks": blocks, "mean": average_incremental_blocks(blocks)}


def _evaluate_control(
    federation: Federation, block: Block, scorer: ScoreUsers, most_users: int | None = None
) -> ScoreRow:
    """The scores of a control, of everybody or of a sample of the users."""
    tested = block
    if most_users is not None:
        key = federation.draws.public("control-users", block.index)
        tested = replace(block, test=sample_user_lists(block.test, federation.stream.user_keys, key, most_users))
    evaluation = evaluate_scorer(federation, tested, scorer)
    scores: ScoreRow = {"users": len(evaluation.users)}
    scores |= evaluation.compute_means()
    if federation.config.evaluate.unmasked:
        unmasked = evaluate_scorer(federation, tested, scorer, mask="none")
        scores |= rename_unmasked_means(unmasked)
    return scores


def average_incremental_blocks(blocks: list[ScoreRow]) -> dict[str, float]:
    """Means over the incremental blocks (1..) in which somebody was tested, or of the only block there is."""
    later = blocks[1:] or blocks
    tested = [block for block in later if block["users"]] or later
    means = {}
    for name, value in tested[0].items():
        is_metric = "@" in name or name == "auc"
        if is_metric and isinstance(value, float):
            values = [block[name] for block in tested]
            means[name] = float(np.mean(values))
    return means
