"""Canaries in tally's later releases: blocks that share one budget, and what people take back.

A run with many canaries, each there by a coin, is played through the loop that plays all others: devices charge, noise
is put into sums, the server's sum changes. The reader sees the sum after every release. Canaries tell another random
half of the items in every block; who takes back keeps a quarter of what is left, so that what changes is nearly as
long as it may be.

`sums`: everything that is released about a canary, weighed by how little noise it has. `changes`: the difference of two
blocks alone, in which noise would vanish that was used twice. The claim is what the devices' ledgers say was spent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Arrays, Block, BlockStream, Bools, Doubles, Ragged, ServerState
from tacita.federation.one_round import Progress
from tacita.federation.requests import handle_requests
from tacita.federation.rounds import begin_block, run_block, start_run
from tacita.messages import OuterProducts, Total
from tacita.models.tally.model import STATE, STATISTIC, TallyConfig
from tacita.models.tally.private_math import unit_vectors
from tacita.models.tally.private_tally import RETRACTION_RELEASE, PrivateTally, read_axes
from tacita.privacy.calibration import mu_of
from tacita.privacy.ledger import ACCOUNT_ARRAYS
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.research.audit.canaries.sums import DELTA, HalfNoiseTally, UnclippedTally
from tacita.round.device_state import PARTS
from tacita.round.plan import Federation
from tacita.round.request import RequestBatch

FREE_RETRACTIONS_BUG, SAME_NOISE_BUG = "retractions that cost nothing", "the noise of the block before"
CATALOGUE_SIZE = 160  # items of many canaries: the more, the less their terms overlap
KEEP_ONE_OF = 4  # who takes back keeps one item of so many


@dataclass(frozen=True)
class StreamScenario:
    """tally under a budget for some blocks; after the last one people take something back, so many times."""

    epsilon: float
    blocks: int = 1
    retractions: int = 0
    reader: Literal["sums", "changes"] = "sums"

    def claim(self) -> Claim:
        """What a canary has spent who told in every block and took back as often."""
        model, mu = self.build_model(None), mu_of(self.epsilon, DELTA)
        if self.reader == "changes":  # of orthogonal terms: as much as one block loses
            return Claim(self.epsilon, DELTA, mu=mu / self.blocks**0.5)
        whole = model.budget.spent_epsilon(self.blocks, self.retractions)
        return Claim(whole, DELTA, mu=mu_of(whole, DELTA))

    def build_model(self, bug: str | None) -> PrivateTally:
        bugs = {
            "half the noise": HalfNoiseTally,
            "no clip": UnclippedTally,
            FREE_RETRACTIONS_BUG: UnchargedRetractions,
            SAME_NOISE_BUG: ReusedNoiseTally,
        }
        made = PrivateTally if bug is None else bugs[bug]
        return made(TallyConfig(decay=1.0), PrivacyConfig(epsilon=self.epsilon, delta=DELTA, blocks=self.blocks))


class UnchargedRetractions(PrivateTally):
    """A planted bug: what is taken back is not written down as spent."""

    def price_release(self, heads: Arrays, question: str) -> tuple[str, float]:
        what, mu = super().price_release(heads, question)
        return what, 0.0 if what == RETRACTION_RELEASE else mu


class ReusedNoiseTally(PrivateTally):
    """A planted bug: every block after the first draws the noise that the one before had."""

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        if int(server.heads["released"][1]):
            heads = {**server.heads, "released": np.ones(2, np.int32)}
            server = replace(server, block=1, heads=heads)
        return super().add_noise(server, total, question, draws)


@dataclass(frozen=True)
class CanaryRelease:
    """What a release added to the sum, the canaries' own vectors in it (added, taken away), and its noise."""

    change: Doubles
    added: Doubles  # (canaries, k)
    gone: Doubles
    s: float

    def project_change(self, added: Doubles, gone: Doubles) -> Doubles:
        """How far the change goes along each canary's vectors."""
        return _quadratic_form(added, self.change) - _quadratic_form(gone, self.change)

    def expect_overlap(self, added: Doubles, gone: Doubles) -> Doubles:
        """What the other canaries put there on average, each by its coin."""
        return (_sum_overlap(added, self) - _sum_overlap(gone, self)) / 2

    @property
    def squared_length(self) -> Doubles:
        """The squared length of a canary's own part."""
        each = (self.added**2).sum(axis=1) ** 2 + (self.gone**2).sum(axis=1) ** 2
        return np.asarray(each - 2 * np.einsum("uk,uk->u", self.added, self.gone) ** 2)


def _quadratic_form(vectors: Doubles, table: Doubles) -> Doubles:
    projected = vectors @ table
    return np.asarray(np.einsum("uk,uk->u", projected, vectors))


def _sum_overlap(vectors: Doubles, other: CanaryRelease) -> Doubles:
    """Of each vector's square with what all others but its own canary add and take away."""
    found = np.zeros(len(vectors))
    for sign, theirs in ((1.0, other.added), (-1.0, other.gone)):
        each = (vectors @ theirs.T) ** 2
        np.fill_diagonal(each, 0.0)
        found += sign * each.sum(axis=1)
    return found


