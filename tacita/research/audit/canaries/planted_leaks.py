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
from tacita.core.config import RunConfig, SplitConfig, TrainConfig
from tacita.data.interaction_table import Interactions
from tacita.data.splits import resolve_split
from tacita.federation.device_protocol import RoundReply
from tacita.learn import rows
from tacita.live.node import admission, answers, noise_replay, sum_release
from tacita.live.node import node_run as node_run_module
from tacita.live.node.answers import QuestionNumber
from tacita.live.node.charging import OpenAccounts, restore_spent
from tacita.live.node.node import Node
from tacita.live.node.node_run import NodeRun
from tacita.live.node.question_reader import ReceivedQuestion
from tacita.live.node.sum_release import ChargedRetraction
from tacita.messages import Total
from tacita.runs import assembly
from tacita.runs.forgetting.verification import AppliedRequest

EXACT_REPLAY = "a repeated retraction is decided by the exact sum"
WAITING_NEWCOMERS = "fresh rows wait until enough people have some"
EXACT_COUNTS = "replies and refusals count who has data"
QUANTILE_BORDERS = "blocks are cut by quantiles of all rows"
COUNTED_DENOMINATOR = "noised sums are divided by who has data"
CATALOGUE_OF_DATA = "the catalogue is made of the data"
NOISE_OF_SEED = "noise follows the seed"
FULL_CERTIFICATE = "certificates hold what verification measured"


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

    def decide_retraction_replay(
        node: Node, node_run: NodeRun, question: ReceivedQuestion, withdraws_together: bool
    ) -> ChargedRetraction:
        batches = sum_release._list_retraction_batches(node, node_run, question, withdraws_together)
        return ChargedRetraction(batches, "", None)

    def replay_or_record_retraction(
        node: Node, node_run: NodeRun, retraction: ChargedRetraction, reply: RoundReply, accounts: OpenAccounts
    ) -> tuple[RoundReply, dict[str, bytes]]:
        digest = _digest_sum(node, exact_sums[-1])
        replay = noise_replay.find_replay_or_refuse(node.store, retraction.batches, digest)
        if replay is None:
            return reply, noise_replay.make_replay_notes(retraction.batches, digest, reply)
        restore_spent(node_run, accounts.spent)
        return noise_replay.with_replayed_noise(reply, replay, str(node.store.path)), {}

    with (
        replace_attribute(sum_release, "compute_sum", compute_sum),
        replace_attribute(sum_release, "decide_retraction_replay", decide_retraction_replay),
        replace_attribute(sum_release, "replay_or_record_retraction", replay_or_record_retraction),
    ):
        yield


def _digest_sum(node: Node, exact_sum: Total) -> str:
    key = hashlib.sha256(node.store.secret.encode()).digest()
    sums = dict(sorted(exact_sum.sums.items()))
    return hashlib.blake2b(pack(sums), key=key, digest_size=32).hexdigest()


@contextmanager
def plant_waiting_newcomers() -> Iterator[None]:
    """Rows that were in no sum join a block once `min_users` people have some, also under a budget."""

    def count_newcomers_needed(node: Node, config: RunConfig) -> int:
        return node.config.min_users

    def mark_released(db: Any, number: QuestionNumber, has_noise: bool) -> None:
        marked(db, number, False)

    marked = answers._mark_released_interactions
    with (
        replace_attribute(node_run_module, "count_newcomers_needed", count_newcomers_needed),
        replace_attribute(answers, "_mark_released_interactions", mark_released),
    ):
        yield


@contextmanager
def plant_exact_counts() -> Iterator[None]:
    """Heads say how many people are in a sum, and thresholds count those who have data."""

    def count_clients_in_reply(
        node: Node, node_run: NodeRun, question: ReceivedQuestion, total: Total
    ) -> tuple[int, float]:
        return total.n_clients, total.weight

    def hides_presence(node_run: NodeRun) -> bool:
        return False

    def count_people_for_minimum(node_run: NodeRun, question: ReceivedQuestion, n_respondents: int) -> int:
        return n_respondents

    with (
        replace_attribute(sum_release, "count_clients_in_reply", count_clients_in_reply),
        replace_attribute(sum_release, "hides_presence", hides_presence),
        replace_attribute(admission, "count_people_for_minimum", count_people_for_minimum),
    ):
        yield


# In the lab


@contextmanager
def plant_quantile_borders() -> Iterator[None]:
    """Borders of time blocks are quantiles of everybody's rows, also under a budget."""

    def choose_split(config: RunConfig, parts: assembly.Parts, table: Interactions) -> SplitConfig:
        return resolve_split(table, config.split)

    with replace_attribute(assembly, "_choose_split", choose_split):
        yield


@contextmanager
def plant_counted_denominator() -> Iterator[None]:
    """Sums are divided by how many of those who have data are expected."""

    def choose_denominator(total: Total, name: str, plan: TrainConfig, expected: float) -> float:
        return expected

    with replace_attribute(rows, "choose_denominator", choose_denominator):
        yield


@contextmanager
def plant_catalogue_of_data() -> Iterator[None]:
    """A model is about the items that people have."""

    def with_catalogue(config: RunConfig, parts: assembly.Parts, data: assembly.RunTable) -> assembly.RunTable:
        return data

    with replace_attribute(assembly, "_with_catalogue", with_catalogue):
        yield


@contextmanager
def plant_noise_of_seed() -> Iterator[None]:
    """The noise of a lab run follows its seed and nothing else."""

    def choose_secret(config: RunConfig, parts: assembly.Parts, noise_secret: str | None) -> str:
        return ""

    with replace_attribute(assembly, "_choose_secret", choose_secret):
        yield


@contextmanager
def plant_full_certificate() -> Iterator[None]:
    """A certificate compares with training again and counts what people have, also under a budget."""

    def counts_releases(applied: AppliedRequest) -> bool:
        return False

    with replace_attribute(AppliedRequest, "counts_releases", property(counts_releases)):
        yield


Plant = Callable[[], AbstractContextManager[None]]

LEAKS: dict[str, Plant] = {
    EXACT_REPLAY: plant_exact_replay,
    WAITING_NEWCOMERS: plant_waiting_newcomers,
    QUANTILE_BORDERS: plant_quantile_borders,
    COUNTED_DENOMINATOR: plant_counted_denominator,
    EXACT_COUNTS: plant_exact_counts,
    CATALOGUE_OF_DATA: plant_catalogue_of_data,
    NOISE_OF_SEED: plant_noise_of_seed,
    FULL_CERTIFICATE: plant_full_certificate,
}
