"""Leaks that were found and mended, put back for the time of an audit: whether canaries would see them again.

Each is a context in which functions of the package do what they did before. Nothing outside of audits and tests uses
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tacita.core.codec import pack
from tacita.federation.devices import RoundReply
from tacita.live.node import noise_replay, sum_release
from tacita.live.node.charging import OpenAccounts, restore_spent
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.node.sum_release import ChargedRetraction
from tacita.messages import Total

EXACT_REPLAY = "a repeated retraction is decided by the exact sum"


@contextmanager
def replace_attribute(owner: object, name: str, value: Any) -> Iterator[None]:
    """Another value under a name, until the context ends."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


# On nodes


@contextmanager
def plant_exact_replay() -> Iterator[None]:
    """Whether a retraction is sent as before is decided by a digest of the sum before noise."""
    exact_sums: list[Total] = []

    def compute_sum(node: Node, node_run: NodeRun, question: ReceivedQuestion) -> RoundReply:
        def draw_seed(total: Total) -> int:
            exact_sums.append(total)
            return noise_replay.draw_noise_seed(node.store, question.number)

        devices = node_run.devices
        devices.draw_nonce = draw_seed
        return devices.exchange(
            node_run.federation, question.server, question.broadcast, question.question, question.respondents
        )

    def admit_retraction(
        node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool
    ) -> ChargedRetraction:
        batches = sum_release._list_batches(node, node_run, question, withdraws_together)
        return ChargedRetraction(batches, "", None)

    def replay_retraction(
        node: Node, node_run: NodeRun, retraction: ChargedRetraction, reply: RoundReply, accounts: OpenAccounts
    ) -> tuple[RoundReply, dict[str, bytes]]:
        digest = _digest_sum(node, exact_sums[-1])
        replay = noise_replay.find_replay(node.store, retraction.batches, digest)
        if replay is None:
            return reply, noise_replay.make_replay_notes(retraction.batches, digest, reply)
        restore_spent(node_run, accounts.spent)
        return noise_replay.replay_reply(reply, replay, str(node.store.path)), {}

    with (
        replace_attribute(sum_release, "compute_sum", compute_sum),
        replace_attribute(sum_release, "admit_retraction", admit_retraction),
        replace_attribute(sum_release, "replay_retraction", replay_retraction),
    ):
        yield


def _digest_sum(node: Node, exact_sum: Total) -> str:
    key = hashlib.sha256(node.store.secret.encode()).digest()
    sums = dict(sorted(exact_sum.sums.items()))
    return hashlib.blake2b(pack(sums), key=key, digest_size=32).hexdigest()


Plant = Callable[[], AbstractContextManager[None]]

LEAKS: dict[str, Plant] = {
    EXACT_REPLAY: plant_exact_replay,
}
