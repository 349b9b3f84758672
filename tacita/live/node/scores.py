"""What people of a node would score a model with: sums over all of them, where no budget is promised.

Scores have no noise and are charged to nobody, and a server chooses the model: one that ranks a single item tells who
has it. So in a run that counts what answers cost, none are sent (session.py).
"""

from __future__ import annotations

from tacita.core.errors import TacitaError
from tacita.federation.evaluation import MetricSums, block_metric_sums
from tacita.live.node.controls import compute_control_sums
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.wire import RequestHead


def count_scored_users(standing: NodeRun, head: RequestHead) -> int:
    """How many people have something to be scored in the block, whatever the model."""
    block = standing.federation.stream.blocks[head.block]
    return int(((block.valid if head.kind == "validate" else block.test).counts() > 0).sum())


def compute_scores(standing: NodeRun, head: RequestHead, question: ReceivedQuestion) -> MetricSums:
    try:
        if head.kind == "validate":
            return standing.devices.validate(standing.federation, question.server, question.down)
        own = block_metric_sums(standing.federation, question.server, standing.devices.best, question.down)
        return own | compute_control_sums(standing.federation, standing.federation.stream.blocks[head.block])
    except TacitaError:  # its scores are not finite
        raise Refusal("this model cannot be scored.") from None
