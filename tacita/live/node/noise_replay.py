"""Noise of what leaves a node: by chance and new every time, except for a retraction that is sent again as it was.

Live noise follows the node's secret and chance, of which nothing is stored. A node that is set back to a copy of its
folder draws other noise, and two sums never have the same noise.

A retraction is no ordinary answer. Its budget does not stop it, and a server that reports a failed attempt may ask
for it again. New noise each time could be averaged away. So a node keeps what a batch of people sent until their
requests are done. If the server asks the same with the same bytes, they send the same and pay nothing. If it asks with
any other byte, they send a new sum and pay, up to `MAX_RETRACTIONS` times in all; then the node refuses. Which of the
three happens depends on what the server sent, never on what the answer would be: else it would tell what people have.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection
from dataclasses import replace

from tacita.core.codec import pack, unpack
from tacita.federation.device_protocol import RoundReply
from tacita.live.node.answers import QuestionNumber, count_answers
from tacita.live.node.node_run import Refusal
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.node.store import NodeStore

MAX_RETRACTIONS = 3  # questions about one batch that differ: more than a server needs that asks again in later blocks
REPLAY_PREFIX = "retold/"  # a batch, and a digest of the question that it answered


def draw_noise_seed(store: NodeStore, number: QuestionNumber) -> int:
    """What the noise of a sum follows besides the secret. A node without one, as tests make it, draws as the lab."""
    if store.secret:
        return secrets.randbits(256)
    return store.run_query(lambda db: count_answers(db, number))


def digest_question(question: ReceivedQuestion, batches: Collection[str]) -> str:
    """A digest of what the server asked and sent, and of whom it asked; nothing in it depends on the answer.

    The numbers of rounds and attempts are not in it: no answer depends on them, and an honest server counts on.
    """
    head = question.head
    identity = [head.run, head.block, question.question.owner, question.question.kind, str(question.question.replay)]
    sent = sorted(head.names.items())
    text = json.dumps([identity, sent, sorted(batches)])
    return hashlib.sha256(text.encode()).hexdigest()


def find_replay_or_refuse(store: NodeStore, batches: Collection[str], digest: str) -> bytes | None:
    """What these batches sent for the same question; None: nothing. Refuses the next question after too many."""
    notes_by_batch = [store.read_notes(f"{REPLAY_PREFIX}{batch}/") for batch in batches]
    same_answers = []
    for notes in notes_by_batch:
        for key, note in notes.items():
            if key.endswith(f"/{digest}"):
                same_answers.append(note)
    if notes_by_batch and len(same_answers) == len(notes_by_batch):
        return bytes(same_answers[0])
    if any(len(notes) >= MAX_RETRACTIONS for notes in notes_by_batch):
        raise Refusal(
            f"what these people take back was asked for in {MAX_RETRACTIONS} ways, each answer with noise of its own; "
            "it is told as before, and in no other way."
        )
    return None


def make_replay_notes(batches: Collection[str], digest: str, reply: RoundReply) -> dict[str, bytes]:
    """What the node keeps of a retraction that leaves."""
    packed_sums = pack(reply.total.sums)
    return {f"{REPLAY_PREFIX}{batch}/{digest}": packed_sums for batch in batches}


def with_replayed_noise(reply: RoundReply, replay: bytes, where: str) -> RoundReply:
    """The same answer with the noise it had when it was sent first."""
    sums = unpack(replay, where)
    return replace(reply, total=reply.total.with_sums(sums))
