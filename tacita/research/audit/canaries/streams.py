"""Canaries in tally's later releases: blocks that share one budget, and what people take back.

A run with many canaries, each inside by a coin, goes through the loop of every run: devices charge, sums get noise, the
server's sum changes. The reader sees the sum after every release. Canaries have another random half of the items in
every block. In a retraction they keep a quarter of the rest, so that the change is nearly as long as it may be.

`sums`: everything that is released about a canary, weighed by how little noise it has. `changes`: the difference of two
blocks alone, in which noise would vanish that was used twice. The claim is what the devices' ledgers record as spent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.types import Arrays, Bools, Doubles, Ragged, ServerState
from tacita.federation.one_round import Progress
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import begin_block, make_initial_progress, run_block
from tacita.messages import OuterProducts, Total
from tacita.models.tally.model import STATE, STATISTIC, TallyConfig
from tacita.models.tally.private_math import build_unit_vectors
from tacita.models.tally.private_tally import RETRACTION_RELEASE, PrivateTally, read_axes
from tacita.privacy.calibration import compute_max_mu
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.research.audit.canaries.canary_stream import make_stream, make_training_block
from tacita.research.audit.canaries.sums import DELTA, HalfNoiseTally, UnclippedTally
from tacita.round.device_state import PARTS
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

FREE_RETRACTIONS_BUG = "retractions that cost nothing"
SAME_NOISE_BUG = "the noise of the block before"
CATALOGUE_SIZE = 160  # items of many canaries: the more, the less their terms overlap
KEEP_ONE_OF = 4  # a retraction keeps one item of so many


@dataclass(frozen=True)
class StreamScenario:
    """tally under a budget for some blocks; after the last one people take something back, so many times."""

    epsilon: float
    blocks: int = 1
    retractions: int = 0
    reader: Literal["sums", "changes"] = "sums"

    def build_claim(self) -> Claim:
        """What a canary has spent who contributed in every block and took back as often."""
        if self.reader == "changes":  # of orthogonal terms: as much as one block loses
            mu = compute_max_mu(self.epsilon, DELTA)
            block_mu = mu / self.blocks**0.5
            return Claim(self.epsilon, DELTA, mu=block_mu)
        model = self.build_model(None)
        spent = model.budget.compute_spent_epsilon(self.blocks, self.retractions)
        return Claim(spent, DELTA, mu=compute_max_mu(spent, DELTA))

    def build_model(self, bug: str | None) -> PrivateTally:
        model_class = STREAM_MODELS[bug]
        config = TallyConfig(decay=1.0)
        privacy = PrivacyConfig(epsilon=self.epsilon, delta=DELTA, blocks=self.blocks)
        return model_class(config, privacy)


class UnchargedRetractions(PrivateTally):
    """A planted bug: what is taken back is not recorded as spent."""

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        release, mu = super().price_release(heads, question)
        if release == RETRACTION_RELEASE:
            mu = 0.0
        return release, mu


class ReusedNoiseTally(PrivateTally):
    """A planted bug: every block after the first draws the noise that the one before had."""

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        is_later_block = int(server.heads["released"][1])
        if is_later_block:
            heads = {**server.heads, "released": np.ones(2, np.int32)}
            server = replace(server, block=1, heads=heads)
        return super().add_noise(server, total, question, draws)


STREAM_MODELS: dict[str | None, type[PrivateTally]] = {
    None: PrivateTally,
    "half the noise": HalfNoiseTally,
    "no clip": UnclippedTally,
    FREE_RETRACTIONS_BUG: UnchargedRetractions,
    SAME_NOISE_BUG: ReusedNoiseTally,
}


@dataclass(frozen=True)
class CanaryRelease:
    """What a release added to the sum, the canaries' own vectors in it (added, taken away), and its noise."""

    change: Doubles
    added: Doubles  # (canaries, k)
    gone: Doubles
    s: float

    def compute_own_part(self) -> Doubles:
        """How far the change goes along each canary's vectors, less what the others put there on average."""
        along_added = _compute_quadratic_form(self.added, self.change)
        along_gone = _compute_quadratic_form(self.gone, self.change)
        along = along_added - along_gone
        added_overlap = self._sum_overlap(self.added)
        gone_overlap = self._sum_overlap(self.gone)
        expected = (added_overlap - gone_overlap) / 2  # each canary is inside by its coin
        return along - expected

    def _sum_overlap(self, vectors: Doubles) -> Doubles:
        """Of each vector's square with what all canaries but its own add and take away."""
        added = _measure_overlap(vectors, self.added)
        gone = _measure_overlap(vectors, self.gone)
        return added - gone

    @property
    def squared_length(self) -> Doubles:
        """The squared length of a canary's own part."""
        added_length = (self.added**2).sum(axis=1)
        gone_length = (self.gone**2).sum(axis=1)
        products = np.einsum("uk,uk->u", self.added, self.gone)
        both_lengths = added_length**2 + gone_length**2
        return np.asarray(both_lengths - 2 * products**2)

    @property
    def variance(self) -> float:
        """Of the noise along a vector of length 1."""
        return 2 * self.s**2