def run_trials(setting: StreamScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    rng = np.random.default_rng([seed, 5])
    inside = rng.random(canaries) < 0.5
    owned = [_draw_halves(rng, canaries) for _ in range(setting.blocks)]
    fed = _make_federation(setting.build_model(bug), owned, inside, seed)
    progress, releases = start_run(fed), []
    for block, lists in enumerate(owned):
        begin_block(fed, progress, block)
        before = _read_sum(progress)
        run_block(fed, progress, lambda report, now: None)
        vectors = _compute_terms(fed, lists, progress)
        s = _noise_deviation(fed, progress, block)
        releases.append(CanaryRelease(_read_sum(progress, before), vectors, np.zeros_like(vectors), s))
    told = owned[-1]
    for number in range(setting.retractions):
        left = _draw_remaining(rng, told, last=number == setting.retractions - 1)
        releases.append(_retract_items(fed, progress, told, left, number))
        told = left
    score = _score_difference(releases) if setting.reader == "changes" else _score_releases(releases)
    return Trials(score, inside, _read_charged_epsilon(fed, progress, inside))


def _score_releases(releases: list[CanaryRelease]) -> Doubles:
    """All releases, each weighed by how little noise it has."""
    parts = sum(
        (r.project_change(r.added, r.gone) - r.expect_overlap(r.added, r.gone)) / (2 * r.s**2) for r in releases
    )
    length = sum(r.squared_length / (2 * r.s**2) for r in releases)
    return np.asarray(parts / np.sqrt(length))


def _score_difference(releases: list[CanaryRelease]) -> Doubles:
    """The difference of the last two blocks, along what a canary's own differ by."""
    one, other = releases[-2:]
    both = replace(one, change=one.change - other.change, gone=other.added)
    found = both.project_change(both.added, both.gone) - both.expect_overlap(both.added, both.gone)
    return np.asarray(found / (2 * one.s * np.sqrt(both.squared_length)))


def _make_federation(model: PrivateTally, owned: list[Ragged], inside: Bools, seed: int) -> Federation:
    n = len(inside)
    names, items = tuple(f"canary {k}" for k in range(n)), tuple(str(k) for k in range(CATALOGUE_SIZE))
    nothing, blocks = Ragged.empty(n), []
    for index, lists in enumerate(owned):
        told = lists.filter_entries(inside[lists.rows()])
        blocks.append(Block(index, n, CATALOGUE_SIZE, told, nothing, nothing, np.full(n, index == 0), len(told.ids)))
    stream = BlockStream(
        "canaries", tuple(blocks), names, items, derive_keys(names), derive_keys(items), {}, "canaries"
    )
    config = RunConfig(seed=seed, backbone={"name": "tally"})
    return Federation(model, (), config, Draws(seed), 1024, stream=stream)


def _retract_items(fed: Federation, progress: Progress, items: Ragged, remaining: Ragged, number: int) -> CanaryRelease:
    """Everybody asks alike, also who has told nothing."""
    gone = items.filter_entries(~remaining.holds(items.rows(), items.ids))
    before, model = progress.server, fed.backbone
    assert isinstance(model, PrivateTally)
    s = model.term_deviation(before, "retraction")
    progress.in_block = True
    handle_requests(
        fed, progress, RequestBatch("forget", fed.stream.user_keys, Ragged(gone.ptr, gone.ids), number=number)
    )
    was = before.parts[STATE]["gram"]
    return CanaryRelease(
        _read_sum(progress, was), _compute_vectors(remaining, progress), _compute_vectors(items, progress), s
    )


def _noise_deviation(fed: Federation, progress: Progress, block: int) -> float:
    """Of the noise in a block's terms; the first had to pay for popularity, too."""
    model, heads = fed.backbone, progress.server.heads
    assert isinstance(model, PrivateTally)
    as_it_was = replace(progress.server, heads={**heads, "released": np.array([block - 1, block], np.int32)})
    return model.term_deviation(as_it_was, STATISTIC)


def _read_sum(progress: Progress, before: Doubles | None = None) -> Doubles:
    """The server's sum, or what it grew by."""
    held = progress.server.parts.get(STATE, {}).get("gram", np.zeros((0, 0)))
    return np.asarray(held if before is None or before.shape != held.shape else held - before)


def _compute_vectors(lists: Ragged, progress: Progress) -> Doubles:
    axes = read_axes(progress.server.heads)
    return unit_vectors(lists, axes.inputs, axes.scale, axes.centre)


def _compute_terms(fed: Federation, lists: Ragged, progress: Progress) -> Doubles:
    """What canaries tell of these lists, by the model's own word."""
    model, ptr = fed.backbone, np.arange(len(lists) + 1, dtype=np.int64)
    assert isinstance(model, PrivateTally)
    terms = model.encode_lists(lists, ptr, progress.server.heads, STATISTIC)["terms"]
    assert isinstance(terms, OuterProducts)
    return terms.vector


def _draw_halves(rng: np.random.Generator, people: int) -> Ragged:
    return Ragged.from_lists([np.flatnonzero(one).tolist() for one in rng.random((people, CATALOGUE_SIZE)) < 0.5])


def _draw_remaining(rng: np.random.Generator, lists: Ragged, last: bool) -> Ragged:
    """One item of so many of each list; in the end nothing."""
    if last:
        return Ragged.empty(len(lists))
    each = (rng.permutation(lists.row(k)) for k in range(len(lists)))
    return Ragged.from_lists([np.sort(one[: max(1, len(one) // KEEP_ONE_OF)]).tolist() for one in each])


def _read_charged_epsilon(fed: Federation, progress: Progress, inside: Bools) -> float:
    """The largest epsilon on anybody's own ledger."""
    account = {name: progress.clients.arrays[f"{PARTS}{fed.learner.name}/{name}"] for name in ACCOUNT_ARRAYS}
    ledger = fed.learner.ledger()
    assert ledger is not None
    return float(ledger.epsilon(account)[inside].max())
