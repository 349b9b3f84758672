"""Canaries in tally's noised sums: by somebody who knows everybody else, and many in one release.

`whole`: the first block is told again and again, with one canary or without it, by everything that a server gets:
popularity, the number of people, the terms. The reader knows all others, so that what is left is the canary's own part
and noise. `in_one`: one release of terms with many canaries, each there by a coin; their terms hardly overlap.

With `order` the model also tells what follows what, and every reader reads both fields of the release.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws, derive_keys
from tacita.core.types import Arrays, Block, BlockStream, Doubles, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, start_run
from tacita.messages import Form, OuterProducts, SequenceTerms, SparseRows, Total
from tacita.models.tally.model import STATE, STATISTIC, SURVEY, TallyConfig
from tacita.models.tally.order import OrderConfig
from tacita.models.tally.order_sums import NEXT
from tacita.models.tally.private_math import PEOPLE_SHARE, POPULARITY_SHARE, SQUARE_ROOT_2, unit_likes, unit_vectors
from tacita.models.tally.private_order import FOLLOWING, FOLLOWING_VARIANCE, PrivateOrderedTally
from tacita.models.tally.private_tally import PrivateTally, read_axes
from tacita.privacy.calibration import mu_of
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.round.plan import Federation

DELTA = 1e-5
OTHERS, ITEMS = 30, 8  # around the one canary
MANY_ITEMS = 100  # items of many canaries
EXCESS_LENGTH = 2.0  # what is told is longer by, where nobody makes it length 1
SEPARATE_CLIPS_BUG = "order outside of the length"


@dataclass(frozen=True)
class SumScenario:
    """tally under a budget; `node`: noise as a node makes it, from a secret of its own."""

    epsilon: float
    node: bool = False
    one_release: bool = False
    order: bool = False

    def claim(self) -> Claim:
        return Claim(self.epsilon, DELTA, mu=mu_of(self.epsilon, DELTA))

    def build_model(self, bug: str | None) -> PrivateTally:
        privacy = PrivacyConfig(epsilon=self.epsilon, delta=DELTA, blocks=1)
        if self.order:
            bugs = {
                None: PrivateOrderedTally,
                "half the noise": HalfNoiseOrder,
                "no clip": UnclippedOrder,
                SEPARATE_CLIPS_BUG: SeparateClipOrder,
            }
            return bugs[bug](OrderConfig(), privacy)
        return {None: PrivateTally, "half the noise": HalfNoiseTally, "no clip": UnclippedTally}[bug](
            TallyConfig(), privacy
        )


class HalfNoiseTally(PrivateTally):
    """A planted bug."""

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        made = super().add_noise(server, total, question, draws)
        half = {name: (value + total[name]) / 2 for name, value in made.sums.items() if name != "draws"}
        return made.with_sums(half)


class UnclippedTally(PrivateTally):
    """A planted bug: what people tell is not made length 1."""

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> dict[str, Form]:
        told = super().encode_lists(lists, user_ptr, heads, question)
        for name, value in told.items():
            if isinstance(value, OuterProducts):
                told[name] = replace(value, vector=EXCESS_LENGTH**0.5 * value.vector)
            elif isinstance(value, SparseRows):
                told[name] = replace(value, value=EXCESS_LENGTH * value.value)
            elif isinstance(value, SequenceTerms):
                told[name] = replace(value, factor=EXCESS_LENGTH * value.factor)
        return told


class HalfNoiseOrder(HalfNoiseTally, PrivateOrderedTally):
    """A planted bug: on terms and on order."""


class UnclippedOrder(UnclippedTally, PrivateOrderedTally):
    """A planted bug: neither terms nor order are made length 1."""


class SeparateClipOrder(PrivateOrderedTally):
    """A planted bug: terms and order have length 1 each, and each the noise that one of them alone would need."""

    @property
    def term_share(self) -> float:
        return 1.0

    def order_deviation(self, server: ServerState, question: str) -> float:
        return self.budget.deviation(
            self.release_share(server.heads, question), self.bound_term_length(server, question)
        )


def run_trials(setting: SumScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    return (run_one_release if setting.one_release else run_repeated_block)(setting, canaries, seed, bug)


def run_repeated_block(setting: SumScenario, runs: int, seed: int, bug: str | None) -> Trials:
    model, rng = setting.build_model(bug), np.random.default_rng([seed, 3])
    others = [np.flatnonzero(rng.random(ITEMS) < 0.5).tolist() or [0] for _ in range(OTHERS)]
    canary = [5, 0, 2] if setting.order else [0, 2, 5]
    known, own = Ragged.from_lists(others), Ragged.from_lists([canary])
    lists = {True: Ragged.from_lists([*others, canary]), False: known}
    empty = ServerState(np.zeros((ITEMS, 0), np.float32), model.init_heads(Draws(0)))
    inside = rng.random(runs) < 0.5
    score = np.zeros(runs)
    for run in range(runs):
        draws = Draws(seed, f"node {run}") if setting.node else Draws(seed + (run << 20))
        server = model.simulate_release(empty, lists[bool(inside[run])], draws)
        score[run] = _score_release(model, server, known, own)
    return Trials(score, inside)


def _score_release(model: PrivateTally, server: ServerState, known: Ragged, own: Ragged) -> float:
    """How much of the canary is in all that was released, each part weighed by how little noise it has."""
    held, axes, of = server.parts[STATE], read_axes(server.heads), model.budget.deviation
    likes, vectors = _compute_known_terms(model, known, server.heads)
    vector, first = unit_vectors(own, axes.inputs, axes.scale, axes.centre)[0], model.budget.term_share(first=True)
    sizes = [of(POPULARITY_SHARE), of(PEOPLE_SHARE), of(model.term_share * first)]  # of the noise along the canary
    parts = [
        unit_likes(own) @ (held["liked"] - likes)[own.ids],
        float(held["people"][0]) - len(known),
        float(vector @ (held["gram"] - vectors.T @ vectors) @ vector),
    ]
    if isinstance(model, PrivateOrderedTally):
        mine, theirs = (compute_order_terms(model, one, server.heads) for one in (own, known))
        sizes.append(held[FOLLOWING_VARIANCE][0] ** 0.5)
        parts.append(float((mine.sum(axis=0) * (held[FOLLOWING].ravel() - theirs.sum(axis=0))).sum()))
    return float((np.array(parts) / np.square(sizes)).sum() / np.linalg.norm(1 / np.array(sizes)))


def compute_order_terms(model: PrivateOrderedTally, lists: Ragged, heads: Arrays) -> Doubles:
    """(lists, k k) what each tells of order, by the model's own word."""
    told = model.encode_lists(lists, np.arange(len(lists) + 1, dtype=np.int64), heads, STATISTIC)[NEXT]
    assert isinstance(told, SequenceTerms)
    out = np.zeros((len(lists), told.n_items, told.n_items))
    for n, one in enumerate(out):
        alone = np.array([n])
        own = {"client": told.client[:1], "start": told.start[alone], "factor": told.factor[alone]}
        replace(told, lists=told.lists.take(alone), **own).add_to(one, np.zeros(0), np.ones(1))
    return out.reshape(len(lists), -1)


