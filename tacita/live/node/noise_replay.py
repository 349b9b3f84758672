"""Noise of what leaves a node: by chance and new every time, except for a retraction that is sent again as it was.

Live noise follows the node's secret and chance, of which nothing is stored. A node that is set back to a copy of its
folder draws other noise, and two sums never have the same noise.

A retraction is no ordinary answer. Its budget does not stop it, and a server that reports a failed attempt may ask
for it again. New noise each time could be averaged away. So a node keeps what a batch of people sent until their
requests are done. If the server asks for the same, to the last bit of the exact sum, they send the same and pay
nothing. If the model has moved on, they send the new sum, too, and pay, up to `MAX_RETRACTIONS` times in all.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace

from tacita.core.codec import pack, unpack
from tacita.federation.devices import RoundReply
from tacita.live.node.answers import QuestionNumber, count_answers
from tacita.live.node.node_run import Refusal
from tacita.live.node.store import NodeStore
from tacita.messages import Spec, Total

MAX_RETRACTIONS = 3  # retractions of one batch that differ: more than a server needs that asks again in later blocks
REPLAY_PREFIX = "retold/"  # a batch, and a digest of the sum that it sent


class NoiseSource:
    """Draws the seed of a sum's noise, and keeps the sum as it was before noise."""

    exact_sum: Total

    def __init__(self, store: NodeStore, number: QuestionNumber) -> None:
        self._store = store
        self._number = number

    def draw_seed(self, total: Total) -> int:
        self.exact_sum = total
        return draw_noise_seed(self._store, self._number)


def draw_noise_seed(store: NodeStore, number: QuestionNumber) -> int:
    """What the noise of a sum follows besides the secret. A node without one, as tests make it, draws as the lab."""
    if store.secret:
        return secrets.randbits(256)
    return store.run_query(lambda db: count_answers(db, number))


def digest_sum(store: NodeStore, exact_sum: Total, specs: Sequence[Spec]) -> str:
    """A digest of a sum before noise, and of what decides how much noise it gets."""
    key = hashlib.sha256(store.secret.encode()).digest()
    digest = hashlib.blake2b(key=key, digest_size=32)
    bounds = [(spec.name, spec.shape, spec.most) for spec in specs]
    sorted_sums = dict(sorted(exact_sum.sums.items()))
    digest.update(repr(bounds).encode())
    digest.update(pack(sorted_sums))
    return digest.hexdigest()


def find_replay(store: NodeStore, batches: Collection[str], digest: str) -> bytes | None:
    """What these batches sent for the same exact sum; None: nothing. Refuses the next sum after too many."""
    notes_by_batch = [store.read_notes(f"{REPLAY_PREFIX}{batch}/") for batch in batches]
    same_sums = []
    for notes in notes_by_batch:
        for key, note in notes.items():
            if key.endswith(f"/{digest}"):
                same_sums.append(note)
    if notes_by_batch and len(same_sums) == len(notes_by_batch):
        return bytes(same_sums[0])
    if any(len(notes) >= MAX_RETRACTIONS for notes in notes_by_batch):
        raise Refusal(
            f"what these people take back was asked for under {MAX_RETRACTIONS} models, "
            "each answer with noise of its own; it is "
            "told as before, and under no other."
        )
    return None


def make_replay_notes(batches: Collection[str], digest: str, reply: RoundReply) -> dict[str, bytes]:
    """What the node keeps of a retraction that leaves."""
    packed_sums = pack(reply.total.sums)
    return {f"{REPLAY_PREFIX}{batch}/{digest}": packed_sums for batch in batches}


def replay_reply(reply: RoundReply, replay: bytes, where: str) -> RoundReply:
    """The same answer with the noise it had when it was sent first."""
    sums = unpack(replay, where)
    return replace(reply, total=reply.total.with_sums(sums))
