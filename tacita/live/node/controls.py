"""What rankings that need no server reach on a block's test items, counted by a node over its own people."""

from __future__ import annotations

from tacita.core.types import Block
from tacita.federation.evaluation import MetricSums
from tacita.kernels.hashing import draw_uniforms
from tacita.kernels.threads import limit_blas_threads
from tacita.live.wire import control_score_name
from tacita.metrics import ScoreUsers
from tacita.round.plan import Federation
from tacita.runs.central_training import evaluate_scorer
from tacita.runs.controls import find_skip_reason, make_linear_scorer, make_popular_scorer

MOST_ITEMS = 5_000  # of a catalogue for which a node solves a linear model of its own: 200 MB, some seconds


def compute_control_sums(federation: Federation, block: Block) -> MetricSums:
    """Sums of scores of each control. The node counts them: nobody may learn of items that few people have."""
    scorers: dict[str, ScoreUsers] = {
        "random": _make_random_scorer(federation, block),
        "popular": make_popular_scorer(federation, block),
    }
    if block.n_items <= MOST_ITEMS and find_skip_reason("linear", federation) is None:
        with limit_blas_threads():  # it can wait, and a node shares its machine
            scorers["node"] = make_linear_scorer(federation, block)  # it pools the people of this node
    sums: MetricSums = {}
    for name, scorer in scorers.items():
        control_sums = evaluate_scorer(federation, block, scorer).compute_sums()
        for metric, value in control_sums.items():
            sums[control_score_name(name, metric)] = value
    return sums


def _make_random_scorer(federation: Federation, block: Block) -> ScoreUsers:
    """Ranks by the node's own chance: scores of a ranking that the server knows would tell it of the test items."""
    key = federation.draws.private("random-control", block.index)
    user_keys = federation.stream.user_keys
    return lambda users: draw_uniforms(key, user_keys[users], block.n_items)
