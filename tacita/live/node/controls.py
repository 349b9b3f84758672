"""What rankings that need no server reach on a block's test items, counted by a node over its own people."""

from __future__ import annotations

from tacita.core.types import Block
from tacita.federation.measuring import Sums
from tacita.kernels.hashing import uniforms
from tacita.kernels.threads import one_core_each
from tacita.lab.centralised import scored
from tacita.lab.controls import linear_scorer, popular_scorer, why_skipped
from tacita.live.wire import control_score
from tacita.metrics import ScoreUsers
from tacita.round.plan import Federation

MOST_ITEMS = 5_000  # of a catalogue for which a node solves a linear model of its own: 200 MB, some seconds


def control_sums(fed: Federation, block: Block) -> Sums:
    """Sums of scores of each control. Counted here, since nobody may be told of items that few people have."""
    made: dict[str, ScoreUsers] = {"random": _random_scorer(fed, block), "popular": popular_scorer(fed, block)}
    if block.n_items <= MOST_ITEMS and why_skipped("linear", fed) is None:
        with one_core_each():  # it can wait, and a node shares its machine
            made["node"] = linear_scorer(fed, block)  # everybody who is pooled are the people here
    return {
        control_score(name, metric): value
        for name, scorer in made.items()
        for metric, value in scored(fed, block, scorer).sums().items()
    }


def _random_scorer(fed: Federation, block: Block) -> ScoreUsers:
    """By the node's own chance: of a ranking that the server knows, scores would tell it of the test items."""
    key = fed.draws.private("random-control", block.index)
    return lambda users: uniforms(key, fed.stream.user_keys[users], block.n_items)
