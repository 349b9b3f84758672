"""tally under a budget: the same exchange with terms of length 1, noise inside the sum, and B from what can be seen.

In the first block the server asks two questions: which items users like, then the terms. Noisy popularity chooses the
items that terms are about, their scales and the direction that is taken out. Later blocks release terms of the same
items. Every release is charged to its users before it leaves (budgeted_release.py); a user whose budget is spent is not
asked any more and goes on being served. What validation or counts of users would decide is fixed: `fixed_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, Ragged, ServerState
from tacita.kernels.pairs import dense_products
from tacita.messages import Total
from tacita.models.base import heads_match, register_private
from tacita.models.statistic_model import RetractionCaveats
from tacita.models.tally.budgeted_release import (
    POPULARITY_RELEASE,
    RETRACTION_RELEASE,
    TERMS_RELEASE,
    BudgetedRelease,
    read_axes,
    term_vectors,
)
from tacita.models.tally.head_checks import private_heads_fit
from tacita.models.tally.model import add_repeat, with_heads
from tacita.models.tally.options import STATE, STATISTIC, SURVEY
from tacita.models.tally.pair_statistic import sum_forms
from tacita.models.tally.private_math import (
    MOST_PEOPLE,
    build_feature_basis,
    choose_axes,
    choose_n_inputs,
    draw_symmetric_noise,
    fit_smoother,
    scale_outside_popularity,
    solve_weights,
)
from tacita.models.tally.weights import recency_weights
from tacita.privacy.noise import NoiseStream

__all__ = ["POPULARITY_RELEASE", "RETRACTION_RELEASE", "TERMS_RELEASE", "PrivateTally", "read_axes"]

RECENCY = 0.0  # in place of "learn", which would read private data
REPEAT = 0.0  # the same


@register_private
class PrivateTally(BudgetedRelease):
    """Linear item-item model from a noisy sum of users' terms."""

    def with_features(self, codes: Floats) -> PrivateTally:
        """The same model with public features of all items."""
        return type(self)(self.config, self.privacy, codes)

    @property
    def wants_features(self) -> bool:
        return self.privacy.features

    @property
    def fixed_settings(self) -> dict[str, float]:
        """What plain tally learns from private data, and this one does not."""
        recency = self.config.recency
        repeat = self.config.repeat
        return {
            "recency": RECENCY if recency == "learn" else float(recency),
            "repeat": REPEAT if repeat == "learn" else float(repeat),
        }

    def init_heads(self, draws: Draws) -> Arrays:
        return {
            **super().init_heads(draws),
            "scale": np.zeros(0),  # what each input is multiplied by
            "centre": np.zeros(0),  # the direction that is taken out
            "liked": np.zeros(0, np.float32),  # popularity of items that are no inputs, from 0 to 1
            "released": np.array([-1, 0], np.int32),  # the last block that was released, and releases so far
        }

    def heads_fit(self, heads: Arrays, n_items: int) -> bool:
        own = self.init_heads(Draws(0))
        return heads_match(heads, own) and private_heads_fit(heads, n_items, self.config.most_inputs)

    def check(self, first_items: int, all_items: int) -> None:
        """The work grows with the users, not with the catalogue, and ends at `most_inputs`: any fits."""

    # on the device

    def score_history(self, view: CohortView) -> Floats:
        """x B among the inputs; below all of them the other items, by popularity."""
        heads = view.heads
        scores = np.zeros((len(view.user), view.n_items), np.float32)
        if len(heads["weights"]) == 0:
            return scores
        input_scores = self.score_inputs(view)
        liked = np.zeros(view.n_items, np.float32)
        liked[: len(heads["liked"])] = heads["liked"]
        lowest = input_scores.min(axis=1, initial=0.0)
        below = lowest[:, None] - 2.0 + liked[None, :]
        has_items = self.select_latest(view).counts() > 0  # without a history nothing is scored
        scores[has_items] = below[has_items]
        scores[:, heads["inputs"]] = input_scores
        add_repeat(view, scores)
        return scores

    def score_inputs(self, view: CohortView) -> Floats:
        """(users, k) scores of the items that terms are about."""
        recency = float(view.heads["recency"][0])
        return multiply_lists(self.select_latest(view), view, recency, view.heads["weights"])

    # on the server

    def learn(self, server: ServerState, total: Total, question: str) -> ServerState:
        n_draws = count_draws(total.sums)
        if question == SURVEY:
            return self._choose_terms(server, total, n_draws)
        last, releases = server.heads["released"].tolist()
        fade = self.config.decay ** (server.block - last) if last >= 0 else 1.0
        terms = self.add_terms(server, total.sums, STATISTIC, fade)
        state = {**server.parts[STATE], **terms, "drawn": np.array([n_draws])}
        released = np.array([server.block, releases + 1], np.int32)
        return self.solve_gram(server.with_part(STATE, state), released)

    def add_terms(self, server: ServerState, sums: Mapping[str, AnyArray], question: str, fade: float = 1.0) -> Arrays:
        """The server's sum, faded, with the terms of a release; and the noise in that."""
        state = server.parts[STATE]
        deviation = self.term_deviation(server, question)
        gram = fade * state["gram"] + sums["terms"]
        variance = fade**2 * state["variance"] + count_draws(sums) * deviation**2
        return {"gram": gram, "variance": variance}

    def _choose_terms(self, server: ServerState, total: Total, n_draws: float) -> ServerState:
        """The items that terms are about, and in what terms."""
        s = self.term_deviation(server, STATISTIC) * n_draws**0.5
        people = min(float(total["people"][0]), MOST_PEOPLE)  # nodes may say any number
        liked = total["liked"]
        k = choose_n_inputs(people, s, len(liked), self.codes is not None)
        k = min(k, self.config.most_inputs)
        axes = choose_axes(liked, k)
        heads: Arrays = {
            "inputs": axes.inputs,
            "scale": axes.scale,
            "centre": axes.centre,
            "liked": scale_outside_popularity(axes, liked),
        }
        state = {
            "liked": liked,
            "people": np.array([people]),
            "gram": np.zeros((k, k)),
            "variance": np.zeros(1),
        }
        return with_heads(server, heads).with_part(STATE, state)

    def solve_gram(self, server: ServerState, released: AnyArray) -> ServerState:
        """B that belongs to the noisy sum."""
        state = server.parts[STATE]
        axes = read_axes(server.heads)
        basis = None
        if self.codes is not None:
            basis = build_feature_basis(self.codes, state["liked"], axes)
        deviation = float(state["variance"][0]) ** 0.5
        smooth = fit_smoother(state["gram"], axes.centre, deviation, basis)
        heads = {
            "weights": solve_weights(smooth, axes.scale),
            "known": np.array([len(server.items)], np.int32),
            "released": released,
        }
        for name, value in self.fixed_settings.items():
            heads[name] = np.array([value], np.float32)
        return with_heads(server, heads)

    @property
    def trials(self) -> int:
        return 1  # validation chooses nothing

    def try_next(self, server: ServerState) -> ServerState:
        return server

    def popularity(self, server: ServerState) -> Floats:
        state = server.parts.get(STATE, {})
        liked = np.maximum(state.get("liked", np.zeros(0)), 0.0)
        n_new = len(server.items) - len(liked)
        return np.pad(liked, (0, n_new)).astype(np.float32)

    def likeness(self, server: ServerState, items: Floats, item: int) -> Floats:
        """The weight of every item for this one: its column of B, which is between the inputs; 0 for other items."""
        inputs = server.heads["inputs"]
        weights = server.heads["weights"]
        likeness = np.zeros(len(server.items), np.float32)
        place = np.flatnonzero(inputs == item)
        if len(place) and len(weights):
            likeness[inputs] = weights[:, place[0]]
        return likeness

    def promises(self, server: ServerState) -> dict[str, float]:
        """What a user lost who took part in every block; who retracted lost more, which their own ledger says."""
        state = server.parts.get(STATE, {})
        n_blocks = min(server.block + 1, self.budget.blocks)
        n_draws = state.get("drawn", np.ones(1))
        return {
            "epsilon": self.budget.spent_epsilon(n_blocks),
            "epsilon_planned": self.budget.epsilon,
            "delta": self.budget.delta,
            "blocks_planned": float(self.budget.blocks),
            "items_told_of": float(len(server.heads["inputs"])),
            "noise_draws_in_a_sum": float(n_draws[0]),
        }

    # retraction: the difference has noise of its own, so that two releases do not show it

    @property
    def retracts_exactly(self) -> bool:
        return False

    def apply_retraction(self, server: ServerState, change: Mapping[str, AnyArray]) -> tuple[ServerState, int]:
        terms = self.add_terms(server, change, "retraction")
        state = {**server.parts[STATE], **terms}
        last, releases = server.heads["released"].tolist()
        released = np.array([last, releases + 1], np.int32)
        return self.solve_gram(server.with_part(STATE, state), released), 0

    def describe_retraction(self) -> RetractionCaveats:
        more = self.budget.spent_epsilon(self.budget.blocks, 1)
        return RetractionCaveats(
            assumptions=(
                "the sum had noise before and has more now, so no comparison with training again is exact",
                "which items are told of, their scales and their popularity stay as they were chosen, with noise",
                f"a retraction is a release of its own and is charged: who told in all {self.budget.blocks} planned "
                f"blocks and retracts once has spent epsilon {more:.3g} at delta {self.budget.delta:g}",
            ),
            residual_risk="What was told before stays protected by the budget it was told under, not erased from "
            "copies of earlier models.",
        )

    def retrain_from(self, server: ServerState, block_lists: list[Ragged]) -> ServerState:
        """The sum of these lists in the same terms, with noise of its own as large as the noise of the sum now."""
        state = server.parts[STATE]
        last, releases = server.heads["released"].tolist()
        gram = np.zeros_like(state["gram"])
        for block, lists in enumerate(block_lists[: last + 1]):
            vectors = term_vectors(self.select_counted(lists), server.heads)
            gram += self.config.decay ** (last - block) * (vectors.T @ vectors)
        deviation = float(state["variance"][0]) ** 0.5
        stream = NoiseStream(Draws(releases), "tally trained again")
        noise = draw_symmetric_noise(stream, deviation, len(gram))
        retrained = server.with_part(STATE, {**state, "gram": gram + noise})
        return self.solve_gram(retrained, server.heads["released"])

    def simulate_release(self, server: ServerState, lists: Ragged, draws: Draws) -> ServerState:
        """The server after a first block of these users and no others, with the noise of these draws."""
        n_users = len(lists)
        user_ptr = np.arange(n_users + 1, dtype=np.int64)
        for question in (SURVEY, STATISTIC):
            fields = self.statistic_fields(server, question)
            forms = self.encode_lists(lists, user_ptr, server.heads, question)
            exact = sum_forms(forms, n_users, fields)
            total = self.add_noise(server, exact, question, draws)
            server = self.learn(server, total, question)
        return server


def count_draws(sums: Mapping[str, AnyArray]) -> float:
    """How many draws of noise are in a sum; at least one."""
    return max(1.0, float(sums["draws"][0]))


def multiply_lists(lists: Ragged, view: CohortView, recency: float, matrix: Floats) -> Floats:
    """(users, k) what lists score through a matrix between the inputs, older items counting less."""
    return multiply_weighted_lists(lists, recency_weights(lists, recency), view, matrix)


def multiply_weighted_lists(lists: Ragged, weight: Floats, view: CohortView, matrix: Floats) -> Floats:
    """The same with a weight for every entry."""
    k = len(matrix)
    row_of = np.full(view.n_items, -1, np.int32)
    row_of[view.heads["inputs"]] = np.arange(k)
    scores = np.zeros((len(view.user), k), np.float32)
    dense_products(lists.ptr, lists.ids, weight, row_of, matrix, scores)
    return scores
