"""Canaries in tally's noised sums: with a reader who knows everybody else, and many canaries in one release.

`run_repeated_block`: the first block is released many times, with one canary or without it, and the reader gets all
that a server gets: popularity, the number of people, the terms. The reader knows all others, so only the canary's own
part and noise remain. `run_one_release`: one release of terms with many canaries, each inside by a coin; their terms
hardly overlap.

With `order` the model also releases what follows what, and every reader reads both fields of the release.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.types import Arrays, Doubles, Longs, Ragged, ServerState
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.messages import Form, OuterProducts, SequenceTerms, SparseRows, Total
from tacita.models.tally.model import STATE, STATISTIC, SURVEY, TallyConfig
from tacita.models.tally.options import OrderConfig
from tacita.models.tally.order_sums import NEXT
from tacita.models.tally.private_math import (
    PEOPLE_SHARE,
    POPULARITY_SHARE,
    SQUARE_ROOT_2,
    build_unit_vectors,
    compute_unit_likes,
)
from tacita.models.tally.private_order import FOLLOWING, FOLLOWING_VARIANCE, PrivateOrderedTally
from tacita.models.tally.private_tally import PrivateTally, read_axes
from tacita.privacy.calibration import compute_max_mu
from tacita.research.audit.canaries.bounds import Claim, Trials
from tacita.research.audit.canaries.canary_stream import make_stream, make_training_block
from tacita.round.plan import Federation
from tacita.round.question import Question

DELTA = 1e-5
OTHERS = 30  # people around the one canary
ITEMS = 8  # of theirs
MANY_ITEMS = 100  # items of many canaries
EXCESS_LENGTH = 2.0  # how many times too long an unclipped upload is
SEPARATE_CLIPS_BUG = "order outside of the length"


@dataclass(frozen=True)
class SumScenario:
    """tally under a budget; `node`: noise as a node makes it, from a secret of its own."""

    epsilon: float
    node: bool = False
    one_release: bool = False
    order: bool = False

    def build_claim(self) -> Claim:
        mu = compute_max_mu(self.epsilon, DELTA)
        return Claim(self.epsilon, DELTA, mu=mu)

    def build_model(self, bug: str | None) -> PrivateTally:
        privacy = PrivacyConfig(epsilon=self.epsilon, delta=DELTA, blocks=1)
        if self.order:
            return ORDER_MODELS[bug](OrderConfig(), privacy)
        return TALLY_MODELS[bug](TallyConfig(), privacy)


class HalfNoiseTally(PrivateTally):
    """A planted bug."""

    def add_noise(self, server: ServerState, total: Total, question: str, draws: Draws) -> Total:
        release = super().add_noise(server, total, question, draws)
        sums = {}
        for name, value in release.sums.items():
            if name != "draws":
                sums[name] = (value + total[name]) / 2
        return release.with_sums(sums)


class UnclippedTally(PrivateTally):
    """A planted bug: what people upload is not scaled to length 1."""

    def encode_lists(self, lists: Ragged, user_ptr: Longs, heads: Arrays, question: str) -> dict[str, Form]:
        fields = super().encode_lists(lists, user_ptr, heads, question)
        return {name: _lengthen_field(form) for name, form in fields.items()}


def _lengthen_field(form: Form) -> Form:
    """The same field, EXCESS_LENGTH times as long."""
    if isinstance(form, OuterProducts):
        return replace(form, vector=EXCESS_LENGTH**0.5 * form.vector)
    if isinstance(form, SparseRows):
        return replace(form, value=EXCESS_LENGTH * form.value)
    if isinstance(form, SequenceTerms):
        return replace(form, factor=EXCESS_LENGTH * form.factor)
    return form


class HalfNoiseOrder(HalfNoiseTally, PrivateOrderedTally):
    """A planted bug: on terms and on order."""


class UnclippedOrder(UnclippedTally, PrivateOrderedTally):
    """A planted bug: neither terms nor order have length 1."""


class SeparateClipOrder(PrivateOrderedTally):
    """A planted bug: terms and order have length 1 each, and each the noise that one of them alone would need."""

    @property
    def share_of_budget_for_terms(self) -> float:
        return 1.0

    def compute_order_deviation(self, server: ServerState, question: str) -> float:
        share = self.find_release_share(server.heads, question)
        length = self.bound_term_length(server, question)
        return self.budget.compute_deviation(share, length)


TALLY_MODELS = {
    None: PrivateTally,
    "half the noise": HalfNoiseTally,
    "no clip": UnclippedTally,
}
ORDER_MODELS = {
    None: PrivateOrderedTally,
    "half the noise": HalfNoiseOrder,
    "no clip": UnclippedOrder,
    SEPARATE_CLIPS_BUG: SeparateClipOrder,
}


def run_trials(setting: SumScenario, canaries: int, seed: int, bug: str | None = None) -> Trials:
    if setting.one_release:
        return run_one_release(setting, canaries, seed, bug)
    return run_repeated_block(setting, canaries, seed, bug)


# One canary, many releases


def run_repeated_block(setting: SumScenario, runs: int, seed: int, bug: str | None) -> Trials:
    model = setting.build_model(bug)
    rng = np.random.default_rng([seed, 3])
    others = _draw_histories_of_others(rng)
    canary = [5, 0, 2] if setting.order else [0, 2, 5]
    known = Ragged.from_lists(others)
    with_canary = Ragged.from_lists([*others, canary])
    canary_list = Ragged.from_lists([canary])
    no_items = np.zeros((ITEMS, 0), np.float32)
    empty_server = ServerState(no_items, model.init_heads(Draws(0)))
    inside = rng.random(runs) < 0.5
    score = np.zeros(runs)
    for run in range(runs):
        lists = with_canary if inside[run] else known
        draws = _make_draws(setting, seed, run)
        server = model.simulate_release(empty_server, lists, draws)
        score[run] = _score_release(model, server, known, canary_list)
    return Trials(score, inside)


def _draw_histories_of_others(rng: np.random.Generator) -> list[list[int]]:
    """About half of the items for everybody, at least one."""
    lists = []
    for _ in range(OTHERS):
        is_chosen = rng.random(ITEMS) < 0.5
        items = np.flatnonzero(is_chosen).tolist()
        lists.append(items or [0])
    return lists


def _make_draws(setting: SumScenario, seed: int, run: int) -> Draws:
    """Noise of its own for every run."""
    if setting.node:
        return Draws(seed, f"node {run}")
    return Draws(seed + (run << 20))


def _score_release(model: PrivateTally, server: ServerState, known: Ragged, canary: Ragged) -> float:
    """How much of the canary is in all that was released, each part weighed by how little noise it has."""
    state = server.parts[STATE]
    first_share = model.budget.compute_term_share(first=True)
    deviations = [  # of the noise along the canary
        model.budget.compute_deviation(POPULARITY_SHARE),
        model.budget.compute_deviation(PEOPLE_SHARE),
        model.budget.compute_deviation(model.share_of_budget_for_terms * first_share),
    ]
    known_likes, known_vectors = _compute_known_terms(model, known, server.heads)
    vector = _compute_canary_vectors(canary, server.heads)[0]
    remaining_likes = state["liked"] - known_likes
    remaining_terms = state["gram"] - known_vectors.T @ known_vectors
    overlaps = [
        compute_unit_likes(canary) @ remaining_likes[canary.ids],
        float(state["people"][0]) - len(known),
        float(vector @ remaining_terms @ vector),
    ]
    if isinstance(model, PrivateOrderedTally):
        own_terms = compute_order_terms(model, canary, server.heads)
        known_terms = compute_order_terms(model, known, server.heads)
        known_order = known_terms.sum(axis=0)
        remaining_order = state[FOLLOWING].ravel() - known_order
        products = own_terms.sum(axis=0) * remaining_order
        variance = state[FOLLOWING_VARIANCE][0]
        deviations.append(variance**0.5)
        overlaps.append(float(products.sum()))
    variances = np.square(deviations)
    weighed = np.array(overlaps) / variances
    precisions = 1 / np.array(deviations)
    scale = np.linalg.norm(precisions)
    return float(weighed.sum() / scale)


def _compute_canary_vectors(lists: Ragged, heads: Arrays) -> Doubles:
    axes = read_axes(heads)
    return build_unit_vectors(lists, axes.inputs, axes.scale, axes.centre)


def compute_order_terms(model: PrivateOrderedTally, lists: Ragged, heads: Arrays) -> Doubles:
    """(lists, k k) what each uploads of order, as the model itself encodes it."""
    fields = model.encode_lists(lists, _make_single_list_ptr(lists), heads, STATISTIC)
    terms = fields[NEXT]
    assert isinstance(terms, SequenceTerms)
    n_lists = len(lists)
    tables = np.zeros((n_lists, terms.n_items, terms.n_items))
    nothing = np.zeros(0)
    alone = np.ones(1)
    for number, table in enumerate(tables):
        own = np.array([number])
        own_terms = replace(
            terms,
            lists=terms.lists.take(own),
            client=terms.client[:1],
            start=terms.start[own],
            factor=terms.factor[own],
        )
        own_terms.add_to(table, nothing, alone)
    return tables.reshape(n_lists, -1)


def _make_single_list_ptr(lists: Ragged) -> Longs:
    """The pointer of users who have one list each."""
    return np.arange(len(lists) + 1, dtype=np.int64)


def _compute_known_terms(model: PrivateTally, lists: Ragged, heads: Arrays) -> tuple[Doubles, Doubles]:
    """What others upload, which the reader knows: their likes together, and the vector of each."""
    user_ptr = _make_single_list_ptr(lists)
    survey_fields = model.encode_lists(lists, user_ptr, heads, SURVEY)
    list_statistic_fields = model.encode_lists(lists, user_ptr, heads, STATISTIC)
    liked = survey_fields["liked"]
    terms = list_statistic_fields["terms"]
    assert isinstance(liked, SparseRows)
    assert isinstance(terms, OuterProducts)
    likes = np.bincount(liked.item, liked.value, ITEMS)
    return likes.astype(np.float64), terms.vector


# Many canaries, one release


@dataclass(frozen=True)
class OneRelease:
    """What a server gets of many canaries at once, and the noise in it."""

    server: ServerState  # as it was when terms were asked for
    total: Total
    term_deviation: float
    order_deviation: float  # 0 where the model releases no order


def run_one_release(setting: SumScenario, canaries: int, seed: int, bug: str | None) -> Trials:
    """Everybody has a random half of the items, or nothing."""
    model = setting.build_model(bug)
    rng = np.random.default_rng([seed, 4])
    inside = rng.random(canaries) < 0.5
    lists = _draw_half_catalogues(setting, rng, canaries)
    contributed = lists.filter_entries(inside[lists.rows()])
    stream = make_stream([make_training_block(contributed, MANY_ITEMS)])
    draws = Draws(seed)
    if setting.node:
        draws = Draws(seed, "a node's secret")
    config = RunConfig(seed=seed, backbone={"name": "tally"})
    federation = Federation(model, (), config, draws, 1024, stream=stream)
    release = _play_until_release(federation, model)
    term_score = _score_terms(model, lists, release)
    if not isinstance(model, PrivateOrderedTally):
        return Trials(term_score / (SQUARE_ROOT_2 * release.term_deviation), inside)
    order_score = _score_order(model, lists, release)
    term_variance = 2 * release.term_deviation**2
    order_variance = release.order_deviation**2
    both = term_score / term_variance + order_score / order_variance  # each weighed by how little noise it has
    precision = 1 / term_variance + 1 / order_variance
    scale = np.sqrt(precision)
    return Trials(both / scale, inside)


def _draw_half_catalogues(setting: SumScenario, rng: np.random.Generator, people: int) -> Ragged:
    """A random half of the items for everybody, in a random order where order counts."""
    lists = []
    for is_chosen in rng.random((people, MANY_ITEMS)) < 0.5:
        lists.append(np.flatnonzero(is_chosen))
    if setting.order:
        lists = [rng.permutation(items) for items in lists]
    return Ragged.from_lists([items.tolist() for items in lists])


def _play_until_release(federation: Federation, model: PrivateTally) -> OneRelease:
    """Play the first block up to the release of terms."""
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    server = progress.server
    broadcast = federation.broadcast_serving(server)
    likes = progress.devices.exchange(federation, server, broadcast, Question(SURVEY))
    n_users = float(federation.stream.n_users)
    server = federation.learner.learn_from_total(server, likes.total, SURVEY, n_users)
    broadcast = federation.broadcast_serving(server)
    terms = progress.devices.exchange(federation, server, broadcast, Question(STATISTIC))
    term_deviation = model.compute_term_deviation(server, STATISTIC)
    order_deviation = 0.0
    if isinstance(model, PrivateOrderedTally):
        order_deviation = model.compute_order_deviation(server, STATISTIC)
    return OneRelease(server, terms.total, term_deviation, order_deviation)


def _score_terms(model: PrivateTally, lists: Ragged, release: OneRelease) -> Doubles:
    """How much of each canary's term is in the sum, less what the others put there on average."""
    heads = release.server.heads
    vectors = _compute_canary_vectors(lists, heads)
    _, uploaded_vectors = _compute_known_terms(model, lists, heads)
    overlap = (vectors @ uploaded_vectors.T) ** 2
    np.fill_diagonal(overlap, 0.0)
    others_part = overlap.sum(axis=1) / 2
    projected = vectors @ release.total["terms"]
    own_part = np.einsum("uk,uk->u", projected, vectors)
    return np.asarray(own_part - others_part)


def _score_order(model: PrivateOrderedTally, lists: Ragged, release: OneRelease) -> Doubles:
    """How much of each canary's order is in the sum, less what the others put there on average."""
    terms = compute_order_terms(model, lists, release.server.heads)
    all_overlap = terms @ terms.sum(axis=0)
    own_overlap = (terms**2).sum(axis=1)
    others_part = (all_overlap - own_overlap) / 2
    order_sum = release.total[NEXT].ravel()
    own_part = terms @ order_sum
    return np.asarray(own_part - others_part)
