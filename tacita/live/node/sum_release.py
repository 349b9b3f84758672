"""One sum that leaves a node: admitted, computed, checked, thinned and recorded, or refused at the first step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Longs
from tacita.federation.device_protocol import RoundReply
from tacita.live.node import min_contributors, noise_replay
from tacita.live.node.admission import Admission, admit_sum, refuse_few_contributors
from tacita.live.node.answers import NodeAnswer, ReleaseRecord
from tacita.live.node.charging import (
    OpenAccounts,
    compute_user_costs,
    describe_highest_cost,
    open_accounts,
    read_accounts,
    restore_spent,
)
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.public_counts import count_clients_in_reply, hides_presence
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.node.withdrawal_batches import list_batch_digests
from tacita.live.per_client_arrays import encode_client_fields
from tacita.live.wire import Reply, encode_total, make_reply_head
from tacita.messages import Total


def answer_sum(node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool) -> NodeAnswer:
    """Decide one release, step by step; the first step that says no raises a `Refusal`.

    Accounts are open before anything is computed. Devices charge themselves as they encode what they send.
    """
    admission = admit_sum(node, node_run, question, withdraws_together)
    retraction = None
    if is_charged_retraction(node_run, admission):
        retraction = decide_retraction_replay(node, node_run, question, withdraws_together)
    accounts = open_accounts(node, node_run, question.server)
    reply = compute_sum(node, node_run, question)
    refuse_few_contributors(node, node_run, admission, reply.contributors)
    replay_notes: dict[str, bytes] = {}
    if retraction is not None:
        reply, replay_notes = replay_or_record_retraction(node, node_run, retraction, reply, accounts)
    if is_statistic_release(node_run, admission):
        total = min_contributors.drop_rare_entries(node_run, reply.total, node.min_contributors, question.server)
        reply = replace(reply, total=total)
    if admission.ends_round:
        node_run.round = question.head.round + 1
    return record_release(node, node_run, question, admission, reply, accounts, replay_notes)


def compute_sum(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> RoundReply:
    """One sum over the people who take part, or what each of them sends."""

    def draw_seed(_: Total) -> int:
        return noise_replay.draw_noise_seed(node.store, question.number)

    devices = node_run.devices
    devices.draw_nonce = draw_seed
    return devices.exchange(
        node_run.federation, question.server, question.broadcast, question.question, question.respondents
    )


# Retractions


@dataclass(frozen=True)
class ChargedRetraction:
    """A retraction that costs budget, decided by what the server sent before anything is computed."""

    batches: set[str]
    digest: str  # of the question
    replay: bytes | None  # the sums that were sent for the same question; None: this is a new release


def is_charged_retraction(node_run: NodeRun, admission: Admission) -> bool:
    """Whether people take back what they contributed, in a run where that costs budget."""
    learner = node_run.federation.learner
    return admission.question.owner == learner.name and learner.ledger() is not None


def _list_retraction_batches(
    node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool
) -> set[str]:
    """Digests of the batches that a retraction is about."""
    queue = node.store.list_requests(node_run.federation.stream.name)
    users = _find_respondents(node_run, question).tolist()
    min_batch = node.config.min_users if withdraws_together else 0
    return list_batch_digests(queue, users, min_batch)


def _find_respondents(node_run: NodeRun, question: ReceivedQuestion) -> Longs:
    """Users whom a question is about, as ids of the store."""
    keys = node_run.user_keys if question.respondents is None else question.respondents
    return node_run.users[np.isin(node_run.user_keys, keys)]


def decide_retraction_replay(
    node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool
) -> ChargedRetraction:
    """Decide whether a retraction is sent as before or is a new release; refuse a new one after too many."""
    batches = _list_retraction_batches(node, node_run, question, withdraws_together)
    digest = noise_replay.digest_question(question, batches)
    replay = noise_replay.find_replay_or_refuse(node.store, batches, digest)
    return ChargedRetraction(batches, digest, replay)


def replay_or_record_retraction(
    node: Node, node_run: NodeRun, retraction: ChargedRetraction, reply: RoundReply, accounts: OpenAccounts
) -> tuple[RoundReply, dict[str, bytes]]:
    """Send a retraction that was sent before as it was, at no cost; else return notes by which it can be repeated."""
    if retraction.replay is None:
        return reply, noise_replay.make_replay_notes(retraction.batches, retraction.digest, reply)
    restore_spent(node_run, accounts.spent)
    return noise_replay.with_replayed_noise(reply, retraction.replay, str(node.store.path)), {}


# Statistics


def is_statistic_release(node_run: NodeRun, admission: Admission) -> bool:
    """Whether the sum is a statistic, in which rare items would show who has them."""
    return node_run.federation.learner.model_after and admission.is_round_question


# The record


def record_release(
    node: Node,
    node_run: NodeRun,
    question: ReceivedQuestion,
    admission: Admission,
    reply: RoundReply,
    accounts: OpenAccounts,
    replay_notes: dict[str, bytes],
) -> NodeAnswer:
    """The answer as it is sent, and the line of the ledger that says what left and what it cost."""
    total = reply.total
    n_clients, weight = count_clients_in_reply(node, node_run, question, total)
    expected = float(n_clients) if hides_presence(node_run) else reply.expected
    head = make_reply_head(question.head, verdict="ok", clients=n_clients, expected=expected, weight=weight)
    keys = node_run.user_keys.tolist()
    pseudonyms = dict(zip(keys, node_run.pseudonyms.tolist(), strict=True))
    sums = encode_total(total, admission.specs)
    arrays = sums | encode_client_fields(total, pseudonyms)
    accounts_now = read_accounts(node_run)
    release = ReleaseRecord(
        users=max(1, total.n_clients) if node_run.counts_epsilon else total.n_clients,  # noise alone is a release, too
        n_bytes=0,
        sees=_describe_content(node_run, admission, total),
        epsilon=describe_highest_cost(accounts_now),
        costs=compute_user_costs(node_run.users, accounts.accounts, accounts_now),
        replay_notes=replay_notes,
    )
    return NodeAnswer(Reply(head, arrays), release)


def _describe_content(node_run: NodeRun, admission: Admission, total: Total) -> str:
    """What the server sees, in a few words."""
    subjects = [spec.about for spec in admission.specs if spec.about]
    subject = subjects[0] if subjects else "a sum"
    if total.each:
        return f"{subject}, of {total.n_clients} people one by one"
    if hides_presence(node_run):
        return f"one sum of {subject}, and not over how many people"
    return f"one sum of {subject}, over {total.n_clients} people"
