"""What people of a node would score a model with: sums over all of them, where no budget is promised.

Scores have no noise and are charged to nobody, and a server chooses the model: one that ranks a single item tells who
has it. So in a run that counts what answers cost, none are sent (session.py).
"""

from __future__ import annotations

from tacita.core.errors import TacitaError
from tacita.federation.measuring import Sums, block_sums
from tacita.lab.centralised import scored
from tacita.lab.controls import popular_scorer
from tacita.live.node.received import Asked
from tacita.live.node.standing import Refusal, Standing
from tacita.live.wire import POPULAR, RequestHead


def asked_about(standing: Standing, head: RequestHead) -> int:
    """How many people have something to be scored in the block, whatever the model."""
    block = standing.fed.stream.blocks[head.block]
    return int(((block.valid if head.kind == "validate" else block.test).counts() > 0).sum())


def scores(standing: Standing, head: RequestHead, asked: Asked) -> Sums:
    try:
        if head.kind == "validate":
            return standing.here.validate(standing.fed, asked.server, asked.down)
        return block_sums(standing.fed, asked.server, standing.here.best, asked.down) | _of_most_popular(standing, head)
    except TacitaError:  # its scores are not finite
        raise Refusal("this model cannot be scored.") from None


def _of_most_popular(standing: Standing, head: RequestHead) -> Sums:
    """What ranking by popularity reaches on the same items: how many people of this node have each, and nothing else.

    Counted here, since nobody may be told of items that few people have.
    """
    fed, block = standing.fed, standing.fed.stream.blocks[head.block]
    found = scored(fed, block, popular_scorer(fed, block)).sums()
    return {f"{POPULAR}{name}": value for name, value in found.items()}