def _compute_known_terms(model: PrivateTally, lists: Ragged, heads: Arrays) -> tuple[Doubles, Doubles]:
    """What others tell, which the reader knows: their likes together, and the vector of each."""
    ptr = np.arange(len(lists) + 1, dtype=np.int64)
    liked, terms = (model.encode_lists(lists, ptr, heads, one) for one in (SURVEY, STATISTIC))
    rows, squares = liked["liked"], terms["terms"]
    assert isinstance(rows, SparseRows)
    assert isinstance(squares, OuterProducts)
    return np.bincount(rows.item, rows.value, ITEMS).astype(np.float64), squares.vector


def run_one_release(setting: SumScenario, canaries: int, seed: int, bug: str | None) -> Trials:
    """Everybody has a random half of the items, or nothing."""
    model, rng = setting.build_model(bug), np.random.default_rng([seed, 4])
    inside = rng.random(canaries) < 0.5
    halves = [np.flatnonzero(one) for one in rng.random((canaries, MANY_ITEMS)) < 0.5]
    all_of = Ragged.from_lists([rng.permutation(one).tolist() if setting.order else one.tolist() for one in halves])
    told = all_of.filter_entries(inside[all_of.rows()])
    names, items = tuple(f"canary {n}" for n in range(canaries)), tuple(str(n) for n in range(MANY_ITEMS))
    nothing = Ragged.empty(canaries)
    block = Block(0, canaries, MANY_ITEMS, told, nothing, nothing, np.ones(canaries, bool), len(told.ids))
    stream = BlockStream("canaries", (block,), names, items, derive_keys(names), derive_keys(items), {}, "canaries")
    draws = Draws(seed, "a node's secret") if setting.node else Draws(seed)
    fed = Federation(model, (), RunConfig(seed=seed, backbone={"name": "tally"}), draws, 1024, stream=stream)
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    server, s, deviation = progress.server, 0.0, 0.0
    for question in (SURVEY, STATISTIC):
        s = model.term_deviation(server, STATISTIC)
        deviation = model.order_deviation(server, STATISTIC) if isinstance(model, PrivateOrderedTally) else 0.0
        total = progress.devices.exchange(fed, server, fed.broadcast_serving(server), question).total
        if question == SURVEY:
            server = fed.learner.learn(server, total, question, float(canaries))
    axes = read_axes(server.heads)
    vectors = unit_vectors(all_of, axes.inputs, axes.scale, axes.centre)
    overlap = (vectors @ _compute_known_terms(model, all_of, server.heads)[1].T) ** 2
    np.fill_diagonal(overlap, 0.0)
    found = np.einsum("uk,uk->u", vectors @ total["terms"], vectors) - overlap.sum(axis=1) / 2
    if not isinstance(model, PrivateOrderedTally):
        return Trials(found / (SQUARE_ROOT_2 * s), inside)
    following = compute_order_terms(model, all_of, server.heads)
    others = following @ following.sum(axis=0) - (following**2).sum(axis=1)
    ordered = following @ total[NEXT].ravel() - others / 2
    both = found / (2 * s**2) + ordered / deviation**2  # each weighed by how little noise it has
    return Trials(both / np.sqrt(1 / (2 * s**2) + 1 / deviation**2), inside)
