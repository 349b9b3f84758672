"""What people of a node would score a model with: sums over all of them, where no budget is promised.

Scores have no noise and are charged to nobody, and a server chooses the model: one that ranks a single item tells who
has it. So in a run that counts what answers cost, none are sent (session.py).
"""

from __future__ import annotations

from tacita.core.errors import TacitaError
from tacita.federation.measuring import Sums, block_sums
from tacita.live.node.controls import control_sums
from tacita.live.node.received import Asked
from tacita.live.node.standing import Refusal, Standing
from tacita.live.wire import RequestHead


def asked_about(standing: Standing, head: RequestHead) -> int:
    """How many people have something to be scored in the block, whatever the model."""
    block = standing.fed.stream.blocks[head.block]
    return int(((block.valid if head.kind == "validate" else block.test).counts() > 0).sum())


def scores(standing: Standing, head: RequestHead, asked: Asked) -> Sums:
    try:
        if head.kind == "validate":
            return standing.here.validate(standing.fed, asked.server, asked.down)
        own = block_sums(standing.fed, asked.server, standing.here.best, asked.down)
        return own | control_sums(standing.fed, standing.fed.stream.blocks[head.block])
    except TacitaError:  # its scores are not finite
        raise Refusal("this model cannot be scored.") from None
