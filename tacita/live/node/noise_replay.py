"""Noise of what leaves a node: by chance and new every time, but for a retraction that is told again as it was.

Live noise follows the node's secret and chance, of which nothing is stored: a node that is set back to a copy of its
folder draws other noise, and two sums never have the same. A retraction is no ordinary answer. Its budget does not stop
it, and a server that says that it came to nothing may ask for it again. Told each time with new noise it could be
averaged away, so what was told of a batch of people is kept until their requests are done: asked for the same, to the
last bit of the exact sum, they send the same again and pay nothing. Asked for something else, because the model has
moved on, they tell that, too, and pay, up to `MOST` times in all.
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
REPLAY_PREFIX = "retold/"  # a batch, and a digest of what it told


def draw_noise_seed(store: NodeStore, number: QuestionNumber) -> int:
    """What the noise of a sum follows besides the secret. A node without one, as tests make it, draws as the lab."""
    return secrets.randbits(256) if store.secret else store.run_query(lambda db: count_answers(db, number))


def digest_sum(store: NodeStore, exact: Total, fields: Sequence[Spec]) -> str:
    """Of a sum before noise, and of how much noise it is to have."""
    made = hashlib.blake2b(key=hashlib.sha256(store.secret.encode()).digest(), digest_size=32)
    made.update(repr([(one.name, one.shape, one.most) for one in fields]).encode())
    made.update(pack({name: exact.sums[name] for name in sorted(exact.sums)}))
    return made.hexdigest()


def find_replay(store: NodeStore, batches: Collection[str], sha: str) -> bytes | None:
    """What these batches told when they were asked for the same; None: nothing. Refuses what they told too often."""
    found = [store.read_notes(f"{REPLAY_PREFIX}{one}/") for one in batches]
    same = [told[key] for told in found for key in told if key.endswith(f"/{sha}")]
    if found and len(same) == len(found):
        return bytes(same[0])
    if any(len(told) >= MAX_RETRACTIONS for told in found):
        raise Refusal(
            f"what these people take back was asked for under {MAX_RETRACTIONS} models, "
            "each answer with noise of its own; it is "
            "told as before, and under no other."
        )
    return None


def make_replay_notes(batches: Collection[str], sha: str, reply: RoundReply) -> dict[str, bytes]:
    """What is kept of a retraction that leaves."""
    return {f"{REPLAY_PREFIX}{one}/{sha}": pack(reply.total.sums) for one in batches}


def replay_reply(reply: RoundReply, replay: bytes, where: str) -> RoundReply:
    """The same answer with the noise of then."""
    return replace(reply, total=reply.total.with_sums(unpack(replay, where)))
