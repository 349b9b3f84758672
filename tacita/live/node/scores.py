"""Scores of a model on the people of a node: sums over all of them, where no budget is promised.

Scores have no noise and are charged to nobody, and a server chooses the model: one that ranks a single item tells who
has it. So a run that counts what answers cost gets no scores.
"""

from __future__ import annotations

from tacita.core.errors import TacitaError
from tacita.federation.evaluation import MetricSums, sum_block_metrics
from tacita.live.node.answers import NodeAnswer, ReleaseRecord
from tacita.live.node.charging import count_budget_use
from tacita.live.node.controls import compute_control_sums
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun, Refusal
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.wire import Reply, RequestHead, make_reply_head


def answer_evaluation_or_close(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> NodeAnswer:
    """Answer a validation, or the end of a block, which ends even where its scores may not leave."""
    head = question.head
    is_close = head.kind == "close"
    refusal = find_score_refusal(node, node_run, head)
    if refusal is not None and not is_close:
        raise Refusal(refusal)
    sums: MetricSums = {}
    if admits_scores(node_run) and not refusal:
        sums = compute_metric_sums(node_run, question)
    spent: list[int] = []
    if is_close:
        node_run.devices.end_block(node_run.federation, question.server, question.broadcast)
        node_run.has_ended = True
        if node.config.insecure_single_user_uploads:
            spent = count_budget_use(node_run)
    people = max((n_users for _, n_users in sums.values()), default=0)
    reply_head = make_reply_head(head, verdict="ok", sums=sums, spent=spent, clients=people, said=refusal or "")
    return NodeAnswer(Reply(reply_head), _make_score_release(people, spent))


def admits_scores(node_run: NodeRun) -> bool:
    """In a run that counts, nothing leaves that is not counted: scores have no noise."""
    return not node_run.federation.ledgers


def find_score_refusal(node: Node, node_run: NodeRun, head: RequestHead) -> str | None:
    """Why scores may not leave now, before anything is computed; None: they may, or the run gets none anyway."""
    if not admits_scores(node_run):
        return None
    return node.find_sum_refusal(count_scored_users(node_run, head), head.kind)


def count_scored_users(node_run: NodeRun, head: RequestHead) -> int:
    """How many people have something to be scored in the block, whatever the model."""
    block = node_run.federation.stream.blocks[head.block]
    held_out = block.valid if head.kind == "validate" else block.test
    return int((held_out.counts() > 0).sum())


def compute_metric_sums(node_run: NodeRun, question: ReceivedQuestion) -> MetricSums:
    """Sums of scores over the people here; refuses a model whose scores are not finite."""
    federation = node_run.federation
    devices = node_run.devices
    head = question.head
    try:
        if head.kind == "validate":
            return devices.sum_validation(federation, question.server, question.broadcast)
        model_sums = sum_block_metrics(federation, question.server, devices.best_devices, question.broadcast)
        control_sums = compute_control_sums(federation, federation.stream.blocks[head.block])
        return model_sums | control_sums
    except TacitaError:
        raise Refusal("this model cannot be scored.") from None


def _make_score_release(people: int, spent: list[int]) -> ReleaseRecord | None:
    """The line of the ledger; None: nothing about people leaves."""
    contents = []
    if people:
        contents.append("sums of scores and how many people they are over")
    if any(spent):
        contents.append("how many people spent how much of their budgets")
    if not contents:
        return None
    return ReleaseRecord(people or sum(spent), 0, ", and ".join(contents))
