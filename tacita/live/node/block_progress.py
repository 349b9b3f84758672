"""How a run moves on, block by block and round by round, on a node's devices."""

from __future__ import annotations

from dataclasses import replace

from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.node.question_reader import ReceivedQuestion


def advance_run(node_run: NodeRun, question: ReceivedQuestion) -> None:
    """Open the block of a question and keep the best round; refuse what is over before anything changes."""
    head = question.head
    _refuse_past_block(node_run, head.block)
    if head.block > node_run.block:
        _begin_block(node_run, question)
    if head.kind != "close" and head.round < node_run.round:
        raise Refusal(f"round {head.round + 1} of block {head.block} is over on this node.")
    if head.best_round >= node_run.round:
        node_run.devices.keep_best_round(head.best_round)


def _refuse_past_block(node_run: NodeRun, block: int) -> None:
    is_over = block == node_run.block and node_run.has_ended
    if block < node_run.block or is_over:
        raise Refusal(f"block {block} of this run is over on this node.")


def _begin_block(node_run: NodeRun, question: ReceivedQuestion) -> None:
    """Begin a block; where the node missed the end of the last one, go on from its best round."""
    devices = node_run.devices
    if not node_run.has_ended:
        devices.clients = devices.best_devices.copy()
    first_round = replace(question.server, round=0)
    devices.begin_block(node_run.federation, first_round, question.broadcast)
    node_run.block = question.head.block
    node_run.round = 0
    node_run.has_ended = False
