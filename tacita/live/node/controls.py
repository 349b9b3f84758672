"""What rankings that need no server reach on a block's test items, counted by a node over its own people."""

from __future__ import annotations

from tacita.core.types import Block
from tacita.federation.evaluation import MetricSums
from tacita.kernels.hashing import uniforms
from tacita.kernels.threads import limit_blas_threads
from tacita.live.wire import control_score_name
from tacita.metrics import ScoreUsers
from tacita.round.plan import Federation
from tacita.runs.central_training import evaluate_scorer
from tacita.runs.controls import find_skip_reason, linear_scorer, popular_scorer

MOST_ITEMS = 5_000  # of a catalogue for which a node solves a linear model of its own: 200 MB, some seconds


def compute_control_sums(fed: Federation, block: Block) -> MetricSums:
    """Sums of scores of each control. Counted here, since nobody may be told of items that few people have."""
    made: dict[str, ScoreUsers] = {"random": _random_scorer(fed, block), "popular": popular_scorer(fed, block)}
    if block.n_items <= MOST_ITEMS and find_skip_reason("linear", fed) is None:
        with limit_blas_threads():  # it can wait, and a node shares its machine
            made["node"] = linear_scorer(fed, block)  # everybody who is pooled are the people here
    return {
        control_score_name(name, metric): value
        for name, scorer in made.items()
        for metric, value in evaluate_scorer(fed, block, scorer).sums().items()
    }


def _random_scorer(fed: Federation, block: Block) -> ScoreUsers:
    """By the node's own chance: of a ranking that the server knows, scores would tell it of the test items."""
    key = fed.draws.private("random-control", block.index)
    return lambda users: uniforms(key, fed.stream.user_keys[users], block.n_items)