def _compute_quadratic_form(vectors: Doubles, table: Doubles) -> Doubles:
    projected = vectors @ table
    return np.asarray(np.einsum("uk,uk->u", projected, vectors))


def _measure_overlap(vectors: Doubles, canary_vectors: Doubles) -> Doubles:
    overlap = (vectors @ canary_vectors.T) ** 2
    np.fill_diagonal(overlap, 0.0)
    return np.asarray(overlap.sum(axis=1))


def run_trials(setting: StreamScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    rng = np.random.default_rng([seed, 5])
    inside = rng.random(canaries) < 0.5
    block_lists = []
    for _ in range(setting.blocks):
        block_lists.append(_draw_half_catalogues(rng, canaries))
    model = setting.build_model(bug)
    federation = _make_federation(model, block_lists, inside, seed)
    progress = make_initial_progress(federation)
    releases = []
    for block, lists in enumerate(block_lists):
        release = _release_block(federation, progress, block, lists)
        releases.append(release)
    items = block_lists[-1]
    for number in range(setting.retractions):
        is_last = number == setting.retractions - 1
        remaining = _draw_remaining_items(rng, items, is_last)
        release = _retract_items(federation, progress, items, remaining, number)
        releases.append(release)
        items = remaining
    if setting.reader == "changes":
        score = _score_difference(releases)
    else:
        score = _score_releases(releases)
    epsilon = _read_charged_epsilon(federation, progress, inside)
    return Trials(score, inside, epsilon)


def _score_releases(releases: list[CanaryRelease]) -> Doubles:
    """All releases, each weighed by how little noise it has."""
    parts = []
    lengths = []
    for release in releases:
        parts.append(release.compute_own_part() / release.variance)
        lengths.append(release.squared_length / release.variance)
    deviation = np.sqrt(sum(lengths))
    return sum(parts) / deviation


def _score_difference(releases: list[CanaryRelease]) -> Doubles:
    """The difference of the last two blocks, along what a canary's own differ by."""
    first, second = releases[-2:]
    change = first.change - second.change
    difference = replace(first, change=change, gone=second.added)
    length = np.sqrt(difference.squared_length)
    scale = 2 * first.s * length
    return difference.compute_own_part() / scale


def _make_federation(model: PrivateTally, block_lists: list[Ragged], inside: Bools, seed: int) -> Federation:
    blocks = []
    for index, lists in enumerate(block_lists):
        contributed = lists.filter_entries(inside[lists.rows()])
        blocks.append(make_training_block(contributed, CATALOGUE_SIZE, index))
    config = RunConfig(seed=seed, backbone={"name": "tally"})
    stream = make_stream(blocks)
    return Federation(model, (), config, Draws(seed), 1024, stream=stream)


def _release_block(federation: Federation, progress: Progress, block: int, lists: Ragged) -> CanaryRelease:
    """Play one block."""
    begin_block(federation, progress, block)
    before = _read_sum(progress)
    run_block(federation, progress, lambda report, now: None)
    vectors = _encode_vectors(federation, lists, progress)
    nothing = np.zeros_like(vectors)
    deviation = _read_noise_deviation(federation, progress, block)
    growth = _read_growth(progress, before)
    return CanaryRelease(growth, vectors, nothing, deviation)


def _retract_items(
    federation: Federation, progress: Progress, items: Ragged, remaining: Ragged, number: int
) -> CanaryRelease:
    """Everybody asks alike, also those who contributed nothing."""
    stays = remaining.holds(items.rows(), items.ids)
    gone = items.filter_entries(~stays)
    deviation = _require_private_tally(federation).compute_term_deviation(progress.server, "retraction")
    before = progress.server.parts[STATE]["gram"]
    progress.in_block = True
    lists = Ragged(gone.ptr, gone.ids)
    batch = RequestBatch("forget", federation.stream.user_keys, lists, number=number)
    handle_requests(federation, progress, batch)
    return CanaryRelease(
        change=_read_growth(progress, before),
        added=_build_list_vectors(remaining, progress),
        gone=_build_list_vectors(items, progress),
        s=deviation,
    )


def _require_private_tally(federation: Federation) -> PrivateTally:
    assert isinstance(federation.backbone, PrivateTally)
    return federation.backbone


def _read_noise_deviation(federation: Federation, progress: Progress, block: int) -> float:
    """Of the noise in a block's terms; the first had to pay for popularity, too."""
    released = np.array([block - 1, block], np.int32)
    heads = {**progress.server.heads, "released": released}
    server_before = replace(progress.server, heads=heads)
    return _require_private_tally(federation).compute_term_deviation(server_before, STATISTIC)


def _read_sum(progress: Progress) -> Doubles:
    """The server's sum."""
    state = progress.server.parts.get(STATE, {})
    nothing = np.zeros((0, 0))
    return state.get("gram", nothing)


def _read_growth(progress: Progress, before: Doubles) -> Doubles:
    """What the server's sum grew by; the whole sum where its shape is another."""
    gram = _read_sum(progress)
    if before.shape != gram.shape:
        return gram
    return gram - before


def _build_list_vectors(lists: Ragged, progress: Progress) -> Doubles:
    axes = read_axes(progress.server.heads)
    return build_unit_vectors(lists, axes.inputs, axes.scale, axes.centre)


def _encode_vectors(federation: Federation, lists: Ragged, progress: Progress) -> Doubles:
    """What canaries upload of these lists, as the model itself encodes it."""
    user_ptr = np.arange(len(lists) + 1, dtype=np.int64)
    model = _require_private_tally(federation)
    fields = model.encode_lists(lists, user_ptr, progress.server.heads, STATISTIC)
    terms = fields["terms"]
    assert isinstance(terms, OuterProducts)
    return terms.vector


def _draw_half_catalogues(rng: np.random.Generator, people: int) -> Ragged:
    lists = []
    for is_chosen in rng.random((people, CATALOGUE_SIZE)) < 0.5:
        lists.append(np.flatnonzero(is_chosen).tolist())
    return Ragged.from_lists(lists)


def _draw_remaining_items(rng: np.random.Generator, lists: Ragged, is_last: bool) -> Ragged:
    """One item of so many of each list; in the end nothing."""
    if is_last:
        return Ragged.empty(len(lists))
    remaining = []
    for row in range(len(lists)):
        items = rng.permutation(lists.row(row))
        n_remaining = max(1, len(items) // KEEP_ONE_OF)
        own_items = np.sort(items[:n_remaining])
        remaining.append(own_items.tolist())
    return Ragged.from_lists(remaining)


def _read_charged_epsilon(federation: Federation, progress: Progress, inside: Bools) -> float:
    """The largest epsilon on anybody's own ledger."""
    prefix = f"{PARTS}{federation.learner.name}/"
    arrays = progress.clients.arrays
    account = {name: arrays[prefix + name] for name in ACCOUNT_ARRAYS}
    ledger = federation.learner.ledger()
    assert ledger is not None
    epsilons = ledger.compute_spent_epsilon(account)
    return float(epsilons[inside].max())
