"""What a node counts by in runs that count epsilon: numbers that nobody's data decides.

An epsilon covers what is noised. An exact headcount beside it, or a refusal by one, tells who is there, and a wait for
others lets one person switch on the data of many. So in such runs thresholds look at how many people are enrolled on
this node, whatever they have. That at least `min_users` are enrolled is public; how many more is not told.
"""

from __future__ import annotations

from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.messages import Total


def hides_presence(node_run: NodeRun) -> bool:
    """Whether the run promises that the server cannot tell well who is in a sum: its learner noises the sum here."""
    return node_run.federation.learner.ledger() is not None


def count_people_for_minimum(node_run: NodeRun, question: ReceivedQuestion, n_respondents: int) -> int:
    """The people whom `min_users` counts: those of a sum, or under a budget all who are enrolled or named."""
    if not node_run.counts_epsilon:
        return n_respondents
    if question.respondents is not None:
        return len(question.respondents)
    return node_run.n_enrolled


def count_clients_in_reply(
    node: Node, node_run: NodeRun, question: ReceivedQuestion, total: Total
) -> tuple[int, float]:
    """How many clients a reply says that its sum is over, and their weight."""
    if not hides_presence(node_run):
        return total.n_clients, total.weight
    n_clients = node.config.min_users
    if question.respondents is not None:
        n_clients = len(question.respondents)
    return n_clients, float(n_clients)
